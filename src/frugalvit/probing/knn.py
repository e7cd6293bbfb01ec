"""Weighted k-nearest-neighbour classification of frozen features (EsViT §4.1; the protocol of DINO).

Plain torch on any device, nothing on disk: the monitor of pre-training calls it as well as `frugalvit probe knn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.config.probe import KS, TEMPERATURE
from frugalvit.errors import UserError
from frugalvit.probing.metrics import classification_scores, rank_classes, require_finite
from frugalvit.probing.validation import as_labels, as_tensors, require_features

# Similarities held at a time: 64 Mi float32 are 256 MiB, small on any GPU and large enough to keep it busy.
CELLS = {"cuda": 1 << 26, "cpu": 1 << 22}
TRAIN_CHUNK = {"cuda": 1 << 16, "cpu": 1 << 13}


def nearest(
    train: Tensor,
    test: Tensor | None,
    k: int,
    *,
    device: torch.device | str | None = None,
    test_chunk: int | None = None,
    train_chunk: int | None = None,
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The k most similar training rows of every test row by cosine, chunk by chunk over the test rows.

    train: (N, D), test: (M, D), or None for leave-one-out (every training row asks all the others).
    Yields (rows, similarity, index) with (m, k') tensors sorted from near to far; k' = min(k, N), N - 1 left out.
    The best k so far are merged with the best k of each block of training rows, so that only
    test_chunk x train_chunk similarities exist at a time: 1.28 M x 50 k fits on any device.
    """
    leave_one_out = test is None
    queries = train if test is None else test
    require_features("k-NN", train, queries)
    available = len(train) - leave_one_out
    if available < 1:
        raise UserError(f"k-NN needs other training images to vote; there are {len(train)}.")
    device = train.device if device is None else torch.device(device)
    k = min(k, available)
    train_chunk = train_chunk or TRAIN_CHUNK.get(device.type, TRAIN_CHUNK["cpu"])
    test_chunk = test_chunk or max(1, CELLS.get(device.type, CELLS["cpu"]) // min(train_chunk, len(train)))
    for start in range(0, len(queries), test_chunk):
        rows = slice(start, min(start + test_chunk, len(queries)))
        asked = _unit(queries[rows], device)
        similarity = asked.new_empty(len(asked), 0)
        index = torch.empty(len(asked), 0, dtype=torch.long, device=device)
        for first in range(0, len(train), train_chunk):
            block = asked @ _unit(train[first : first + train_chunk], device).T
            if leave_one_out:  # an image must not vote for itself
                own = torch.arange(rows.start, rows.stop, device=device) - first
                inside = ((own >= 0) & (own < block.shape[1])).nonzero().squeeze(1)
                block[inside, own[inside]] = -torch.inf
            best = block.topk(min(k, block.shape[1]), dim=1)
            similarity = torch.cat([similarity, best.values], dim=1)
            index = torch.cat([index, best.indices + first], dim=1)
            if first > 0:
                similarity, order = similarity.topk(min(k, similarity.shape[1]), dim=1)
                index = index.gather(1, order)
        yield rows, similarity, index


def knn_predict(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor | None,
    ks: Sequence[int] | int = KS,
    temperature: float = TEMPERATURE,
    classes: int | None = None,
    *,
    top: int = 5,
    device: torch.device | str | None = None,
    test_chunk: int | None = None,
    train_chunk: int | None = None,
) -> dict[int, Tensor]:
    """Ranked classes of every test image for each k: {k: (M, min(top, k, classes))}, best first, all k from one pass.

    Each of the k nearest training images votes for its class with weight exp(cosine / temperature). As many votes name
    at most as many classes, so no more are ranked. Where the votes agree on fewer, those without any follow in order of
    their numbers, as they do in the released code: top5 of a k not far above 5 holds a few right by chance.
    test=None leaves one out. A k beyond the data uses all the data. Features are L2-normalised here.
    """
    train, test = as_tensors(train, test)
    ks = sorted({ks} if isinstance(ks, int) else set(ks))
    if not ks or ks[0] < 1 or any(k != int(k) for k in ks):
        raise UserError(f"k must be a whole number of at least 1, not {list(ks)}.")
    ks = [int(k) for k in ks]
    require_features("k-NN", train, train if test is None else test)
    labels = as_labels(train_labels, train, "training features", classes or None)
    if temperature <= 0:
        raise UserError(f"the temperature of k-NN must be above 0, not {temperature}.")
    require_finite(train, "training features")
    if test is not None:
        require_finite(test, "test features")
    device = train.device if device is None else torch.device(device)
    labels = labels.to(device)
    classes = classes or int(labels.max()) + 1
    ranked: dict[int, list[Tensor]] = {k: [] for k in ks}
    for _, similarity, index in nearest(
        train, test, ks[-1], device=device, test_chunk=test_chunk, train_chunk=train_chunk
    ):
        # relative to the nearest: the ranking is the same and a small temperature cannot overflow
        weight = ((similarity - similarity[:, :1]) / temperature).exp()
        neighbour = labels[index]
        votes = weight.new_zeros(len(weight), classes)
        counted = 0
        for k in ks:
            votes.scatter_add_(1, neighbour[:, counted:k], weight[:, counted:k])
            counted = k
            ranked[k].append(rank_classes(votes, min(top, k, similarity.shape[1])))
    return {k: torch.cat(parts) for k, parts in ranked.items()}


def knn_accuracy(
    train: Tensor,
    train_labels: Tensor,
    test: Tensor | None,
    test_labels: Tensor | None,
    ks: Sequence[int] | int = KS,
    temperature: float = TEMPERATURE,
    classes: int | None = None,
    *,
    device: torch.device | str | None = None,
    test_chunk: int | None = None,
    train_chunk: int | None = None,
) -> dict[int, dict[str, float]]:
    """{k: {"top1", "top5", "mean_per_class"}} in percent. test=None leaves one out and scores the training images.

    Labels are whole numbers from 0 on, (N,) or a column (N, 1), of any type.
    Fewer than five neighbours give as many answers: with k = 1, top5 is top1.
    """
    train, test = as_tensors(train, test)
    asked = train if test is None else test
    require_features("k-NN", train, asked)
    if test is not None and test_labels is None:
        raise UserError("k-NN accuracy needs labels of the test images.")
    if len(asked) == 0:
        raise UserError("there are no test images to score; give a test split with at least one labelled image.")
    train_labels = as_labels(train_labels, train, "training features", classes or None)
    labels = train_labels if test is None else as_labels(test_labels, test, "test features", classes or None)
    classes = classes or 1 + max(int(train_labels.max()), int(labels.max()))
    ranked = knn_predict(
        train,
        train_labels,
        test,
        ks,
        temperature,
        classes,
        device=device,
        test_chunk=test_chunk,
        train_chunk=train_chunk,
    )
    return {k: classification_scores(classes_of_k, labels) for k, classes_of_k in ranked.items()}


def _unit(rows: Tensor, device: torch.device) -> Tensor:
    return F.normalize(rows.to(device).float(), dim=1)
