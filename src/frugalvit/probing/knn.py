"""Weighted k-nearest-neighbour classification of frozen features (EsViT §4.1; the protocol of DINO).

``frugalvit probe knn`` and the online k-NN of pre-training call it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.backbones.knn_head import KnnHead
from frugalvit.config.probe import KS, TEMPERATURE, KnnConfig
from frugalvit.errors import UserError
from frugalvit.probing.metrics import classification_scores, rank_classes
from frugalvit.probing.probe import ProbeInputs, ProbeScores, run_probe
from frugalvit.probing.saved_probe import KnnClassifier
from frugalvit.probing.splits import ProbeSplit, concat, draw_labels, leave_fifths_out, to_probe_split
from frugalvit.probing.validation import as_features, as_labels
from frugalvit.utils.scores import read_scores, score_table
from frugalvit.utils.tables import CommandResult
from frugalvit.utils.text import pluralize

HEADLINE_K = 20  # "top1" is the score at this k if --ks has it, as DINO and EsViT report it
# Similarities in memory at a time: 64 Mi float32 are 256 MiB, small on any GPU and large enough to keep it busy.
CELLS = {"cuda": 1 << 26, "cpu": 1 << 22}
TRAIN_CHUNK = {"cuda": 1 << 16, "cpu": 1 << 13}


def knn(config: KnnConfig) -> CommandResult:
    """Score the test split, else the val split, else every image against all others (leave one out)."""

    def score(inputs: ProbeInputs) -> ProbeScores:
        features = dict(inputs.features)
        tested = next((features.pop(name) for name in ("test", "val") if name in features), None)
        queries = None if tested is None else to_probe_split(tested)
        gallery = concat(*map(to_probe_split, features.values()))
        notes = ["without a test split, all other images vote on each image"] if queries is None else []
        unseen: list[str] = []
        keys = np.array(next(iter(features.values())).keys)
        if queries is None and (copies := features["train"].copies) is not None:
            first = np.isin(np.arange(len(gallery)), np.unique(copies, return_index=True)[1])
            gallery, keys = gallery.subset(first), keys[first]
            if not first.all():
                notes.append(f"{pluralize(int((~first).sum()), 'copy')} of other images left out")
        if config.labels != 1:
            labelled = draw_labels(gallery, np.ones(len(gallery), dtype=bool), config.labels, config.seed)
            if queries is None and not labelled.all():
                queries, unseen = gallery.subset(~labelled), keys[~labelled].tolist()
                notes = ["there is no test split: the images without a label are scored"]
            notes.append(f"{labelled.sum():,} of {len(gallery):,} labels are used")
            gallery = gallery.subset(labelled)
        scored = (None, None) if queries is None else (queries.features, queries.targets)
        learned, options = (gallery.features, gallery.targets), (config.ks, config.temperature, inputs.classes)
        scores = knn_accuracy(*learned, *scored, *options, device=inputs.device)
        headline = HEADLINE_K if HEADLINE_K in scores else min(scores)
        train_images, test_images = len(gallery), len(gallery if queries is None else queries)
        data: dict[str, Any] = {
            **scores[headline],
            "k": headline,
            "knn": {str(k): values["top1"] for k, values in scores.items()},
            "leave_one_out": queries is None,
            "train_images": train_images,
            "test_images": test_images,
        }
        truth = gallery.targets if queries is None else queries.targets
        data["chance"] = {"top1": 100 * float(truth.bincount().max()) / test_images}
        where = {"scored_on": "test", "scored_images": test_images, "chance": data["chance"]}
        tops = {k: read_scores({"top1": values["top1"]} | where)[0] for k, values in scores.items()}
        rows = [replace(top, name=f"top-1, k = {k}") for k, top in tops.items()]
        voted = "each other" if queries is None else f"{test_images:,} other images"
        title = f"k-NN on {inputs.source.name}: {train_images:,} images vote on {voted}"
        settings = (inputs.classes, headline, config.temperature)

        def vote(part: ProbeSplit) -> KnnHead:
            head = KnnHead(len(part), part.features.shape[1], *settings)
            head.set_images(part.features, part.targets)
            return head

        held_out = partial(leave_fifths_out, gallery, inputs.classes, vote)
        classifier = KnnClassifier(gallery.features, gallery.targets, *settings, held_out)
        table = replace(score_table(rows), title=title)
        return ProbeScores(data, notes=notes, table=table, classifier=classifier, unseen=unseen)

    return run_probe("knn", config, score)


def nearest(
    train: Tensor, test: Tensor | None, k: int, *, device: torch.device | str | None = None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the k most similar training rows of every test row by cosine, a chunk of test rows at a time.

    train: (N, D), test: (M, D), or None for leave-one-out (every training row against all others).
    Yields (rows, similarity, index) with (m, k') tensors, the nearest first; k' = min(k, N), for leave-one-out N - 1.
    The best k so far are merged with the best k of each block of training rows. So only one chunk of test rows x one of
    training rows is in memory: 1.28 M x 50 k fits on any device.
    """
    queries = train if test is None else test
    available = len(train) - (test is None)
    if available < 1:
        raise UserError(f"k-NN needs at least 2 images to leave one out and 1 otherwise, not {len(train)}.")
    device = train.device if device is None else torch.device(device)
    k = min(k, available)
    train_chunk = TRAIN_CHUNK.get(device.type, TRAIN_CHUNK["cpu"])
    test_chunk = max(1, CELLS.get(device.type, CELLS["cpu"]) // min(train_chunk, len(train)))
    for start in range(0, len(queries), test_chunk):
        rows = slice(start, min(start + test_chunk, len(queries)))
        query = _unit(queries[rows], device)
        similarity = query.new_empty(len(query), 0)
        index = torch.empty(len(query), 0, dtype=torch.long, device=device)
        for first in range(0, len(train), train_chunk):
            block = query @ _unit(train[first : first + train_chunk], device).T
            if test is None:  # an image must not vote for itself
                own_column = torch.arange(rows.start, rows.stop, device=device) - first
                inside = ((own_column >= 0) & (own_column < block.shape[1])).nonzero().squeeze(1)
                block[inside, own_column[inside]] = -torch.inf
            best = block.topk(min(k, block.shape[1]), dim=1)
            similarity = torch.cat([similarity, best.values], dim=1)
            index = torch.cat([index, best.indices + first], dim=1)
            if first > 0:
                similarity, order = similarity.topk(min(k, similarity.shape[1]), dim=1)
                index = index.gather(1, order)
        yield rows, similarity, index


def knn_predict(
    train: Tensor,
    labels: Tensor,
    test: Tensor | None,
    ks: Sequence[int],
    temperature: float,
    classes: int,
    *,
    device: torch.device | str | None = None,
) -> dict[int, Tensor]:
    """Rank the classes of every test image for each k: {k: (M, min(5, k, classes))}, best first.

    Each of the k nearest training images votes for its class with weight exp(cosine / temperature). At most k classes
    are ranked. Classes without a vote follow in the order of their numbers, as in the released code. So a few top5
    hits at a small k are chance. test=None leaves one out. A k larger than the data uses all images.
    """
    ks = sorted(set(ks))
    ranked: dict[int, list[Tensor]] = {k: [] for k in ks}
    for _, similarity, index in nearest(train, test, ks[-1], device=device):
        # relative to the nearest: the ranking is the same and a small temperature cannot overflow
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        neighbour = labels.to(index.device)[index]
        votes = weight.new_zeros(len(weight), classes)
        counted = 0
        for k in ks:
            votes.scatter_add_(1, neighbour[:, counted:k], weight[:, counted:k])
            counted = k
            ranked[k].append(rank_classes(votes, min(5, k, similarity.shape[1])))
    return {k: torch.cat(parts) for k, parts in ranked.items()}


def knn_accuracy(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor | None,
    test_labels: Tensor | None,
    ks: Sequence[int] = KS,
    temperature: float = TEMPERATURE,
    classes: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> dict[int, dict[str, float]]:
    """Return {k: {"top1", "top5", "mean_per_class"}} in percent; test=None leaves one out.

    Features need not be normalized. Labels are integers from 0. With k below 5, top5 counts k classes.
    """
    if min(ks, default=0) < 1 or temperature <= 0:
        raise UserError(f"k-NN needs k of at least 1 and a temperature above 0, not {list(ks)} and {temperature}.")
    if test is None:
        (train,) = as_features(train)
    else:
        train, test = as_features(train, test)
    train_labels = labels = as_labels(train_labels, train, classes)
    if test is not None:
        labels = as_labels(test_labels, test, classes)
    classes = classes or 1 + max(int(train_labels.max()), int(labels.max()))
    ranked = knn_predict(train, train_labels, test, ks, temperature, classes, device=device)
    return {k: classification_scores(classes_of_k, labels) for k, classes_of_k in ranked.items()}


def _unit(rows: Tensor, device: torch.device) -> Tensor:
    return F.normalize(rows.to(device).float(), dim=1)
