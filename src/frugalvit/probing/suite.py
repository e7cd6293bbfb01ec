"""``frugalvit probe suite``: logistic regression on EsViT's 18 datasets (Table 9), if present.

Protocol of B.3: take last-layer features, search λ on the validation split (made from train if missing), fit on
train + val. The score on the test split is the dataset's own metric. Every dataset and model has a JSON file. So an
interrupted suite resumes, and a changed model or dataset is scored again.
"""

import hashlib
import json
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frugalvit.config.probe import SuiteConfig
from frugalvit.data import DatasetSplits
from frugalvit.data.formats.named_catalog import DATASETS, dataset_status
from frugalvit.data.paths import datasets_root
from frugalvit.errors import UserError, did_you_mean
from frugalvit.probing.extractor import FeatureExtractor
from frugalvit.probing.logistic import fit_and_score
from frugalvit.probing.metrics import METRIC_NAMES, Metric
from frugalvit.probing.splits import (
    embed_splits,
    make_extractor,
    make_probe_splits,
    open_labelled,
    open_model,
    probe_device,
)
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, write_text
from frugalvit.utils.scores import Score
from frugalvit.utils.tables import CommandResult, Table, as_csv

Scores = dict[str, dict[str, Any]]  # by dataset


@dataclass(frozen=True)
class Entry:
    """One dataset of the suite: its data, its metric, and whether it is present."""

    name: str
    title: str
    data: str
    metric: Metric
    status: str  # present, downloadable, by hand
    instruction: str = ""


