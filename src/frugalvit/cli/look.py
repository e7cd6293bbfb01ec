"""``frugalvit look correspond | attend | explore`` and ``frugalvit report``."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from frugalvit.backbones.timm_features import eval_no_grad
from frugalvit.config.tools import AttendConfig, CorrespondConfig, ExploreConfig, ReportConfig
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.decode import PixelFormat, read_pixels
from frugalvit.data.open import open_data
from frugalvit.engine.hardware import pick_device
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.report import html
from frugalvit.report.run_record import find_runs, is_run
from frugalvit.runs import layout
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, write_text
from frugalvit.utils.plotting import save
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import truncate_list
from frugalvit.visualization import attention as attention_lens
from frugalvit.visualization import correspondence as lens
from frugalvit.visualization import figures
from frugalvit.visualization.explorer_data import Picture, gather
from frugalvit.visualization.grid import Regions
from frugalvit.visualization.model_views import SecondView, input_batches, model_input, model_view, shown, spread_evenly

_MAX_NAME, _MAX_STEM = 230, 160
"""Longest file name, and longest part of it from an image's name, in bytes: most systems allow 255."""


def correspond(config: CorrespondConfig) -> CommandResult:
    """Draw the best matches between two views, score them on a dataset, or both."""
    if not config.images and config.data is None:
        raise UserError("Pass one or two images to draw matches, or --data to score them on a dataset.")
    if len(config.images) > 2:
        raise UserError(f"Matches need two images, not {len(config.images)}. Try 'frugalvit look explore'.")
    examples = _open_examples(config) if config.data else None
    models = _load_models(config, [config.model, *config.against])
    pictures = [read_picture(path, models[0].transform.pixels) for path in config.images]
    result = CommandResult({})
    if pictures:
        _draw_matches(config, models, pictures, result)
    if examples is not None:
        _score_matches(config, models, examples, result)
    return result


def _draw_matches(
    config: CorrespondConfig, models: list[Model], pictures: list[Picture], result: CommandResult
) -> None:
    rows = []
    for model in models:
        first, second = (model_view(model.backbone, picture.pixels)[0] for picture in (pictures * 2)[:2])
        if len(pictures) == 1:
            second = SecondView.of(pictures[0].pixel_type)(second[None], torch.Generator().manual_seed(config.seed))[0]
        with eval_no_grad(model.backbone):
            features = [model.backbone(model_input(model.backbone, view[None])) for view in (first, second)]
        matches = lens.correspond(*features, top=config.top)
        regions = [Regions.of(model.backbone, (view.shape[1], view.shape[2])) for view in (first, second)]
        first, second = (shown(view, pictures[0].pixel_type) for view in (first, second))
        rows.append(figures.MatchedViews(model.name, first, second, matches, (regions[0], regions[1])))
    path = _new_file(config.out, f"correspond_{pictures[0].name}", config.format)
    save(figures.correspondence_figure(rows), path)
    drawn = [
        {
            "model": row.title,
            "grids": row.matches.grids,
            "pairs": [vars(pair) for pair in row.matches.pairs],
            "nearest_own": row.matches.own,
            "nearest_other": row.matches.other,
        }
        for row in rows
    ]
    result.data |= {"figure": str(path), "matches": drawn}
    for row in rows:
        lines: list[list[object]] = [
            [p.rank, *(f"{r + 1},{c + 1}" for r, c in (p.first, p.second)), p.similarity] for p in row.matches.pairs
        ]
        result.tables.append(Table(["rank", "row,column", "matches", "similarity"], lines, row.title))
    result.notes += ["rows and columns of regions count from 1 here, from 0 in --json", f"figure  {path}"]


