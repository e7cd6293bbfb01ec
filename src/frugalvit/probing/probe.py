"""What all probes share: open the model and the data, extract features, record the scores.

A probe is a function from ``ProbeInputs`` to ``ProbeScores``; ``run_probe`` makes a command of it.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from frugalvit.config.probe import ProbeConfig
from frugalvit.data import DatasetSplits
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureExtractor, FeatureSet
from frugalvit.probing.saved_probe import KnnClassifier, LinearClassifier, save_probe_run
from frugalvit.probing.splits import HELD_OUT, embed_splits, make_extractor, open_labelled, open_model, probe_device
from frugalvit.runs import layout
from frugalvit.utils import console
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import read_json, write_text
from frugalvit.utils.scores import read_scores, score_table
from frugalvit.utils.tables import CommandResult, Table, as_text
from frugalvit.utils.text import pluralize


@dataclass(frozen=True)
class ProbeInputs:
    """What a probe scores: the features of every split, and where they come from."""

    source: DatasetSplits
    features: dict[str, FeatureSet]
    extractor: FeatureExtractor
    device: torch.device

    @property
    def classes(self) -> int:
        return len(self.source.classes or ())


@dataclass(frozen=True)
class ProbeScores:
    """The result of a probe."""

    data: dict[str, Any]  # scores and chosen settings as --json prints them; test_images is required
    settings: tuple[str, ...] = ()  # the keys of ``data`` that a note below the scores shows
    notes: list[str] = field(default_factory=list)
    table: Table | None = None  # replaces the table of scores that ``run_probe`` makes
    classifier: LinearClassifier | KnnClassifier | None = None  # for --save
    unseen: list[str] = field(default_factory=list)  # the keys of the scored images, if they were held out of train
    meta: dict[str, Any] = field(default_factory=dict)  # what the model folder of --save stores, as ``Target.meta``


def run_probe(
    name: str,
    config: ProbeConfig,
    score: Callable[[ProbeInputs], ProbeScores],
    *,
    multi_label: bool = False,
    loose: bool = False,
) -> CommandResult:
    """Run a probe on one model and one dataset, and record its result in the run's folder.

    multi_label: the probe accepts data with several labels per image
    loose: keep the images of the dataset that have no label
    """
    began = time.monotonic()
    if config.save is not None:
        layout.check_free_for_run(Path(config.save))
    _read_results(config)  # an unreadable probes.json is an error before the work, not after it
    source = open_labelled(config.data, config.root, config.target, loose=loose)
    if not multi_label and any(examples.labels is None for examples in source.splits.values()):
        raise UserError(
            f"{source.name} has several labels per image: use 'frugalvit probe logistic' without --unlabelled."
        )
    model = open_model(config.model, config)
    extractor = make_extractor(model, config, config.features, config.blocks)
    features = embed_splits(extractor, source)
    scores = score(ProbeInputs(source, features, extractor, probe_device(model)))
    data = {"probe": name, "model": config.model, "data": source.name, "features": config.features} | scores.data
    data["seconds"] = round(time.monotonic() - began, 2)
    data = _record_result(config, f"{name} {source.name}", data)
    left_out = HELD_OUT if scores.unseen else "train, each left out in turn"
    where = {"scored_images": data["test_images"]}
    where |= {"scored_on": next((split for split in ("test", "val") if split in features), left_out)}
    title = f"{name} probe on {source.name}, {where['scored_on']}: {pluralize(data['test_images'], 'image')}"
    settings = [f"{key.replace('_', ' ')} {as_text(data[key])}" for key in scores.settings]
    notes = [*source.notes, *scores.notes, ", ".join([*settings, f"in {console.clock(data['seconds'])}"])]
    if config.save is not None:
        assert scores.classifier is not None
        data["saved"] = str(
            save_probe_run(config, model, scores.classifier, source, features, data | where, scores.unseen, scores.meta)
        )
        notes += [f"saved   {config.save}", f"report  {config.save}/{layout.REPORT}"]
        notes += [f"next    frugalvit predict {shell_quote(config.save)} IMAGE…"]
    return CommandResult(data, [scores.table or score_table(read_scores(data | where), title)], notes)


def _read_results(config: ProbeConfig) -> dict[str, Any]:
    return read_json(Path(config.model) / layout.PROBES, dict) or {}


def _record_result(config: ProbeConfig, key: str, data: dict[str, Any]) -> dict[str, Any]:
    """Add a result to the run's probes.json, which reports and plots read."""
    if config.labels != 1:
        data["labels"] = config.labels
        key += f", labels {config.labels:g}, seed {config.seed}"
    run = Path(config.model)
    if not (run / layout.CONFIG).exists():
        return data
    results = _read_results(config) | {key: data}
    try:
        write_text(run / layout.PROBES, json.dumps(results, indent=1, ensure_ascii=False))
    except OSError as error:  # a full disk, another person's run: the scores must still be printed
        console.warning(f"cannot write {run / 'probes.json'} ({error.strerror}): note the scores now")
    return {"run": config.model} | data
