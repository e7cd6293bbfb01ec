"""Images and folders named on the command line."""

from pathlib import Path

import pytest

from frugalvit.data.image_inputs import InputImages
from frugalvit.errors import UserError
from helpers.data_layouts import fill


def test_paths_of_files_and_folders(tmp_path: Path) -> None:
    fill(tmp_path, {"photos": 2, "photos/deep": 2, "empty": 0})
    assert len(InputImages([str(tmp_path / "photos"), str(tmp_path / "photos" / "000.png")]).paths) == 5
    for name in ("empty", "missing.png"):
        with pytest.raises(UserError, match=name):
            InputImages([str(tmp_path / name)])


def test_a_table_names_labelled_and_unlabelled_images(tmp_path: Path) -> None:
    fill(tmp_path, {"photos": 3})
    table = tmp_path / "plants.csv"
    table.write_text("photo,species\nphotos/000.png,fern\nphotos/001.png,\n", encoding="utf-8")
    paths = InputImages([f"{table}:path=photo,label=species"]).paths
    assert [path.name for path in paths] == ["000.png", "001.png"]
