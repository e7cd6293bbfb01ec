"""What a person wants to see of a finished run besides curves: the worst mistakes, what augmentation does, tables."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.config.train import RunConfig
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.loader import BatchSource, eval_batches
from frugalvit.experiment.auto_values import AutoValue
from frugalvit.experiment.builders import EvalSet
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils import console
from frugalvit.utils.files import utf8_safe
from frugalvit.utils.tables import CommandResult, Table, as_text


@torch.inference_mode()
def worst_mistakes(
    backbone: Backbone, dataset: EvalSet, classes: tuple[str, ...], where: str = "", count: int = 24
) -> list[dict[str, Any]]:
    """The wrong answers the model was surest of, as small pictures with both names and the image's own.

    where: the folder or the table of the data, which names of files are seen from
    """
    backbone.eval()
    found: list[tuple[float, int, int, int]] = []
    batches = eval_batches(dataset.store, dataset.transform, dataset.batch)
    for images, labels, index in console.progress(batches, dataset.batches, "finding the worst mistakes"):
        assert labels is not None
        chances = backbone.classify(backbone(images).pooled).float().softmax(1)
        sure, guess = chances.max(1)
        wrong = (guess != labels).nonzero()[:, 0]
        rows = zip(
            sure[wrong].tolist(),
            index[wrong.cpu()].tolist(),
            labels[wrong].tolist(),
            guess[wrong].tolist(),
            strict=True,
        )
        found = sorted([*found, *rows], reverse=True)[:count]
    pictures = _thumbnails(dataset.store, [place for _, place, _, _ in found])
    return [
        {
            "file": _seen_from(where, dataset.store.names[place]),
            "image": picture,
            "label": classes[label],
            "predicted": classes[guess],
            "probability": round(sure, 4),
        }
        for picture, (sure, place, label, guess) in zip(pictures, found, strict=True)
    ]


def _seen_from(where: str, name: str) -> str:
    """An image's name in its dataset: the report that shows it may go to people who have the data elsewhere."""
    path, place = Path(name), Path(where)
    where = str(place.parent) if place.is_file() else where  # a table's images lie around it
    return utf8_safe(path.relative_to(where).as_posix() if where and path.is_relative_to(where) else name)


