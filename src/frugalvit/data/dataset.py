"""Examples: images that can be read one by one, their labels and their names; and the source they come from."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from frugalvit.data.decode import Header, UnreadableImage, decode, read_header
from frugalvit.utils.files import utf8_safe
from frugalvit.utils.text import pluralize

if TYPE_CHECKING:
    from frugalvit.data.webdataset.index import PackedImages
    from frugalvit.data.webdataset.streaming_dataset import StreamingDataset


class ImageDataset:
    """One split of a dataset. Small to send to another process; reading is safe from many threads.

    Attributes:
        names: what people call each image: its path, or its place in an archive.
        keys: the same without the folder the dataset lies in, so that a moved dataset splits the same way.
        labels: int64 (N,) indices into the source's classes, None without labels.
        targets: int8 (N, classes) for datasets with several labels per image: 1 present, 0 absent, -1 not to be judged.
    """

    decoded: PackedImages | None = None  # files of decoded images that came with a packed dataset
    split_rows: np.ndarray | None = None  # positions in the whole split that these files hold; None: this is the whole

    def __init__(self, names: Sequence[str], labels: np.ndarray | None, keys: Sequence[str] | None = None) -> None:
        self.names = list(names)
        self.keys = list(keys) if keys is not None else self.names
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int64)
        self.targets: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def streaming(self) -> StreamingDataset | None:
        """The dataset as one to stream; None if its images can be read one by one."""
        return None

    def sample_images(self) -> ImageDataset:
        """The images that can be read one by one: all, or a sample of streamed ones."""
        return self

    def as_array(self) -> np.ndarray | None:
        """All images as one uint8 array, (N, H, W), (N, H, W, 1) or (N, H, W, 3); None if they are encoded."""
        return None

    def run_facts(self) -> dict[str, Any]:
        """What a run must store about the dataset besides its fingerprint, to resume in the same way."""
        return {}

    def raw(self, index: int) -> bytes:
        """The encoded image as it is stored, or ``UnreadableImage``."""
        raise NotImplementedError

    def stored_size(self, index: int) -> int:
        """Bytes of ``raw(index)``, found without reading them; -1 when the image is missing."""
        raise NotImplementedError

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        """The decoded image, uint8 (H, W, 3), RGB, upright; ``UnreadableImage`` when that cannot be."""
        return decode(self.raw(index), self.names[index], at_least=at_least)

    def header(self, index: int) -> Header:
        """Format and size without decoding; ``UnreadableImage`` too when the file's structure shows that it is cut short."""
        return read_header(self.raw(index), self.names[index], complete=True)

    def fingerprint(self, *, times: bool = True) -> str:
        """Changes when the images, their order or their classes do; of several labels per image it knows nothing.

        By names, sizes and times; of content only a few samples are read, which tell datasets apart that an archive
        has given the same ones. Without ``times`` a copy has the print of what it is a copy of.
        """
        digest = hashlib.sha256(type(self).__name__.encode())
        for key, mark in zip(self.keys, self._fingerprint_items(times), strict=True):
            digest.update(f"{key}\0{mark}\0".encode("utf-8", "surrogateescape"))
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()[:32]

    def subset(self, indices: Iterable[int] | np.ndarray) -> ImageDataset:
        """Only these, in this order."""
        chosen = np.asarray(list(indices) if not isinstance(indices, np.ndarray) else indices)
        if chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)
        chosen = chosen.astype(np.int64)
        smaller = object.__new__(type(self))
        smaller.__dict__.update(self.__dict__)
        smaller.names = [self.names[i] for i in chosen]
        smaller.keys = smaller.names if self.keys is self.names else [self.keys[i] for i in chosen]
        smaller.labels = None if self.labels is None else self.labels[chosen]
        smaller.targets = None if self.targets is None else self.targets[chosen]
        smaller._select(self, chosen)
        return smaller

    def _select(self, whole: ImageDataset, chosen: np.ndarray) -> None:
        """Keep the ``chosen`` of what a kind of examples holds besides names and labels, for ``raw`` to find them."""
        raise NotImplementedError

    def __repr__(self) -> str:
        labels = "labelled" if self.labels is not None or self.targets is not None else "no labels"
        return f"{type(self).__name__}({pluralize(len(self), 'image')}, {labels})"

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        """One thing per image that changes when the image does; ``times``: when it was written counts."""
        raise NotImplementedError


