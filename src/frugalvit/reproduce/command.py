"""``frugalvit reproduce TABLE``: a table of docs/RESULTS.md run again with one command; what is finished is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from frugalvit.config.compare import CompareConfig, parse_assignments
from frugalvit.config.dense import DetectCompareConfig, DetectConfig, SegmentCompareConfig, SegmentConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.tools import ReproduceConfig
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError, did_you_mean
from frugalvit.reproduce.scoring import probe_scores
from frugalvit.reproduce.table_specs import TABLES, Recipe
from frugalvit.utils import console
from frugalvit.utils.files import write_text
from frugalvit.utils.tables import CommandResult, Table, as_markdown


def reproduce(config: ReproduceConfig) -> CommandResult:
    """Run a table, or list them."""
    if not config.table:
        rows: list[list[object]] = [[name, recipe.about, recipe.data] for name, recipe in TABLES.items()]
        return CommandResult({"tables": list(TABLES)}, [Table(["table", "what it shows", "data"], rows)])
    if config.table not in TABLES:
        raise UserError(
            f"There is no table '{config.table}'.{did_you_mean(config.table, TABLES)} See 'frugalvit reproduce'."
        )
    recipe = TABLES[config.table]
    for name in {config.table, *(table for table, _ in recipe.starts.values())}:
        folder = Path(config.data) / TABLES[name].data
        if not folder.is_dir():
            raise UserError(f"{name} needs {folder.name}: there is no folder {folder}. Say where it is with --data.")
    settings = {name: _as_long_as(values, config) for name, values in _chosen(recipe, config.only).items()}
    if _wanted(recipe, *settings.values()) and len(config.out.split()) != 1:
        raise UserError(f"{config.table} names runs in {config.out!r}, which has spaces; choose an --out without.")
    _make_starts(recipe, config, *(text for name, text in settings.items() if not _finished(config, recipe, name)))
    settings = {name: _from_starts(recipe, text, config) for name, text in settings.items()}
    if recipe.kind == "pretrain":
        return _pretrained(config.table, settings, config)
    if len(settings) == 1:
        return _alone(config.table, *next(iter(settings.items())), config)
    return _compared(config.table, settings, config)


def _chosen(recipe: Recipe, only: list[str]) -> dict[str, str]:
    """The settings to run: all, or those asked for."""
    for name in only:
        if name not in recipe.settings:
            hint, known = did_you_mean(name, recipe.settings), ", ".join(recipe.settings)
            raise UserError(f"The table has no setting '{name}'.{hint} It has: {known}.")
    return {name: values for name, values in recipe.settings.items() if not only or name in only}


def _as_long_as(values: str, config: ReproduceConfig) -> str:
    """A setting's options without its own length, where the user wants another."""
    if config.epochs is None and config.steps is None:
        return values
    return " ".join(value for value in values.split() if not value.startswith(("epochs=", "steps=")))


def _wanted(recipe: Recipe, *settings: str) -> dict[str, tuple[str, str]]:
    """The starts of a table that its settings begin from."""
    return {name: start for name, start in recipe.starts.items() if any(f"{{{name}}}" in text for text in settings)}


def _finished(config: ReproduceConfig, recipe: Recipe, setting: str) -> bool:
    """Whether every run of a setting is there, so that nothing has to be made that it begins from."""
    backbones = (config.backbone,) if config.backbone else recipe.backbones
    runs = (
        _folder(config, str(config.table), name, setting, seed) for name in backbones for seed in range(config.seeds)
    )
    return all((run / "summary.json").exists() for run in runs)


def _make_starts(recipe: Recipe, config: ReproduceConfig, *settings: str) -> None:
    """Run what settings begin from, where it is absent."""
    for start in _wanted(recipe, *settings).values():
        _make_start(*start, config)


def _from_starts(recipe: Recipe, text: str, config: ReproduceConfig) -> str:
    """A setting's options with the folders of the runs that it begins from."""
    return text.format(**{name: _start_folder(*start, config) for name, start in _wanted(recipe, text).items()})


def _values(recipe: Recipe, config: ReproduceConfig, backbone: str) -> dict[str, Any]:
    """What all runs of a table share, with what the user wants otherwise."""
    wanted = {name: getattr(config, name) for name in ("epochs", "steps", "img_size")}
    changes = {name: value for name, value in wanted.items() if value is not None}
    if "epochs" in changes:
        changes.setdefault("steps", None)  # a table's steps would count instead
    where = str(Path(config.data) / recipe.data)
    return recipe.common | {"data": where, "device": config.device, "backbone": config.backbone or backbone} | changes


def _folder(config: ReproduceConfig, table: str, backbone: str, setting: str, seed: int) -> Path:
    """The folder of one run. Names of folders go into options, which are parted by spaces."""
    return Path(config.out) / table / (config.backbone or backbone) / folder_name(setting) / f"seed_{seed}"


def _start_folder(table: str, setting: str, config: ReproduceConfig) -> Path:
    return _folder(config, table, TABLES[table].backbones[0], setting, seed=0)


def folder_name(setting: str) -> str:
    """``L_V + L_R`` as ``L_V+L_R``, ``paper, raw grid`` as ``paper,_raw_grid``."""
    return setting.replace(" + ", "+").replace(" ", "_")


