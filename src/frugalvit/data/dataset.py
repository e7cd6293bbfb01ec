"""Datasets: images by index, with names and labels, and the splits of a dataset."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.decode import PHOTO, Header, PixelFormat, decode, read_header, read_pixels, resize_to, turn_of
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.errors import UserError
from frugalvit.utils.files import open_regular, read_bytes, utf8_safe
from frugalvit.utils.text import pluralize

SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class StreamedShards:
    """The shards of a streamed dataset, and the number of examples in each.

    raw_labels: the labels in the order of the classes; None without labels
    """

    paths: list[str]
    counts: list[int]
    raw_labels: list[str] | None


class ImageDataset:
    """One split of a dataset. It pickles to few bytes, and many threads can read it at once.

    Attributes:
        names: the paths of the images, or their names inside an archive.
        keys: the names without the dataset's folder, so that a moved dataset splits the same way.
        labels: int64 (N,) indices into the classes; None without labels.
        targets: int8 (N, classes) for datasets with several labels per image: 1 present, 0 absent, -1 ignored; or
            float32 (N, 1), a number per image.
    """

    per_image: tuple[str, ...] = ()  # further lists and arrays with one entry for each image
    streaming: StreamedShards | None = None  # None if the images can be read one by one
    images: np.ndarray | None = None  # all images as one uint8 array, (N, H, W) or (N, H, W, 1 or 3), if decoded
    run_facts: Mapping[str, Any] = MappingProxyType({})  # besides the fingerprint, what a run stores to resume exactly
    pixels: PixelFormat = PHOTO  # how images are read; ``open_data`` decides it

    def __init__(self, names: Sequence[str], labels: np.ndarray | None, keys: Sequence[str] | None = None) -> None:
        self.names = list(names)
        self.keys = list(keys) if keys is not None else self.names
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def truth(self) -> np.ndarray | None:
        """The labels or, if an image has several or a number, the targets; None without either."""
        return self.labels if self.targets is None else self.targets

    def leaves(self) -> list[ImageDataset]:
        """Return the datasets that a joined one holds; any other dataset alone."""
        return [self]

    def sample_images(self) -> ImageDataset:
        """Return the images that can be read by index: all, or a sample of a streamed dataset."""
        return self

    def raw(self, index: int) -> bytes:
        """Read the encoded image. Raises ``UnreadableImage``."""
        raise NotImplementedError

    def stored_size(self, index: int) -> int:
        """Return the size of ``raw(index)`` in bytes, if possible without reading; -1 if it is missing."""
        raise NotImplementedError

    def sample_bytes(self, index: int) -> bytes:
        """Return a few bytes of an image, cheap to read; equal images have equal ones. Raises ``UnreadableImage``."""
        return self.raw(index)

    def stored_format(self, index: int) -> PixelFormat:
        """Return the pixel format that keeps the range and the channels of an image. Raises ``UnreadableImage``."""
        return PHOTO

    def with_pixels(self, pixels: PixelFormat) -> ImageDataset:
        """Return the same images, read in another pixel format."""
        if pixels != self.pixels:
            raise UserError(f"These images are {self.pixels}, not {pixels}. Give files in folders or tables.")
        return self

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        """Read an image (H, W, C), upright, in the pixel format. Raises ``UnreadableImage``."""
        return decode(self.raw(index), self.names[index], at_least=at_least)

    def read_sized(
        self, index: int, size: tuple[int, int], crop: CenterCrop | None = None
    ) -> tuple[np.ndarray, tuple[int, int]]:
        """Read an image at a cached size: (S, S', C). Also return the size that crops are drawn in.

        crop: evaluation's, from all pixels; without it a JPEG may be decoded at a reduced size, for training
        """
        pixels = self.read(index, at_least=None if crop else size)
        height, width = pixels.shape[:2]
        with turn_of(height, width):
            return (crop(pixels), size) if crop else (resize_to(pixels, size), (height, width))

    def header(self, index: int) -> Header:
        """Read format and size without decoding. An unreadable or truncated file raises ``UnreadableImage``."""
        return read_header(self.raw(index), self.names[index], complete=True)

    def fingerprint(self, *, times: bool = True, labels: bool = True) -> str:
        """Hash the images, their order and, if ``labels``, their labels or targets.

        Uses keys, file sizes, times of modification and change, and the first bytes of a few files. Without ``times``
        a copy of a dataset has the same fingerprint.
        """
        digest = hashlib.sha256(type(self).__name__.encode())
        for key, item in zip(self.keys, self._fingerprint_items(times), strict=True):
            digest.update(f"{key}\0{item}\0".encode("utf-8", "surrogateescape"))
        if labels and self.truth is not None:
            digest.update(self.truth.tobytes())
        return digest.hexdigest()[:32]

    def subset(self, indices: Iterable[int] | np.ndarray) -> ImageDataset:
        """Select images by indices or by a mask, in the order of ``indices``."""
        chosen = np.asarray(list(indices) if not isinstance(indices, np.ndarray) else indices)
        if chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64)
        smaller = copy.copy(self)
        for name in ("names", "keys", "labels", "targets", *self.per_image):
            values = getattr(self, name)
            if values is not None:
                setattr(smaller, name, [values[i] for i in chosen] if isinstance(values, list) else values[chosen])
        return smaller

    def __repr__(self) -> str:
        labels = "labelled" if self.labels is not None or self.targets is not None else "no labels"
        return f"{type(self).__name__}({pluralize(len(self), 'image')}, {labels})"

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        """Yield one item per image; it changes if the image changes. ``times`` adds the modification time."""
        raise NotImplementedError

    def measure_statistics(self) -> tuple[list[float], list[float], int]:
        """Return mean and standard deviation of each channel, and the number of images they come from."""
        measured = []
        for index in sorted(spread(len(self), _MEASURED)):
            with contextlib.suppress(UnreadableImage):
                values = self.read(index).reshape(-1, self.pixels.channels).astype(np.float64)
                measured.append((len(values), values.mean(0), values.var(0)))
        if not measured:
            raise UserError(f"No training image can be read as {self.pixels}. 'frugalvit data' lists the reasons.")
        sizes, means, variances = (np.array(column) for column in zip(*measured, strict=True))
        share = sizes / sizes.sum()
        deviation = np.sqrt(share @ (variances + (means - share @ means) ** 2))
        mean, std = ([float(f"{x:.6g}") for x in values] for values in (share @ means, deviation))
        return mean, [x or 1.0 for x in std], len(measured)  # 1 for a constant channel


class FileExamples(ImageDataset):
    """Images in files."""

    def __init__(self, paths: Sequence[str], labels: np.ndarray | None, root: str = "") -> None:
        super().__init__(paths, labels, _relative_keys(root, paths))

    def raw(self, index: int) -> bytes:
        return self._open(index, read_bytes)

    def sample_bytes(self, index: int) -> bytes:
        return self._open(index, _read_end)

    def _open(self, index: int, read: Callable[[str], bytes]) -> bytes:
        path = self.names[index]
        try:
            return read(path)
        except (OSError, ValueError) as error:
            raise UnreadableImage.of_file(path, error) from None

    def stored_size(self, index: int) -> int:
        try:
            return Path(self.names[index]).stat().st_size
        except (OSError, ValueError):
            return -1

    def stored_format(self, index: int) -> PixelFormat:
        name = self.names[index]
        return PHOTO if name.lower().endswith(_PICTURES) else read_header(name, values=True).pixels

    def with_pixels(self, pixels: PixelFormat) -> ImageDataset:
        if pixels == PHOTO and self.pixels.channels not in (1, 3):
            raise UserError(f"{self.names[0]} and others hold {self.pixels}, but the network takes {PHOTO}.")
        same = copy.copy(self)
        same.pixels = pixels
        return same

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        return read_pixels(self.names[index], self.pixels, at_least=at_least)

    def header(self, index: int) -> Header:
        return read_header(self.names[index], complete=True, values=self.pixels != PHOTO)

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        sampled = spread(len(self), _SAMPLED_FILES)
        for index, path in enumerate(self.names):
            try:
                status = Path(path).stat()
            except (OSError, ValueError):
                yield "missing"
                continue
            # A replaced file may have the old time of modification, but never the old time of its last change.
            modified = [status.st_mtime_ns, status.st_ctime_ns] if times else []
            yield status.st_size, *modified, *([_hash_start(path)] if index in sampled else [])


_PICTURES = (".jpg", ".jpeg", ".webp", ".gif", ".bmp")  # formats that hold no more than 8-bit RGB
_MEASURED = 512  # images, at most, that mean and deviation come from
_SAMPLED_FILES, _SAMPLED_BYTES = 16, 4096  # a fingerprint hashes the first bytes of a few files


def spread(length: int, most: int) -> set[int]:
    """Return at most ``most`` evenly spaced indices."""
    return {round(index) for index in np.linspace(0, length - 1, min(most, length))}


def _read_end(path: str) -> bytes:
    """Read the last bytes of a file: photos of one camera differ there, not at their start."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _SAMPLED_BYTES))
        return file.read(_SAMPLED_BYTES)


def _hash_start(path: str) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.blake2b(file.read(_SAMPLED_BYTES), digest_size=8).hexdigest()
    except OSError:
        return "unreadable"


def _relative_keys(root: str, paths: Sequence[str]) -> list[str]:
    """Make paths below ``root`` relative to it, with forward slashes; other paths stay as they are."""
    prefixes = tuple(folder.rstrip(f"/{os.sep}") + os.sep for folder in (root, os.path.abspath(root)) if root)  # noqa: PTH100
    keys = []
    for path in paths:
        prefix = next((prefix for prefix in prefixes if path.startswith(prefix)), "")
        keys.append(path[len(prefix) :].replace(os.sep, "/"))
    return keys


class ArrayExamples(ImageDataset):
    """Decoded images in one uint8 array: (N, H, W), (N, H, W, 1) or (N, H, W, 3)."""

    images: np.ndarray
    per_image = ("images",)

    def __init__(self, images: np.ndarray, labels: np.ndarray | None, name: str) -> None:
        width = len(str(max(len(images) - 1, 0)))
        super().__init__([f"{name}[{i:0{width}d}]" for i in range(len(images))], labels)
        self.images = images

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        pixels = np.asarray(self.images[index])
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        return np.ascontiguousarray(np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels)

    def raw(self, index: int) -> bytes:
        """Encode the pixels as PNG, which is lossless."""
        buffer = BytesIO()
        Image.fromarray(np.squeeze(np.asarray(self.images[index]))).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def sample_bytes(self, index: int) -> bytes:
        return np.asarray(self.images[index]).tobytes()

    def stored_size(self, index: int) -> int:
        return int(np.prod(self.images.shape[1:]))

    def header(self, index: int) -> Header:
        colour = self.images.ndim == 4 and self.images.shape[3] == 3
        return Header("array", int(self.images.shape[2]), int(self.images.shape[1]), "RGB" if colour else "L")

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        if hasattr(self.images, "fingerprint_items"):  # an array that stays on disk
            yield from self.images.fingerprint_items(times)  # type: ignore[attr-defined]
            return
        for image in self.images:
            yield hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=8).hexdigest()


