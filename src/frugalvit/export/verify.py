"""Choose the images that an export is checked on: the run's own if they are local, else noise."""

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

CHECKED = 5  # images
_SPLITS = ("test", "val", "train")


def check_images(model: ReadyModel, images: str | None, settings: Mapping[str, Any]) -> tuple[Tensor, str]:
    """Return a batch of preprocessed images and a description of them.

    images:   the user's choice, which may be remote
    settings: config.yaml of the model's run; empty if there is none. Its data is never downloaded.
    """
    backbone = model.backbone
    data = images or settings.get("data")
    if data and backbone.in_chans == 3:
        try:
            pixels = read_images(str(data)) if images else _run_images(str(data), settings)
        except UserError as error:
            if images:
                raise
            console.warning(f"cannot read the run's data ({error}); checking the export on noise")
        else:
            if pixels:
                return model.transform(pixels), f"{len(pixels)} images of {data}"
            console.info(f"{data} is not local: checking the export on noise; choose other images with --images")
    noise = torch.randn(CHECKED, backbone.in_chans, *backbone.img_size, generator=torch.Generator().manual_seed(0))
    return noise, f"{CHECKED} images of noise"


def read_images(data: str, **options: Any) -> list[Any]:
    """Read the first readable images of a file, a folder or a dataset; ``options`` go to ``open_data``."""
    from frugalvit.data import open_data
    from frugalvit.data.decode import decode
    from frugalvit.data.formats.registry import find_format
    from frugalvit.data.unreadable import UnreadableImage

    if Path(data).is_file() and find_format(data) is None:
        return [decode(data)]
    splits = open_data(data, split="given", **options).splits
    examples = next((splits[name] for name in _SPLITS if len(splits.get(name, ()))), None)
    pixels: list[Any] = []
    for index in range(len(examples) if examples is not None else 0):
        with contextlib.suppress(UnreadableImage):
            pixels.append(examples.read(index))  # type: ignore[union-attr]
        if len(pixels) == CHECKED:
            return pixels
    if not pixels:
        raise UserError(f"{data} has no readable image.")
    return pixels


def _run_images(data: str, settings: Mapping[str, Any]) -> list[Any]:
    """Read images of a run's data with the run's options; none if they are not local."""
    from frugalvit.data.webdataset.shards import list_shards
    from frugalvit.data.webdataset.streaming_dataset import should_stream

    root = settings.get("root")
    if not _is_local(data, root):
        return []
    if should_stream(data, settings.get("stream", "auto")):  # one shard is enough
        splits, _ = list_shards(data)
        shard = next((splits[name][0] for name in _SPLITS if splits.get(name)), data)
        return read_images(shard)
    options: dict[str, Any] = {"root": root}
    labels, classes = settings.get("labels"), settings.get("classes")
    if isinstance(labels, str):  # a number is a share of the labels
        options["labels"] = labels
    if isinstance(classes, str) and Path(classes).is_file():
        options["classes"] = classes
    return read_images(data, **options)


def _is_local(data: str, root: Any) -> bool:
    """True if opening the data downloads nothing."""
    from frugalvit.data.formats.named_catalog import DATASETS, dataset_status
    from frugalvit.data.paths import local
    from frugalvit.data.webdataset.remote import is_remote

    if is_remote(data) or data.startswith("hf:"):
        return False
    name, _, folder = data.partition(":")
    if name.lower() not in DATASETS or local(data).exists():
        return True
    return dataset_status(name.lower(), local(folder) if folder else root).state != "downloadable"
