"""``frugalvit probe knn | linear | logistic``: one frozen model, one dataset, one number."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from frugalvit.config.probe import KnnConfig, LinearConfig, LogisticConfig, ProbeConfig
from frugalvit.data import DatasetSplits
from frugalvit.errors import UserError
from frugalvit.probing.extractor import Kind
from frugalvit.probing.knn import knn_accuracy
from frugalvit.probing.linear import linear_probe
from frugalvit.probing.metrics import classification_scores, rank_classes
from frugalvit.probing.splits import (
    as_part,
    concat,
    draw_labels,
    embed_splits,
    fit_and_score,
    labelled_splits,
    make_extractor,
    make_probe_splits,
    open_labelled,
    open_model,
    probe_device,
)
from frugalvit.runs import layout
from frugalvit.utils import console
from frugalvit.utils.files import read_json, write_text
from frugalvit.utils.tables import CommandResult, Table

HEADLINE_K = 20  # the k that "top1" of k-NN means where it is among the ks, as DINO and EsViT report it


def knn(config: KnnConfig) -> CommandResult:
    """Bank: all images but those scored. Scored: test, else a given val, else every image by leaving one out."""
    began = time.monotonic()
    source = _open(config)
    model = open_model(config.model, config)
    parts = embed_splits(make_extractor(model, config, config.features, config.blocks), source)
    tested = next((parts.pop(name) for name in ("test", "val") if name in parts), None)
    asked, bank = None if tested is None else as_part(tested), concat(*map(as_part, parts.values()))
    notes = ["there is no test split: every image was asked of all the others"] if asked is None else []
    if config.labels != 1:
        known = draw_labels(bank, np.ones(len(bank), dtype=bool), config.labels, config.seed)
        if asked is None and not known.all():
            asked, notes = bank.subset(~known), ["there is no test split: the images without a label were asked"]
        notes.append(f"{known.sum():,} of {len(bank):,} labels are used")
        bank = bank.subset(known)
    scores = knn_accuracy(
        bank.features,
        bank.targets,
        None if asked is None else asked.features,
        None if asked is None else asked.targets,
        config.ks,
        config.temperature,
        len(source.classes or ()),
        device=probe_device(model),
    )
    headline = HEADLINE_K if HEADLINE_K in scores else min(scores)
    data: dict[str, Any] = {
        **scores[headline],
        "k": headline,
        "knn": {str(k): values["top1"] for k, values in scores.items()},
        "leave_one_out": asked is None,
        "train_images": len(bank),
        "test_images": len(bank) if asked is None else len(asked),
    }
    data = _data(config, "knn", source, config.features, data, began)
    most = len(bank) - (asked is None)  # more neighbours than there are images are all of them
    once = {min(k, most): values for k, values in scores.items()}
    table = Table(
        ["k", "top1", "top5", "mean_per_class"],
        [[k, values["top1"], values["top5"], values["mean_per_class"]] for k, values in once.items()],
        f"k-NN on {source.name}: {data['train_images']:,} images vote on {data['test_images']:,}",
    )
    return CommandResult(data, [table], [*source.notes, *notes])


def linear(config: LinearConfig) -> CommandResult:
    """EsViT's linear probe: last blocks, SGD, the best of several learning rates on validation images."""
    began = time.monotonic()
    source = _open(config)
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    parts = embed_splits(extractor, source)
    views = None
    if config.views:
        learned = ["train"] if config.labels == 1 else labelled_splits(parts)
        made = [
            extractor(source.splits[name], f"{source.name} {name}, view {view + 1}", view, config.seed).features
            for view in range(config.views)
            for name in learned
        ]
        views = torch.stack([torch.cat(made[i : i + len(learned)]) for i in range(0, len(made), len(learned))])
    prepared = make_probe_splits(
        parts, len(source.classes or ()), config.val_fraction, config.seed, views, config.labels
    )
    found = linear_probe(
        prepared.train.features,
        prepared.train.targets,
        prepared.val.features,
        prepared.val.targets,
        prepared.test.features,
        classes=prepared.classes,
        lrs=config.lrs,
        weight_decays=config.weight_decays,
        epochs=config.epochs,
        batch=config.probe_batch,
        seed=config.seed,
        device=probe_device(model),
        held_out=None if prepared.held_out is None else prepared.held_out.features,
    )
    data = classification_scores(rank_classes(found.scores), prepared.test.targets) | {
        "val_top1": found.validation,
        "lr": found.learning_rate,
        "weight_decay": found.weight_decay,
        "tried": found.tried,
        "train_images": len(prepared.train) + (0 if prepared.held_out is None else len(prepared.held_out)),
        "test_images": len(prepared.test),
    }
    data = _data(config, "linear", source, config.features, data, began)
    return CommandResult(data, [_scores_table(data, "lr", "weight_decay")], [*source.notes, *prepared.notes])


