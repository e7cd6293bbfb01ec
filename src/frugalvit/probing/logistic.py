"""The logistic-regression probe of EsViT B.3 (after CLIP): L-BFGS to convergence and a search over λ.

The objective is that of scikit-learn's ``LogisticRegression(C=1 / λ)``: the **sum** of the losses over the images
plus λ/2 |W|², without a penalty of the bias. Three and more classes: softmax cross-entropy. Two classes: one logistic
output, as in scikit-learn. Several labels per image (VOC2007): one logistic output per class, all with the same λ.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor

from frugalvit.backbones import Backbone
from frugalvit.config.probe import MAX_ITERATIONS, LogisticConfig
from frugalvit.config.semi_supervised import REST
from frugalvit.data import open_data
from frugalvit.data.loader import eval_batches
from frugalvit.data.splits import hold_out, leave_out_files
from frugalvit.errors import UserError
from frugalvit.probing.lbfgs import Axes, minimize, principal_axes
from frugalvit.probing.metrics import (
    METRIC_NAMES,
    Metric,
    best_thresholds,
    chance_precision,
    classification_scores,
    metric_interval,
    rank_classes,
    score,
    score_facts,
)
from frugalvit.probing.probe import ProbeInputs, ProbeScores, run_probe
from frugalvit.probing.propagation import UNKNOWN, guess_labels
from frugalvit.probing.saved_probe import LinearClassifier
from frugalvit.probing.splits import ProbeData, ProbeSplit, concat, leave_fifths_out, make_probe_splits
from frugalvit.probing.validation import as_features, as_labels, as_targets
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult
from frugalvit.utils.text import pluralize

# |gradient| <= 1 % of λ|W|: by strong convexity f is above its minimum by at most 1e-4 of the penalty λ/2 |W|².
TOLERANCE = 1e-2
STEPS_PER_DECADE = 8
DECADES = 6  # λ from 1e-6 to 1e6
STRIDE = 100.0  # the ratio of successive λ on the path to a weak one
WEAKEST = 1e-5
"""The weakest λ for labels that spread, relative to the largest curvature of the loss. Guesses contradict each other: a
weaker λ takes hundreds of iterations more and scores lower (CIFAR-100, Flowers-102, ViT-Ti: best at 1e-4 to 1e-3)."""


def logistic(config: LogisticConfig) -> CommandResult:
    """Search λ on validation images, fit on train + val, and score the test images."""

    def score_features(inputs: ProbeInputs) -> ProbeScores:
        splits = make_probe_splits(
            inputs.features, inputs.classes, config.val_fraction, config.seed, labels=config.labels
        )
        others = _embed_unlabelled(config.unlabelled, inputs, splits)
        several = splits.train.targets.ndim == 2
        metric: Metric = "map" if several else "accuracy"
        data, result = fit_and_score(splits, metric, inputs.device, config.max_iterations, others)
        total, interval, best = (data.pop(name) for name in ("score", "score_interval", "validation"))
        meta: dict[str, Any] = {}
        if several:
            targets = splits.test.targets
            data |= {
                "map": total,
                "map_interval": interval,
                "val_map": best,
                "chance": {"map": chance_precision(targets)},
            }
            data["map11"] = score("map11", result.scores, targets)
            thresholds = best_thresholds(result.val_scores.sigmoid().cpu(), splits.val.targets)
            meta = {"target": "labels", "thresholds": [round(value, 6) for value in thresholds.tolist()]}
        else:
            data["val_top1"] = best
        if others is not None:
            data["unlabelled_images"] = len(others)
            splits.notes.append(f"the labels spread to {pluralize(len(others), 'unlabelled image')}")
        data["tried"] = {f"{strength:.6g}": value for strength, value in result.tried.items()}
        learned = concat(splits.train, splits.val)

        def fit(part: ProbeSplit) -> Callable[[Tensor], Tensor]:
            # The loss is a sum: with λ / N as in the full fit, the scale of the logits stays.
            strength = result.strength * len(part) / len(learned)
            features, targets = with_unlabelled(part.features, part.targets, others)
            problem = LogisticRegression(features, targets, splits.classes, inputs.device)
            found = problem.fit(strength, max_iterations=config.max_iterations)
            return lambda features: found.scores(features).clamp_min(-1e9)

        held_out = None if several else partial(leave_fifths_out, learned, splits.classes, fit)
        classifier, settings = LinearClassifier(*result.classifier, held_out), ("lambda", "iterations")
        return ProbeScores(data, settings, splits.notes, classifier=classifier, unseen=splits.unseen, meta=meta)

    without = config.unlabelled is None
    return run_probe("logistic", config, score_features, multi_label=without, loose=config.unlabelled == REST)


def _embed_unlabelled(images: str | None, inputs: ProbeInputs, splits: ProbeData) -> Tensor | None:
    """Return the features (N, D) of the images of --unlabelled."""
    if images is None:
        return None
    if images != REST:
        opened, known = open_data(images, split="given", labels="ignore").splits, inputs.source.splits
        if "train" not in opened:
            raise UserError(f"--unlabelled {images} has no training images: use another folder.")
        scored = [known[name] for name in ("val", "test") if name in known]
        scored.append(known["train"].subset(np.isin(known["train"].keys, splits.unseen)))
        return inputs.extractor(leave_out_files(opened["train"], scored, splits.notes), "unlabelled images").features
    parts = [] if splits.unlabelled is None else [splits.unlabelled]
    if "train" in inputs.source.loose:
        parts.append(inputs.extractor(inputs.source.loose["train"], "unlabelled images").features)
    if not parts:
        raise UserError(
            f"--unlabelled rest: every training image of {inputs.source.location} has a label. Use --labels, or name a "
            "folder: --unlabelled IMAGES."
        )
    return torch.cat(parts)


@dataclass
class LogisticFit:
    """A classifier for one λ: weight (D, K), bias (K,); K = 1 for two classes."""

    weight: Tensor
    bias: Tensor
    strength: float
    present: Tensor  # the classes with a training image, (P,)
    classes: int
    several_labels: bool
    iterations: int
    converged: bool

    def scores(self, features: Tensor) -> Tensor:
        """Class scores (N, classes); -inf for a class without a training image."""
        logits = features.to(self.weight) @ self.weight + self.bias
        if self.several_labels:
            return logits
        if len(self.present) == 2:
            logits = F.pad(logits, (1, 0))
        full = logits.new_full((len(logits), self.classes), -torch.inf)
        full[:, self.present] = logits
        return full

    def to_linear(self) -> tuple[Tensor, Tensor]:
        """Weight (classes, D) and bias (classes,) with the same scores.

        A class without a training image gets a bias that is finite, for exports, and never the highest.
        """
        weight, bias = self.weight.T, self.bias
        if len(self.present) == 2 and not self.several_labels:
            weight, bias = F.pad(weight, (0, 0, 1, 0)), F.pad(bias, (1, 0))
        all_weights, all_biases = weight.new_zeros(self.classes, weight.shape[1]), bias.new_full((self.classes,), -1e9)
        all_weights[self.present], all_biases[self.present] = weight, bias
        return all_weights, all_biases


def extrapolate(fits: Sequence[LogisticFit], strength: float) -> tuple[Tensor, Tensor]:
    """Weight (D, K) and bias (K,) for another λ, on the line through the two nearest fits over log λ.

    The weights of separable classes grow with log 1/λ in one direction (Soudry et al. 2018), so the line leads to
    the next λ. It is followed at most as far as the two fits are apart.
    """
    near, *others = sorted(fits, key=lambda fit: abs(math.log(fit.strength / strength)))
    second = next((fit for fit in others if fit.strength != near.strength), None)
    if second is None or near.strength == strength:
        return near.weight, near.bias
    share = math.log(strength / near.strength) / math.log(second.strength / near.strength)
    share = max(-1.0, min(1.0, share))
    return near.weight + share * (second.weight - near.weight), near.bias + share * (second.bias - near.bias)


class LogisticRegression:
    """The problem for one set of training images; its principal axes serve every λ."""

    def __init__(
        self, features: Tensor, targets: Tensor, classes: int | None = None, device: torch.device | str | None = None
    ) -> None:
        """features (N, D); targets (N,) classes, or for several labels (N, C) of 0, 1 and -1 = unknown.

        Some of the classes may be UNKNOWN: the others spread to these images first (``guess_labels``).
        """
        self.several_labels, self.row_weights = targets.ndim == 2, None
        device = features.device if device is None else torch.device(device)
        features = features.to(device, torch.float64 if features.dtype == torch.float64 else torch.float32)
        targets = targets.to(device)
        if self.several_labels:
            self.classes = targets.shape[1]
            self.present = torch.arange(self.classes, device=device)
            self.targets = targets
        else:
            self.classes = classes or int(targets.max()) + 1
            self.present = targets[targets != UNKNOWN].unique()
            if len(self.present) < 2:
                raise UserError("Logistic regression needs training images of at least two classes; there is one.")
            if bool((targets == UNKNOWN).any()):
                targets, self.row_weights = guess_labels(features, targets, self.classes)
            one_hot = F.one_hot(targets, self.classes)[:, self.present]
            self.targets = one_hot[:, 1:] if len(self.present) == 2 else one_hot
        self.axes: Axes = principal_axes(features)
        # The largest curvature of the loss.
        self.curvature = float(self.axes.spectrum.max()) / 4 if len(self.axes.spectrum) else 0.0

    @torch.no_grad()
    def fit(
        self,
        strength: float,
        earlier: Sequence[LogisticFit] = (),
        max_iterations: int = MAX_ITERATIONS,
        tolerance: float = TOLERANCE,
    ) -> LogisticFit:
        """Fit one λ, from the extrapolation of ``earlier`` fits and of some between the next stronger one and λ.

        Few images are often separable. The first step from zero to a weak λ then overshoots to a region without
        curvature, and the way back is long. The line through two stronger λ ends near the minimum. Without a stronger
        fit the path starts at the largest curvature of the loss, 1/4 of the spectrum: for a stronger λ the minimum is
        near zero.
        """
        earlier = list(earlier)
        last = min((fit.strength for fit in earlier if fit.strength >= strength), default=self.curvature)
        while last > 1.01 * STRIDE * strength:
            last /= STRIDE
            earlier.append(self._fit_one(last, earlier, max_iterations, max(tolerance, TOLERANCE)))
        return self._fit_one(strength, earlier, max_iterations, tolerance)

    def search(
        self,
        val: Tensor,
        targets: Tensor,
        metric: Metric,
        max_iterations: int = MAX_ITERATIONS,
        tolerance: float = TOLERANCE,
    ) -> tuple[float, dict[float, float], dict[float, LogisticFit]]:
        """Return the λ with the best score on validation images, and the score and the fit of every λ tried."""
        fits: dict[float, LogisticFit] = {}

        def evaluate(strengths: list[float]) -> list[float]:
            for strength in sorted(strengths, reverse=True):
                fits[strength] = self.fit(strength, [*fits.values()], max_iterations, tolerance)
            return [score(metric, fits[strength].scores(val), targets) for strength in strengths]

        weakest = 0.0 if self.row_weights is None else WEAKEST * self.curvature
        return (*search_strength(evaluate, weakest), fits)

    def _fit_one(
        self, strength: float, earlier: Sequence[LogisticFit], max_iterations: int, tolerance: float
    ) -> LogisticFit:
        weight, bias = self.axes.into(*extrapolate(earlier, strength)) if earlier else (None, None)
        outputs = self.targets.shape[1]
        minimum = minimize(
            self.axes,
            self.targets,
            strength,
            several_labels=self.several_labels or outputs == 1,
            row_weights=self.row_weights,
            weight=weight,
            bias=bias,
            max_iterations=max_iterations,
            tolerance=tolerance,
        )
        weight, bias = self.axes.back(minimum.weight, minimum.bias)
        if outputs > 1 and not self.several_labels:
            bias = bias - bias.mean()  # softmax ignores a common shift: choose a zero mean
        shared = (self.present, self.classes, self.several_labels)
        return LogisticFit(weight, bias, strength, *shared, minimum.iterations, minimum.converged)


def with_unlabelled(features: Tensor, labels: Tensor, others: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append the features of unlabelled images, with the label UNKNOWN."""
    if others is None:
        return features, labels
    return torch.cat([features, others.to(features)]), torch.cat([labels, labels.new_full((len(others),), UNKNOWN)])


