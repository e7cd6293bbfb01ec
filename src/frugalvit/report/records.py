"""A run as its folder tells it: files in, plain values out. What is missing is simply absent."""

from __future__ import annotations

import base64
import io
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frugalvit.config.base import read_yaml
from frugalvit.errors import UserError

Curve = list[tuple[float, float]]
"""Points (x, y) in the order of x."""

_NO_METRIC = {"step", "epoch", "split", "time", "seconds", "wall"}
_DATA_URI = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+")


@dataclass
class Record:
    """Everything a page can show of one run.

    curves:    (split, metric) -> points; x is the epoch where every line has one, else the step
    setting:   the configuration, flattened to dotted names
    summary:   the final result as the run wrote it
    """

    name: str
    folder: Path
    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)
    x_label: str = "step"
    setting: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    mistakes: list[dict[str, Any]] = field(default_factory=list)
    augmentations: str | None = None
    lens: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> Any:
        return self.setting.get("seed", self.summary.get("seed"))

    def kind(self) -> str:
        """What runs that differ only in their seed have in common."""
        same = {key: value for key, value in self.setting.items() if key not in ("seed", "out", "resume", "name")}
        return json.dumps(same, sort_keys=True, default=str) if same else str(self.folder)


def find_runs(places: list[Path]) -> list[Path]:
    """Run folders among ``places``; a folder of runs stands for the runs in it."""
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise UserError(f"There is no run {place}.")
        if _is_run(place):
            found.append(place)
            continue
        inside = sorted(path for path in place.rglob("*") if path.is_dir() and _is_run(path)) if place.is_dir() else []
        if not inside:
            raise UserError(f"{place} is not a run folder: it holds no metrics.jsonl and no summary.json.")
        found += inside
    return list(dict.fromkeys(found))


def read_comparison(place: Path) -> dict[str, Any] | None:
    """What a comparison found, where ``place`` is the folder of one."""
    return _read_json(place / "comparison.json", dict) if place.is_dir() else None


def name_apart(records: list[Record]) -> None:
    """Give runs whose folders are called the same ("seed_0") as much of their path as tells them apart."""
    for length in range(2, 8):
        names = [record.name for record in records]
        same = [record for record in records if names.count(record.name) > 1]
        if not same:
            return
        for record in same:
            record.name = "/".join(record.folder.resolve().parts[-length:])


def _is_run(place: Path) -> bool:
    return any((place / name).is_file() for name in ("metrics.jsonl", "summary.json"))


def read_run(folder: Path) -> Record:
    """Read what lies in a run folder."""
    record = Record(folder.resolve().name, folder)
    for name in ("metrics.jsonl", "health.jsonl"):
        _read_lines(folder / name, record)
    if (folder / "config.yaml").is_file():
        record.setting = flatten(read_yaml(folder / "config.yaml"))
    record.summary = _read_json(folder / "summary.json", dict) or {}
    for mistake in _read_json(folder / "mistakes.json", list) or []:
        image = embed(str(mistake.get("image", "")), folder)
        if image is None:
            record.notes.append(f"mistakes.json names an image that is not there: {mistake.get('image')}")
        else:
            record.mistakes.append({**mistake, "image": image})
    record.augmentations = embed("augmentations.jpg", folder, limit=None)
    record.lens = _read_json(folder / "lens.json", dict)
    return record


def _read_lines(path: Path, record: Record) -> None:
    """Add the lines of a metrics file to the curves; a line of the same step written later (a resumed run) wins."""
    if not path.is_file():
        return
    lines: list[dict[str, Any]] = []
    bad = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            bad += 1
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int | float):
            lines.append(line)
    if bad:
        record.notes.append(f"{bad} line(s) of {path.name} could not be read (a run that was stopped while writing).")
    with_epochs = bool(lines) and all(isinstance(line.get("epoch"), int | float) for line in lines)
    record.x_label = "epoch" if with_epochs else "step"
    points: dict[tuple[str, str], dict[float, float]] = {}
    for line in lines:
        place = float(line[record.x_label])
        for name, value in line.items():
            if name in _NO_METRIC or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if math.isfinite(value):
                points.setdefault((str(line.get("split", "train")), name), {})[place] = float(value)
    for key, values in points.items():
        record.curves[key] = sorted(values.items())


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested groups -> dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def embed(image: str, folder: Path, limit: int | None = 192) -> str | None:
    """A data URI as it is, or a picture inside ``folder`` as one, its longer side at most ``limit``; None if absent."""
    if image.startswith("data:"):
        return image if _DATA_URI.fullmatch(image) else None
    path = (folder / image).resolve()
    if not image or not path.is_file() or not path.is_relative_to(folder.resolve()):
        return None
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            picture = picture.convert("RGB")
            if limit is not None:
                picture.thumbnail((limit, limit))
            buffer = io.BytesIO()
            picture.save(buffer, "JPEG", quality=82)
    except (UnidentifiedImageError, OSError):
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _read_json(path: Path, kind: type) -> Any:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not readable JSON ({error}); the report cannot show what it does not know."
        ) from None
    if not isinstance(value, kind):
        raise UserError(f"{path} must hold a JSON {'object' if kind is dict else 'list'}.")
    return value


def thin(curve: Curve, buckets: int = 150) -> Curve:
    """At most two points per bucket of x, the lowest and the highest: spikes survive, every point is a real one."""
    if len(curve) <= 2 * buckets:
        return curve
    low, high = curve[0][0], curve[-1][0]
    kept: dict[int, list[tuple[float, float]]] = {}
    for point in curve:
        kept.setdefault(min(int((point[0] - low) / (high - low) * buckets), buckets - 1), []).append(point)
    thinned: Curve = [curve[0]]
    for points in kept.values():
        thinned += sorted({min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])})
    return sorted({*thinned, curve[-1]})


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean of several curves at the places all of them have."""
    tables = [dict(curve) for curve in curves]
    common = sorted(set.intersection(*(set(table) for table in tables)))
    return [(x, sum(table[x] for table in tables) / len(tables)) for x in common]
