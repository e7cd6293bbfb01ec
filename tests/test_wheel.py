"""The wheel and the source archive are complete, install, and start."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "frugalvit"
PARTS = ("src", "docs", "tests", "examples", "notebooks", "benchmarks")
HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(what: str, project: Path, out: Path) -> Path:
    """Call the build hook of the installed setuptools; nothing is downloaded."""
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", HOOK, f"build_{what}", str(out)], cwd=project, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive of a copy of this checkout, and the wheel built from that archive."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 or newer is not installed")
    folder = tmp_path_factory.mktemp("built")
    copy = folder / "checkout"
    copy.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    source = build("sdist", copy, folder / "dist")
    with tarfile.open(source) as archive:
        safely: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # since Python 3.11.4
        archive.extractall(folder / "unpacked", **safely)
    (unpacked,) = (folder / "unpacked").iterdir()
    return source, build("wheel", unpacked, folder / "dist")


def package_files() -> Iterator[str]:
    for path in SOURCE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(SOURCE.parent))


def test_wheel_contents(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        names = set(wheel.namelist())
        assert wheel.testzip() is None
        entry_points = wheel.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == set(package_files()), "every file of the package, no other"
    assert "frugalvit/py.typed" in names and "frugalvit/recipes/scratch.yaml" in names
    assert "frugalvit/report/templates/page.html" in names
    assert "frugalvit = frugalvit.cli.main:main" in entry_points
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_source_archive_contents(archives: tuple[Path, Path]) -> None:
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "mkdocs.yml", "pyproject.toml"}
    expected |= {"tests/conftest.py", "docs/start.md", "examples/plain_pytorch.py", "notebooks/first_steps.ipynb"}
    assert expected <= names, expected - names
    assert {f"src/{name}" for name in package_files()} <= names
    assert not any(part in name for name in names for part in ("__pycache__", ".venv"))


@pytest.mark.parametrize("which", ["wheel", pytest.param("sdist", marks=pytest.mark.slow)])
def test_install_and_start(which: str, archives: tuple[Path, Path], tmp_path: Path) -> None:
    """In another folder, with the installed dependencies and without the checkout."""
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    archive = archives[1 if which == "wheel" else 0]
    words = ["install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", *words, str(archive)], capture_output=True, text=True, cwd=elsewhere
    )
    assert pip.returncode == 0, pip.stderr
    environment = os.environ | {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    code = "import frugalvit, sys; from frugalvit.cli.main import main; print(frugalvit.__file__); sys.exit(main())"
    for arguments in (["--version"], ["list", "recipes"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=elsewhere, env=environment
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        assert Path(done.stdout.splitlines()[0]).is_relative_to(site)
    script = site / "bin" / "frugalvit"
    assert script.exists() and "frugalvit.cli.main" in script.read_text()
