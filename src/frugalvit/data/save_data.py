"""Images in memory, or from a program of one's own, written once as a dataset that every command takes."""

from __future__ import annotations

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
    """Write images as a dataset, and return its folder: every command takes it, and so does ``fv.train``.

    Arrays become PNG in WebDataset shards, files stay as they are. Each image is asked for once.

    Args:
        out: a new folder.
        train: ``(images, labels)``, ``(images, None)`` without labels, or a ``torch.utils.data.Dataset`` (anything with
            a length) of such pairs. An image is a uint8 array (H, W) or (H, W, 3), a PIL image, a path, a file's bytes,
            or a tensor (C, H, W), uint8 or floats from 0 to 1; a label is a number or a name.
        val: the same; made from train by those who need it where it is left out.
        test: the same.
        classes: the names of the classes that numbers count, from 0; by default the numbers themselves.
        replace: a dataset that is there already, of this function or of ``data pack``, is written anew.
    """
    folder = Path(out)
    replace = replace and (folder / INDEX).is_file()
    if replace:
        check_replaceable(folder)
    else:
        check_free(folder)
    given = {split: part for split, part in (("train", train), ("val", val), ("test", test)) if part is not None}
    parts = {split: _pairs(part, split) for split, part in given.items()}
    names, numbers = _numbered({split: labels for split, (_, labels) in parts.items()}, classes)
    splits: dict[str, ImageDataset] = {
        split: MemoryExamples(contents, numbers[split], split) for split, (contents, _) in parts.items()
    }
    source = DatasetSplits(folder.resolve().name, "memory", "arrays", names, splits)
    with working_folder(
        folder.resolve(), inside=False
    ) as fresh:  # what is replaced is there until the new one is whole
        with console.quiet():
            written = pack(source, fresh, shuffle=False).data
        for bad in written["bad"]:
            console.warning(f"{bad['name']} is left out: {bad['reason']}")
        empty = [split for split, shards in written["splits"].items() if not shards]
        if empty:
            raise UserError(f"No image of {empty[0]} can be read: nothing was written.")
        move_into(fresh, folder, replace=replace)
    return str(folder)


class MemoryExamples(ImageDataset):
    """Images that lie encoded in memory."""

    def __init__(self, contents: Sequence[bytes], labels: np.ndarray | None, name: str) -> None:
        super().__init__([f"{name}-{number}" for number in range(len(contents))], labels)
        self.contents = contents

    def raw(self, index: int) -> bytes:
        return self.contents[index]

    def stored_size(self, index: int) -> int:
        return len(self.contents[index])

    def _select(self, whole: ImageDataset, chosen: np.ndarray) -> None:
        assert isinstance(whole, MemoryExamples)
        self.contents = [whole.contents[index] for index in chosen]

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        return (hashlib.blake2b(content, digest_size=8).hexdigest() for content in self.contents)


def _pairs(part: Any, split: str) -> tuple[list[bytes], list[int | str] | None]:
    """The encoded images and the labels of what was given for a split."""
    if hasattr(part, "columns"):  # a frame of pandas or polars
        columns = truncate_list([repr(name) for name in part.columns])
        raise UserError(
            f"{split}: a table with the columns {columns}: give two of them, as in (table['image'], table['label'])."
        )
    if isinstance(part, tuple) and len(part) == 2:
        if all(isinstance(half, tuple) and len(half) == 2 and _is_picture(half[0]) for half in part):
            raise UserError(
                f"{split}: two pairs in a tuple look like (images, labels): give a list, [(image, label), …]."
            )
        images = list(part[0])
        # In their order: a Series of pandas has an index of its own.
        labels = [None] * len(images) if part[1] is None else list(part[1])
        if len(labels) != len(images):
            raise UserError(f"{split} has {pluralize(len(images), 'image')} and {pluralize(len(labels), 'label')}.")
        items = zip(images, labels, strict=True)
    elif hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, np.ndarray | torch.Tensor):
        items = (_pair(part[index], split) for index in range(len(part)))
    else:
        raise UserError(f"{split}: {_kind(part)} {_WANTED}")
    contents: list[bytes] = []
    found: list[int | str | None] = []
    for image, label in items:
        contents.append(_encoded(image, f"{split}-{len(contents)}"))
        found.append(_label(label, f"{split}-{len(found)}"))
    if not contents:
        raise UserError(f"{split} has no images.")
    labelled = [label for label in found if label is not None]
    if labelled and len(labelled) < len(found):
        bare = [str(number) for number, label in enumerate(found) if label is None]
        raise UserError(
            f"{split}: {len(bare):,} of {pluralize(len(found), 'image')} {'has' if len(bare) == 1 else 'have'} no label "
            f"({truncate_list(bare)}, counted from 0): give them one, or leave them out."
        )
    return contents, labelled or None


