"""Tables and pictures of a finished run: worst mistakes, augmented images, scores per class."""

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.config.train import RunConfig
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.decode import to_picture
from frugalvit.data.loader import BatchSource, eval_batches
from frugalvit.experiment.builders import EvalSet
from frugalvit.runs import layout
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils import console
from frugalvit.utils.files import utf8_safe
from frugalvit.utils.tables import CommandResult, Table


@dataclass(frozen=True)
class Answers:
    """Answers of a classifier: logits (N, C), pooled (N, D), labels and index in the store (N,), on the CPU."""

    logits: Tensor
    pooled: Tensor
    labels: Tensor
    index: Tensor

    @property
    def confidence(self) -> Tensor:
        return self.logits.softmax(1).amax(1)

    @property
    def predicted(self) -> Tensor:
        return self.logits.argmax(1)

    @property
    def right(self) -> Tensor:
        return self.predicted == self.labels


@torch.inference_mode()
def collect_answers(backbone: Backbone, dataset: EvalSet, label: str) -> Answers:
    """Classify every readable image of the dataset."""
    backbone.eval()
    parts: list[tuple[Tensor, ...]] = []
    batches = eval_batches(dataset.store, dataset.transform, dataset.batch)
    for images, labels, index in console.progress(batches, dataset.batches, label):
        assert labels is not None
        pooled = backbone(images).pooled
        parts.append((backbone.classify(pooled).float().cpu(), pooled.float().cpu(), labels.cpu(), index))
    if not parts:  # all images are unreadable
        parts = [(torch.empty(0, 1), torch.empty(0, 1), torch.empty(0).long(), torch.empty(0).long())]
    return Answers(*(torch.cat(column) for column in zip(*parts, strict=True)))


def worst_mistakes(
    answers: Answers, store: ImageStore, classes: tuple[str, ...], location: str = "", count: int = 24
) -> list[dict[str, Any]]:
    """Return the most confident wrong predictions with thumbnails; file names are relative to ``location``."""
    wrong = (~answers.right).nonzero()[:, 0]
    columns = (answers.confidence[wrong], answers.index[wrong], answers.labels[wrong], answers.predicted[wrong])
    mistakes = sorted(zip(*(column.tolist() for column in columns), strict=True), reverse=True)[:count]
    entries = [(index, classes[label], classes[predicted], sure) for sure, index, label, predicted in mistakes]
    return show_mistakes(entries, store, location)


def show_mistakes(
    entries: Sequence[tuple[int, str, str, float | None]], store: ImageStore, location: str
) -> list[dict[str, Any]]:
    """Return mistakes, (index, truth, prediction, its probability or None), with thumbnails and file names."""
    thumbnails = _thumbnails(store, [index for index, *_ in entries])
    return [
        {
            "file": relative_name(location, store.names[index]),
            "image": thumbnail,
            "label": label,
            "predicted": predicted,
            "probability": None if probability is None else round(probability, 4),
        }
        for thumbnail, (index, label, predicted, probability) in zip(thumbnails, entries, strict=True)
    ]


def relative_name(location: str, name: str) -> str:
    """Return an image's name relative to its dataset: readers of the report may have the data elsewhere."""
    path, root = Path(name), Path(location)
    folder = str(root.parent) if root.is_file() else location  # a table's images are beside it
    return utf8_safe(path.relative_to(folder).as_posix() if folder and path.is_relative_to(folder) else name)


def augmentation_sheet(batches: BatchSource, backbone: Backbone, columns: int = 8) -> bytes:
    """Return the first training batch, augmented, as one JPEG."""
    batch = batches.peek(0)
    views = batch.images if isinstance(batch.images, list) else [batch.images]
    columns = min(columns, *map(len, views)) if len(views) > 1 else columns  # one row per view
    tiles: list[Tensor] = []
    for view in views[: 4 if len(views) > 1 else 1]:
        pixels = view[: columns if len(views) > 1 else 3 * columns].float()
        if backbone.pixel_type == "uint8":
            mean = torch.tensor(backbone.mean, device=view.device)[:, None, None]
            std = torch.tensor(backbone.std, device=view.device)[:, None, None]
            pixels = ((pixels * std + mean).clamp(0, 1) * 255).round().byte()
        tiles += list(pixels.cpu())
    return _sheet([_picture(tile) for tile in tiles], columns, max(64, min(112, tiles[0].shape[-1])))


