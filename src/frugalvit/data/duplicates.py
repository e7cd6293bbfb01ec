"""Find images with the same or nearly the same content. Copies on both sides of a split give too high a score."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from frugalvit.data.bad_images import UnreadableImage, read_all
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import resize_to, to_picture
from frugalvit.utils.text import pluralize

SIDE = 16  # of a thumbnail
# Re-encoded, resized and slightly cropped photos differ by 0.01 to 0.06, different ones by 0.3 and more, similar
# drawings and digits by 0.09 and more.
NEAR = 0.08
MIN_CONTRAST = 2.0  # of 255; a thumbnail does not show the details of an almost empty image
MAX_IMAGES, MAX_MEGAPIXELS = 20_000, 500.0  # about ten seconds on two cores
_CHUNK = 2048  # rows of a block of distances
_PAIRS = 10_000  # compared at a time


def group_copies(examples: ImageDataset, labels: np.ndarray | None) -> tuple[np.ndarray, str]:
    """Return the first image of every image's group of copies, int (N,), and the end of a note about a made split.

    Near copies that are most of a class (a fixed camera, one simple shape) are images of their own.
    """
    exact = find_copies(examples)
    distinct, rows = np.unique(exact, return_inverse=True)
    counts = [pluralize(len(exact) - len(distinct), "exact copy")] if len(distinct) < len(exact) else []
    thumbnails, copies, note = read_thumbnails(examples.subset(distinct)), exact, ""
    if thumbnails is None:
        note = f"; near copies are not searched above {MAX_IMAGES:,} images or {MAX_MEGAPIXELS:,.0f} megapixels"
    else:
        copies = distinct[find_near_copies(thumbnails).numpy()][rows]
        labels = np.zeros(len(copies), dtype=np.int64) if labels is None else labels
        (groups, classes), sizes = np.unique([copies, labels], axis=1, return_counts=True)
        alike = np.isin(copies, groups[sizes > np.maximum(4, np.bincount(labels)[classes] / 2)])
        if (copies != exact)[alike].any():
            note = f"; {alike.sum():,} images are most of their class and look alike: they may be on both sides"
        copies = np.where(alike, exact, copies)
        if surplus := len(distinct) - len(np.unique(copies)):
            counts.append(pluralize(surplus, "near copy"))
    kept = f"; {' and '.join(counts)} kept on the side of the original" if counts else ""
    return copies, kept + note


def read_thumbnails(examples: ImageDataset) -> Tensor | None:
    """Decode all images to thumbnails, (N, 3, SIDE, SIDE), NaN if unreadable; None if that takes too long."""

    def count_pixels(index: int) -> float:
        header = examples.header(index)
        return header.width * header.height / (4 if header.format in ("JPEG", "MPO") else 1)  # decoded at half size

    def read(index: int) -> Tensor:
        pixels = to_picture(examples.read(index, at_least=(8 * SIDE, 8 * SIDE)))
        return torch.from_numpy(resize_to(pixels, (SIDE, SIDE))).permute(2, 0, 1).float()

    indices = range(len(examples))
    if len(examples) > MAX_IMAGES:
        return None
    counts = read_all(count_pixels, indices, "comparing")
    if sum(count for count in counts if not isinstance(count, UnreadableImage)) > MAX_MEGAPIXELS * 1e6:
        return None
    blank = torch.full((3, SIDE, SIDE), torch.nan)
    images = read_all(read, indices, "comparing")
    return torch.stack([blank if isinstance(image, UnreadableImage) else image for image in images])


def find_near_copies(thumbnails: Tensor) -> Tensor:
    """Return the first row of every row's group of near copies: (N, 3, S, S) -> int64 (N,).

    Two images are near copies if |a - b| <= NEAR max(|a - mean a|, |b - mean b|). Means of 4 x 4 cells, which are never
    further apart than the images, exclude almost all pairs.
    """
    pixels = thumbnails.flatten(1)
    contrast = (thumbnails - thumbnails.mean((2, 3), keepdim=True)).flatten(1).norm(dim=1)
    contrast[contrast < MIN_CONTRAST * pixels.shape[1] ** 0.5] = torch.nan  # compares with nothing
    cell = thumbnails.shape[-1] // 4
    coarse = avg_pool2d(thumbnails.mean(1), cell).flatten(1).double() * cell * 3**0.5
    first = torch.arange(len(pixels))
    for start in range(0, len(pixels), _CHUNK):
        for begin in range(start, len(pixels), _CHUNK):
            limit = NEAR * torch.maximum(contrast[start:][:_CHUNK, None], contrast[begin:][:_CHUNK])
            pairs = (torch.cdist(coarse[start:][:_CHUNK], coarse[begin:][:_CHUNK]) <= limit + 1e-3).nonzero()
            for left, right in (part.T for part in (pairs + torch.tensor([start, begin])).split(_PAIRS)):
                separate = first[left] != first[right]
                left, right = left[separate], right[separate]
                apart = (pixels[left] - pixels[right]).norm(dim=1)
                near = apart <= NEAR * torch.maximum(contrast[left], contrast[right])
                first = connect_groups(first, left[near], right[near])
    return first


def connect_groups(first: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Merge the groups of all pairs; first: (N,), the first row of every group; left, right: (P,) rows.

    All pairs at once: ten thousand black frames are fifty million pairs. Each group joins the earliest that it is
    connected with, until nothing changes.
    """
    while True:
        separate = first[left] != first[right]
        if not separate.any():
            return first
        left, right = left[separate], right[separate]
        low, high = torch.minimum(first[left], first[right]), torch.maximum(first[left], first[right])
        first = first.scatter_reduce(0, high, low, "amin")
        while not torch.equal(first, first[first]):  # follow groups that have moved
            first = first[first]


def find_copies(examples: ImageDataset) -> np.ndarray:
    """Return for each image the index of the first image with the same content: int (N,).

    Only images of equal size are opened, and only those with equal last bytes are read in full.
    """

    def digest(index: int) -> bytes:
        return hashlib.blake2b(examples.raw(index), digest_size=16).digest()

    groups = _divide([list(range(len(examples)))], lambda index: max(examples.stored_size(index), 0) or None, 1)
    for read in (examples.sample_bytes, digest):
        groups = _divide(groups, read, 0)
    first = np.arange(len(examples))
    for group in groups:
        first[group] = group[0]
    return first


def _divide(groups: list[list[int]], read: Callable[[int], Hashable], threads: int) -> list[list[int]]:
    """Divide each group by what ``read`` returns; drop single images, unreadable ones and None."""
    indices = [(number, index) for number, group in enumerate(groups) for index in group]
    parts: dict[Hashable, list[int]] = defaultdict(list)
    values = read_all(read, [index for _, index in indices], "comparing", threads)
    for (number, index), value in zip(indices, values, strict=True):
        if value is not None and not isinstance(value, UnreadableImage):
            parts[number, value].append(index)
    return [part for part in parts.values() if len(part) > 1]