class FileExamples(ImageDataset):
    """Images in files of their own."""

    def __init__(self, paths: Sequence[str], labels: np.ndarray | None, root: str = "") -> None:
        keys = _seen_from(root, paths) if root else paths
        keys = [key.replace("\\", "/") for key in keys] if os.sep == "\\" else keys
        super().__init__(paths, labels, keys)

    def raw(self, index: int) -> bytes:
        path = self.names[index]
        try:
            return Path(path).read_bytes()
        except FileNotFoundError:
            raise UnreadableImage(path, "the file is missing") from None
        except (OSError, ValueError) as error:
            raise UnreadableImage(
                path, f"the file cannot be read: {getattr(error, 'strerror', None) or error}"
            ) from None

    def stored_size(self, index: int) -> int:
        try:
            return Path(self.names[index]).stat().st_size
        except (OSError, ValueError):
            return -1

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        return decode(self.names[index], at_least=at_least)

    def _select(self, whole: ImageDataset, chosen: np.ndarray) -> None:
        """Nothing: the names, which are cut already, are all that is held."""

    def header(self, index: int) -> Header:
        return read_header(self.names[index], complete=True)

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        sampled = {round(i) for i in np.linspace(0, len(self) - 1, _SAMPLED)}
        for place, path in enumerate(self.names):
            try:
                facts = Path(path).stat()
            except (OSError, ValueError):
                yield "missing"
                continue
            read = place in sampled and stat.S_ISREG(facts.st_mode)
            written = [facts.st_mtime_ns] if times else []
            yield facts.st_size, *written, *([_beginning_of(path)] if read else [])


_SAMPLED, _BEGINNING = 16, 4096  # files whose first bytes are looked at, and how many


