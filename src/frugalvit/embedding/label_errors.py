"""``frugalvit data DATA --suspicious MODEL``: rank labelled images by how unlikely their labels are.

A logistic classifier on frozen features judges each image after training on other folds. Confident learning
(Northcutt et al., JAIR 2021) then decides which labels are likely wrong.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from frugalvit.backbones.registry import is_model_name
from frugalvit.backbones.weights.published import has_published
from frugalvit.config.data import DataConfig
from frugalvit.config.probe import ExtractConfig
from frugalvit.data import DatasetSplits, ImageDataset, join, open_data
from frugalvit.data.formats.csv import WANTED_COLUMN
from frugalvit.embedding.image_table import are_files, path_from_table
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureSet
from frugalvit.probing.logistic import LogisticRegression
from frugalvit.probing.splits import (
    ProbeSplit,
    assign_fifths,
    leave_fifths_out,
    make_extractor,
    open_model,
    probe_device,
)
from frugalvit.runs.run_folder import read_summary
from frugalvit.utils import console
from frugalvit.utils.files import check_new_file, write_text
from frugalvit.utils.tables import CommandResult, Table, as_csv
from frugalvit.utils.text import pluralize

_STRIDE, _MIN_GAIN = 10**0.5, 1e-3  # the ratio of successive penalties, and the gain in nats that a weaker one needs
_MAX_DRAWN, _LISTED = 200, 10  # images on the page and in the terminal


class LabelScores(NamedTuple):
    """One value per image (N,): the probability of its label, the suggested class, and if the label is likely wrong."""

    score: Tensor
    suggested: Tensor
    likely_wrong: Tensor


class RankedImage(NamedTuple):
    """A line of the ranking, without its rank; ``position`` is the image's index in the data."""

    position: int
    path: str
    label: str
    suggested: str
    score: float
    likely_wrong: bool


def find_label_errors(config: DataConfig) -> CommandResult:
    """Rank the images of all splits by how unlikely their labels are, as a table and a page."""
    began, out = time.monotonic(), Path(config.out or "suspicious.csv")
    assert config.suspicious is not None
    page = out.with_suffix(".html")
    check_new_file(out, (".csv",))
    check_new_file(page, (".html",))
    source = open_data(config.data, split="given", labels=config.label_source, classes=config.classes, root=config.root)
    examples = _join_labelled(source)
    # Random weights cannot judge labels, so the name of a network means its published ones.
    name = config.suspicious
    pretrained = not Path(name).exists() and is_model_name(name) and has_published(name)
    options = ExtractConfig(
        backbone=config.backbone, img_size=config.img_size, device=config.device, pretrained=pretrained
    )
    model = open_model(name, options)
    features = make_extractor(model, options, "pooled")(examples, source.name)
    assert source.classes is not None
    ranking = _rank(features, source.classes, config.seed, probe_device(model))
    wrong = sum(image.likely_wrong for image in ranking)
    files = are_files(examples)
    lines = [
        [rank, path_from_table(out, image.path) if files else image.path, *image[2:5], "yes" if image[5] else "no"]
        for rank, image in enumerate(ranking, 1)
    ]
    write_text(out, as_csv(["rank", "path", "label", "suggested", "score", "likely_wrong"], lines))
    verdict = f"{wrong:,} of {pluralize(len(ranking), 'label')} are likely wrong"
    about = f"{verdict} · judged by {config.suspicious} · all are in {out.name}"
    write_text(page, _make_page(ranking, examples, f"Labels of {source.name}", about))
    notes = [*source.notes, f"{verdict}. Check the first images of the page: the least probable labels come first."]
    if len(ranking) < len(features):
        notes.append(f"{pluralize(len(features) - len(ranking), 'image')} alone in a class cannot be judged.")
    if model.classes == source.classes and (read_summary(Path(config.suspicious)) or {}).get("task") != "probe":
        notes.append(f"If {config.suspicious} was trained on these labels, it hides wrong ones. Use another model.")
    notes.append(f"page {page}, table {out}")
    data = {"model": config.suspicious, "data": source.name, "images": len(features), "judged": len(ranking)}
    data |= {"likely_wrong": [image._asdict() for image in ranking if image.likely_wrong], "out": str(out)}
    data |= {"page": str(page), "seconds": round(time.monotonic() - began, 2)}
    listed: list[list[object]] = [[rank, *image[1:5]] for rank, image in enumerate(ranking[:_LISTED], 1)]
    return CommandResult(data, [Table(["rank", "image", "label", "suggested", "score"], listed)], notes)


def _rank(features: FeatureSet, classes: tuple[str, ...], seed: int, device: torch.device) -> list[RankedImage]:
    """Rank the images whose class has others, the most suspicious label first."""
    labels = features.labels
    assert labels is not None
    rows = _has_others(labels).nonzero().squeeze(1)
    if len(labels[rows].unique()) < 2:
        raise UserError("--suspicious needs at least two classes with at least two images each.")
    scores = score_labels(cross_validate(features.features, labels, seed, device), labels[rows])
    order = scores.score.argsort(stable=True)
    columns = (rows, labels[rows], scores.suggested, scores.score, scores.likely_wrong)
    return [
        RankedImage(
            features.positions[row], features.names[row], classes[label], classes[suggested], round(score, 6), wrong
        )
        for row, label, suggested, score, wrong in zip(*(column[order].tolist() for column in columns), strict=True)
    ]


