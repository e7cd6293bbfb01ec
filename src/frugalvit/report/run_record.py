"""A run as its folder tells it: files in, plain values out. What is missing is simply absent."""

from __future__ import annotations

import base64
import io
import json
import re
import statistics
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from frugalvit.config.base import flatten
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import read_summary
from frugalvit.utils import console
from frugalvit.utils.files import read_json
from frugalvit.utils.statistics import Difference

Curve = list[tuple[float, float]]
"""Points (x, y) in the order of x."""

_NO_METRIC = {"step", "epoch", "split", "time", "seconds", "wall"}
_LARGEST = 1e300  # sums and differences of what is drawn must not run over
_GUESSES = 5  # of top5
_DATA_URI = re.compile(r"data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+")


@dataclass
class RunRecord:
    """Everything a page can show of one run.

    curves:    (split, metric) -> points; x is the epoch where every line has one, else the step
    setting:   the configuration, flattened to dotted names
    summary:   the final result as the run wrote it
    data:      what it wrote down of its data
    finished:  whether it wrote one
    setting_folder: of a run that ``compare`` made, the folder of its setting
    """

    name: str
    folder: Path
    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)
    x_label: str = "step"
    setting: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    mistakes: list[dict[str, Any]] = field(default_factory=list)
    augmentations: str | None = None
    lens: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    finished: bool = True
    setting_folder: Path | None = None

    def note(self, text: str) -> None:
        """Say something below the page, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def seed(self) -> Any:
        return self.setting.get("seed", self.summary.get("seed"))

    def kind(self) -> str:
        """What runs that differ only in their seed have in common.

        In a comparison that is the setting's folder: a later version may have written down more of its configuration.
        """
        if self.setting_folder is not None:
            return str(self.setting_folder)
        same = {key: value for key, value in self.setting.items() if key not in ("seed", "out", "resume", "name")}
        return json.dumps(same, sort_keys=True, default=str) if same else str(self.folder)

    def identity(self) -> tuple[str, str]:
        """What the copy of a run, or the same done again, has in common with it; without a seed, all it wrote."""
        return self.kind(), str(self.seed if self.seed is not None else (self.summary, self.curves))


def distinct(records: list[RunRecord]) -> list[RunRecord]:
    """The first of each run and its copies: two of the same seed tell nothing of the deviation between seeds."""
    found: dict[tuple[str, str], RunRecord] = {}
    for record in records:
        found.setdefault(record.identity(), record)
    return list(found.values())


def find_runs(places: list[Path]) -> list[Path]:
    """Run folders among ``places``; a folder of runs stands for the runs in it."""
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise UserError(f"There is no run {place}.")
        if is_run(place):
            found.append(place)
            continue
        inside = sorted(path for path in place.rglob("*") if path.is_dir() and is_run(path)) if place.is_dir() else []
        if not inside:
            raise UserError(f"{place} is not a run folder: it holds no metrics.jsonl and no summary.json.")
        found += inside
    return list(dict.fromkeys(found))


def read_comparison(place: Path) -> dict[str, Any] | None:
    """What a comparison found, where ``place`` is the folder of one; settings without their numbers are left out."""
    found = read_json(place / "comparison.json", dict)
    if found is None:
        return None
    settings, differences = (found.get(name) for name in ("settings", "differences"))
    sound = {
        "settings": {name: values for name, values in _items(settings) if _is_spread(values)},
        "differences": {name: values for name, values in _items(differences) if _is_difference(values)},
    }
    if any(sound[name] != (found.get(name) or {}) for name in sound):
        console.warning(f"{place / 'comparison.json'} holds settings without their numbers: they are left out")
    return found | sound


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _is_spread(value: Any) -> bool:
    numbers = isinstance(value, dict) and all(finite(value.get(name)) is not None for name in ("mean", "deviation"))
    return numbers and isinstance(value.get("values"), list)


def _is_difference(value: Any) -> bool:
    """With one seed, or where it never varied, only its mean is a number."""
    if not isinstance(value, dict) or set(value) != {field.name for field in fields(Difference)}:
        return False
    without_interval = all(value[name] is None for name in ("low", "high", "p_value"))
    wanted = ("mean", "count") if without_interval else value
    return all(finite(value[name]) is not None for name in wanted)


def name_apart(records: list[RunRecord]) -> None:
    """Give runs whose folders are called the same ("seed_0") as much of their path as tells them apart."""
    for length in range(2, 8):
        names = [record.name for record in records]
        same = [record for record in records if names.count(record.name) > 1]
        if not same:
            return
        for record in same:
            record.name = "/".join(record.folder.resolve().parts[-length:])


def is_run(place: Path) -> bool:
    return any((place / name).is_file() for name in ("metrics.jsonl", "summary.json"))


def read_run(folder: Path, seen: dict[str, Any] | None = None) -> RunRecord:
    """Read what lies in a run folder; ``seen`` is what its model saw just now, in place of lens.json."""
    record = RunRecord(folder.resolve().name, folder)
    _read_lines(folder / "metrics.jsonl", record)
    if (folder / "config.yaml").is_file():
        record.setting = flatten(read_yaml(folder / "config.yaml"))
    summary = read_summary(folder)
    record.finished = summary is not None
    record.summary = _validate_summary(_with_decisions(summary or {}, folder), record)
    _drop_trivial_top5(record)
    record.data = _sound_data(read_json(folder / "data.json", dict) or {}, record)
    if (folder.resolve().parent.parent / "comparison.json").is_file():
        record.setting_folder = folder.resolve().parent
    for mistake in read_json(folder / "mistakes.json", list) or []:
        if not isinstance(mistake, dict):
            record.note(_unlike("mistakes.json", "an entry"))
            continue
        image = embed(str(mistake.get("image", "")), folder)
        if image is None:
            record.notes.append(f"mistakes.json names an image that is not there: {mistake.get('image')}")
        else:
            record.mistakes.append({**mistake, "image": image})
    record.augmentations = embed("augmentations.jpg", folder, limit=None)
    record.lens = seen or _sound_lens(read_json(folder / "lens.json", dict), record)
    return record


def _with_decisions(summary: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A summary with what "auto" chose: a run that was stopped has it in a file only."""
    return summary if "auto" in summary else summary | {"auto": read_json(folder / "decisions.json", list) or []}


