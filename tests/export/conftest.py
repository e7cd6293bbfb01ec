"""Photographs for the tests of exports."""

from pathlib import Path

import pytest
from PIL import Image
from sklearn.datasets import load_sample_images

from helpers.exported_models import write_photos


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The photographs of scikit-learn, each in full and in four pieces."""
    folder = tmp_path_factory.mktemp("photographs")
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        height, width = pixels.shape[:2]
        Image.fromarray(pixels).save(folder / f"{name}.png")
        for number, (top, left) in enumerate([(0, 0), (0, width // 2), (height // 2, 0), (height // 2, width // 2)]):
            piece = pixels[top : top + height // 2, left : left + width // 2]
            Image.fromarray(piece).save(folder / f"{name}_{number}.png")
    return folder
