"""The linear probe of EsViT §4.1: linear classifiers by SGD, several learning rates at once.

Every learning rate is a column block of one weight matrix (D, R, C). A step of all R classifiers takes the same two
matrix products as a step of one. The protocol is the paper's: SGD with momentum 0.9, no weight decay, cosine to 0 by
the epoch, lr scaled by batch / 256, weights from N(0, 0.01). One thing differs: validation images choose
the rate, and the test images are scored once. If the validation images come from the training images, the chosen
classifier trains again with them.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frugalvit.config.probe import BATCH, EPOCHS, LEARNING_RATES, LinearConfig
from frugalvit.errors import UserError
from frugalvit.probing.metrics import classification_scores, rank_classes, score, score_facts
from frugalvit.probing.probe import ProbeInputs, ProbeScores, run_probe
from frugalvit.probing.saved_probe import LinearClassifier
from frugalvit.probing.splits import labelled_splits, make_probe_splits
from frugalvit.probing.validation import as_features, as_labels
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult

MOMENTUM = 0.9


def linear(config: LinearConfig) -> CommandResult:
    """Train classifiers on the last blocks by SGD and score the one with the best validation accuracy."""

    def score_features(inputs: ProbeInputs) -> ProbeScores:
        views = view_count(inputs) if config.views == "auto" else config.views
        splits = make_probe_splits(
            inputs.features,
            inputs.classes,
            config.val_fraction,
            config.seed,
            _extract_views(config, inputs, views) if views else None,
            config.labels,
        )
        train, val, held_out = splits.train, splits.val, splits.held_out
        options: dict[str, Any] = config.model_dump(include={"lrs", "epochs", "seed"}) | {"batch": config.probe_batch}
        options |= {"classes": splits.classes, "device": inputs.device}
        options |= {"held_out": None if held_out is None else held_out.features}
        result = linear_probe(train.features, train.targets, val.features, val.targets, splits.test.features, **options)
        ranked = rank_classes(result.scores)
        data: dict[str, Any] = classification_scores(ranked, splits.test.targets) | {
            **score_facts(ranked, splits.test.targets, splits.classes),
            "val_top1": result.validation,
            "lr": result.learning_rate,
            "tried": result.tried,
            "views": views,
            "train_images": len(splits.train) + (0 if splits.held_out is None else len(splits.held_out)),
            "test_images": len(splits.test),
        }
        classifier = LinearClassifier(*result.classifier, lambda: (result.held_out.cpu(), splits.val.targets.cpu()))
        return ProbeScores(data, ("lr",), splits.notes, classifier=classifier, unseen=splits.unseen)

    return run_probe("linear", config, score_features)


def view_count(inputs: ProbeInputs) -> int:
    """Return the number of augmented views: 4, or as many as fit into 8 GB; 0 for the centre crop."""
    size = 4 * inputs.features["train"].features.numel()
    return min(4, int(8e9 // size))


def _extract_views(config: LinearConfig, inputs: ProbeInputs, views: int) -> Tensor:
    """Extract the features of augmented training images: (V, N, D)."""
    names = ["train"] if config.labels == 1 else labelled_splits(inputs.features)

    def extract(name: str, view: int) -> Tensor:
        label = f"{inputs.source.name} {name}, view {view + 1}"
        return inputs.extractor(inputs.source.splits[name], label, view, config.seed).features

    return torch.stack([torch.cat([extract(name, view) for name in names]) for view in range(views)])


@dataclass
class LinearFit:
    """R trained classifiers, one per learning rate: weight (D, R, C), bias (R, C)."""

    weight: Tensor
    bias: Tensor

    def scores(self, features: Tensor) -> Tensor:
        width, runs, classes = self.weight.shape
        logits = features.to(self.weight) @ self.weight.view(width, runs * classes)
        return (logits.view(-1, runs, classes) + self.bias).movedim(1, 0)


@torch.no_grad()
def fit_linear(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    lrs: Sequence[float] = LEARNING_RATES,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> LinearFit:
    """Train one classifier per learning rate.

    features: (N, D), or (V, N, D) with V augmented views of every image; each epoch takes one at random.
    """
    views = features[None] if features.ndim == 2 else features
    device = features.device if device is None else torch.device(device)
    views, labels = views.to(device).float(), labels.to(device)
    count, images, width = views.shape
    batch = min(batch, images)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same draws on every device
    start = 0.01 * torch.randn(width, 1, classes, generator=generator).to(device)
    weight = start.repeat(1, len(lrs), 1)
    bias = torch.zeros(len(lrs), classes, device=device)
    weight_speed, bias_speed = torch.zeros_like(weight), torch.zeros_like(bias)
    rate = torch.tensor([lr * batch / 256 for lr in lrs], device=device)[:, None]
    for epoch in console.progress(range(epochs), label="linear probe"):
        current = rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        order = torch.randperm(images, generator=generator).to(device)
        view = torch.randint(count, (images,), generator=generator).to(device)
        for rows in order.split(batch):
            batch_features = views[view[rows], rows]
            residual = _residual(batch_features, weight, bias, labels[rows])
            slope = (batch_features.T @ residual.flatten(1)).view_as(weight)
            weight_speed.mul_(MOMENTUM).add_(slope)
            bias_speed.mul_(MOMENTUM).add_(residual.sum(dim=0))
            weight.addcmul_(current, weight_speed, value=-1)
            bias.addcmul_(current, bias_speed, value=-1)
    return LinearFit(weight, bias)


def _residual(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy of every classifier, (softmax - one-hot) / B: (B, R, C)."""
    width, runs, classes = weight.shape
    logits = (features @ weight.view(width, runs * classes)).view(-1, runs, classes) + bias
    residual = logits.softmax(dim=2)
    index = labels[:, None, None].expand(-1, runs, 1)
    residual.scatter_add_(2, index, residual.new_full((1, 1, 1), -1.0).expand(index.shape))
    return residual.div_(len(features))