def search_strength(
    evaluate: Callable[[list[float]], list[float]], weakest: float = 0.0
) -> tuple[float, dict[float, float]]:
    """Return the best λ by CLIP's binary search, on 8 steps a decade, and the score of every λ tried.

    The search starts from {1e-6, 1e-4, 1e-2, 1, 1e2, 1e4, 1e6} and halves the interval around the peak until it is one
    step wide: 15 evaluations instead of 97. λ below ``weakest`` are left out. Of equally good λ the middle one is the
    peak: with few validation images the edges of a plateau are uncertain.
    """
    end = DECADES * STEPS_PER_DECADE
    spacing = 2 * STEPS_PER_DECADE
    tried: dict[int, float] = {}
    new = list(range(-end, end + 1, spacing))
    while True:
        new = [step for step in new if step == end or _strength(step) >= weakest]
        tried |= dict(zip(new, evaluate([_strength(step) for step in new]), strict=True))
        highest = max(tried.values())
        plateau = sorted(step for step in tried if tried[step] == highest)
        peak = plateau[len(plateau) // 2]
        if spacing == 1:
            return _strength(peak), {_strength(step): tried[step] for step in sorted(tried)}
        spacing //= 2
        new = [step for step in (peak - spacing, peak + spacing) if -end <= step <= end]


@dataclass
class LogisticResult:
    """Scores (N_test, classes) of the test images, the classifier (weight, bias), and how λ was chosen.

    val_scores: of the classifier that learned from the training images alone
    """

    scores: Tensor
    val_scores: Tensor
    classifier: tuple[Tensor, Tensor]
    strength: float
    validation: float
    tried: dict[float, float]
    iterations: int
    converged: bool


def logistic_probe(
    train: Tensor,
    train_targets: Tensor,
    val: Tensor,
    val_targets: Tensor,
    test: Tensor,
    *,
    metric: Metric = "accuracy",
    classes: int | None = None,
    device: torch.device | str | None = None,
    max_iterations: int = MAX_ITERATIONS,
    tolerance: float = TOLERANCE,
    unlabelled: Tensor | None = None,
) -> LogisticResult:
    """Choose λ on the validation images, fit on training + validation images, and score the test images.

    unlabelled: features to which the labels spread first (``guess_labels``)

    train_targets, val_targets: integers from 0; with the metrics "map" and "map11" several labels per image, (N, C)
        of 1 = present, 0 = absent and -1 = unknown.
    """
    if metric not in METRIC_NAMES:
        raise UserError(f"The metric must be one of {', '.join(METRIC_NAMES)}, not {metric}.")
    train, val, test = as_features(train, val, test)
    if metric in ("map", "map11"):
        train_targets, val_targets = as_targets(train_targets, train), as_targets(val_targets, val)
    else:
        train_targets, val_targets = as_labels(train_targets, train, classes), as_labels(val_targets, val, classes)
        classes = classes or 1 + max(int(train_targets.max()), int(val_targets.max()))
    device = train.device if device is None else torch.device(device)
    problem = LogisticRegression(*with_unlabelled(train, train_targets, unlabelled), classes, device)
    val = val.to(device)
    strength, tried, fits = problem.search(val, val_targets.to(device), metric, max_iterations, tolerance)
    targets = torch.cat([train_targets, val_targets.to(train_targets.device)])
    both = LogisticRegression(
        *with_unlabelled(torch.cat([train.to(device), val]), targets, unlabelled), classes, device
    )
    # From zero, not from the fit without the validation images: with a weak λ its mistakes are corrected slowly.
    final = both.fit(strength, (), max_iterations, tolerance)
    facts = (strength, tried[strength], tried, final.iterations, final.converged)
    return LogisticResult(final.scores(test.to(device)), fits[strength].scores(val), final.to_linear(), *facts)


def fit_on_features(
    backbone: Backbone, datasets: Sequence[Any], classes: int, fabric: Fabric, unlabelled: Any = None
) -> tuple[Tensor, Tensor, float]:
    """Fit logistic regression on the pooled features of datasets (``EvalSet``): weight, bias and λ.

    A fifth of the images chooses λ; then all of them are fitted.

    unlabelled: images to which the labels spread first
    """
    backbone.to(fabric.device).eval()

    def embed(dataset: Any, label: str = "frozen features") -> tuple[Tensor, Tensor]:
        parts = []
        batches = eval_batches(dataset.store, dataset.transform, dataset.batch)
        with torch.no_grad(), fabric.autocast():
            for images, labels, _ in console.progress(batches, dataset.batches, label):
                known = torch.full((len(images),), UNKNOWN) if labels is None else labels.cpu()
                parts.append((backbone(images).pooled.float().cpu(), known))
        features, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        return features, labels

    features, labels = (torch.cat(column) for column in zip(*map(embed, datasets), strict=True))
    others = None if unlabelled is None else embed(unlabelled, "features of unlabelled images")[0]
    device = "cpu" if fabric.device.type == "mps" else fabric.device  # MPS has no double precision for the axes
    metric: Metric
    groups, metric = (labels.numpy(), "accuracy") if labels.ndim == 1 else (None, "map")
    held = torch.from_numpy(hold_out([str(row) for row in range(len(labels))], groups, 0.2, 0))
    strength = 1.0
    if held.any() and len(labels[~held].unique()) > 1:
        problem = LogisticRegression(*with_unlabelled(features[~held], labels[~held], others), classes, device)
        strength, *_ = problem.search(features[held].to(device), labels[held].to(device), metric)
    fitted = LogisticRegression(*with_unlabelled(features, labels, others), classes, device).fit(strength)
    weight, bias = (part.cpu() for part in fitted.to_linear())
    return weight, bias.clamp_min(float(bias[bias > -1e8].min()) - 10), strength


def fit_and_score(
    data: ProbeData, metric: Metric, device: torch.device, max_iterations: int, unlabelled: Tensor | None = None
) -> tuple[dict[str, Any], LogisticResult]:
    """Search λ on validation images, fit on train + val, score the test images; 11-point mAP for several labels.

    Returns the score by the metric, with facts about the fit and, for one label an image, scores of classes.
    """
    multi_label = data.train.targets.ndim == 2
    metric = "map11" if multi_label and metric != "map" else metric
    parts = data.train.features, data.train.targets, data.val.features, data.val.targets, data.test.features
    result = logistic_probe(
        *parts, metric=metric, classes=data.classes, device=device, max_iterations=max_iterations, unlabelled=unlabelled
    )
    if not result.converged:
        console.warning(f"L-BFGS reached its limit of {max_iterations} iterations; raise --max-iterations")
    facts: dict[str, Any] = {
        "score": score(metric, result.scores, data.test.targets),
        "score_interval": metric_interval(metric, result.scores, data.test.targets),
        "metric": metric,
        "validation": result.validation,
        "lambda": result.strength,
        "iterations": result.iterations,
        "converged": result.converged,
        "train_images": len(data.train) + len(data.val),
        "test_images": len(data.test),
    }
    if not multi_label:
        ranked = rank_classes(result.scores)
        facts |= classification_scores(ranked, data.test.targets) | score_facts(ranked, data.test.targets, data.classes)
    return facts, result


def _strength(step: int) -> float:
    return 10.0 ** (step / STEPS_PER_DECADE)
