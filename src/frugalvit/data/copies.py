"""Find images with the same content. A split that puts copies on both sides gives too high a score."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import ImageDataset
from frugalvit.utils import console
from frugalvit.utils.system import cores


def find_copies(examples: ImageDataset) -> np.ndarray:
    """Return for each image the index of the first image with the same content: int (N,).

    Only images of equal size are opened, and only those with equal last bytes are read in full.
    """

    def digest(index: int) -> bytes:
        return hashlib.blake2b(examples.raw(index), digest_size=16).digest()

    groups = _divide([list(range(len(examples)))], lambda index: max(examples.stored_size(index), 0) or None, 1)
    for read in (examples.sample_bytes, digest):
        groups = _divide(groups, read, min(8, cores() + 1))
    first = np.arange(len(examples))
    for group in groups:
        first[group] = group[0]
    return first


def _divide(groups: list[list[int]], read: Callable[[int], Hashable], threads: int) -> list[list[int]]:
    """Divide each group by what ``read`` returns; drop single images, unreadable ones and None."""

    def read_or_none(index: int) -> Hashable:
        try:
            return read(index)
        except UnreadableImage:
            return None

    indices = [(number, index) for number, group in enumerate(groups) for index in group]
    parts: dict[Hashable, list[int]] = defaultdict(list)
    with ThreadPoolExecutor(threads, thread_name_prefix="copies") as pool:
        apply = pool.map if threads > 1 else map
        values = console.progress(
            apply(read_or_none, [index for _, index in indices]), total=len(indices), label="comparing"
        )
        for (number, index), value in zip(indices, values, strict=True):
            if value is not None:
                parts[number, value].append(index)
    return [part for part in parts.values() if len(part) > 1]