def suite(config: SuiteConfig) -> CommandResult:
    """Score one model, or two against each other, on every dataset that is present."""
    began = time.monotonic()
    entries = list_entries(config)
    usable = ("present", "downloadable") if config.download else ("present",)
    runnable = [entry for entry in entries if entry.status in usable]
    if not runnable:
        examples = "; ".join(f"{entry.name}: {entry.instruction}" for entry in entries[:3])
        raise UserError(f"No dataset is in {datasets_root(config.root)}. For example {examples}. Or pass --download.")
    out = make_folder(Path(config.out))
    scores: dict[str, Scores] = {}
    for name in [config.model, *([config.against] if config.against else [])]:
        model = open_model(name, config)
        extractor = make_extractor(model, config, "pooled")
        folder = make_folder(out / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', model.name)}-{extractor.weights[:8]}")
        label = f"{model.name} (2)" if model.name in scores else model.name  # two runs may have the same name
        scores[label] = {entry.name: _score(entry, extractor, config, folder) for entry in runnable}
    result = summarize(entries, scores, out)
    result.data |= {"model": config.model, "against": config.against, "out": str(out)}
    result.data["seconds"] = round(time.monotonic() - began, 2)
    return result


def list_entries(config: SuiteConfig) -> list[Entry]:
    """List the 18 datasets (or those of --datasets) in the order of Table 9, then those of --own."""
    known = {name: entry for name, entry in DATASETS.items() if entry.suite}
    for name in config.datasets:
        if name not in known:
            hint = did_you_mean(name, known) or f" They are {', '.join(known)}."
            raise UserError(f"--datasets {name} is not in the suite.{hint} For other data use --own {name}")
    metrics: dict[str, Metric] = {title: metric for metric, title in METRIC_NAMES.items()}
    entries = []
    for name, entry in known.items():
        if config.datasets and name not in config.datasets:
            continue
        state, instruction = dataset_status(name, config.root)
        entries.append(Entry(name, entry.title, name, metrics[entry.metric], state, instruction))
    taken = {entry.name for entry in entries}
    for data in config.own:
        path = Path(data)
        name = re.sub(r"[^\w.-]+", "-", path.resolve().name if path.exists() else data)
        while name in taken:
            name += "_"
        taken.add(name)
        entries.append(Entry(name, name, data, "accuracy", "present"))
    return entries


def _score(entry: Entry, extractor: FeatureExtractor, config: SuiteConfig, folder: Path) -> dict[str, Any]:
    """Score one dataset, or read its file if model, images and settings are the same."""
    path = folder / f"{entry.name}.json"
    try:
        source = open_labelled(entry.data, config.root)
        identity = _identity(entry, source, extractor, config)
        try:
            cached = read_json(path, dict) or {}
        except UserError as error:
            console.warning(f"{error} Scoring {entry.title} again")
            cached = {}
        if cached.get("identity") == identity and isinstance(cached.get("score"), int | float):
            console.info(f"{entry.title}: {_describe(cached)} (from {path})")
            return cached
        result: dict[str, Any] = {"identity": identity} | score_dataset(source, entry.metric, extractor, config)
    except UserError as error:
        # One unreadable dataset must not cost the results of the others.
        console.warning(f"{entry.title}: {error}")
        return {"error": str(error)}
    write_text(path, json.dumps(result, indent=1, ensure_ascii=False))
    console.info(f"{entry.title}: {_describe(result)}, {result['seconds']:.1f} s")
    return result


def _describe(result: dict[str, Any]) -> str:
    name, interval = METRIC_NAMES[result["metric"]], tuple(result["score_interval"])
    return str(Score(name, result["score"], "test", result["test_images"], interval))


def score_dataset(
    source: DatasetSplits, metric: Metric, extractor: FeatureExtractor, config: SuiteConfig
) -> dict[str, Any]:
    """Score one model on one dataset by the protocol."""
    began = time.monotonic()
    splits = make_probe_splits(
        embed_splits(extractor, source), len(source.classes or ()), config.val_fraction, config.seed
    )
    result, _ = fit_and_score(splits, metric, probe_device(extractor.model), config.max_iterations)
    result |= {"classes": splits.classes, "notes": [*source.notes, *splits.notes]}
    return result | {"seconds": round(time.monotonic() - began, 2)}


def _identity(entry: Entry, source: DatasetSplits, extractor: FeatureExtractor, config: SuiteConfig) -> str:
    facts = {
        "metric": entry.metric,
        "weights": extractor.weights,
        "images": {name: examples.fingerprint() for name, examples in source.splits.items()},
        "transform": extractor.model.transform.spec(),
        "precision": extractor.precision,
        "settings": [config.val_fraction, config.seed, config.max_iterations],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def summarize(entries: Sequence[Entry], scores: dict[str, Scores], out: Path) -> CommandResult:
    """Combine the results of one or two models (Table 10), and write suite.csv and suite.png into ``out``."""
    first, *others = scores.values()
    complete = [entry for entry in entries if all("score" in model.get(entry.name, {}) for model in scores.values())]
    averages = [
        statistics.fmean(model[entry.name]["score"] for entry in complete) if complete else None
        for model in scores.values()
    ]
    datasets: dict[str, Any] = {}
    rows: list[list[object]] = []
    missing: list[list[object]] = []
    for entry in entries:
        facts: dict[str, Any] = {"title": entry.title, "metric": entry.metric, "status": entry.status}
        if entry.name not in first:
            datasets[entry.name] = facts | {"what_to_do": entry.instruction}
            missing.append([entry.name, entry.status, entry.instruction])
            continue
        facts |= {key: value for key, value in first[entry.name].items() if key != "identity"}
        facts |= {"status": "failed"} if "error" in facts else {}
        if others:
            facts["against"] = others[0][entry.name].get("score")
        datasets[entry.name] = facts
        values = [model[entry.name].get("score") for model in scores.values()]
        cells = [_cell(model[entry.name]) for model in scores.values()]
        rows.append(
            [entry.title, METRIC_NAMES[facts["metric"]], facts.get("test_images"), *cells, *_difference(values)]
        )
        errors = [model[entry.name]["error"] for model in scores.values() if "error" in model[entry.name]]
        missing += [[entry.name, "failed", error] for error in errors[:1]]
    data: dict[str, Any] = {"average": averages[0], "scored": len(complete), "datasets": datasets}
    notes = [f"{out}/suite.csv, suite.png and one JSON file per dataset and model"]
    title = " against ".join(scores)
    if others:
        wins = sum(first[entry.name]["score"] > others[0][entry.name]["score"] for entry in complete)
        data |= {"average_against": averages[1], "wins": wins}
        title += f": wins on {wins} of {len(complete)} datasets"
        notes.insert(0, title)
    if complete:
        shown = [None if value is None else f"{value:.1f} %" for value in averages]
        rows.append(["Average of the scores", "", "", *shown, *_difference(averages)])
        _draw(complete, scores, title, out / "suite.png")
    columns = ["metric", "classes", "train_images", "test_images"]
    lines = [
        [entry.name, *(first[entry.name][name] for name in columns), *(m[entry.name]["score"] for m in scores.values())]
        for entry in complete
    ]
    write_text(out / "suite.csv", as_csv(["dataset", *columns, *scores], lines))
    columns = ["dataset", "metric", "test images", *scores, *(["difference"] if others else [])]
    tables = [Table(columns, rows, "Logistic regression on frozen features, 95 % interval of the test images")]
    if missing:
        tables.append(Table(["dataset", "status", "what to do"], missing, "not scored"))
    return CommandResult(data, tables, notes)


def _cell(result: dict[str, Any]) -> str | None:
    if "score" not in result:
        return None
    return "{:.1f} % ({:.1f} to {:.1f})".format(result["score"], *result["score_interval"])


def _difference(values: Sequence[float | None]) -> list[str | None]:
    """Return the difference of two scores, None if one is missing, nothing for one model."""
    if len(values) < 2:
        return []
    return [None if values[0] is None or values[1] is None else f"{values[0] - values[1]:+.2f}"]


def _draw(entries: Sequence[Entry], scores: dict[str, Scores], title: str, path: Path) -> None:
    from frugalvit.probing.figures import suite_figure
    from frugalvit.utils.plotting import save

    values, *others = [[model[entry.name]["score"] for entry in entries] for model in scores.values()]
    save(suite_figure([entry.title for entry in entries], values, others[0] if others else None, title), path)
