"""``frugalvit probe suite``: logistic regression on those of EsViT's 18 datasets (Table 9) that are present.

Protocol of B.3: last-layer features, λ searched on the validation split (made from train if missing), a fit on
train + val, the dataset's own metric on the test split. Every dataset and model has a JSON file: an interrupted suite
resumes, and a changed model or dataset is computed again.
"""

import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

from frugalvit.config.probe import SuiteConfig
from frugalvit.data import DatasetSplits, dataset_status
from frugalvit.data.formats import ucf101
from frugalvit.data.formats.named_catalog import DATASETS
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
from frugalvit.probing.suite_tables import Entry, suite_result
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, read_json, write_text
from frugalvit.utils.tables import CommandResult

_VERSION = 1  # of the protocol; raise it when results of the old one are not comparable


def suite(config: SuiteConfig) -> CommandResult:
    """Score one model, or two against each other, on every dataset that is present."""
    began = time.monotonic()
    entries = list_entries(config)
    runnable = [
        entry for entry in entries if entry.status == "present" or (config.download and entry.status == "downloadable")
    ]
    if not runnable:
        examples = "; ".join(f"{entry.name}: {entry.instruction}" for entry in entries[:3])
        raise UserError(f"No dataset is in {datasets_root(config.root)}. For example {examples}. Or pass --download.")
    out = make_folder(Path(config.out))
    scores: list[dict[str, dict[str, Any]]] = []
    labels: list[str] = []
    for name in [config.model, *([config.against] if config.against else [])]:
        model = open_model(name, config)
        extractor = make_extractor(model, config, "pooled")
        folder = make_folder(out / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', model.name)}-{extractor.weights[:8]}")
        labels.append(model.name)
        scores.append({entry.name: _score(entry, extractor, config, folder) for entry in runnable})
    result = suite_result(entries, labels, scores, out)
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
    root = datasets_root(config.root)
    entries = []
    for name, entry in known.items():
        if config.datasets and name not in config.datasets:
            continue
        state, instruction = dataset_status(name, config.root)
        if name == "ucf101" and state != "present" and ucf101.videos_present(root):
            try:
                ucf101.make_frames(root)
                state, instruction = dataset_status(name, config.root)
            except UserError as error:
                instruction = str(error)
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
        cached = _read_result(path)
        if cached.get("identity") == identity:
            console.info(f"{entry.title}: {cached['score']:.2f} (from {path})")
            return cached
        result: dict[str, Any] = {"identity": identity} | score_dataset(source, entry.metric, extractor, config)
    except UserError as error:
        # One unreadable dataset must not cost the results of the others.
        console.warning(f"{entry.title}: {error}")
        return {"error": str(error)}
    write_text(path, json.dumps(result, indent=1, ensure_ascii=False))
    console.info(f"{entry.title}: {result['score']:.2f} {METRIC_NAMES[result['metric']]}, {result['seconds']:.1f} s")
    return result


def _read_result(path: Path) -> dict[str, Any]:
    """Read an earlier result; an unreadable one is computed again."""
    try:
        return read_json(path, dict) or {}
    except UserError as error:
        console.warning(f"{error} Computing it again.")
        return {}


def score_dataset(
    source: DatasetSplits, metric: Metric, extractor: FeatureExtractor, config: SuiteConfig
) -> dict[str, Any]:
    """Score one model on one dataset by the protocol."""
    began = time.monotonic()
    splits = make_probe_splits(
        embed_splits(extractor, source), len(source.classes or ()), config.val_fraction, config.seed
    )
    scored = fit_and_score(splits, metric, probe_device(extractor.model), config.max_iterations)
    result: dict[str, Any] = {
        "score": scored.score,
        "metric": scored.metric,
        "validation": scored.result.validation,
        "lambda": scored.result.strength,
        "iterations": scored.result.iterations,
        "converged": scored.result.converged,
        "train_images": len(splits.train) + len(splits.val),
        "test_images": len(splits.test),
        "classes": splits.classes,
        "notes": [*source.notes, *splits.notes],
    }
    result |= scored.by_class
    result["seconds"] = round(time.monotonic() - began, 2)
    return result


def _identity(entry: Entry, source: DatasetSplits, extractor: FeatureExtractor, config: SuiteConfig) -> str:
    facts = {
        "version": _VERSION,
        "metric": entry.metric,
        "weights": extractor.weights,
        "images": {name: examples.fingerprint() for name, examples in source.splits.items()},
        "transform": extractor.model.transform.spec(),
        "precision": extractor.precision,
        "settings": [config.val_fraction, config.seed, config.max_iterations],
    }
    targets = {name: examples.targets for name, examples in source.splits.items() if examples.targets is not None}
    if targets:  # the fingerprint of the images leaves them out
        facts["targets"] = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in targets.items()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
