"""Recipes: named sets of values with what they cost and what to expect. YAML files beside the code, and the user's."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from frugalvit.config.base import read_yaml
from frugalvit.errors import UserError, did_you_mean


@dataclass(frozen=True)
class RecipeFile:
    """What its file says; of the user's own, ``task`` and ``values`` are enough."""

    name: str
    task: str
    values: dict[str, Any]
    summary: str = ""
    command: str = ""
    hardware: str = ""
    cost: str = ""
    expect: str = ""


@cache  # every configuration asks
def all_recipes() -> tuple[RecipeFile, ...]:
    """The recipes that come with the package."""
    folder = resources.files("frugalvit") / "recipes"
    files = sorted(path.name for path in folder.iterdir() if path.name.endswith(".yaml"))
    return tuple(_read(Path(str(folder / name))) for name in files)


def recipe_values(name: str, task: str) -> dict[str, Any]:
    """The values of a recipe for ``task`` by its name, or of a YAML file of the user's in the same form."""
    if is_file(name):
        recipe = _read(Path(name))
        if recipe.task != task:
            raise UserError(f"{name} is a recipe for {recipe.task}, not for {task}.")
        return recipe.values
    known = {recipe.name: recipe.values for recipe in all_recipes() if recipe.task == task}
    if name not in known:
        raise UserError(
            f"There is no recipe '{name}' for {task}; there are {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return deepcopy(known[name])


def is_file(name: str) -> bool:
    """Whether a recipe's name is that of a file of the user's."""
    return name.endswith((".yaml", ".yml"))


def _read(path: Path) -> RecipeFile:
    said = read_yaml(path)
    known = [field.name for field in fields(RecipeFile) if field.name != "name"]
    for key in said:
        if key not in known:
            raise UserError(
                f"{path}: a recipe has no '{key}', and options stand below 'values'.{did_you_mean(key, known)}"
            )
    if missing := [name for name in ("task", "values") if name not in said]:
        raise UserError(f"{path} is no recipe: it lacks {' and '.join(missing)}.")
    if not isinstance(said["values"], dict):
        raise UserError(f"{path}: 'values' must hold options and their values, e.g. {{optimizer: {{warmup: 5}}}}.")
    return RecipeFile(path.stem, **said)
