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
