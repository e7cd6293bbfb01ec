"""``save_data``: write images from memory as a dataset that every command reads."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import as_pixels
from frugalvit.data.webdataset.index import INDEX
from frugalvit.data.webdataset.pack import check_free, check_replaceable, move_into, pack
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import working_folder
from frugalvit.utils.text import pluralize, truncate_list


def save_data(
    out: str | os.PathLike[str],
    train: Any,
    *,
    val: Any = None,
    test: Any = None,
    classes: Sequence[str | int] | None = None,
    replace: bool = False,
) -> str:
    """Write images as a dataset and return its folder. Every command and ``fv.train`` read it.

    Arrays become PNG in WebDataset shards; the content of files does not change. Each image is read once.

    Args:
        out: a new folder.
        train: ``(images, labels)``, ``(images, None)`` without labels, or a ``torch.utils.data.Dataset`` (anything with
            a length) of such pairs. An image is a uint8 array (H, W) or (H, W, 3), a PIL image, a path, a file's bytes,
            or a tensor (C, H, W), uint8 or floats from 0 to 1; a label is a number or a name.
        val: the same. Without it, training takes a val split from train.
        test: the same.
        classes: the class names of the labels 0, 1, …; by default the labels themselves.
        replace: overwrite a dataset that this function or ``data pack`` wrote.
    """
    folder = Path(out)
    replace = replace and (folder / INDEX).is_file()
    if replace:
        check_replaceable(folder)
    else:
        check_free(folder)
    inputs = {split: part for split, part in (("train", train), ("val", val), ("test", test)) if part is not None}
    parts = {split: _read_pairs(part, split) for split, part in inputs.items()}
    names, numbers = _number_labels({split: labels for split, (_, labels) in parts.items()}, classes)
    splits: dict[str, ImageDataset] = {
        split: MemoryExamples(contents, numbers[split], split) for split, (contents, _) in parts.items()
    }
    source = DatasetSplits(folder.resolve().name, "memory", "arrays", names, splits)
    with working_folder(folder.resolve()) as fresh:  # the old dataset stays until the new one is complete
        with console.quiet():
            packed = pack(source, fresh, shuffle=False).data
        for bad in packed["bad"]:
            console.warning(f"{bad['name']} is left out: {bad['reason']}")
        empty = [split for split, shards in packed["splits"].items() if not shards]
        if empty:
            raise UserError(f"No image of {empty[0]} is readable. Nothing was written.")
        move_into(fresh, folder, replace=replace)
    return str(folder)


class MemoryExamples(ImageDataset):
    """Encoded images in memory."""

    def __init__(self, contents: Sequence[bytes], labels: np.ndarray | None, name: str) -> None:
        super().__init__([f"{name}-{number}" for number in range(len(contents))], labels)
        self.contents = contents

    def raw(self, index: int) -> bytes:
        return self.contents[index]

    def stored_size(self, index: int) -> int:
        return len(self.contents[index])

    def _select(self, full: ImageDataset, chosen: np.ndarray) -> None:
        assert isinstance(full, MemoryExamples)
        self.contents = [full.contents[index] for index in chosen]

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        return (hashlib.blake2b(content, digest_size=8).hexdigest() for content in self.contents)


def _read_pairs(part: Any, split: str) -> tuple[list[bytes], list[int | str] | None]:
    """Encode the images of a split and read its labels."""
    if hasattr(part, "columns"):  # a frame of pandas or polars
        columns = truncate_list([repr(name) for name in part.columns])
        raise UserError(
            f"{split}: got a table with the columns {columns}. Give two columns: (table['image'], table['label'])."
        )
    if isinstance(part, tuple) and len(part) == 2:
        images = list(part[0])
        # list() follows the order, not the index, of a pandas Series.
        labels = [None] * len(images) if part[1] is None else list(part[1])
        if len(labels) != len(images):
            raise UserError(f"{split} has {pluralize(len(images), 'image')} and {pluralize(len(labels), 'label')}.")
        items = zip(images, labels, strict=True)
    elif hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, np.ndarray | torch.Tensor):
        items = (_pair(part[index], split) for index in range(len(part)))
    else:
        raise _not_pairs(part, split)
    contents: list[bytes] = []
    numbers: list[int | str | None] = []
    for image, label in items:
        contents.append(_encode(image, f"{split}-{len(contents)}"))
        numbers.append(_check_label(label, f"{split}-{len(numbers)}"))
    if not contents:
        raise UserError(f"{split} has no images.")
    labelled = [label for label in numbers if label is not None]
    if labelled and len(labelled) < len(numbers):
        unlabelled = [str(index) for index, label in enumerate(numbers) if label is None]
        raise UserError(
            f"{split}: {len(unlabelled):,} of {pluralize(len(numbers), 'image')} without a label "
            f"(index {truncate_list(unlabelled)}). Label them, or leave them out."
        )
    return contents, labelled or None


def _pair(item: Any, split: str) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise _not_pairs(item, split)
    return item[0], item[1]


def _not_pairs(value: Any, split: str) -> UserError:
    return UserError(
        f"{split}: expected (images, labels), (images, None) without labels, or a dataset of (image, label), "
        f"got {_describe(value)}."
    )


def _describe(value: Any) -> str:
    """Return the type of a value and, of an array, its shape."""
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}"


def _encode(image: Any, name: str) -> bytes:
    """Read a file unchanged, by its path or bytes; encode anything else as PNG."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        try:
            return Path(image).read_bytes()
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
    if label is None or (isinstance(label, str) and label.strip()):
        return label
    if isinstance(label, int) and not isinstance(label, bool) and label >= 0:
        return label
    shown = repr(label) if isinstance(label, int | float | str) else _describe(label)
    raise UserError(f"{name}: expected a label, an integer from 0 or a name, got {shown}.")


Labels = dict[str, list[int | str] | None]


def _number_labels(
    labels: Labels, classes: Sequence[str | int] | None
) -> tuple[tuple[str, ...] | None, dict[str, np.ndarray | None]]:
    """Return the class names, and the labels as indices into them."""
    every = [label for part in labels.values() for label in part or ()]
    unlabelled = [split for split, part in labels.items() if part is None]
    if not every:
        return None, dict.fromkeys(labels)
    if unlabelled:
        raise UserError(f"{unlabelled[0]} has no labels, but other splits have. Label all splits, or none.")
    if len({isinstance(label, str) for label in every}) > 1:
        raise UserError("Some labels are numbers and some are names. Use one kind.")
    if isinstance(classes, Mapping):
        raise UserError("classes is a dictionary. Give a list of names, in the order of the labels 0, 1, ….")
    names = None if classes is None else [str(name) for name in classes]
    if names is not None and (len(set(names)) < len(names) or not all(name.strip() for name in names)):
        raise UserError("classes has an empty or repeated name.")
    known: list[Any]
    if names is None:
        known = sorted(set(every))
    else:
        known = list(names) if isinstance(every[0], str) else list(range(len(names)))
    index = {label: number for number, label in enumerate(known)}
    unknown = next((label for label in every if label not in index), None)
    if unknown is not None:
        raise UserError(f"The label {unknown!r} is not among the {pluralize(len(known), 'class')} of classes=….")
    numbers = {split: np.array([index[label] for label in part or ()]) for split, part in labels.items()}
    return tuple(map(str, known if names is None else names)), dict(numbers)