def _score_matches(
    config: CorrespondConfig, models: list[Model], examples: ImageDataset, result: CommandResult
) -> None:
    scores = {}
    for model in models:
        images = examples.with_pixels(model.transform.pixels)
        batches = input_batches(images, model.backbone, config.batch, model.name)
        scores[model.name] = lens.evaluate_correspondence(model.backbone, batches, top=config.top, seed=config.seed)
    path = _new_file(config.out, "correspond_scores", config.format, "_scores" if config.images else "")
    save(figures.score_figure(scores), path)
    result.data |= {"chart": str(path), "scores": {name: asdict(score) for name, score in scores.items()}}
    rows: list[list[object]] = [
        [name, s.accuracy, s.error, s.error_cells, s.chance_accuracy, s.chance_error, s.images]
        for name, s in scores.items()
    ]
    columns = ["model", "accuracy", "error (pixels)", "error (cells)", "by chance", "error by chance", "images"]
    tops = sorted({score.top for score in scores.values()})  # a grid may have fewer regions than --top
    count = " or ".join(map(str, tops))
    result.tables.append(Table(columns, rows, f"The {count} most similar pairs, image against mirrored grey image"))
    result.notes.append(f"chart   {path}")


def attend(config: AttendConfig) -> CommandResult:
    """Draw the attention of every head of a block from one point, for one or several models."""
    drawn, result = [], CommandResult({})
    models = _load_models(config, [config.model, *config.against])
    picture = read_picture(config.image, models[0].transform.pixels)
    for model in models:
        image, box = model_view(model.backbone, picture.pixels)
        attention, regions = attention_lens.block_attention(model.backbone, image, config.block)
        size = (picture.pixels.shape[0], picture.pixels.shape[1])
        query = attention_lens.parse_query(config.query, size, box, regions)
        view = attention_lens.view_attention(attention, regions.grid, query)
        block = "the last block" if config.block is None else f"block {config.block}"
        title = f"{model.name}: {picture.name}" + ("" if config.block is None else f", {block}")
        end = f"_{len(drawn) + 1}" if drawn else ""
        path = _new_file(config.out, f"attend_{picture.name}", config.format, end)
        save(figures.attention_figure(shown(image, picture.pixel_type), view, regions, title), path)
        heads = [
            {"head": head, "entropy": view.entropy[head].item(), "regions": int(view.masks[head].sum())}
            | ({"on_class_token": view.elsewhere[head].item()} if view.extra else {})
            for head in view.order
        ]
        facts = {"figure": str(path), "model": model.name, "grid": regions.grid, "query": query, "reach": view.reach}
        drawn.append(facts | {"heads": heads})
        rows: list[list[object]] = [list(head.values()) for head in heads]
        columns = ["head", "entropy (bits)", f"regions with {100 * attention_lens.MASS:.0f} %"]
        columns += ["on class token"] if view.extra else []
        cells = "x".join(f"{side:.3g}" for side in regions.cell)
        result.tables.append(
            Table(
                columns,
                rows,
                f"Heads of {block} of {model.name}, most focused first; {regions.grid[0]}x{regions.grid[1]} regions of "
                f"{cells} px; the query reaches {view.reach} of them; uniform attention has "
                f"{figures.most_bits(view):.3g} bits",
            )
        )
        result.notes.append(f"figure  {path}")
    result.data |= drawn[0] | ({"against": drawn[1:]} if drawn[1:] else {})
    return result


def explore(config: ExploreConfig) -> CommandResult:
    """Write the page of the explorer."""
    models = _load_models(config, [config.model, *config.against])
    pictures = [read_picture(path, models[0].transform.pixels) for path in config.images]
    second = len(pictures) == 1 if config.second_views == "auto" else config.second_views
    keep = models[0].backbone.eval_crop["crop_pct"]
    for model in models[1:]:
        if abs(model.backbone.eval_crop["crop_pct"] - keep) > 0.01:
            console.warning(f"{model.name} is evaluated on another crop; here it uses that of {models[0].name}")
    data = gather([(m.name, m.backbone) for m in models], pictures, second_views=second, seed=config.seed)
    path = _new_file(config.out, f"explore_{pictures[0].name}", "html")
    write_text(
        path, html.explorer(data, f"{models[0].name}: {truncate_list([picture.name for picture in pictures], 3)}")
    )
    summary = {"page": str(path), "models": [model.name for model in models], "images": len(data["images"])}
    return CommandResult(summary | {"bytes": path.stat().st_size}, [], [f"page    {path}"])