def _of_part(method: str) -> Any:
    """Return a method that calls this one of the dataset which holds the image."""

    def call(self: JoinedExamples, index: int, **options: Any) -> Any:
        part, inner = self.rows[index]
        return getattr(part, method)(inner, **options)

    return call


class JoinedExamples(ImageDataset):
    """Several datasets one after the other, for example train and val."""

    per_image = ("rows",)

    def __init__(self, parts: Sequence[ImageDataset]) -> None:
        names = [name for part in parts for name in part.names]
        keys = [key for part in parts for key in part.keys]
        # If one dataset has no labels, the result has none.
        labels = [part.labels for part in parts if part.labels is not None]
        super().__init__(names, np.concatenate(labels) if labels and len(labels) == len(parts) else None, keys)
        targets = [part.targets for part in parts if part.targets is not None]
        self.targets = np.concatenate(targets) if targets and len(targets) == len(parts) else None
        self.parts, self.pixels = list(parts), parts[0].pixels
        self.rows = [(part, i) for part in parts for i in range(len(part))]

    def with_pixels(self, pixels: PixelFormat) -> ImageDataset:
        same, parts = copy.copy(self), {part: part.with_pixels(pixels) for part in self.parts}
        same.parts, same.pixels = list(parts.values()), pixels
        same.rows = [(parts[part], i) for part, i in self.rows]
        return same

    def leaves(self) -> list[ImageDataset]:
        return [leaf for part in self.parts for leaf in part.leaves()]

    raw, stored_size, sample_bytes, read, header = map(
        _of_part, ("raw", "stored_size", "sample_bytes", "read", "header")
    )

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        items = {part: list(part._fingerprint_items(times)) for part in self.parts}
        return (items[part][inner] for part, inner in self.rows)


