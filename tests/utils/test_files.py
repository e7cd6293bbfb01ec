"""Folders that appear when they are whole: what a killed process leaves of one goes away, and nothing else does."""

from __future__ import annotations

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

    def begin(place: Path, inside: bool) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", WORK, str(place), "inside" if inside else "beside"]
        children.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert children[-1].stdout is not None and children[-1].stdout.readline() == "at work\n"
        return children[-1]

    yield begin
    for child in children:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_moved_stays_and_the_rest_vanishes(inside: bool, tmp_path: Path) -> None:
    place = tmp_path / "out"
    if inside:
        place.mkdir()
    with working_folder(place, inside=inside) as folder:
        assert folder.parent.parent == (place if inside else tmp_path) and not list(folder.iterdir())
        (folder / "rest").write_text("")
        (folder / "whole").write_text("")
        (folder / "whole").rename(tmp_path / "moved")
        remove_leftovers(place)  # it is at work itself
        assert (folder / "rest").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["moved"] + ["out"] * inside


@pytest.mark.parametrize("inside", [False, True])
def test_only_what_a_killed_process_left_is_removed(inside: bool, start: Work, tmp_path: Path) -> None:
    place = tmp_path / "out"
    if inside:
        place.mkdir()
    child = start(place, inside)
    other = start(tmp_path / "out.b", False)  # for another place of nearly the same name
    mine = [tmp_path / ".out.12345678.partial", tmp_path / ".out.abcdefgh", tmp_path / ".out.a.partial"]
    for folder in mine:  # not by us: the first has no lock, the others have other names
        folder.mkdir()
    for folder in mine[1:]:
        (folder / ".lock").write_text("")
    (tmp_path / ".out.abcd_123.partial").symlink_to(mine[1], target_is_directory=True)
    (half,) = tmp_path.rglob(".out.????????.partial/new/half") if not inside else place.rglob("half")
    remove_leftovers(place)
    assert half.exists()
    other.kill()
    other.wait()
    child.kill()
    child.wait()
    assert half.exists()
    remove_leftovers(place)
    assert not half.parent.parent.exists() and all(folder.exists() for folder in mine)
    assert len(list(tmp_path.glob(".out.b.*.partial"))) == 1
    remove_leftovers(tmp_path / "out.b")
    assert not list(tmp_path.glob(".out.b.*"))


def test_leftovers_of_a_place_that_is_not_there(tmp_path: Path) -> None:
    remove_leftovers(tmp_path / "no" / "such")
    assert not list(tmp_path.iterdir()), "nor is it made"


def test_where_nothing_locks_the_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems know no locks. What a killed process left there stays: it might be somebody's."""

    def refuse(handle: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("frugalvit.utils.files._lock", refuse)
    with working_folder(tmp_path / "made", inside=False) as folder:
        (folder / "file").write_text("whole")
        remove_leftovers(tmp_path / "made")
        folder.rename(tmp_path / "made")
    assert [path.name for path in tmp_path.iterdir()] == ["made"] and (tmp_path / "made" / "file").exists()
