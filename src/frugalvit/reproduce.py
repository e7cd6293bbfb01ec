"""``frugalvit reproduce TABLE``: the tables of docs/RESULTS.md as data, each rerun with one command, each resumable."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frugalvit.config.compare import CompareConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.probe import KnnConfig
from frugalvit.config.reproduce import ReproduceConfig
from frugalvit.errors import UserError, nearest
from frugalvit.files import write_text
from frugalvit.results import Result, Table


@dataclass(frozen=True)
class Recipe:
    """One table: the data it needs, the values all its runs share, and its settings (the last is the baseline)."""

    about: str
    data: str
    common: dict[str, Any]
    settings: dict[str, str] = field(default_factory=dict)
    backbones: tuple[str, ...] = ("swin_tiny_w7",)
    pretrains: dict[str, dict[str, Any]] = field(default_factory=dict)


_FLOWERS = {"split": "train+val", "epochs": 100, "batch": 128, "img_size": 224}
_ON, _OFF = "localization.weight=0.5", "localization.weight=0"
_UNLABELLED = {"images": "all", "epochs": 100, "batch": 64, "img_size": 224}

TABLES = {
    "drloc-flowers": Recipe(
        "Drloc from scratch on Flowers-102 (paper, Table 4): with and without, for each backbone",
        "flowers102",
        _FLOWERS,
        {"with": "", "without": _OFF},
        ("swin_tiny_w7", "t2t_vit_14", "cvt_13", "vit_base", "resnet50"),
    ),
    "drloc-forms": Recipe(
        "the paper's normalised targets and constant λ against the released raw targets and ramp; grid before the norm",
        "flowers102",
        _FLOWERS,
        {
            "paper": _ON,
            "released": f"{_ON} localization.form=released localization.schedule=ramp localization.grid=raw",
            "paper, raw grid": f"{_ON} localization.grid=raw",
            "clean images": f"{_ON} localization.images=clean",
            "fast head": f"{_ON} localization.lr_scale=10",
            "without": _OFF,
        },
    ),
    "drloc-variants": Recipe(
        "loss variants (paper, Table 6)",
        "flowers102",
        _FLOWERS,
        {name: f"{_ON} localization.variant={name}" for name in ("l1", "signed", "ce", "reg", "dense")}
        | {"without": _OFF},
    ),
    "drloc-pairs": Recipe(
        "pairs per image (paper, Table 2a)",
        "flowers102",
        _FLOWERS,
        {f"m={pairs}": f"{_ON} localization.pairs={pairs}" for pairs in (32, 64, 128, "all")} | {"without": _OFF},
    ),
    "drloc-weights": Recipe(
        "the weight λ (paper, Table 2b)",
        "flowers102",
        _FLOWERS,
        {f"λ={weight}": f"localization.weight={weight}" for weight in (0.1, 0.5, 1.0, 4.0)} | {"λ=0": _OFF},
    ),
    "drloc-width": Recipe(
        "width of the head (paper, Table 16)",
        "flowers102",
        _FLOWERS,
        {f"width={width}": f"{_ON} localization.hidden={width}" for width in (256, 512, 1024)} | {"without": _OFF},
    ),
    "drloc-batch": Recipe(
        "the same epochs at other batch sizes: steps matter more than the loss",
        "flowers102",
        _FLOWERS,
        {
            f"batch={batch} {name}": f"{weight} batch={batch}"
            for batch in (1024, 256, 128)
            for name, weight in (("with", _ON), ("without", _OFF))
        },
    ),
    "esvit-flowers": Recipe(
        "label-free pre-training on all Flowers-102 images: L_V, L_V + L_R, and Drloc as a third objective; k-NN",
        "flowers102",
        _UNLABELLED,
        pretrains={
            "L_V": {"matching": {"region_weight": 0.0, "view_weight": 1.0}},
            "L_V + L_R": {},
            "L_V + L_R + Drloc": {"localization": {"weight": 0.5}},
        },
    ),
}


def reproduce(config: ReproduceConfig) -> Result:
    """Run a table, or list them."""
    if not config.table:
        rows: list[list[object]] = [[name, recipe.about, recipe.data] for name, recipe in TABLES.items()]
        return Result({"tables": list(TABLES)}, [Table(["table", "what it shows", "data"], rows)])
    if config.table not in TABLES:
        raise UserError(
            f"There is no table '{config.table}'.{nearest(config.table, TABLES)} See 'frugalvit reproduce'."
        )
    recipe = TABLES[config.table]
    data = Path(config.data) / recipe.data
    if not data.is_dir():
        raise UserError(f"{config.table} needs {recipe.data}: there is no folder {data}. Say where it is with --data.")
    folder = Path(config.out) / config.table
    common = recipe.common | {"data": str(data), "device": config.device} | _changes(config)
    if recipe.pretrains:
        return _pretrained(recipe, common, folder, config)
    return _compared(recipe, common, folder, config)


def _changes(config: ReproduceConfig) -> dict[str, Any]:
    wanted = {name: getattr(config, name) for name in ("epochs", "steps", "img_size")}
    return {name: value for name, value in wanted.items() if value is not None}


def _compared(recipe: Recipe, common: dict[str, Any], folder: Path, config: ReproduceConfig) -> Result:
    """One comparison per backbone."""
    from frugalvit.training.compare import compare

    data: dict[str, Any] = {}
    tables: list[Table] = []
    for backbone in (config.backbone,) if config.backbone else recipe.backbones:
        settings = [f"{name}: {values}" for name, values in recipe.settings.items()]
        values = common | {"backbone": backbone, "settings": settings, "seeds": config.seeds}
        result = compare(CompareConfig.parse(values | {"out": str(folder / backbone)}))
        data[backbone] = result.data
        tables += [Table(table.columns, table.rows, backbone) for table in result.tables]
    return Result({"run": str(folder), "table": data}, tables, [f"{folder}: one folder per backbone"])


def _pretrained(recipe: Recipe, common: dict[str, Any], folder: Path, config: ReproduceConfig) -> Result:
    """One pre-training per setting and seed, each scored by k-NN on the test images."""
    from frugalvit.probing.commands import knn
    from frugalvit.training.compare import run_once
    from frugalvit.training.pretrain import pretrain

    rows: list[list[object]] = []
    for name, values in recipe.pretrains.items():
        for seed in range(config.seeds):
            out = folder / name.replace(" ", "").replace("+", "-") / f"seed_{seed}"
            backbone = config.backbone or recipe.backbones[0]
            wanted = common | values | {"backbone": backbone, "seed": seed, "out": str(out)}
            run = run_once(PretrainConfig.parse(wanted), pretrain)
            score = knn(KnnConfig.parse({"model": str(out), "data": common["data"], "device": config.device})).data
            rows.append([name, seed, score["top1"], run["effective_rank"], run["health"], run["seconds"]])
    columns = ["objective", "seed", "k-NN top-1", "effective rank", "health", "seconds"]
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in [columns, ["---"] * len(columns), *rows]]
    write_text(folder / "table.md", "\n".join(lines) + "\n")
    return Result({"run": str(folder), "rows": rows}, [Table(columns, rows)], [f"{folder}/table.md"])