def join(*parts: ImageDataset) -> ImageDataset:
    return parts[0] if len(parts) == 1 else JoinedExamples(parts)


def _in_order(splits: dict[str, ImageDataset]) -> dict[str, ImageDataset]:
    return {split: splits[split] for split in SPLITS if split in splits and len(splits[split])}


@dataclass
class DatasetSplits:
    """A dataset as ``open_data`` returns it: its splits, its sorted classes, and notes for the user.

    ``splits`` holds those of "train", "val" and "test" that have images. ``classes`` is None for unlabelled images. The
    names of dataset and classes are valid UTF-8, because a run writes them into its files. ``loose`` holds unlabelled
    images beside class folders, by split, if the caller requests them.
    """

    name: str
    location: str
    kind: str
    classes: tuple[str, ...] | None
    splits: dict[str, ImageDataset]
    notes: list[str] = field(default_factory=list)
    loose: dict[str, ImageDataset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.name = utf8_safe(self.name)
        self.splits, self.loose = _in_order(self.splits), _in_order(self.loose)
        if self.classes is not None:
            self.classes = tuple(utf8_safe(name) for name in self.classes)

    def __len__(self) -> int:
        return sum(len(examples) for examples in self.splits.values())

    @property
    def target(self) -> str:
        """What an image has, as --target names it: one "class" (or none), several "labels", or a "number"."""
        targets = next((part.targets for part in self.splits.values() if part.targets is not None), None)
        return "class" if targets is None else "labels" if targets.dtype == np.int8 else "number"