def cross_validate(features: Tensor, labels: Tensor, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Predict each row whose class has others by a classifier trained on other fifths of the rows.

    (N, D), (N,) -> probabilities (N', classes). The penalty is that under which the labels of a fifth are most likely.
    """
    is_first, classes = assign_fifths(labels, seed) == 0, int(labels.max()) + 1
    problem = LogisticRegression(features[~is_first], labels[~is_first], classes, device)
    strength = _choose_strength(problem, features[scored := is_first & _has_others(labels)], labels[scored])

    def fit(part: ProbeSplit) -> Callable[[Tensor], Tensor]:
        found = LogisticRegression(part.features, part.targets, classes, device).fit(strength)
        return lambda features: found.scores(features)

    return leave_fifths_out(ProbeSplit(features, labels), classes, fit, seed)[0].softmax(1)


def _choose_strength(problem: LogisticRegression, features: Tensor, labels: Tensor) -> float:
    """Return the penalty that makes held-out labels most likely: from strong to weak while the gain is clear."""
    strength, best, earlier = float(problem.axes.spectrum.max()) / 4, -torch.inf, ()
    while True:
        earlier = (problem.fit(strength, earlier),)
        rows = earlier[0].scores(features).log_softmax(1)
        likelihood = float(rows.gather(1, labels[:, None].to(rows.device)).mean())
        if not likelihood >= best + _MIN_GAIN:  # also without images to judge it
            return strength * _STRIDE
        best, strength = likelihood, strength / _STRIDE


def score_labels(probabilities: Tensor, labels: Tensor) -> LabelScores:
    """Score labels by confident learning; probabilities (N, C) of a model trained without the image, labels (N,).

    threshold_c = mean of p_i[c] over the images labelled c
    A label is likely wrong if, of the classes with p_i[c] >= threshold_c, another one is the most probable.
    score_i = p_i[label]. On Flowers-102 98 % of the flipped labels were in its first 5 %, 91 % by the margin.
    """
    own = probabilities.gather(1, labels[:, None]).squeeze(1)
    sums = torch.zeros(probabilities.shape[1]).index_add_(0, labels, own)
    counts = torch.bincount(labels, minlength=probabilities.shape[1])
    thresholds = torch.where(counts > 0, sums / counts.clamp_min(1), torch.inf)
    confident = torch.where(probabilities >= thresholds, probabilities, -1.0)
    best, candidate = confident.max(1)
    suggested = torch.where(best >= 0, candidate, probabilities.argmax(1))
    return LabelScores(own, suggested, (best >= 0) & (candidate != labels))


def _join_labelled(source: DatasetSplits) -> ImageDataset:
    """Join all splits; an error if an image has no label or several."""
    parts = list(source.splits.values())
    if any(part.targets is not None for part in parts):
        raise UserError(f"{source.location} has several labels per image; --suspicious needs one.")
    if source.classes is None or any(part.labels is None for part in parts):
        raise UserError(
            f"{source.location} has no labels, which --suspicious checks: "
            f"put the images into one folder per class, or give a CSV with a column {WANTED_COLUMN}."
        )
    return join(*parts)


def _has_others(labels: Tensor) -> Tensor:
    """True for images whose class has another one: without its only image a class cannot be learned."""
    return torch.bincount(labels)[labels] > 1


def _make_page(ranking: list[RankedImage], examples: ImageDataset, title: str, about: str) -> str:
    """Make a page with the thumbnails of the labels that are likely wrong, then of others, up to a limit."""
    from frugalvit.embedding.contact_sheet import make_thumbnail
    from frugalvit.report import html, sections
    from frugalvit.visualization.explorer_data import data_uri

    entries: dict[bool, list[dict[str, str]]] = {True: [], False: []}
    drawn = sorted(ranking, key=lambda image: not image.likely_wrong)[:_MAX_DRAWN]
    for position, path, label, suggested, score, likely_wrong in console.progress(drawn, label="drawing"):
        pixels = torch.tensor(make_thumbnail(examples, position, "").pixels).permute(2, 0, 1) / 255
        entry = {"label": label, "predicted": suggested, "score": f"{score:.3f}", "file": path}
        entries[likely_wrong].append({"image": data_uri(pixels), **entry})
    lead = "The number is the probability of the label, by a classifier that was trained without the image."
    content = sections.section("wrong", "Likely wrong", sections.gallery(entries[True], "looks like"), lead)
    lead = "Of the other labels, the least probable ones, with the same probability as a number."
    content += sections.section("others", "Less likely wrong", sections.gallery(entries[False], "looks like"), lead)
    return html.render(title, about, content)