def _make_start(table: str, setting: str, config: ReproduceConfig) -> None:
    """The run of another table that settings begin from: its first seed, made now where it is absent."""
    from frugalvit.comparison.compare import asked_otherwise, run_once

    recipe, folder = TABLES[table], _start_folder(table, setting, config)
    backbone, text = recipe.backbones[0], recipe.settings[setting]
    finished = (folder / "summary.json").exists()
    if not finished:
        _make_starts(recipe, config, text)
    text = _from_starts(recipe, text, config)
    # A longer run from it is meant, not a longer start.
    own = {"epochs": recipe.common.get("epochs"), "steps": TABLES[str(config.table)].common.get("steps")}
    own |= {name: float(value) for name, value in parse_assignments(text.split()).items() if name == "epochs"}
    longer = [name for name, most in own.items() if most and (getattr(config, name) or 0) > most]
    if table != config.table:  # where it is a row of the same table, too, it is as long as they are
        config = config.model_copy(update=dict.fromkeys(longer))
    # A shorter length, a backbone or a size that the user wants is meant for it too.
    wanted, train = _one_run(table, setting, _as_long_as(text, config), config, backbone, seed=0)
    if not finished:
        console.info(f"first the run to begin from: {table}, {setting}")
        run_once(wanted, train)
    elif other := asked_otherwise(folder, wanted):
        console.warning(f"{other}: the table begins from it as it is, another --out makes it anew")


def _one_run(table: str, setting: str, text: str, config: ReproduceConfig, backbone: str, seed: int) -> tuple[Any, Any]:
    """The configuration of one run of a table, as ``compare`` would make it, and what runs it."""
    recipe = TABLES[table]
    values, folder = parse_assignments(text.split()), str(_folder(config, table, backbone, setting, seed))
    if recipe.kind == "pretrain":
        from frugalvit.tasks.pretraining.train import pretrain

        changes = values | {"seed": seed, "out": folder}
        return PretrainConfig.parse(_values(recipe, config, backbone) | changes), pretrain
    compared, one, train, _ = _kind(recipe)
    common = compared.parse(_values(recipe, config, backbone))
    return one.parse(common.run_values(values, seed, folder)), train


def _kind(recipe: Recipe) -> tuple[Any, Any, Any, Any]:
    """The configuration of a comparison and of one of its runs, and what runs each."""
    from frugalvit.comparison import dense
    from frugalvit.comparison.compare import compare
    from frugalvit.tasks.classification import train as commands
    from frugalvit.tasks.detection import commands as detect_commands
    from frugalvit.tasks.segmentation import commands as segment_commands

    if recipe.kind == "detect":
        return DetectCompareConfig, DetectConfig, detect_commands.train, dense.detect
    if recipe.kind == "segment":
        return SegmentCompareConfig, SegmentConfig, segment_commands.train, dense.segment
    return CompareConfig, TrainConfig, commands.train, compare


def _compared(table: str, settings: dict[str, str], config: ReproduceConfig) -> CommandResult:
    """One comparison per backbone."""
    recipe = TABLES[table]
    compared, _, _, compare = _kind(recipe)
    data: dict[str, Any] = {}
    tables: list[Table] = []
    named = [f"{folder_name(name)}: {values}" for name, values in settings.items()]
    for backbone in (config.backbone,) if config.backbone else recipe.backbones:
        folder = Path(config.out) / table / backbone
        values = _values(recipe, config, backbone) | {"settings": named, "seeds": config.seeds, "metric": recipe.metric}
        result = compare(compared.parse(values | {"out": str(folder), "redraw": True}))
        data[backbone] = result.data
        tables += [Table(shown.columns, shown.rows, backbone) for shown in result.tables]
    folder = Path(config.out) / table
    return CommandResult({"run": str(folder), "table": data}, tables, [f"{folder}: one folder per backbone"])


def _alone(table: str, setting: str, text: str, config: ReproduceConfig) -> CommandResult:
    """One setting without the others: nothing to compare with yet."""
    from frugalvit.comparison.compare import run_once

    recipe = TABLES[table]
    rows: list[list[object]] = []
    for backbone in (config.backbone,) if config.backbone else recipe.backbones:
        for seed in range(config.seeds):
            found = run_once(*_one_run(table, setting, text, config, backbone, seed))
            rows.append([backbone, setting, seed, found[recipe.metric]])
    columns = ["backbone", "setting", "seed", recipe.metric]
    note = "the comparison is written when 'reproduce' is run without --only"
    return CommandResult({"run": str(Path(config.out) / table), "rows": rows}, [Table(columns, rows)], [note])


def _pretrained(table: str, settings: dict[str, str], config: ReproduceConfig) -> CommandResult:
    """One pre-training per backbone, setting and seed, each looked at with every probe."""
    from frugalvit.comparison.compare import run_once

    recipe = TABLES[table]
    rows: list[dict[str, Any]] = []
    for backbone in (config.backbone,) if config.backbone else recipe.backbones:
        for seed in range(config.seeds):
            for setting, text in settings.items():
                wanted, train = _one_run(table, setting, text, config, backbone, seed)
                run = run_once(wanted, train)
                facts = {"effective_rank": run["effective_rank"], "health": run["health"], "seconds": run["seconds"]}
                name = {"backbone": backbone, "objective": setting, "seed": seed}
                rows.append(name | probe_scores(Path(wanted.out), wanted.data, config.device) | facts)
    columns = list(rows[0])
    shown = [[row[column] for column in columns] for row in rows]
    folder = Path(config.out) / table
    write_text(folder / "table.md", as_markdown(columns, shown))
    return CommandResult({"run": str(folder), "rows": rows}, [Table(columns, shown)], [f"{folder}/table.md"])
