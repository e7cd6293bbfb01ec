"""``frugalvit probe suite``: logistic regression on the 18 datasets of EsViT's Table 9, as far as they are present.

Protocol of B.3: last-layer features, λ searched on the validation split (made from train where there is none), fitted
on train + val, the dataset's own metric on the test split, once. One JSON file a dataset and model: an interrupted
suite goes on where it was, and a changed model or dataset is computed anew.
"""

from __future__ import annotations

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
from frugalvit.probing.metrics import METRIC_NAMES, Metric
from frugalvit.probing.splits import (
    embed_splits,
    fit_and_score,
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

_VERSION = 1  # of the protocol: raise it when an old result would no longer be what is computed today


def suite(config: SuiteConfig) -> CommandResult:
    """Score one model, or two against each other, on every dataset that is there."""
    began = time.monotonic()
    entries = list_entries(config)
    runnable = [
        entry for entry in entries if entry.status == "present" or (config.download and entry.status == "downloadable")
    ]
    if not runnable:
        todo = "; ".join(f"{entry.name}: {entry.instruction}" for entry in entries[:3])
        raise UserError(
            f"None of the datasets is in {datasets_root(config.root)}. For example {todo}. Or pass --download."
        )
    out = make_folder(Path(config.out))
    scores: list[dict[str, dict[str, Any]]] = []
    labels: list[str] = []
    for where in [config.model, *([config.against] if config.against else [])]:
        model = open_model(where, config)
        extractor = make_extractor(model, config, "pooled")
        folder = make_folder(out / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', model.name)}-{extractor.weights[:8]}")
        labels.append(model.name)
        scores.append({entry.name: _score(entry, extractor, config, folder) for entry in runnable})
    result = suite_result(entries, labels, scores, out)
    result.data |= {"model": config.model, "against": config.against, "out": str(out)}
    result.data["seconds"] = round(time.monotonic() - began, 2)
    return result


def list_entries(config: SuiteConfig) -> list[Entry]:
    """The 18 (or those asked for) in the order of Table 9 with their status, then own datasets."""
    known = {name: entry for name, entry in DATASETS.items() if entry.suite}
    for name in config.datasets:
        if name not in known:
            hint = did_you_mean(name, known) or f" They are {', '.join(known)}."
            raise UserError(f"'{name}' is not one of the suite's datasets.{hint} Own data: --own {name}")
    metrics: dict[str, Metric] = {words: metric for metric, words in METRIC_NAMES.items()}
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
        place = Path(data)
        name = re.sub(r"[^\w.-]+", "-", place.resolve().name if place.exists() else data)
        while name in taken:
            name += "_"
        taken.add(name)
        entries.append(Entry(name, name, data, "accuracy", "present"))
    return entries


def _score(entry: Entry, extractor: FeatureExtractor, config: SuiteConfig, folder: Path) -> dict[str, Any]:
    """The result of one dataset: from its file if that is of this model, these images and these settings."""
    path = folder / f"{entry.name}.json"
    try:
        source = open_labelled(entry.data, config.root)
        identity = _identity(entry, source, extractor, config)
        kept = _kept(path)
        if kept.get("identity") == identity:
            console.info(f"{entry.title}: {kept['score']:.2f} (from {path})")
            return kept
        result: dict[str, Any] = {"identity": identity} | score_dataset(source, entry.metric, extractor, config)
    except UserError as error:
        # One broken dataset must not cost the results of the other seventeen.
        console.warning(f"{entry.title}: {error}")
        return {"error": str(error)}
    write_text(path, json.dumps(result, indent=1, ensure_ascii=False))
    console.info(f"{entry.title}: {result['score']:.2f} {METRIC_NAMES[result['metric']]}, {result['seconds']:.1f} s")
    return result


def _kept(path: Path) -> dict[str, Any]:
    """An earlier result; a damaged one is said and computed again."""
    try:
        return read_json(path, dict) or {}
    except UserError as error:
        console.warning(f"{error} It is computed again.")
        return {}


def score_dataset(
    source: DatasetSplits, metric: Metric, extractor: FeatureExtractor, config: SuiteConfig
) -> dict[str, Any]:
    """One dataset, one model, by the protocol."""
    began = time.monotonic()
    prepared = make_probe_splits(
        embed_splits(extractor, source), len(source.classes or ()), config.val_fraction, config.seed
    )
    scored = fit_and_score(prepared, metric, probe_device(extractor.model), config.max_iterations)
    result: dict[str, Any] = {
        "score": scored.score,
        "metric": scored.metric,
        "validation": scored.found.validation,
        "lambda": scored.found.strength,
        "iterations": scored.found.iterations,
        "converged": scored.found.converged,
        "train_images": len(prepared.train) + len(prepared.val),
        "test_images": len(prepared.test),
        "classes": prepared.classes,
        "notes": [*source.notes, *prepared.notes],
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
    several = {name: examples.targets for name, examples in source.splits.items() if examples.targets is not None}
    if several:  # which no fingerprint of images knows
        facts["targets"] = {name: hashlib.sha256(found.tobytes()).hexdigest() for name, found in several.items()}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