def _validate_summary(summary: dict[str, Any], record: RunRecord) -> dict[str, Any]:
    """A summary without the parts that are not what the page takes them for; what goes is noted."""
    sound = dict(summary)
    for name in ("alarms", "auto", "classes"):
        if not isinstance(sound.get(name) or [], list):
            record.note(_unlike("summary.json", f"'{name}'"))
            del sound[name]
    matrix = sound.get("confusion") or []
    square = isinstance(matrix, list) and all(
        isinstance(row, list)
        and len(row) == len(matrix)
        and all(isinstance(count, int) and count >= 0 for count in row)
        for row in matrix
    )
    names = sound.get("classes") or matrix
    if not square or len(names) != len(matrix) > 0:
        record.note(_unlike("summary.json", "'confusion'"))
        del sound["confusion"]
    return sound


def _sound_data(found: dict[str, Any], record: RunRecord) -> dict[str, Any]:
    """What a run wrote down of its data, without the parts that are not what the page takes them for."""
    sound = dict(found)
    for name, fits in (("used", _is_counts), ("notes", _is_words), ("classes", _is_words), ("left_out", _is_left_out)):
        if name in sound and not fits(sound[name]):
            record.note(_unlike("data.json", f"'{name}'"))
            del sound[name]
    return sound


def _is_counts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(count, int) for count in value.values())


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_left_out(value: Any) -> bool:
    """How many files, and the first of them with the reasons."""
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("count"), int)
        or not isinstance(value.get("files"), list)
    ):
        return False
    return all(_has(file, {"name": str, "split": str, "reason": str}) for file in value["files"])


def _drop_trivial_top5(record: RunRecord) -> None:
    """Of five classes or fewer the right one is always among five guesses."""
    classes = record.summary.get("classes") or record.summary.get("confusion") or ()
    if 0 < len(classes) <= _GUESSES:
        record.summary.pop("top5", None)
        record.curves = {key: curve for key, curve in record.curves.items() if key[1] != "top5"}


_LENS = {"images": {"name": str, "src": str, "width": int, "height": int},
         "models": {"name": str, "grid": list, "similarity": dict, "best": dict, "top": dict, "global": list,
                    "heads": list, "notes": list}}  # fmt: skip
"""What the explorer asks of every image and every model."""


def _sound_lens(lens: dict[str, Any] | None, record: RunRecord) -> dict[str, Any] | None:
    if lens is None:
        return None
    for part, wanted in _LENS.items():
        members = lens.get(part)
        if not isinstance(members, list) or not members or not all(_has(member, wanted) for member in members):
            record.note(_unlike("lens.json", f"'{part}'"))
            return None
    if not all(_DATA_URI.fullmatch(image["src"]) for image in lens["images"]):
        record.note(_unlike("lens.json", "an image"))
        return None
    return lens


def _has(member: Any, wanted: dict[str, type]) -> bool:
    return isinstance(member, dict) and all(isinstance(member.get(name), kind) for name, kind in wanted.items())


def _unlike(file: str, what: str) -> str:
    return f"{what} of {file} is not what it should be and is left out."


def _read_lines(path: Path, record: RunRecord) -> None:
    """Add the lines of a metrics file to the curves; a line of the same step written later (a resumed run) wins."""
    if not path.is_file():
        return
    lines: list[dict[str, Any]] = []
    bad = 0
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
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
        place = finite(line[record.x_label])
        if place is None:
            record.note(f"A line of {path.name} without a sound {record.x_label} is left out.")
            continue
        for name, value in line.items():
            number = finite(value)
            if name not in _NO_METRIC and number is not None:
                points.setdefault((str(line.get("split", "train")), name), {})[place] = number
    for key, values in points.items():
        record.curves[key] = sorted(values.items())


def embed(image: str, folder: Path, limit: int | None = 192) -> str | None:
    """A data URI as it is, or a picture inside ``folder`` as one, its longer side at most ``limit``; None if absent."""
    if image.startswith("data:"):
        return image if _DATA_URI.fullmatch(image) else None
    from PIL import Image

    try:
        path = (folder / image).resolve()
        if not image or not path.is_file() or not path.is_relative_to(folder.resolve()):
            return None
        with Image.open(path) as picture:
            picture = picture.convert("RGB")
            if limit is not None:
                picture.thumbnail((limit, limit))
            buffer = io.BytesIO()
            picture.save(buffer, "JPEG", quality=82)
    except (OSError, ValueError, Image.DecompressionBombError):  # no image, no name of a file, or a bomb
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def finite(value: Any) -> float | None:
    """A number that can be drawn, or None. JSON may hold NaN, and whole numbers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < _LARGEST else None


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
    """The mean of several curves at the places all of them have; no curves have no mean."""
    tables = [dict(curve) for curve in curves]
    common = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return [(x, statistics.fmean(table[x] for table in tables)) for x in common]
