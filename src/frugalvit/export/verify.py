"""Choose the images that an export is checked on: the user's, the run's own if they are local files, else noise."""

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frugalvit.data import open_data
from frugalvit.data.decode import decode
from frugalvit.data.formats.registry import find_format
from frugalvit.data.paths import local
from frugalvit.data.unreadable import UnreadableImage
from frugalvit.errors import UserError
from frugalvit.export.inference_model import ReadyModel
from frugalvit.utils import console

CHECKED = 5  # images


def check_images(model: ReadyModel, images: str | None, run_data: str | None) -> tuple[Tensor, str]:
    """Return a batch of preprocessed images and a description of them.

    images:   the user's choice, which may be remote
    run_data: the data of the model's run; used if it is a local path, never downloaded
    """
    backbone = model.backbone
    data = images or run_data
    if data and backbone.in_chans == 3 and (images or local(data).exists()):
        try:
            pixels = read_images(data)
        except UserError as error:
            if images:
                raise
            console.warning(f"cannot read the run's data ({error}); checking the export on noise")
        else:
            return model.transform(pixels), f"{len(pixels)} images of {data}"
    noise = torch.randn(CHECKED, backbone.in_chans, *backbone.img_size, generator=torch.Generator().manual_seed(0))
    return noise, f"{CHECKED} images of noise"


def read_images(data: str) -> list[Any]:
    """Read the first readable images of a file, a folder or a dataset."""
    if Path(data).is_file() and find_format(data) is None:
        return [decode(data)]
    splits = open_data(data, split="given").splits
    examples = next((splits[name] for name in ("test", "val", "train") if len(splits.get(name, ()))), [])
    pixels: list[Any] = []
    for index in range(len(examples)):
        with contextlib.suppress(UnreadableImage):
            pixels.append(examples.read(index))
        if len(pixels) == CHECKED:
            break
    if not pixels:
        raise UserError(f"{data} has no readable image.")
    return pixels
