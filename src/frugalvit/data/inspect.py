"""``frugalvit data DATA``: what is in a dataset, before anything is trained on it."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from frugalvit.config.data import DataConfig
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import Header, UnreadableImage, describe_darkness
from frugalvit.data.open import open_data
from frugalvit.data.splits import absence
from frugalvit.utils import console
from frugalvit.utils.system import cores
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

# "auto" decodes everything up to this many megapixels: about ten seconds on two cores.
FULL_DECODE_MEGAPIXELS = 300.0
SAMPLE = 2000
_SHOWN = 20
_LOOSE = ", loose"  # behind the name of a split: its images that lie beside the class folders
_NO_LABEL = -1


class Look(NamedTuple):
    """What one pass over the headers of a split found."""

    headers: list[Header | None]
    bad: dict[int, str]


def command(config: DataConfig) -> CommandResult:
    """``frugalvit data``."""
    began = time.monotonic()
    source = open_data(
        config.data, split=config.split, seed=config.seed, val_fraction=config.val_fraction, labels=config.labels,
        classes=config.classes, root=config.root, loose=True,
    )  # fmt: skip
    return inspect(source, decode=config.decode, duplicates=config.duplicates, began=began)


def inspect(
    source: DatasetSplits, decode: str = "auto", duplicates: bool = True, began: float | None = None
) -> CommandResult:
    """Images, classes, sizes, formats, duplicates and bad files of an opened dataset."""
    began = time.monotonic() if began is None else began
    parts = source.splits | {f"{split}{_LOOSE}": examples for split, examples in source.loose.items()}
    looks = {name: _headers(examples, name) for name, examples in parts.items()}
    checked = _decode(parts, looks, decode)
    data: dict[str, Any] = {
        "data": source.location,
        "name": source.name,
        "kind": source.kind,
        "images": len(source),
        "classes": None if source.classes is None else len(source.classes),
        "class_names": None if source.classes is None else [clean(name) for name in source.classes],
        "splits": {split: _split_facts(examples, source.classes) for split, examples in source.splits.items()},
        "loose": {split: len(examples) for split, examples in source.loose.items()},
        **_image_facts(looks),
        "bad": [
            {"name": clean(parts[name].names[i]), "split": name.removesuffix(_LOOSE), "reason": clean(reason)}
            for name, look in looks.items()
            for i, reason in sorted(look.bad.items())
        ],
        "decoded": checked,
        "duplicates": _duplicates(parts) if duplicates else None,
        "notes": [clean(note) for note in source.notes],
    }
    data["seconds"] = round(time.monotonic() - began, 2)
    return CommandResult(data, _tables(data), _notes(data))


def _parallel(function: Any, count: int, label: str) -> Iterator[Any]:
    """``function(0)`` … in threads, in order, with a bar; a bounded number under way at a time."""
    workers = min(8, cores() + 1)
    with ThreadPoolExecutor(workers) as pool:
        chunks = (pool.map(function, range(start, min(start + 1024, count))) for start in range(0, count, 1024))
        yield from console.progress((item for chunk in chunks for item in chunk), total=count, label=label)


def _headers(examples: ImageDataset, split: str) -> Look:
    def look(index: int) -> Header | str:
        try:
            return examples.header(index)
        except UnreadableImage as bad:
            return bad.reason

    found = Look([], {})
    for index, result in enumerate(_parallel(look, len(examples), f"reading {split}")):
        found.headers.append(None if isinstance(result, str) else result)
        if isinstance(result, str):
            found.bad[index] = result
    return found


def _decode(parts: dict[str, ImageDataset], looks: dict[str, Look], mode: str) -> dict[str, Any]:
    """Decode all, some or none of the images whose headers are sound; failures join ``look.bad``."""
    sound = [(split, i) for split, look in looks.items() for i, header in enumerate(look.headers) if header is not None]
    pixels = sum(h.width * h.height for look in looks.values() for h in look.headers if h is not None)
    if mode == "auto":
        mode = "all" if pixels <= FULL_DECODE_MEGAPIXELS * 1e6 or len(sound) <= SAMPLE else "sample"
    if mode == "headers":
        sound = []
    elif mode == "sample" and len(sound) > SAMPLE:
        chosen = np.random.default_rng(0).choice(len(sound), SAMPLE, replace=False)
        sound = [sound[i] for i in sorted(chosen)]

    def check(number: int) -> str | int:
        split, index = sound[number]
        try:
            return int(parts[split].read(index).max())
        except UnreadableImage as bad:
            return bad.reason

    brightest = None
    for number, found in enumerate(_parallel(check, len(sound), "decoding")):
        if isinstance(found, int):
            brightest = max(found, brightest or 0)
        else:
            split, index = sound[number]
            looks[split].bad[index] = found
    return {"mode": mode, "images": len(sound), "brightest": brightest}


def _split_facts(examples: ImageDataset, classes: tuple[str, ...] | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"images": len(examples)}
    if classes is not None and examples.labels is not None:
        counts = np.bincount(examples.labels, minlength=len(classes))
        facts["per_class"] = {"min": int(counts.min()), "median": float(np.median(counts)), "max": int(counts.max())}
        facts["counts"] = {clean(name): int(count) for name, count in zip(classes, counts, strict=True)}
        facts["without_images"] = [clean(classes[i]) for i in np.flatnonzero(counts == 0)]
    elif classes is not None and examples.targets is not None:
        counts = (examples.targets == 1).sum(0)
        facts["counts"] = {clean(name): int(count) for name, count in zip(classes, counts, strict=True)}
    return facts


def _image_facts(looks: dict[str, Look]) -> dict[str, Any]:
    headers = [header for look in looks.values() for header in look.headers if header is not None]
    if not headers:
        return {"sizes": None, "formats": {}, "channels": {}}
    extent = np.array([(header.width, header.height) for header in headers])
    sizes = {
        side: {"min": int(column.min()), "median": float(np.median(column)), "max": int(column.max())}
        for side, column in (("width", extent[:, 0]), ("height", extent[:, 1]))
    }
    formats, channels = (Counter(words) for words in zip(*((h.format, h.channels) for h in headers), strict=True))
    return {"sizes": sizes, "formats": dict(formats.most_common()), "channels": dict(channels.most_common())}


def _duplicates(parts: dict[str, ImageDataset]) -> dict[str, Any]:
    """Groups of files with the same content. Only files of the same size are read and hashed."""
    by_size: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for split, examples in parts.items():
        for index in range(len(examples)):
            size = examples.stored_size(index)
            if size > 0:
                by_size[size].append((split, index))
    suspects = [place for places in by_size.values() if len(places) > 1 for place in places]

    def digest(number: int) -> str | None:
        split, index = suspects[number]
        try:
            return hashlib.blake2b(parts[split].raw(index), digest_size=16).hexdigest()
        except UnreadableImage:
            return None

    groups: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for number, found in enumerate(_parallel(digest, len(suspects), "comparing")):
        if found is not None:
            groups[found].append(suspects[number])
    same = [places for places in groups.values() if len(places) > 1]
    same.sort(key=_splits_among, reverse=True)  # those across splits first
    across = [places for places in same if _splits_among(places) > 1]
    labels = [{_label(parts, place) for place in places} - {_NO_LABEL} for places in same]
    return {
        "groups": len(same),
        "surplus": sum(len(places) - 1 for places in same),
        "across_splits": len(across),
        "across_classes": sum(len(found) > 1 for found in labels),
        "examples": [[clean(parts[split].names[i]) for split, i in places[:4]] for places in same[:_SHOWN]],
    }


def _splits_among(places: list[tuple[str, int]]) -> int:
    return len({name.removesuffix(_LOOSE) for name, _ in places})


def _label(parts: dict[str, ImageDataset], place: tuple[str, int]) -> int:
    labels = parts[place[0]].labels
    return _NO_LABEL if labels is None else int(labels[place[1]])


def _tables(data: dict[str, Any]) -> list[Table]:
    columns = ["split", "images", "classes", "fewest per class", "median", "most"]
    rows: list[list[object]] = []
    for split, facts in data["splits"].items():
        spread = facts.get("per_class")
        seen = sum(1 for count in facts["counts"].values() if count) if "counts" in facts else None
        rows.append([split, facts["images"], seen, *(spread.values() if spread else (None,) * 3)])
    rows += [[f"{split}{_LOOSE}", count, *(None,) * 4] for split, count in data["loose"].items()]
    tables = [
        Table(columns, rows, f"{clean(data['data'])}: {data['images']:,} images, {_classes(data)}, {data['kind']}")
    ]
    if data["sizes"]:
        extent = [[side, *(values[key] for key in ("min", "median", "max"))] for side, values in data["sizes"].items()]
        tables.append(Table(["pixels", "smallest", "median", "largest"], extent))
        kinds: list[list[object]] = [["format", name, count] for name, count in data["formats"].items()]
        kinds += [["channels", name, count] for name, count in data["channels"].items()]
        tables.append(Table(["what", "kind", "images"], kinds))
    if data["bad"]:
        listed = [[entry["name"], entry["reason"]] for entry in data["bad"][:200]]
        tables.append(Table(["bad file", "reason"], listed, pluralize(len(data["bad"]), "bad file")))
    return tables


def _classes(data: dict[str, Any]) -> str:
    return "no labels" if data["classes"] is None else f"{data['classes']:,} classes"


def _notes(data: dict[str, Any]) -> list[str]:
    notes = list(data["notes"])
    if len(data["bad"]) > 200:
        notes.append(f"{pluralize(len(data['bad']) - 200, 'more bad file')}: --json lists them all.")
    empty = {split: facts["without_images"] for split, facts in data["splits"].items() if facts.get("without_images")}
    notes += [absence(split, names) for split, names in empty.items()]
    found = data["duplicates"]
    if found is not None:
        if found["groups"]:
            notes.append(
                f"{pluralize(found['surplus'], 'exact copy')} of other images; {found['across_splits']:,} lie in several "
                f"splits, {found['across_classes']:,} in several classes."
            )
            notes += ["  the same: " + " = ".join(group) for group in found["examples"][:5]]
        else:
            notes.append("No two images have the same content.")
    decoded = data["decoded"]
    if decoded["brightest"] is not None and (dark := describe_darkness(decoded["brightest"])):
        notes.append(f"{dark[0].upper()}{dark[1:]}.")
    what = {
        "all": f"All {decoded['images']:,} images with a sound header were decoded",
        "sample": f"All headers and ends were read, {decoded['images']:,} images decoded (--decode all: every one)",
        "headers": "Only headers and ends were read",
    }[decoded["mode"]]
    bad = pluralize(len(data["bad"]), "bad file") if data["bad"] else "no bad files"
    notes.append(f"{what}; {bad}. {data['seconds']:.1f} s.")
    return notes


def clean(text: str) -> str:
    """A name that any terminal and any JSON reader can take: undecodable bytes and control characters are replaced."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(character if character.isprintable() else "?" for character in text)
