"""``frugalvit list models|datasets|recipes``: what there is to choose from."""

from __future__ import annotations

from dataclasses import replace

from frugalvit.config.tools import DatasetsConfig, ModelsConfig, RecipesConfig
from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table


def models(config: ModelsConfig) -> CommandResult:
    from frugalvit.backbones import list_models
    from frugalvit.backbones.factory import close_names

    found = list_models(config.pattern)
    if not found:
        raise UserError(f"No network is called {config.pattern}.{close_names(config.pattern)} '*' stands for anything.")
    rows: list[list[object]] = [
        [
            info.name,
            info.family,
            f"{info.params / 1e6:.2f} M",
            "×".join(map(str, info.grid or ("?",))),
            "×".join(map(str, info.img_size)),
            info.source,
        ]
        for info in found
    ]
    data = {"models": [vars(info) | {"grid": list(info.grid or ())} for info in found]}
    notes = (
        [] if config.pattern else ["Any timm model with a final grid works too: 'frugalvit list models \"convnext*\"'."]
    )
    return CommandResult(data, [Table(["name", "family", "parameters", "grid", "pixels", "from"], rows)], notes)


def datasets(config: DatasetsConfig) -> CommandResult:
    from frugalvit.data.formats.named_catalog import list_datasets

    found = list_datasets(config.pattern, config.root)
    if not found:
        raise UserError(_none("dataset", config.pattern, [d.name for d in list_datasets(root=config.root)]))
    if config.root is not None:  # the command that fetches one has to be told too
        told = f" --root {console.shell_quote(config.root)}'"
        found = [replace(d, instruction=d.instruction.replace(f" {d.name}'", f" {d.name}{told}")) for d in found]
    rows: list[list[object]] = [[d.name, d.classes, d.train, d.test, d.metric, d.status] for d in found]
    data = {"datasets": [vars(d) for d in found]}
    return CommandResult(data, [Table(["name", "classes", "train", "test", "metric", "status"], rows)])


def recipes(config: RecipesConfig) -> CommandResult:
    from fnmatch import fnmatch

    from frugalvit.config.recipes import all_recipes

    found = [r for r in all_recipes() if not config.pattern or fnmatch(r.name, f"*{config.pattern}*")]
    if not found:
        raise UserError(_none("recipe", config.pattern, [r.name for r in all_recipes()]))
    rows: list[list[object]] = [[r.name, r.task, r.summary, r.command] for r in found]
    return CommandResult({"recipes": [vars(r) for r in found]}, [Table(["name", "for", "what it is", "command"], rows)])


def _none(what: str, pattern: str, names: list[str]) -> str:
    return f"No {what} is called {pattern}.{did_you_mean(pattern, names)} '*' stands for anything."
