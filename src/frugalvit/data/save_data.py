"""``save_data``: write images from memory as a dataset that every command reads."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import as_pixels
from frugalvit.data.webdataset.pack import check_free, move_into, pack
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import read_bytes, working_folder
from frugalvit.utils.text import pluralize


def save_data(
    out: str | os.PathLike[str],
    train: Any,
    *,
    val: Any = None,
    test: Any = None,
    classes: Sequence[str | int] | None = None,
) -> str:
    """Write images as a dataset and return its folder. Every command and ``fv.train`` read it.

    Arrays become PNG in WebDataset shards; the content of files does not change. Each image is read once.

    Args:
        out: a new folder.
        train: ``(images, labels)``, ``(images, None)`` without labels, or a ``torch.utils.data.Dataset`` (anything with
            a length) of such pairs. An image is a uint8 array (H, W) or (H, W, 3), a PIL image, a path, a file's bytes,
            or a tensor (C, H, W), uint8 or floats from 0 to 1; a label is a number or a name.
        val, test: the same. Without val, training takes a val split from train.
        classes: the class names of the labels 0, 1, …; by default the labels themselves.
    """
    folder = Path(out)
    check_free(folder)
    inputs = {split: part for split, part in (("train", train), ("val", val), ("test", test)) if part is not None}
    parts = {split: _read_pairs(part, split) for split, part in inputs.items()}
    names, numbers = _number_labels({split: labels for split, (_, labels) in parts.items()}, classes)
    splits: dict[str, ImageDataset] = {
        split: MemoryExamples(contents, numbers[split], split) for split, (contents, _) in parts.items()
    }
    source = DatasetSplits(folder.resolve().name, "memory", "arrays", names, splits)
    with working_folder(folder.resolve()) as fresh:
        with console.quiet():
            packed = pack(source, fresh, shuffle=False).data
        for bad in packed["bad"]:
            console.warning(f"{bad['name']} is left out: {bad['reason']}")
        empty = [split for split, shards in packed["splits"].items() if not shards]
        if empty:
            raise UserError(f"No image of {empty[0]} is readable. Nothing was written.")
        move_into(fresh, folder)
    return str(folder)


class MemoryExamples(ImageDataset):
    """Encoded images in memory."""

    per_image = ("contents",)

    def __init__(self, contents: Sequence[bytes], labels: np.ndarray | None, name: str) -> None:
        super().__init__([f"{name}-{number}" for number in range(len(contents))], labels)
        self.contents = contents

    def raw(self, index: int) -> bytes:
        return self.contents[index]

    def stored_size(self, index: int) -> int:
        return len(self.contents[index])

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        return (hashlib.blake2b(content, digest_size=8).hexdigest() for content in self.contents)


def _read_pairs(part: Any, split: str) -> tuple[list[bytes], list[int | str] | None]:
    if isinstance(part, tuple) and len(part) == 2:
        images = list(part[0])
        labels = [None] * len(images) if part[1] is None else list(part[1])
        if len(labels) != len(images):
            raise UserError(f"{split} has {pluralize(len(images), 'image')} and {pluralize(len(labels), 'label')}.")
        pairs: Iterable[Any] = zip(images, labels, strict=True)
    elif hasattr(part, "__len__") and hasattr(part, "__getitem__") and not hasattr(part, "columns"):
        pairs = (part[index] for index in range(len(part)))
    else:  # no length, or a pandas frame: the check below refuses it
        pairs = [part]
    contents: list[bytes] = []
    numbers: list[int | str | None] = []
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UserError(
                f"{split}: expected (images, labels), (images, None) without labels, or a dataset of (image, label), "
                f"got {type(pair).__name__}."
            )
        name = f"{split}-{len(contents)}"
        contents.append(_encode(pair[0], name))
        numbers.append(_check_label(pair[1], name))
    if not contents:
        raise UserError(f"{split} has no images.")
    labelled = [label for label in numbers if label is not None]
    if labelled and len(labelled) < len(numbers):
        raise UserError(f"{split}-{numbers.index(None)} has no label. Label all images, or none.")
    return contents, labelled or None


def _encode(image: Any, name: str) -> bytes:
    """Read a file unchanged, by its path or bytes; encode anything else as PNG."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        try:
            return read_bytes(os.fspath(image))
        except OSError as error:
            raise UserError(f"Cannot read {image} ({error.strerror}).") from None
    try:
        pixels = as_pixels(image)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    buffer = BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _check_label(label: Any, name: str) -> int | str | None:
    if hasattr(label, "item") and getattr(label, "ndim", 0) == 0:
        label = label.item()
    is_number = isinstance(label, int) and not isinstance(label, bool) and label >= 0
    if label is None or is_number or (isinstance(label, str) and label.strip()):
        return label
    raise UserError(f"{name}: expected a label, an integer from 0 or a name, got {label!r:.60}.")


def _number_labels(
    labels: dict[str, list[int | str] | None], classes: Sequence[str | int] | None
) -> tuple[tuple[str, ...] | None, dict[str, np.ndarray | None]]:
    """Return the class names, and the labels as indices into them."""
    all_labels = [label for part in labels.values() for label in part or ()]
    if not all_labels:
        return None, dict.fromkeys(labels)
    if None in labels.values():
        raise UserError("Some splits have labels and some have none. Label all splits, or none.")
    if len({isinstance(label, str) for label in all_labels}) > 1:
        raise UserError("Some labels are numbers and some are names. Use one kind.")
    known: list[Any] = sorted(set(all_labels))
    names = [str(label) for label in known]
    if classes is not None:
        names = [str(name) for name in classes]
        if isinstance(classes, Mapping) or len(set(names)) < len(names):
            raise UserError("classes must be a list of different names, in the order of the labels 0, 1, ….")
        known = names if isinstance(all_labels[0], str) else list(range(len(names)))
    index = {label: number for number, label in enumerate(known)}
    unknown = next((label for label in all_labels if label not in index), None)
    if unknown is not None:
        raise UserError(f"The label {unknown!r} is not among the {pluralize(len(known), 'class')} of classes=….")
    return tuple(names), {split: np.array([index[label] for label in part or ()]) for split, part in labels.items()}
