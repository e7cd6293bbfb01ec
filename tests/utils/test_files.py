"""Working folders: temporary, locked, and removed by the next process if theirs was killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from frugalvit.errors import UserError
from frugalvit.utils.files import working_folder

WORK = """
import sys
from pathlib import Path
from frugalvit.utils.files import working_folder
with working_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("")
    print("at work", flush=True)
    sys.stdin.read()
"""


def test_moved_files_stay_and_others_are_removed(tmp_path: Path) -> None:
    with working_folder(tmp_path / "out") as folder:
        (folder / "rest").write_text("")
        (folder / "complete").write_text("")
        (folder / "complete").rename(tmp_path / "moved")
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_only_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORK, str(tmp_path / "out")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "at work\n"
        with pytest.raises(UserError, match="Another process"), working_folder(tmp_path / "out"):
            pass
        assert len(list(tmp_path.rglob("half"))) == 1
    finally:
        child.kill()
        child.communicate()
    assert len(list(tmp_path.rglob("half"))) == 1
    with working_folder(tmp_path / "out") as folder:
        assert not list(folder.iterdir())
    assert not list(tmp_path.iterdir())
