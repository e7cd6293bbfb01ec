"""The floor of a run: what simple methods without a network score on the same images.

An image becomes one vector: an 8 × 8 thumbnail, the mean and deviation of its colours, and a histogram of 4 × 4 × 4
colours. Nearest neighbour and logistic regression learn from these vectors of the training images. The third method
always answers the most frequent class.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frugalvit.data.cache.store import ImageStore
from frugalvit.data.rng import generator_for
from frugalvit.probing.knn import nearest
from frugalvit.probing.logistic import LogisticRegression
from frugalvit.probing.metrics import top_k_accuracy
from frugalvit.utils.scores import share_interval

METHODS = {
    "majority": "the most frequent class",
    "nearest_neighbour": "nearest neighbour",
    "logistic": "logistic regression",
}
SIDE = 8  # of a thumbnail; 16 scores no better and takes longer
LEVELS = 4  # of each colour in the histogram
PIXELS = 64  # a side, at most; of a larger image every second, third, … pixel is read
BATCH = 256
# Within 2 points of the best on validation images of Flowers-102, CIFAR-100, Quick, Draw! and on digits.
COLOUR_WEIGHT = 5.0  # makes colours and thumbnail about equally long
STRENGTH = 3.0  # λ of the logistic regression
TOLERANCE = 0.1  # of its gradient; 0.01 takes longer and changes scores by less than 0.5
# Limits of the training images, and of images × classes. They bound the time: about ten seconds on two cores.
MAX_IMAGES, MAX_CELLS = 20_000, 8_000_000


def compute_floor(train: ImageStore, scored: ImageStore, classes: int, seed: int) -> dict[str, Any]:
    """Return top-1 on the images of ``scored`` by method, the best of them, and how many images they learned from.

    If there are more training images than the limits, ``seed`` draws a part of them.
    """
    rows, most = torch.arange(len(train)), min(MAX_IMAGES, MAX_CELLS // max(1, classes))
    if len(rows) > most:
        rows = torch.randperm(len(rows), generator=generator_for(seed, "floor"))[:most].sort().values
    features, labels = _read(train, rows)
    queries, truth = _read(scored, torch.arange(len(scored)))
    assert train.labels is not None
    most_frequent = train.labels.bincount().argmax().cpu()
    neighbours = torch.cat([index[:, 0] for _, _, index in nearest(features, queries, 1)])
    answers = {"majority": most_frequent.expand(len(truth)), "nearest_neighbour": labels[neighbours]}
    answers["logistic"] = answers["majority"]
    if len(labels.unique()) > 1:
        fitted = LogisticRegression(features, labels, classes).fit(STRENGTH, tolerance=TOLERANCE)
        answers["logistic"] = fitted.scores(queries).argmax(1)
    scores = {name: top_k_accuracy(answers[name][:, None], truth) for name in METHODS}
    method = max(scores, key=scores.__getitem__)
    return {
        **scores,
        "best": scores[method],
        "method": method,
        "fitted_images": len(labels),
        "train_images": len(train),
        "scored_images": len(truth),
    }


def describe_images(images: Tensor) -> Tensor:
    """Return the vectors (B, 262) of uint8 images (B, 3, H, W)."""
    height, width = images.shape[-2:]
    pixels = images[:, :, :: -(-height // PIXELS), :: -(-width // PIXELS)].cpu()
    red, green, blue = (pixels.int() * LEVELS // 256).flatten(2).unbind(1)
    colours = LEVELS**3
    bins = (red * LEVELS + green) * LEVELS + blue + colours * torch.arange(len(pixels))[:, None]
    histogram = bins.flatten().bincount(minlength=colours * len(pixels)).view(-1, colours) / bins.shape[1]
    values = pixels.float() / 255
    thumbnail = F.adaptive_avg_pool2d(values, SIDE).flatten(1)
    deviation, mean = torch.std_mean(values, (2, 3), correction=0)
    # The root makes distances between histograms less dependent on their largest bins (Hellinger).
    return torch.cat([thumbnail, COLOUR_WEIGHT * torch.cat([mean, deviation, histogram.sqrt()], 1)], 1)


def describe_floor(floor: dict[str, Any], top1: float | None = None) -> str:
    """Return the floor in one line, and whether a network's ``top1`` is about that."""
    if "skipped" in floor:
        return f"not computed: {floor['skipped']}"
    part = ""
    if floor["fitted_images"] < floor["train_images"]:
        part = f", which learned from {floor['fitted_images']:,} of {floor['train_images']:,} training images"
    low, high = share_interval(floor["best"], floor["scored_images"])
    score = f"{floor['best']:.1f} % (95 %: {low:.1f} to {high:.1f})"
    text = f"{score} without a network, on the same images: {METHODS[floor['method']]}{part}"
    return f"{text}. The network is not clearly better or worse" if low <= (top1 or 0) <= high else text


def check_floor(top1: float, floor: dict[str, Any], pretrained: bool = False) -> list[str]:
    """Return an alarm with advice if a network's top-1 is below the floor's interval, or the most frequent class.

    pretrained: the network started from other weights, so these are no advice
    """
    if "skipped" in floor:
        return []
    lowest = share_interval(floor["best"], floor["scored_images"])[0]
    if top1 >= lowest and not top1 <= floor["majority"] < 100:
        return []
    by = METHODS[floor["method"]]
    if top1 <= floor["majority"]:
        majority = f"{floor['majority']:.1f} %"
        sign = f"top-1 {top1:.1f} % is not above the most frequent class: always answering it has {majority}"
    else:
        sign = f"top-1 {top1:.1f} % is below the floor: {by} on thumbnails and colours has {floor['best']:.1f} %"
    published = "" if pretrained else "published weights (--pretrained, or 'frugalvit probe' on their features), "
    return [f"{sign}. Try {published}more --epochs, or another --backbone"]


def _read(store: ImageStore, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the vectors and labels of the readable images among ``rows``, on the CPU."""
    assert store.labels is not None
    fetcher = store.fetcher(lambda step: rows[step * BATCH :][:BATCH])
    vectors, indices = [], []
    for step, wanted in enumerate(rows.split(BATCH)):
        images, _, index = fetcher.at(step)
        readable = index == wanted  # others are substitutes
        vectors.append(describe_images(images)[readable])
        indices.append(index[readable])
    return torch.cat(vectors), store.labels.cpu()[torch.cat(indices)]