_WANTED = "is no pair: give (images, labels), (images, None) without labels, or a dataset of (image, label)."


def _pair(item: Any, split: str) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise UserError(f"{split}: {_kind(item)} {_WANTED}")
    return item[0], item[1]


def _is_picture(thing: Any) -> bool:
    return isinstance(thing, Image.Image) or getattr(thing, "ndim", 0) >= 2


def _kind(thing: Any) -> str:
    """What something is, in a message: its type and, of an array, its shape."""
    shape = getattr(thing, "shape", None)
    return f"{type(thing).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}"


def _encoded(image: Any, name: str) -> bytes:
    """A file as it is, by its name or its bytes; anything else as a PNG."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise UserError(f"{image} cannot be read ({error.strerror}).") from None
    try:
        pixels = as_pixels(image)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    buffer = BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _label(label: Any, name: str) -> int | str | None:
    if hasattr(label, "item") and getattr(label, "ndim", 0) == 0:
        label = label.item()
    if label is None:
        return None
    if isinstance(label, str):
        if not label.strip():
            raise UserError(f"{name}: its label is empty: name its class, or give None where no image has a label.")
        return label
    if isinstance(label, int) and not isinstance(label, bool) and label >= 0:
        return label
    shown = repr(label) if isinstance(label, int | float) else _kind(label)
    raise UserError(f"{name}: {shown} is no label: give a number from 0 on, or a name.")


Labels = dict[str, list[int | str] | None]


def _numbered(
    labels: Labels, given: Sequence[str | int] | None
) -> tuple[tuple[str, ...] | None, dict[str, np.ndarray | None]]:
    """The names of the classes, and every label as its place among them."""
    every = [label for found in labels.values() for label in found or ()]
    bare = [split for split, found in labels.items() if found is None]
    if not every:
        return None, dict.fromkeys(labels)
    if bare:
        raise UserError(f"{bare[0]} has no labels, and other splits have: give all of them, or none.")
    if len({isinstance(label, str) for label in every}) > 1:
        raise UserError("Some labels are numbers and some are names: give all of one kind.")
    if isinstance(given, Mapping):
        raise UserError("classes: give a list of names, in the order of the numbers that mean them, not a dictionary.")
    classes = None if given is None else [str(name) for name in given]
    if classes is not None and (len(set(classes)) < len(classes) or not all(name.strip() for name in classes)):
        raise UserError("classes: every class has a name of its own, and none is empty.")
    known: list[Any]
    if classes is None:
        known = sorted(set(every))
    else:
        known = list(classes) if isinstance(every[0], str) else list(range(len(classes)))
    places = {label: place for place, label in enumerate(known)}
    unknown = next((label for label in every if label not in places), None)
    if unknown is not None:
        raise UserError(
            f"{unknown!r} is a label, and there are {pluralize(len(known), 'class')} (classes=…) without it."
        )
    numbers = {split: np.array([places[label] for label in found or ()]) for split, found in labels.items()}
    return tuple(map(str, known if classes is None else classes)), dict(numbers)