def _sheet(pictures: list[Image.Image], columns: int, edge: int) -> bytes:
    sheet = Image.new("RGB", (columns * edge, -(-len(pictures) // columns) * edge), "white")
    for index, picture in enumerate(pictures):
        square = picture.resize((edge, edge), Image.Resampling.LANCZOS)
        sheet.paste(square, (index % columns * edge, index // columns * edge))
    return _encode(sheet)


def save_pictures(run: RunFolder, mistakes: list[dict[str, Any]] | None, sheet: bytes | None) -> None:
    """Write the pictures into the run folder and send them to the trackers."""
    if not run.writer:
        return
    if sheet is not None:
        picture = run.path(layout.AUGMENTATIONS)
        picture.write_bytes(sheet)
        run.picture("augmentations", picture)
    if mistakes is not None:
        run.save_json(layout.MISTAKES, mistakes)
        if mistakes:
            picture = run.path(layout.MISTAKES_PICTURE)
            encoded = (base64.b64decode(mistake["image"].partition("base64,")[2]) for mistake in mistakes)
            picture.write_bytes(_sheet([Image.open(io.BytesIO(data)) for data in encoded], columns=6, edge=96))
            run.picture("mistakes", picture)
        columns = ["label", "predicted", "probability", "file"]
        shown: list[list[object]] = [[mistake.get(column) for column in columns] for mistake in mistakes]
        run.table("mistakes", Table(columns, shown, "Worst mistakes, most confident first"))


# -- tables


def per_class_table(confusion: Tensor, classes: tuple[str, ...]) -> Table:
    """Return each class with its images, correct predictions, and most frequent confusion; worst first."""
    counts = confusion.cpu()
    wrong = counts.clone().fill_diagonal_(0)
    times, other = wrong.max(1)
    rows: list[list[object]] = []
    for label, name in enumerate(classes):
        images, right = int(counts[label].sum()), int(counts[label, label])
        if images:
            confused = classes[int(other[label])] if times[label] else None
            rows.append([name, images, right, round(100 * right / images, 2), confused, int(times[label])])
    rows.sort(key=lambda row: row[3])  # type: ignore[arg-type, return-value]
    return Table(["class", "images", "right", "percent", "most often taken for", "times"], rows, "Each class")


def run_facts(config: RunConfig, outcome: Mapping[str, Any], network: nn.Module) -> dict[str, Any]:
    """Return what every summary says about the training; ``outcome`` is the result of ``loop.fit``."""
    return {
        "skipped_steps": outcome["skipped"],
        "seed": config.seed,
        "steps": outcome["steps"],
        "seconds": round(outcome["seconds"], 2),
        "seconds_per_step": outcome["seconds_per_step"],
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }


def run_result(summary: dict[str, Any], table: Table, commands: list[str], notes: Iterable[str] = ()) -> CommandResult:
    """Return what a command prints about its finished run: numbers, paths, notes, and the commands to type next."""
    folder = Path(summary["run"])
    lines = [f"run folder  {folder}"]
    lines += [f"time        {console.clock(summary['seconds'])}"] if "seconds" in summary else []
    lines += [f"weights     {summary['weights']}"] if summary.get("weights") else []
    if skipped := summary.get("skipped_steps"):
        lines.append(f"skipped     {skipped:,} of {summary['steps']:,} steps had non-finite gradients")
    lines += notes
    lines += [f"report      {folder}/{layout.REPORT}"] if (folder / layout.REPORT).exists() else []
    lines += [f"{'' if number else 'next':<12}{command}" for number, command in enumerate(commands)]
    hidden = ("auto", "classes", "confusion", "pseudo_values")
    return CommandResult({key: value for key, value in summary.items() if key not in hidden}, [table], lines)


def describe_weights(outcome: Mapping[str, Any], eval_split: str, weights: str) -> dict[str, Any]:
    """Return which weights a run exports, and the split that chose them: without a score on val, the last."""
    step = int(outcome["best_step"])
    facts = {"best_step": step if step >= 0 else None, "chosen_on": None}
    if step >= 0 and (weights == "best" or outcome["broken"]):
        broken = "; outputs of the last weights are non-finite" if outcome["broken"] else ""
        return facts | {"chosen_on": eval_split, "weights": f"the best on {eval_split}, step {step:,}{broken}"}
    if step >= 0:
        return facts | {"weights": "the last step (no images chose it)"}
    reason = "no score on val" if eval_split == "val" else "no validation images"
    return facts | {"weights": f"the last step ({reason})"}


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _thumbnails(store: ImageStore, indices: list[int], edge: int = 96) -> list[str]:
    """Return images of a store as small JPEGs with their aspect ratios."""
    if not indices:
        return []
    no_images = torch.empty(0, dtype=torch.long)  # the fetcher prefetches step 1
    images, sizes, _ = store.fetcher(lambda step: torch.tensor(indices) if step == 0 else no_images).at(0)
    encoded = []
    for pixels, (height, width) in zip(images.cpu(), sizes.tolist(), strict=True):
        scale = edge / max(height, width)
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        picture = _picture(pixels).resize(size, Image.Resampling.LANCZOS)
        encoded.append("data:image/jpeg;base64," + base64.b64encode(_encode(picture)).decode())
    return encoded


def _picture(pixels: Tensor) -> Image.Image:
    return Image.fromarray(to_picture(pixels.permute(1, 2, 0).contiguous().numpy()))


def _encode(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
