"""``frugalvit list models|datasets|recipes``."""

from frugalvit.config.tools import DatasetsConfig, ModelsConfig, RecipesConfig
from frugalvit.errors import UserError, did_you_mean
from frugalvit.utils.tables import CommandResult, Table


def models(config: ModelsConfig) -> CommandResult:
    from frugalvit.backbones import list_models
    from frugalvit.backbones.registry import suggest_names

    infos = list_models(config.pattern)
    if not infos:
        raise UserError(f"No network matches {config.pattern}.{suggest_names(config.pattern)} Use * as a wildcard.")
    rows: list[list[object]] = [
        [
            info.name,
            info.family,
            f"{info.params / 1e6:.2f} M",
            "×".join(map(str, info.grid or ("?",))),
            "×".join(map(str, info.img_size)),
            info.source,
        ]
        for info in infos
    ]
    data = {"models": [vars(info) | {"grid": list(info.grid or ())} for info in infos]}
    hint = "Any timm model with a final grid works too: 'frugalvit list models \"convnext*\"'."
    notes = [] if config.pattern else [hint]
    return CommandResult(data, [Table(["name", "family", "parameters", "grid", "pixels", "from"], rows)], notes)


def datasets(config: DatasetsConfig) -> CommandResult:
    from frugalvit.data.formats.named_catalog import list_datasets

    infos = list_datasets(config.pattern, config.root)
    if not infos:
        raise UserError(_no_match("dataset", config.pattern, [d.name for d in list_datasets(root=config.root)]))
    rows: list[list[object]] = [[d.name, d.classes, d.train, d.test, d.metric, d.status] for d in infos]
    data = {"datasets": [vars(d) for d in infos]}
    return CommandResult(data, [Table(["name", "classes", "train", "test", "metric", "status"], rows)])


def recipes(config: RecipesConfig) -> CommandResult:
    from fnmatch import fnmatch

    from frugalvit.config.recipes import all_recipes

    matches = [r for r in all_recipes() if not config.pattern or fnmatch(r.name, f"*{config.pattern}*")]
    if not matches:
        raise UserError(_no_match("recipe", config.pattern, [r.name for r in all_recipes()]))
    rows: list[list[object]] = [[r.name, r.task, r.summary, r.command] for r in matches]
    return CommandResult({"recipes": [vars(r) for r in matches]}, [Table(["name", "for", "summary", "command"], rows)])


def _no_match(kind: str, pattern: str, names: list[str]) -> str:
    return f"No {kind} matches {pattern}.{did_you_mean(pattern, names)} Use * as a wildcard."
