"""Images named on the command line."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.decode import PHOTO, PixelFormat, read_pixels
from frugalvit.data.formats.csv import is_table
from frugalvit.data.formats.image_folder import list_images
from frugalvit.data.open import open_data
from frugalvit.errors import UserError
from frugalvit.utils import console

_MAX_BYTES = 300_000_000  # of the decoded images in one batch: 100 megapixels


class Decoded(NamedTuple):
    """A decoded image: its index among the inputs, its path, its pixels (H, W, C)."""

    index: int
    path: Path
    pixels: np.ndarray


@dataclass
class InputImages:
    """Image files, and all images of folders and tables. Unreadable images are logged and left out of the results."""

    names: list[str]
    paths: list[Path] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.names:
            path = Path(name)
            if path.is_dir():
                self.paths += [Path(image) for image in list_images(str(path))]
            elif is_table(name):
                splits = open_data(name, split="given", labels="ignore").splits.values()
                self.paths += [Path(image) for examples in splits for image in examples.names]
            elif path.is_file():
                self.paths.append(path)
            else:
                raise UserError(f"There is no image, folder or table {name}.")
        if not self.paths:
            raise UserError(f"{self.names[0]} holds no images.")

    def batches(self, size: int, label: str, pixels: PixelFormat = PHOTO) -> Iterator[list[Decoded]]:
        """Yield the readable images in a pixel format, in lists of ``size``, shorter if images are large."""
        batch: list[Decoded] = []
        for index, path in enumerate(console.progress(self.paths, label=label)):
            try:
                batch.append(Decoded(index, path, read_pixels(path, pixels)))
            except UnreadableImage as error:
                console.warning(str(error))
                self.unreadable.append(str(path))
            if len(batch) == size or sum(image.pixels.nbytes for image in batch) > _MAX_BYTES:
                yield batch
                batch = []
        if batch:
            yield batch
        if len(self.unreadable) == len(self.paths):
            raise UserError(
                f"No image can be read (files: {len(self.paths)}). Name image files, folders of images or tables; "
                "unpack archives first."
            )


def as_list(images: Any) -> Sequence[Any]:
    """Return several images as a list. An array of pixels or an open file is one image."""
    if isinstance(images, list | tuple):
        return images
    is_names = isinstance(images, np.ndarray) and images.ndim == 1 and images.dtype.kind in "OU"
    is_generator = isinstance(images, Iterator) and not hasattr(images, "read")
    is_column = hasattr(images, "to_numpy") and not hasattr(images, "columns")  # of pandas or polars
    return list(images) if is_names or is_generator or is_column else [images]
