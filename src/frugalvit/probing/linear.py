"""The linear probe of EsViT §4.1: a linear classifier on frozen features, by SGD, several learning rates at once.

Every pair of learning rate and weight decay is a column block of one weight matrix (D, R, C): a step of all R
classifiers is the same two matrix products a single one needs, over the same batch. The protocol is the paper's
(SGD with momentum 0.9, cosine to 0 by the epoch, lr scaled by batch / 256, weights from N(0, 0.01)), but the rate is
chosen on validation images and the test images are looked at once. Validation images that were taken from the training
images are given back: the chosen classifier is trained again with them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from frugalvit.config.probe import BATCH, EPOCHS, LEARNING_RATES, WEIGHT_DECAYS
from frugalvit.errors import UserError
from frugalvit.probing.metrics import SINGLE_LABEL, Metric, require_finite, require_metric, score
from frugalvit.probing.validation import as_labels, as_tensors, require_features
from frugalvit.utils import console

MOMENTUM = 0.9


@dataclass
class LinearFit:
    """R trained classifiers: weight (D, R, C), bias (R, C), and the settings of each."""

    weight: Tensor
    bias: Tensor
    settings: list[tuple[float, float]]  # (learning rate, weight decay)

    def scores(self, features: Tensor) -> Tensor:
        """Class scores (R, N, C)."""
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
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> LinearFit:
    """Train one classifier per pair of learning rate and weight decay.

    features: (N, D), or (V, N, D) with V augmented views of every image, of which each epoch takes one at random.
    """
    (features,) = as_tensors(features)
    require_features("the linear probe", features, views=True)
    labels = as_labels(labels, features, "training features", classes)
    views = features[None] if features.ndim == 2 else features
    if min(lrs, default=0) <= 0 or min(weight_decays, default=-1) < 0:
        raise UserError("the linear probe needs learning rates above 0 and weight decays of at least 0.")
    device = features.device if device is None else torch.device(device)
    views, labels = views.to(device).float(), labels.to(device)
    settings = [(lr, decay) for lr in lrs for decay in weight_decays]
    count, images, width = views.shape
    batch = min(batch, images)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same draws on every device
    start = 0.01 * torch.randn(width, 1, classes, generator=generator).to(device)
    weight = start.repeat(1, len(settings), 1)
    bias = torch.zeros(len(settings), classes, device=device)
    weight_speed, bias_speed = torch.zeros_like(weight), torch.zeros_like(bias)
    rate = torch.tensor([lr * batch / 256 for lr, _ in settings], device=device)[:, None]
    decay = torch.tensor([decay for _, decay in settings], device=device)[:, None]
    for epoch in console.progress(range(epochs), label="linear probe"):
        current = rate * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        order = torch.randperm(images, generator=generator).to(device)
        view = torch.randint(count, (images,), generator=generator).to(device)
        for rows in order.split(batch):
            batch_features = views[view[rows], rows]
            residual = _residual(batch_features, weight, bias, labels[rows])
            slope = (batch_features.T @ residual.flatten(1)).view_as(weight)
            weight_speed.mul_(MOMENTUM).add_(slope).addcmul_(decay, weight)
            bias_speed.mul_(MOMENTUM).add_(residual.sum(dim=0)).addcmul_(decay, bias)
            weight.addcmul_(current, weight_speed, value=-1)
            bias.addcmul_(current, bias_speed, value=-1)
    return LinearFit(weight, bias, settings)


def _residual(features: Tensor, weight: Tensor, bias: Tensor, labels: Tensor) -> Tensor:
    """(softmax - one-hot) / B of the batch for every classifier, the gradient of the mean cross-entropy: (B, R, C)."""
    width, runs, classes = weight.shape
    logits = (features @ weight.view(width, runs * classes)).view(-1, runs, classes) + bias
    residual = logits.softmax(dim=2)
    index = labels[:, None, None].expand(-1, runs, 1)
    residual.scatter_add_(2, index, residual.new_full((1, 1, 1), -1.0).expand(index.shape))
    return residual.div_(len(features))


@dataclass
class LinearResult:
    """Scores (N_test, C) of the chosen classifier, what was chosen, and every setting's validation score."""

    scores: Tensor
    learning_rate: float
    weight_decay: float
    validation: float
    tried: list[dict[str, float]]


def linear_probe(
    train: Tensor,
    train_labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    test: Tensor,
    *,
    classes: int | None = None,
    metric: Metric = "accuracy",
    lrs: Sequence[float] = LEARNING_RATES,
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
    epochs: int = EPOCHS,
    batch: int = BATCH,
    seed: int = 0,
    device: torch.device | str | None = None,
    held_out: Tensor | None = None,
) -> LinearResult:
    """Train all settings, take the best on the validation images, and score the test images with it once.

    train: (N, D), or (V, N, D) with V views of every image; val and test: (N, D).
    train_labels, val_labels: whole numbers from 0 on, (N,) or a column (N, 1), of any type.
    held_out: the validation images as ``train`` has its own (with views), where they were a part of these: the best is
        trained again with them before that.
    """
    train, val, test, held_out = as_tensors(train, val, test, held_out)
    require_metric(metric, SINGLE_LABEL)
    if len(val) == 0:
        raise UserError("choosing a learning rate needs validation images; give a val split or more training images.")
    require_features("the linear probe", train, val, test, views=True)
    if held_out is not None and held_out.shape != (as_train := (*train.shape[:-2], *val.shape)):
        raise UserError(f"held_out must be {list(as_train)}, as train has its images, not {list(held_out.shape)}.")
    for features, what in ((train.flatten(0, -2), "training"), (val, "validation"), (test, "test")):
        require_finite(features, f"{what} features")
    device = train.device if device is None else torch.device(device)
    train_labels = as_labels(train_labels, train, "training features", classes or None)
    val_labels = as_labels(val_labels, val, "validation features", classes or None)
    classes = classes or 1 + max(int(train_labels.max()), int(val_labels.max()))
    fitted = functools.partial(fit_linear, classes=classes, epochs=epochs, batch=batch, seed=seed, device=device)
    fit = fitted(train, train_labels, lrs=lrs, weight_decays=weight_decays)
    best = -1
    tried: list[dict[str, float]] = []
    reached = _validate(metric, fit.scores(val.to(device)), val_labels)
    for i, ((lr, decay), value) in enumerate(zip(fit.settings, reached, strict=True)):
        tried.append({"lr": lr, "weight_decay": decay, "validation": value})
        if not math.isnan(value) and (best < 0 or value > tried[best]["validation"]):
            best = i
    if best < 0:
        raise UserError("every learning rate of the linear probe diverged; give smaller ones with --lrs.")
    chosen = tried[best]
    if held_out is not None:
        labels, setting = torch.cat([train_labels, val_labels]), fit.settings[best]
        both = torch.cat([train, held_out.to(train)], dim=-2)
        fit, best = fitted(both, labels, lrs=setting[:1], weight_decays=setting[1:]), 0
    scores = fit.scores(test.to(device))[best]
    if not bool(torch.isfinite(scores).all()):
        raise UserError("the linear probe diverged with all training images; give smaller learning rates with --lrs.")
    return LinearResult(scores, chosen["lr"], chosen["weight_decay"], chosen["validation"], tried)


def _validate(metric: Metric, scores: Iterable[Tensor], labels: Tensor) -> list[float]:
    """The validation score of every classifier, NaN for one that diverged."""
    return [score(metric, one, labels) if bool(torch.isfinite(one).all()) else math.nan for one in scores]