@dataclass
class LinearResult:
    """The chosen classifier (weight (C, D), bias (C,)), its test scores (N_test, C), and all validation scores."""

    scores: Tensor
    classifier: tuple[Tensor, Tensor]
    learning_rate: float
    validation: float
    tried: list[dict[str, float]]
    held_out: Tensor  # scores of the validation images by the classifier that has not learned from them


def linear_probe(
    train: Tensor,
    train_labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    test: Tensor,
    *,
    classes: int | None = None,
    lrs: Sequence[float] = LEARNING_RATES,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    seed: int = 0,
    device: torch.device | str | None = None,
    held_out: Tensor | None = None,
) -> LinearResult:
    """Train all settings, choose the best on the validation images, and score the test images with it.

    train: (N, D), or (V, N, D) with V views of every image; val and test: (N, D).
    train_labels, val_labels: integers from 0.
    held_out: the validation images in the shape of ``train`` (with views), if they come from the training images; the
        best classifier is then trained again with them.
    """
    train, val, test = as_features(train, val, test, views=True)
    device = train.device if device is None else torch.device(device)
    train_labels, val_labels = as_labels(train_labels, train, classes), as_labels(val_labels, val, classes)
    classes = classes or 1 + max(int(train_labels.max()), int(val_labels.max()))
    fit_all = functools.partial(fit_linear, classes=classes, epochs=epochs, batch=batch, seed=seed, device=device)
    fit = fit_all(train, train_labels, lrs=lrs)
    tried: list[dict[str, float]] = []
    for lr, scores in zip(lrs, fit.scores(val.to(device)), strict=True):
        diverged = not bool(torch.isfinite(scores).all())
        accuracy = math.nan if diverged else score("accuracy", scores, val_labels)
        tried.append({"lr": lr, "validation": accuracy})
    converged = [i for i, setting in enumerate(tried) if not math.isnan(setting["validation"])]
    if not converged:
        raise UserError("Every learning rate of the linear probe diverged: give smaller ones with --lrs.")
    best = max(converged, key=lambda i: tried[i]["validation"])
    chosen, unseen = tried[best], fit.scores(val.to(device))[best]
    if held_out is not None:
        labels = torch.cat([train_labels, val_labels])
        both = torch.cat([train, torch.as_tensor(held_out).to(train)], dim=-2)
        fit, best = fit_all(both, labels, lrs=[chosen["lr"]]), 0
    scores = fit.scores(test.to(device))[best]
    if not bool(torch.isfinite(scores).all()):
        raise UserError("The linear probe diverged with all training images: give smaller learning rates with --lrs.")
    classifier = fit.weight[:, best].T, fit.bias[best]
    return LinearResult(scores, classifier, chosen["lr"], chosen["validation"], tried, unseen)
