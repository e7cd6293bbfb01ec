"""Imports point one way, as the data flows; and the project speaks of itself alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "frugalvit"

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
BASE = {"errors", "console", "results", "features", "files", "kernels", "_hooks", "__init__"}
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
    ("transfer", "report"),
    ("lens", "report"),
    ("probing", "report"),
}


def room_of(parts: tuple[str, ...]) -> str:
    if len(parts) == 1:
        return "base" if parts[0] in BASE else "top"
    return parts[0]


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, whether at the top of the file) for every import of ours."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top = {id(node) for node in tree.body}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "frugalvit":
            names = [
                f"{node.module}.{alias.name}" if node.module == "frugalvit" else node.module for alias in node.names
            ]
            found += [(name, id(node) in top) for name in names]
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_flow(path: Path) -> None:
    here = room_of(path.relative_to(SOURCE).with_suffix("").parts)
    if here == "top" or (path.name == "__init__.py" and path.parent == SOURCE):
        return
    for module, at_top in imports(path):
        parts = tuple(module.split(".")[1:]) or ("__init__",)
        there = parts[0] if (SOURCE / parts[0]).is_dir() else room_of(parts[:1])
        if there == "top":
            assert parts[0] in {"__version__"}, f"{path} imports {module}"
            continue
        if not at_top and (here, there) in HANDOVERS:
            continue
        assert ORDER.index(there) <= ORDER.index(here), f"{here} must not know {there}: {path} imports {module}"
        assert there not in NOT_FOR.get(here, set()), f"{here} must not know {there}: {path} imports {module}"
