"""Save the classifier of a probe as a run folder, which predict, eval, export and report take."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frugalvit.backbones.base import Backbone
from frugalvit.backbones.factory import from_spec
from frugalvit.backbones.knn_head import KnnHead
from frugalvit.backbones.weights.load import load_weights
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.probe import ProbeConfig
from frugalvit.config.train import same_value
from frugalvit.data import DatasetSplits
from frugalvit.errors import UserError
from frugalvit.experiment.calibration import Calibration, calibrate, describe_calibration, save_calibration, spread_rows
from frugalvit.experiment.load_model import Model
from frugalvit.probing.extractor import FeatureSet
from frugalvit.report.html import write_report
from frugalvit.runs import layout
from frugalvit.runs.run_folder import new_run_folder, read_summary
from frugalvit.utils import console
from frugalvit.utils.files import read_json, utf8_safe, write_text
from frugalvit.utils.tables import to_json

MAX_IMAGES = 20_000  # the largest number that a model folder may have among its keywords


HeldOut = Callable[[], tuple[Tensor, Tensor]]
"""Computes logits (N, C) and labels (N,) of images by a classifier that has not learned from them."""


@dataclass(frozen=True)
class LinearClassifier:
    """Class scores = features · weightᵀ + bias; weight (C, D), bias (C,)."""

    weight: Tensor
    bias: Tensor
    held_out: HeldOut | None  # None for several labels per image, which are not calibrated

    def attach_to(self, backbone: Backbone) -> Backbone:
        """Return a copy of the backbone with this classifier."""
        network = _copy_with_classes(backbone, len(self.bias))
        network.set_classifier(self.weight, self.bias)
        return network


@dataclass(frozen=True)
class KnnClassifier:
    """k-NN on the features (N, D) and labels (N,) of labelled images."""

    features: Tensor
    labels: Tensor
    classes: int
    k: int
    temperature: float
    held_out: HeldOut

    def attach_to(self, backbone: Backbone) -> Backbone:
        """Return a copy of the backbone with this classifier."""
        if len(self.features) > MAX_IMAGES:
            raise UserError(
                f"--save: a k-NN classifier holds at most {MAX_IMAGES:,} images, not {len(self.features):,}."
            )
        settings = {"images": len(self.features), "k": self.k, "temperature": self.temperature}
        network = _copy_with_classes(backbone, self.classes, knn_head=settings)
        head = network.model.get_classifier()  # type: ignore[operator]
        assert isinstance(head, KnnHead)
        head.set_images(self.features, self.labels)
        return network


def _copy_with_classes(backbone: Backbone, classes: int, **keywords: Any) -> Backbone:
    network = from_spec(backbone.spec(), num_classes=classes, **keywords)
    state = {name: tensor.detach().cpu() for name, tensor in backbone.model.state_dict().items()}
    load_weights(network, state, classifier=False)
    return network.eval()


def save_probe_run(
    config: ProbeConfig,
    model: Model,
    classifier: LinearClassifier | KnnClassifier,
    source: DatasetSplits,
    features: dict[str, FeatureSet],
    scores: dict[str, Any],
    unseen: Collection[str],
    target: dict[str, Any],
) -> Path:
    """Write the network with the classifier, the scores and a report into the new folder --save.

    unseen: the keys of the scored images, if they were held out of train; ``eval`` scores them too
    target: facts of the model for images with several labels; empty for one class per image
    """
    network = classifier.attach_to(model.backbone)
    folder, classes, keys = new_run_folder(config.save), list(source.classes or ()), set(unseen)
    meta = {"classes": classes, "data": source.name, "recipe": f"probe {scores['probe']}"}
    meta |= {name: scores[name] for name in ("top1", "map") if name in scores} | target
    calibration: Calibration | str = "not calibrated: it needs one class per image"
    if classifier.held_out is not None:
        gallery, images = _training_features(features, scores["scored_on"], keys, classes)
        calibration = calibrate(*classifier.held_out(), "training images, each left out of a fit", gallery)
        write_text(folder / layout.TRAINING_IMAGES, to_json(images, indent=1))
    console.info(str(calibration))
    meta |= save_calibration(calibration, folder / layout.MODEL)
    save_model_folder(network, folder / layout.MODEL, classes=classes, meta=meta)
    summary = {"run": config.save, "task": "probe", **scores, **target, "classes": classes}
    scored = features.get(scores["scored_on"])
    if classifier.held_out is not None and (scored is not None or unseen):
        part = scored or features["train"]
        assert part.labels is not None
        rows = torch.tensor([row for row, key in enumerate(part.keys) if not unseen or key in keys])
        with torch.inference_mode():
            logits = torch.cat([network.classify(batch).float() for batch in part.features[rows].split(1024)])
        labels = part.labels[rows]
        pairs = labels * len(classes) + logits.argmax(1)
        summary["confusion"] = pairs.bincount(minlength=len(classes) ** 2).view(len(classes), -1).tolist()
        summary["calibration"] = describe_calibration(logits, labels, calibration)
    facts = {"data": config.data, "images": scores["train_images"], "classes": classes, "held_out": list(unseen)}
    write_text(folder / layout.DATA, to_json(facts, indent=1))
    write_text(folder / layout.SUMMARY, to_json(summary, indent=1))
    write_report([folder], folder / layout.REPORT)
    return folder


def _training_features(
    features: dict[str, FeatureSet], scored_on: str, unseen: Collection[str], classes: list[str]
) -> tuple[Tensor, list[dict[str, str]]]:
    """Return the features (N, D) of training images, evenly spaced, and their files and classes."""
    rows = [
        (part.features[row], {"file": utf8_safe(part.names[row]), "label": classes[int(part.labels[row])]})
        for name, part in features.items()
        for row, key in enumerate(part.keys)
        if name != scored_on and key not in unseen and part.labels is not None
    ]
    chosen = [rows[row] for row in spread_rows(len(rows)).tolist()]
    return torch.stack([feature for feature, _ in chosen]), [image for _, image in chosen]


def learned_images(folder: Path, data: str | None, split: str, keys: Collection[str]) -> int:
    """Count the images of a split that the classifier of a saved probe or run may have learned from.

    folder: of the probe or run, or its model folder; a run that did not learn from val gives 0
    """
    folder = folder.parent if folder.name == layout.MODEL else folder
    summary, facts = read_summary(folder) or {}, read_json(folder / layout.DATA, dict) or {}
    learned = summary.get("task") == "probe" or summary.get("learned_val")
    if not learned or not same_value("data", data, facts.get("data")):
        return 0
    if held_out := set(facts.get("held_out") or ()):
        return sum(key not in held_out for key in keys)
    return len(keys) if split != summary.get("scored_on") else 0