def report(config: ReportConfig) -> CommandResult:
    """Write the page of one or several runs from their files."""
    folders = find_runs([Path(run) for run in config.runs])
    if config.out is None and len(config.runs) > 1:
        raise UserError("A page of several runs needs --out.")
    out = Path(config.out) if config.out else Path(config.runs[0]) / layout.REPORT
    if out.is_dir():
        raise UserError(f"{out} is a folder: name a file in it, for instance {out / layout.REPORT}.")
    _check_replaceable(out, [Path(run) for run in config.runs])
    make_folder(out.parent)
    explored: dict[Path, dict[str, Any]] = {}
    for folder in console.progress(folders if config.images else [], label="exploring"):
        model = load_model(str(folder), pick_device(config.device))
        pictures = [read_picture(path, model.transform.pixels) for path in config.images]
        named = [(console.sanitize(model.name), model.backbone)]
        explored[folder] = gather(named, pictures, second_views=len(pictures) == 1)
    try:
        html.write_report([Path(run) for run in config.runs], out, seen=explored)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        raise UserError(
            f"A file of {config.runs[0]} holds values that no run writes ({reason}). Restore its JSON and YAML files."
        ) from error
    data = {"page": str(out), "runs": [str(folder) for folder in folders], "bytes": out.stat().st_size}
    return CommandResult(data, [], [f"report  {out}"])


def _check_replaceable(out: Path, runs: list[Path]) -> None:
    """Allow a page to replace only a page of frugalvit, and not that of another run."""
    is_own = len(runs) == 1 and out.resolve() == runs[0].resolve() / layout.REPORT
    if out.name == layout.REPORT and not is_own and is_run(out.parent):
        raise UserError(f"{out} is the page of the run in that folder; choose another --out.")
    if out.exists() and html.GENERATOR not in out.read_text(encoding="utf-8", errors="replace")[:4000]:
        raise UserError(f"{out} exists and is not a report of frugalvit; choose another --out.")


def read_picture(path: str, pixels: PixelFormat) -> Picture:
    return Picture.of(path, read_pixels(Path(path), pixels))


def _load_models(config: Any, paths: list[str]) -> list[Model]:
    device = pick_device(config.device)
    options = {"img_size": config.img_size, "architecture": config.backbone, "pretrained": config.pretrained}
    models = [load_model(path, device, **options) for path in paths]
    if len({model.transform.pixels for model in models}) > 1:
        raise UserError("These models take different kinds of images. Show them one by one.")
    names = [model.name for model in models]
    for number, model in enumerate(models):
        name = f"{model.name} ({paths[number]})" if names.count(model.name) > 1 else model.name
        model.name = console.sanitize(name)
    return models


def _open_examples(config: CorrespondConfig) -> ImageDataset:
    assert config.data is not None
    source = open_data(config.data, split="given")  # matching needs no labels: do not make a split
    if config.split == "auto":
        name = next(split for split in ("val", "test", "train") if split in source.splits)
    elif config.split in source.splits:
        name = config.split
    else:
        raise UserError(f"{config.data} has no split '{config.split}'. Use one of {', '.join(source.splits)}.")
    return spread_evenly(source.splits[name], config.limit)


def _new_file(out: str | None, stem: str, suffix: str, end: str = "") -> Path:
    """Return the path of a new file: ``out`` with ``end`` behind its stem, or a free name in the folder ``out``."""
    if out is not None and len(os.fsencode(Path(out).name)) > _MAX_NAME:
        raise UserError(f"--out {out} is too long for a file name.")
    if out is None or Path(out).is_dir():
        stem = re.sub(r"[^\w.-]+", "-", stem).encode()[:_MAX_STEM].decode("utf-8", "ignore")
        numbered = (f"{stem}{f'_{n}' if n > 1 else ''}.{suffix}" for n in range(1, 100_000))
        return next(path for name in numbered if not (path := Path(out or "") / name).exists())
    path = Path(out).with_stem(Path(out).stem + end)
    path = path if path.suffix else Path(f"{path}.{suffix}")
    if path.suffix != f".{suffix}":
        hint = "choose another name" if suffix == "html" else "use --format or another name"
        raise UserError(f"--out {out} does not end with .{suffix}; {hint}.")
    if path.exists():
        raise UserError(f"{path} exists; choose another --out.")
    make_folder(path.parent)
    return path
