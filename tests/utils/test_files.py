"""Working folders: those of killed processes are removed, and nothing else is."""

import errno
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frugalvit.utils.files import remove_leftovers, working_folder

WORK = """
import sys
from pathlib import Path
from frugalvit.utils.files import working_folder
with working_folder(Path(sys.argv[1]), inside=sys.argv[2] == "inside") as folder:
    (folder / "half").write_text("")
    print("at work", flush=True)
    sys.stdin.read()
"""
Work = Callable[[Path, bool], "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Work]:
    """Start a process that is at work in a folder until it is killed."""
    children: list[subprocess.Popen[str]] = []

    def begin(target: Path, inside: bool) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", WORK, str(target), "inside" if inside else "beside"]
        children.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert children[-1].stdout is not None and children[-1].stdout.readline() == "at work\n"
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("inside", [False, True])
def test_moved_files_stay_and_others_are_removed(inside: bool, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if inside:
        target.mkdir()
    with working_folder(target, inside=inside) as folder:
        assert folder.parent.parent == (target if inside else tmp_path) and not list(folder.iterdir())
        (folder / "rest").write_text("")
        (folder / "whole").write_text("")
        (folder / "whole").rename(tmp_path / "moved")
        remove_leftovers(target)  # it is at work itself
        assert (folder / "rest").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["moved"] + ["out"] * inside


@pytest.mark.parametrize("inside", [False, True])
def test_only_leftovers_of_killed_processes_are_removed(inside: bool, start: Work, tmp_path: Path) -> None:
    target = tmp_path / "out"
    if inside:
        target.mkdir()
    child = start(target, inside)
    other = start(tmp_path / "out.b", False)  # for another target of nearly the same name
    mine = [tmp_path / ".out.12345678.partial", tmp_path / ".out.abcdefgh", tmp_path / ".out.a.partial"]
    for folder in mine:  # not by us: the first has no lock, the others have other names
        folder.mkdir()
    for folder in mine[1:]:
        (folder / ".lock").write_text("")
    (tmp_path / ".out.abcd_123.partial").symlink_to(mine[1], target_is_directory=True)
    (half,) = tmp_path.rglob(".out.????????.partial/new/half") if not inside else target.rglob("half")
    remove_leftovers(target)
    assert half.exists()
    other.kill()
    other.wait()
    child.kill()
    child.wait()
    assert half.exists()
    remove_leftovers(target)
    assert not half.parent.parent.exists() and all(folder.exists() for folder in mine)
    assert len(list(tmp_path.glob(".out.b.*.partial"))) == 1
    remove_leftovers(tmp_path / "out.b")
    assert not list(tmp_path.glob(".out.b.*"))


def test_leftovers_of_a_missing_folder(tmp_path: Path) -> None:
    remove_leftovers(tmp_path / "no" / "such")
    assert not list(tmp_path.iterdir()), "nor is it made"


def test_file_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have no locks: leftovers stay there, another process may use them."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("frugalvit.utils.files._lock", refuse)
    with working_folder(tmp_path / "made", inside=False) as folder:
        (folder / "file").write_text("whole")
        remove_leftovers(tmp_path / "made")
        folder.rename(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"] and (tmp_path / "made" / "file").exists()