def augmentation_sheet(batches: BatchSource, backbone: Backbone, columns: int = 8) -> bytes:
    """The first training batch as the model saw it, as one JPEG."""
    batch = batches.peek(0)
    views = batch.images if isinstance(batch.images, list) else [batch.images]
    tiles: list[Tensor] = []
    for view in views[: 4 if len(views) > 1 else 1]:
        mean = torch.tensor(backbone.mean, device=view.device)[:, None, None]
        std = torch.tensor(backbone.std, device=view.device)[:, None, None]
        pixels = (view[: columns if len(views) > 1 else 3 * columns].float() * std + mean).clamp(0, 1)
        tiles += list((pixels * 255).round().byte().cpu())
    edge = max(64, min(112, tiles[0].shape[-1]))
    sheet = Image.new("RGB", (columns * edge, -(-len(tiles) // columns) * edge), "white")
    for place, tile in enumerate(tiles):
        picture = _picture(tile).resize((edge, edge), Image.Resampling.LANCZOS)
        sheet.paste(picture, (place % columns * edge, place // columns * edge))
    return _encode(sheet)


def save_pictures(run: RunFolder, mistakes: list[dict[str, Any]] | None, sheet: bytes | None) -> None:
    """Lay the pictures beside the run's numbers, where the report looks for them, and show them to the trackers."""
    if not run.writer:
        return
    if sheet is not None:
        picture = run.folder / "augmentations.jpg"
        picture.write_bytes(sheet)
        run.picture("augmentations", picture)
    if mistakes is not None:
        run.save_json("mistakes.json", mistakes)
        if mistakes:
            picture = run.folder / "mistakes.jpg"
            picture.write_bytes(mistake_sheet(mistakes))
            run.picture("mistakes", picture)
        columns = ["label", "predicted", "probability", "file"]
        shown: list[list[object]] = [[mistake.get(column) for column in columns] for mistake in mistakes]
        run.table("mistakes", Table(columns, shown, "Worst mistakes, surest first"))


def mistake_sheet(mistakes: list[dict[str, Any]], columns: int = 6, edge: int = 96) -> bytes:
    """The worst mistakes as one JPEG, with what they were taken for: for trackers that show no pages."""
    cell = (edge + 24, edge + 36)
    sheet = Image.new("RGB", (columns * cell[0], -(-len(mistakes) // columns) * cell[1]), "white")
    pen = ImageDraw.Draw(sheet)
    for place, mistake in enumerate(mistakes):
        left, top = place % columns * cell[0], place // columns * cell[1]
        encoded = mistake["image"].partition("base64,")[2]
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as picture:
            sheet.paste(picture, (left + (cell[0] - picture.width) // 2, top + (edge - picture.height) // 2))
        for line, text in enumerate((f"is: {mistake['label']}", f"said: {mistake['predicted']}")):
            pen.text((left + 6, top + edge + 4 + 14 * line), _ascii(text), fill="black")
    return _encode(sheet)


# -- tables, for trackers: what the report shows in its own way


def per_class_table(confusion: Tensor, classes: tuple[str, ...]) -> Table:
    """Each class with its images, how many of them are right, and what it is taken for most often; worst first."""
    counts = confusion.cpu()
    wrong = counts.clone().fill_diagonal_(0)
    most, where = wrong.max(1)
    rows: list[list[object]] = []
    for label, name in enumerate(classes):
        images, right = int(counts[label].sum()), int(counts[label, label])
        if images:
            taken_for = classes[int(where[label])] if most[label] else None
            rows.append([name, images, right, round(100 * right / images, 2), taken_for, int(most[label])])
    rows.sort(key=lambda row: row[3])  # type: ignore[arg-type, return-value]
    return Table(["class", "images", "right", "percent", "most often taken for", "times"], rows, "Each class")


def run_facts(config: RunConfig, outcome: Mapping[str, Any], network: nn.Module) -> dict[str, Any]:
    """What the summary of every run says about its course; ``outcome`` is what ``loop.fit`` gave."""
    return {
        "skipped_steps": outcome["skipped"],
        "seed": config.seed,
        "steps": outcome["steps"],
        "seconds": round(outcome["seconds"], 2),
        "seconds_per_step": outcome["seconds_per_step"],
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }


def run_result(summary: dict[str, Any], table: Table, then: list[str], remarks: Iterable[str] = ()) -> CommandResult:
    """What a command says of its finished run: the numbers, where everything lies, and what to do with it.

    then:    commands to go on with
    remarks: what else a person should know, before that
    """
    folder = Path(summary["run"])
    notes = [f"run folder  {folder}"]
    notes += [f"weights     {summary['weights']}"] if summary.get("weights") else []
    notes += _skipped(summary)
    notes += remarks
    notes += [f"report      {folder}/report.html"] if (folder / "report.html").exists() else []
    notes += [f"{'' if number else 'next':<12}{command}" for number, command in enumerate(then)]
    shown = {key: value for key, value in summary.items() if key not in ("auto", "classes", "confusion")}
    return CommandResult(shown, [table], notes)


def _skipped(summary: Mapping[str, Any]) -> list[str]:
    skipped, steps = summary.get("skipped_steps") or 0, summary.get("steps") or 0
    were = "was" if skipped == 1 else "were"
    return [f"skipped     {skipped:,} of {steps:,} steps {were} not finite, and left out"] if skipped else []


def kept_weights(outcome: Mapping[str, Any], watched: str) -> dict[str, Any]:
    """Which weights a run hands out: where validation images chose none as the best, there is no best step."""
    step = int(outcome["best_step"])
    if step >= 0:
        worse = "; the last ones' answers are not finite" if outcome["broken"] else ""
        return {"best_step": step, "weights": f"the best on {watched}, of step {step:,}{worse}"}
    reason = "no score on val" if watched == "val" else "no validation images"
    return {"best_step": None, "weights": f"those of the last step: {reason} to choose the best by"}


def finite(number: float) -> float | None:
    """A number as JSON can hold it: the best score of a run that was never scored is none."""
    return number if math.isfinite(number) else None


def decisions_table(decisions: Iterable[AutoValue]) -> Table:
    """What "auto" chose, and why."""
    rows: list[list[object]] = [[d.name, str(d.value), d.reason] for d in decisions]
    return Table(["option", "value", "reason"], rows, 'What "auto" chose')


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The numbers of a finished run, one a row."""
    rows: list[list[object]] = [[k, as_text(v)] for k, v in summary.items() if isinstance(v, int | float | str)]
    return Table(["result", "value"], rows, "Result")


def _ascii(text: str, most: int = 18) -> str:
    """Short enough for its cell, in letters that the built-in font has."""
    known = text.encode("ascii", "replace").decode()
    return known if len(known) <= most else known[: most - 2] + ".."


def _thumbnails(store: ImageStore, places: list[int], edge: int = 96) -> list[str]:
    """Images of a store as small JPEGs, in their own proportions; they are fetched, for not every store keeps them."""
    if not places:
        return []
    nothing = torch.empty(0, dtype=torch.long)  # there is no second step to look ahead to
    images, sizes, _ = store.fetcher(lambda step: torch.tensor(places) if step == 0 else nothing).at(0)
    encoded = []
    for pixels, (height, width) in zip(images.cpu(), sizes.tolist(), strict=True):
        scale = edge / max(height, width)
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        picture = _picture(pixels).resize(size, Image.Resampling.LANCZOS)
        encoded.append("data:image/jpeg;base64," + base64.b64encode(_encode(picture)).decode())
    return encoded


def _picture(pixels: Tensor) -> Image.Image:
    channels = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(channels.permute(1, 2, 0).contiguous().numpy())


def _encode(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