def logistic(config: LogisticConfig) -> CommandResult:
    """Logistic regression: λ searched on validation images, fitted on train + val, tested once."""
    began = time.monotonic()
    source = _open(config, several_labels=True)
    model = open_model(config.model, config)
    parts = embed_splits(make_extractor(model, config, config.features, config.blocks), source)
    prepared = make_probe_splits(
        parts, len(source.classes or ()), config.val_fraction, config.seed, labels=config.labels
    )
    scored = fit_and_score(prepared, "accuracy", probe_device(model), config.max_iterations)
    found = scored.found
    data: dict[str, Any] = {**scored.by_class, "val_top1": found.validation}
    if scored.metric == "map11":
        data = {"map11": scored.score, "val_map11": found.validation}
    data |= {
        "lambda": found.strength,
        "iterations": found.iterations,
        "tried": {f"{strength:.6g}": value for strength, value in found.tried.items()},
        "train_images": len(prepared.train) + len(prepared.val),
        "test_images": len(prepared.test),
    }
    data = _data(config, "logistic", source, config.features, data, began)
    return CommandResult(data, [_scores_table(data, "lambda", "iterations")], [*source.notes, *prepared.notes])


def _open(config: ProbeConfig, several_labels: bool = False) -> DatasetSplits:
    """The data; what would keep the result from being written later is said now, before anything is computed."""
    _kept(config)
    source = open_labelled(config.data, config.root)
    if not several_labels and any(examples.labels is None for examples in source.splits.values()):
        raise UserError(f"{source.name} has several labels an image: use 'frugalvit probe logistic'.")
    return source


def _kept(config: ProbeConfig) -> dict[str, Any]:
    """The results of a run's earlier probes."""
    return read_json(Path(config.model) / layout.PROBES, dict) or {}


def _data(
    config: ProbeConfig, probe: str, source: DatasetSplits, features: Kind, data: dict[str, Any], began: float
) -> dict[str, Any]:
    """The result with what it is a result of; a run keeps it in its folder, for reports and plots."""
    whole = {"probe": probe, "model": config.model, "data": source.name, "features": features} | data
    whole["seconds"] = round(time.monotonic() - began, 2)
    name = f"{probe} {source.name}"
    if config.labels != 1:
        whole["labels"] = config.labels
        name += f", labels {config.labels:g}, seed {config.seed}"
    run = Path(config.model)
    if (run / layout.CONFIG).exists():
        kept = _kept(config) | {name: whole}
        try:
            write_text(run / layout.PROBES, json.dumps(kept, indent=1, ensure_ascii=False))
        except OSError as error:  # another person's run, a disk that is full: the scores were the work
            console.warning(f"the scores could not be kept in {run / 'probes.json'} ({error.strerror}): note them now")
        whole = {"run": config.model} | whole
    return whole


def _scores_table(data: dict[str, Any], *settings: str) -> Table:
    names = [name for name in ("top1", "top5", "mean_per_class", "map11", "val_top1", "val_map11") if name in data]
    columns = [*names, *settings, "seconds"]
    title = f"{data['probe']} probe on {data['data']}: {data['test_images']:,} test images"
    return Table(columns, [[data[name] for name in columns]], title)
