"""Images an export is checked on: the run's own where they are at hand, else noise. A check never downloads."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.utils import console

if TYPE_CHECKING:
    from frugalvit.export.inference_model import ReadyModel

CHECKED = 5
"""Images an export is checked on."""
_SPLITS = ("test", "val", "train")


def check_images(model: ReadyModel, images: str | None, settings: Mapping[str, Any]) -> tuple[Tensor, str]:
    """A batch of preprocessed images and what they are in words.

    images:   what somebody asked for, which is opened wherever it lies
    settings: of the run the model comes from; empty where there is none
    """
    backbone = model.backbone
    where = images or settings.get("data")
    if where and backbone.in_chans == 3:
        try:
            pixels = read_images(str(where)) if images else _own_images(str(where), settings)
        except UserError as error:
            if images:
                raise
            console.warning(f"the run's data cannot be read ({error}); the export is checked on noise instead")
        else:
            if pixels:
                return model.transform(pixels), f"{len(pixels)} images of {where}"
            console.info(
                f"{where} would have to be fetched: the export is checked on noise; --images names other images"
            )
    noise = torch.randn(CHECKED, backbone.in_chans, *backbone.img_size, generator=torch.Generator().manual_seed(0))
    return noise, f"{CHECKED} images of noise"


def read_images(where: str, **options: Any) -> list[Any]:
    """The first readable images of a file, a folder or a dataset; ``options`` are ``open_data``'s."""
    from frugalvit.data import open_data
    from frugalvit.data.decode import UnreadableImage, decode
    from frugalvit.data.formats.registry import find_format

    if Path(where).is_file() and find_format(where) is None:
        return [decode(where)]
    splits = open_data(where, split="given", **options).splits
    examples = next((splits[name] for name in _SPLITS if len(splits.get(name, ()))), None)
    pixels: list[Any] = []
    for index in range(len(examples) if examples is not None else 0):
        with contextlib.suppress(UnreadableImage):  # any readable images will do
            pixels.append(examples.read(index))  # type: ignore[union-attr]
        if len(pixels) == CHECKED:
            return pixels
    if not pixels:
        raise UserError(f"{where} holds no readable image.")
    return pixels


def _own_images(where: str, settings: Mapping[str, Any]) -> list[Any]:
    """Images of a run's data, opened as the run opened them; none where they would have to be fetched."""
    from frugalvit.data.webdataset.shards import layout
    from frugalvit.data.webdataset.streaming_dataset import should_stream

    root = settings.get("root")
    if not _is_here(where, root):
        return []
    if should_stream(where, settings.get("stream", "auto")):  # more than is listed for five images
        splits = layout(where).splits
        shard = next((splits[name][0] for name in _SPLITS if splits.get(name)), where)
        return read_images(shard)
    options: dict[str, Any] = {"root": root}
    labels, classes = settings.get("labels"), settings.get("classes")
    if isinstance(labels, str):  # of 'train' it is a share
        options["labels"] = labels
    if isinstance(classes, str) and Path(classes).is_file():  # without the list, images of all classes do as well
        options["classes"] = classes
    return read_images(where, **options)


def _is_here(where: str, root: Any) -> bool:
    """Whether opening data fetches nothing."""
    from frugalvit.data.formats.named_catalog import DATASETS, dataset_status
    from frugalvit.data.paths import local
    from frugalvit.data.webdataset.remote import is_remote

    if is_remote(where) or where.startswith("hf:"):
        return False
    name, _, folder = where.partition(":")
    if name.lower() not in DATASETS or local(where).exists():
        return True
    return dataset_status(name.lower(), local(folder) if folder else root).state != "downloadable"
