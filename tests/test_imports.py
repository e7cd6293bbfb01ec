"""The source tree: imports point one way, no cycles, folders a reader can survey, names a stranger can guess."""

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "frugalvit"

# A package may import itself and the packages before it.
ORDER = (
    "errors",
    "features",
    "utils",
    "config",
    "data",
    "backbones",
    "objectives",
    "runs",
    "engine",
    "visualization",
    "report",
    "experiment",
    "probing",
    "tasks",
    "comparison",
    "embedding",
    "export",
    "cli",
    "api",
)
# These packages must work without the named earlier ones.
INDEPENDENT = {"config": {"data"}, "backbones": {"data"}, "objectives": {"data", "backbones"}}
# The file names of a run folder: this module imports only utils, and the torch-free configuration reads it.
# Checkpoints: the loop writes them through the run folder, and strangers look for them beside the loop.
LEVELS = {"runs.layout": "utils", "engine.checkpoint": "runs"}
MAX_MODULES = 15
# Participles, adjectives and catch-all words: a stranger cannot guess what they hold.
BANNED = {
    "absent", "apart", "asked", "begun", "common_stuff", "found", "given", "held", "helpers", "kept", "known", "lens",
    "look_at", "made", "misc", "places", "ready", "running", "setup", "things", "trained", "unbegun", "unfinished",
    "used", "usual", "using", "verbs", "whole", "words", "written",
}  # fmt: skip

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py"
}


def imported_modules(path: Path) -> set[str]:
    """Return the modules of frugalvit that a file imports, at the top or inside functions, for types or not."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            # "from frugalvit.utils import console" imports a module, "from frugalvit.features import Features" a name.
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name.partition(".")[2] in MODULES else str(node.module) for name in full}
    return {name.partition(".")[2] for name in names if name.startswith("frugalvit.")} & MODULES.keys()


GRAPH = {module: imported_modules(path) - {module} for module, path in MODULES.items() if module != "__init__"}


@pytest.mark.parametrize("module", sorted(GRAPH))
def test_imports_point_one_way(module: str) -> None:
    package = LEVELS.get(module, module.partition(".")[0])
    for other in GRAPH[module]:
        imported = LEVELS.get(other, other.partition(".")[0])
        assert ORDER.index(imported) <= ORDER.index(package), f"{module} must not import {other}"
        assert imported not in INDEPENDENT.get(package, ()), f"{module} must not import {other}"


def test_no_import_cycles() -> None:
    left = dict(GRAPH)
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"these modules import each other: {sorted(left)}"


def test_no_folder_has_too_many_modules() -> None:
    counts = Counter(path.parent for path in SOURCE.rglob("*.py") if not path.name.startswith("__"))
    assert {str(folder): count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_no_banned_module_names() -> None:
    assert {module for module in MODULES if module.rpartition(".")[2] in BANNED} == set()


def test_packages_are_listed_in_order() -> None:
    found = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__"} == set(ORDER)


def test_slow_cases_name_existing_tests() -> None:
    tests = Path(__file__).parent
    for line in (tests / "slow_cases.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            file, name = line.split("::")
            function = name.partition("[")[0].rstrip("*")
            assert f"def {function}" in (tests / file).read_text(encoding="utf-8"), line
