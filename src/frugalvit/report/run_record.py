"""Read the files of a run folder for its page. Every file is optional."""

import base64
import io
import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frugalvit.config.base import flatten
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.runs import layout
from frugalvit.runs.run_folder import read_summary
from frugalvit.utils.files import read_json, read_text

Curve = list[tuple[float, float]]
"""Points (x, y) in the order of x."""

_NOT_METRICS = {"step", "epoch", "split", "time", "seconds", "wall"}
_LARGEST = 1e300  # sums and differences of drawn values must not overflow


@dataclass
class RunRecord:
    """Everything that a page shows of one run."""

    name: str
    folder: Path
    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)  # (split, metric) -> points; x is the epoch
    setting: dict[str, Any] = field(default_factory=dict)  # the configuration, flattened to dotted names
    summary: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # data.json
    mistakes: list[dict[str, Any]] = field(default_factory=list)
    augmentations: str | None = None
    lens: dict[str, Any] | None = None
    finished: bool = True  # it wrote a summary
    setting_folder: Path | None = None  # of a run of ``compare``

    def kind(self) -> str:
        """Return a key that is equal for runs that differ only in their seed."""
        if self.setting_folder is not None:
            return str(self.setting_folder)
        same = {key: value for key, value in self.setting.items() if key not in ("seed", "out", "resume", "name")}
        return json.dumps(same, sort_keys=True, default=str) if same else str(self.folder)

    @property
    def best_epoch(self) -> float | None:
        """The epoch of the best score of the evaluations; None without one."""
        step, steps = (as_finite(self.summary.get(name)) for name in ("best_step", "steps"))
        last = max((curve[-1][0] for curve in self.curves.values()), default=0.0)
        return step / steps * last if step is not None and steps and "chosen_on" in self.summary else None


def find_runs(paths: list[Path]) -> list[Path]:
    """List the run folders among ``paths``, and those inside the others."""
    runs: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"There is no run {path}.")
        if is_run(path):
            runs.append(path)
            continue
        inside = sorted(below for below in path.rglob("*") if below.is_dir() and is_run(below)) if path.is_dir() else []
        if not inside:
            raise UserError(f"{path} is not a run folder: it has no metrics.jsonl and no summary.json.")
        runs += inside
    return list(dict.fromkeys(runs))


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in (layout.METRICS, layout.SUMMARY))


def read_comparison(path: Path) -> dict[str, Any] | None:
    """Read the result of ``compare``, if ``path`` is its folder."""
    return read_json(path / layout.COMPARISON, dict)


def make_names_unique(records: list[RunRecord]) -> None:
    """Name runs by their relative paths if two have the same name ("seed_0")."""
    if len({record.name for record in records}) < len(records):
        folders = [record.folder.resolve() for record in records]
        common = os.path.commonpath(folders)
        for record, folder in zip(records, folders, strict=True):
            record.name = folder.relative_to(common).as_posix()


def read_run(folder: Path, lens: dict[str, Any] | None = None) -> RunRecord:
    """Read a run folder; ``lens`` replaces lens.json."""
    record = RunRecord(folder.resolve().name, folder, _read_curves(folder / layout.METRICS))
    if (folder / layout.CONFIG).is_file():
        record.setting = flatten(read_yaml(folder / layout.CONFIG))
    summary = read_summary(folder)
    record.finished = summary is not None
    # A run that is not finished has its auto values in this file only.
    record.summary = {"auto": read_json(folder / layout.DECISIONS, list) or [], **(summary or {})}
    classes = record.summary.get("classes") or record.summary.get("confusion") or ()
    if 0 < len(classes) <= 5:  # top-5 of five classes or fewer is always 100
        record.summary.pop("top5", None)
        record.curves = {key: curve for key, curve in record.curves.items() if key[1] != "top5"}
    record.data = read_json(folder / layout.DATA, dict) or {}
    if (folder.resolve().parent.parent / layout.COMPARISON).is_file():
        record.setting_folder = folder.resolve().parent
    record.mistakes = read_json(folder / layout.MISTAKES, list) or []
    record.augmentations = to_data_uri(layout.AUGMENTATIONS, folder)
    record.lens = lens or read_json(folder / layout.LENS, dict)
    return record


def _read_curves(path: Path) -> dict[tuple[str, str], Curve]:
    """Read the curves of metrics.jsonl. Of two lines for one epoch, the later one (of a resumed run) counts."""
    points: dict[tuple[str, str], dict[float, float]] = {}
    for text in read_text(path, errors="replace").splitlines() if path.is_file() else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue  # the run was stopped while it wrote the line
        if not isinstance(line, dict) or not isinstance(line.get("split"), str) or as_finite(line.get("epoch")) is None:
            continue
        for name, value in line.items() if line["split"] != "rescue" else ():
            number = as_finite(value)
            if name not in _NOT_METRICS and number is not None:
                points.setdefault((line["split"], name), {})[float(line["epoch"])] = number
    return {key: sorted(values.items()) for key, values in points.items()}


def to_data_uri(image: str, folder: Path, limit: int | None = None) -> str | None:
    """Convert a picture in ``folder`` to a data URI, at most ``limit`` pixels a side; None if unreadable."""
    from PIL import Image

    path = (folder / image).resolve()
    if not path.is_file() or not path.is_relative_to(folder.resolve()):
        return None
    try:
        with Image.open(path) as picture:
            picture = picture.convert("RGB")
            if limit is not None:
                picture.thumbnail((limit, limit))
            buffer = io.BytesIO()
            picture.save(buffer, "JPEG", quality=82)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def as_finite(value: Any) -> float | None:
    """Return a number that can be drawn, else None. JSON may hold NaN, and integers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


def thin_curve(curve: Curve, buckets: int = 150) -> Curve:
    """Keep at most two points per bucket of x, the lowest and the highest, so that spikes stay."""
    if len(curve) <= 2 * buckets:
        return curve
    low, high = curve[0][0], curve[-1][0]
    by_bucket: dict[int, list[tuple[float, float]]] = {}
    for point in curve:
        by_bucket.setdefault(min(int((point[0] - low) / (high - low) * buckets), buckets - 1), []).append(point)
    thinned: Curve = [curve[0]]
    for points in by_bucket.values():
        thinned += sorted({min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])})
    return sorted({*thinned, curve[-1]})


def mean_curve(curves: list[Curve]) -> Curve:
    """Average curves at the x that all of them have."""
    tables = [dict(curve) for curve in curves]
    common = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return [(x, statistics.fmean(table[x] for table in tables)) for x in common]
