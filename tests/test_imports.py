"""Imports point one way, as the data flows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "frugalvit"

# A room may import itself and what stands before it.
ORDER = [
    "base",
    "config",
    "data",
    "backbones",
    "objectives",
    "training",
    "probing",
    "lens",
    "transfer",
    "report",
    "reproduce",
    "top",
]
BASE = {
    "errors",
    "console",
    "results",
    "words",
    "features",
    "files",
    "figures",
    "formats",
    "palette",
    "kernels",
    "onednn",
    "launchers",
    "interrupts",
    "_hooks",
    "__init__",
}
NOT_FOR = {
    "backbones": {"data"},
    "objectives": {"data", "backbones"},
    "lens": {"probing"},
    "transfer": {"probing", "lens"},
}
# Commands at the end of a run hand over to the rooms after them, inside functions; these are all of them.
HANDOVERS = {
    ("training", "report"),  # the report at the end of every run
    ("training", "probing"),  # the online k-NN while pre-training
    ("training", "transfer"),  # what is no data for a classifier may be some for a detector
    ("transfer", "report"),
}


def room_of(parts: tuple[str, ...]) -> str:
    if len(parts) == 1:
        return "base" if parts[0] in BASE else "top"
    return parts[0]


def imports(path: Path, source: Path = SOURCE) -> list[tuple[str, bool]]:
    """(module, whether at the top of the file) for every import of ours, however it is written."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = ("frugalvit", *path.relative_to(source).parent.parts)
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            here = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*here, *([node.module] if node.module else [])])
            # "from frugalvit import console" names a module, "from frugalvit.utils.files import write_text" what is in one.
            names = [f"{module}.{alias.name}" if module == "frugalvit" else module for alias in node.names]
        else:
            continue
        found += [(name, id(node) in top) for name in names if name.split(".")[0] == "frugalvit"]
    return found


def room_imported(module: str) -> str:
    parts = tuple(module.split(".")[1:]) or ("__init__",)
    return parts[0] if (SOURCE / parts[0]).is_dir() else room_of(parts[:1])


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_flow(path: Path) -> None:
    here = room_of(path.relative_to(SOURCE).with_suffix("").parts)
    if here == "top" or (path.name == "__init__.py" and path.parent == SOURCE):
        return
    for module, at_top in imports(path):
        there = room_imported(module)
        if there == "top":
            assert module == "frugalvit.__version__", f"{path} imports {module}"
            continue
        if not at_top and (here, there) in HANDOVERS:
            continue
        assert ORDER.index(there) <= ORDER.index(here), f"{here} must not know {there}: {path} imports {module}"
        assert there not in NOT_FOR.get(here, set()), f"{here} must not know {there}: {path} imports {module}"


def test_every_handover_happens() -> None:
    files = [(room_of(path.relative_to(SOURCE).with_suffix("").parts), path) for path in SOURCE.rglob("*.py")]
    used = {(here, room_imported(module)) for here, path in files for module, at_top in imports(path) if not at_top}
    assert used >= HANDOVERS, "a handover that nobody makes any more is one too many"


def test_imports_are_seen_however_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "lens").mkdir()
    path = tmp_path / "lens" / "views.py"
    path.write_text(
        "import frugalvit.report.page as page, json\n"
        "from frugalvit import console\n"
        "from ..training import runs\n"
        "from .explore import Picture\n"
        "from .. import files\n"
        "def late():\n    import frugalvit.probing\n"
    )
    assert imports(path, tmp_path) == [
        ("frugalvit.report.page", True),
        ("frugalvit.utils.console", True),
        ("frugalvit.engine", True),
        ("frugalvit.visualization.explorer_data", True),
        ("frugalvit.utils.files", True),
        ("frugalvit.probing", False),
    ]