def _beginning_of(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.blake2b(file.read(_BEGINNING), digest_size=8).hexdigest()
    except OSError:
        return "unreadable"


_LONGEST_PATH = 4096  # no system opens a longer one, and each of its folders would be asked for


def _seen_from(root: str, paths: Sequence[str]) -> list[str]:
    """The paths without the folder they lie in, however it is written in them; one from elsewhere stays whole."""
    typed = root.rstrip(f"/{os.sep}") + os.sep
    real = Path(root).resolve()

    @functools.cache
    def is_root(folder: Path) -> bool:
        try:
            return folder.resolve() == real
        except (OSError, ValueError, RuntimeError):  # a null character, or links that go round in circles
            return False

    @functools.cache
    def above(folder: str) -> str | None:
        """How a full path spells the root."""
        return next((str(place) for place in reversed((Path(folder), *Path(folder).parents)) if is_root(place)), None)

    def key(path: str) -> str:
        if path.startswith(typed):
            return path[len(typed) :]
        # A table with full paths may be addressed from its folder, or through a link.
        looked_up = Path(path).is_absolute() and len(path) < _LONGEST_PATH
        spelled = above(path.rpartition(os.sep)[0] or os.sep) if looked_up else None
        return path if spelled is None else path[len(spelled) :].lstrip(os.sep)

    return [key(path) for path in paths]


class ArrayExamples(ImageDataset):
    """Images that lie decoded in one array, (N, H, W), (N, H, W, 1) or (N, H, W, 3), uint8."""

    def __init__(self, images: np.ndarray, labels: np.ndarray | None, name: str) -> None:
        width = len(str(max(len(images) - 1, 0)))
        super().__init__([f"{name}[{i:0{width}d}]" for i in range(len(images))], labels)
        self.images = images

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        pixels = np.asarray(self.images[index])
        if pixels.ndim == 3 and pixels.shape[2] == 1:
            pixels = pixels[:, :, 0]
        if pixels.ndim == 2:
            pixels = np.repeat(pixels[:, :, None], 3, axis=2)
        return np.ascontiguousarray(pixels)

    def raw(self, index: int) -> bytes:
        """A PNG of the pixels: lossless."""
        buffer = BytesIO()
        Image.fromarray(np.squeeze(np.asarray(self.images[index]))).save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()

    def as_array(self) -> np.ndarray:
        return self.images

    def stored_size(self, index: int) -> int:
        return int(np.prod(self.images.shape[1:]))

    def header(self, index: int) -> Header:
        colour = self.images.ndim == 4 and self.images.shape[3] == 3
        return Header("array", int(self.images.shape[2]), int(self.images.shape[1]), "RGB" if colour else "L")

    def _select(self, whole: ImageDataset, chosen: np.ndarray) -> None:
        assert isinstance(whole, ArrayExamples)
        self.images = whole.images[chosen]

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        if hasattr(self.images, "marks"):  # an array that stays on disk knows its own
            yield from self.images.marks(times)  # type: ignore[attr-defined]
            return
        for image in self.images:
            yield hashlib.blake2b(np.ascontiguousarray(image).tobytes(), digest_size=8).hexdigest()


class JoinedExamples(ImageDataset):
    """Several examples one after the other (train and val together, for a last training)."""

    def __init__(self, parts: Sequence[ImageDataset]) -> None:
        names = [name for part in parts for name in part.names]
        keys = [key for part in parts for key in part.keys]
        # Joining labelled with unlabelled examples leaves no labels: half a label vector would mislead.
        labels = [part.labels for part in parts if part.labels is not None]
        super().__init__(names, np.concatenate(labels) if labels and len(labels) == len(parts) else None, keys)
        targets = [part.targets for part in parts if part.targets is not None]
        self.targets = np.concatenate(targets) if targets and len(targets) == len(parts) else None
        self.parts = list(parts)
        self.where = [(number, i) for number, part in enumerate(parts) for i in range(len(part))]

    def _at(self, index: int) -> tuple[ImageDataset, int]:
        number, inner = self.where[index]
        return self.parts[number], inner

    def raw(self, index: int) -> bytes:
        part, inner = self._at(index)
        return part.raw(inner)

    def stored_size(self, index: int) -> int:
        part, inner = self._at(index)
        return part.stored_size(inner)

    def read(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        part, inner = self._at(index)
        return part.read(inner, at_least=at_least)

    def header(self, index: int) -> Header:
        part, inner = self._at(index)
        return part.header(inner)

    def _select(self, whole: ImageDataset, chosen: np.ndarray) -> None:
        assert isinstance(whole, JoinedExamples)
        self.where = [whole.where[i] for i in chosen]

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        marks = [list(part._fingerprint_items(times)) for part in self.parts]
        return (marks[number][inner] for number, inner in self.where)


def join(*parts: ImageDataset) -> ImageDataset:
    """The examples of all parts, in order."""
    return parts[0] if len(parts) == 1 else JoinedExamples(parts)


@dataclass
class DatasetSplits:
    """What ``open_data`` found: named splits of examples, one sorted list of classes, and what was decided on the way.

    ``splits`` holds some of "train", "val" and "test", in this order. ``classes`` is None for unlabelled images. Names
    of classes and datasets go into every file a run writes, so they are kept in letters that those can hold. ``loose``
    are images without a label beside labelled ones, by the split they lie in, where they were asked for.
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
        if self.classes is not None:
            self.classes = tuple(utf8_safe(name) for name in self.classes)

    def __len__(self) -> int:
        return sum(len(examples) for examples in self.splits.values())
