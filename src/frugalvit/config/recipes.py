"""Load recipes, named sets of values with their cost and results: recipes/*.yaml and the user's."""

from copy import deepcopy
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from frugalvit.config.base import Config
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError, did_you_mean


class RecipeFile(Config):
    """The content of a recipe file; a user's recipe needs ``task`` and ``values`` only."""

    name: str
    task: str
    values: dict[str, Any]
    summary: str = ""
    command: str = ""
    hardware: str = ""
    cost: str = ""
    expect: str = ""


@cache
def all_recipes() -> tuple[RecipeFile, ...]:
    folder = resources.files("frugalvit") / "recipes"
    files = sorted(path.name for path in folder.iterdir() if path.name.endswith(".yaml"))
    return tuple(_load_recipe(Path(str(folder / name))) for name in files)


def recipe_values(name: str, task: str) -> dict[str, Any]:
    """Return the values of a recipe for ``task``, by its name or from a user's YAML file."""
    if name.endswith((".yaml", ".yml")):
        recipe = _load_recipe(Path(name))
        if recipe.task != task:
            raise UserError(f"{name} is a recipe for {recipe.task}, not for {task}.")
        return recipe.values
    known = {recipe.name: recipe.values for recipe in all_recipes() if recipe.task == task}
    if name not in known:
        raise UserError(
            f"There is no recipe '{name}' for {task}. Use one of {', '.join(known)}.{did_you_mean(name, known)}"
        )
    return deepcopy(known[name])


def _load_recipe(path: Path) -> RecipeFile:
    content = read_yaml(path)
    if content.get("name", path.stem) != path.stem:
        raise UserError(f"{path}: a recipe has the name of its file, {path.stem!r}. Delete the line 'name:'.")
    try:
        return RecipeFile.parse(content | {"name": path.stem})
    except UserError as error:
        raise UserError(f"{path} is not a recipe; options go below 'values'. {error}") from None
