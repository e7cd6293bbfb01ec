"""``frugalvit data DATA``: report images, classes, sizes, duplicates and unreadable files."""

import time
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np

from frugalvit.config.data import DataConfig
from frugalvit.data.bad_images import UnreadableImage, read_all
from frugalvit.data.dataset import DatasetSplits, ImageDataset, JoinedExamples
from frugalvit.data.decode import Header
from frugalvit.data.duplicates import find_copies
from frugalvit.data.open import open_data
from frugalvit.data.splits import absent_classes
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

# "auto" decodes all images up to this many megapixels, which takes about ten seconds on two cores.
FULL_DECODE_MEGAPIXELS = 300.0
SAMPLE = 2000
_SHOWN_GROUPS = 20
_SHOWN_BAD = 200
_LOOSE = ", unlabelled"  # suffix for the images of a split outside class folders


class SplitScan(NamedTuple):
    """The headers of a split, and the reasons why images are unreadable, by index."""

    headers: list[Header | None]
    bad: dict[int, str]


def command(config: DataConfig) -> CommandResult:
    source = open_data(
        config.data, split=config.split, seed=config.seed, val_fraction=config.val_fraction, labels=config.label_source,
        classes=config.classes, root=config.root, loose=True,
    )  # fmt: skip
    return inspect(source, decode=config.decode, duplicates=config.duplicates)


def inspect(source: DatasetSplits, *, decode: str, duplicates: bool) -> CommandResult:
    started = time.monotonic()
    parts = source.splits | {f"{split}{_LOOSE}": examples for split, examples in source.loose.items()}
    scans = {name: _read_headers(examples, name) for name, examples in parts.items()}
    decoded = _decode(parts, scans, decode)
    data: dict[str, Any] = {
        "data": source.location,
        "name": source.name,
        "kind": source.kind,
        "images": len(source),
        "classes": None if source.classes is None else len(source.classes),
        "class_names": None if source.classes is None else list(source.classes),
        "splits": {split: _split_facts(examples, source.classes) for split, examples in source.splits.items()},
        "loose": {split: len(examples) for split, examples in source.loose.items()},
        **_image_facts(scans),
        "bad": [
            {"name": parts[name].names[i], "split": name.removesuffix(_LOOSE), "reason": reason}
            for name, scan in scans.items()
            for i, reason in sorted(scan.bad.items())
        ],
        "decoded": decoded,
        "duplicates": _duplicates(parts) if duplicates else None,
        "notes": source.notes,
    }
    data["seconds"] = round(time.monotonic() - started, 2)
    return CommandResult(data, _tables(data), _notes(data, source))


def _read_headers(examples: ImageDataset, split: str) -> SplitScan:
    results = list(read_all(examples.header, range(len(examples)), f"reading {split}"))
    bad = {index: result.reason for index, result in enumerate(results) if isinstance(result, UnreadableImage)}
    return SplitScan([None if isinstance(result, UnreadableImage) else result for result in results], bad)


def _decode(parts: dict[str, ImageDataset], scans: dict[str, SplitScan], mode: str) -> dict[str, Any]:
    """Decode the images with a valid header, as ``mode`` says, and add failures to ``scan.bad``."""
    valid = [(split, i) for split, scan in scans.items() for i, header in enumerate(scan.headers) if header is not None]
    pixels = sum(h.width * h.height for scan in scans.values() for h in scan.headers if h is not None)
    if mode == "auto":
        mode = "all" if pixels <= FULL_DECODE_MEGAPIXELS * 1e6 or len(valid) <= SAMPLE else "sample"
    if mode == "headers":
        valid = []
    elif mode == "sample" and len(valid) > SAMPLE:
        chosen = np.random.default_rng(0).choice(len(valid), SAMPLE, replace=False)
        valid = [valid[i] for i in sorted(chosen)]

    def check(number: int) -> None:
        split, index = valid[number]
        parts[split].read(index)

    for (split, index), result in zip(valid, read_all(check, range(len(valid)), "decoding"), strict=True):
        if isinstance(result, UnreadableImage):
            scans[split].bad[index] = result.reason
    return {"mode": mode, "images": len(valid)}


def _split_facts(examples: ImageDataset, classes: tuple[str, ...] | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"images": len(examples)}
    if classes is not None and examples.labels is not None:
        counts = np.bincount(examples.labels, minlength=len(classes))
        facts["per_class"] = {"min": int(counts.min()), "median": float(np.median(counts)), "max": int(counts.max())}
        facts["counts"] = dict(zip(classes, counts.tolist(), strict=True))
        facts["without_images"] = [classes[i] for i in np.flatnonzero(counts == 0)]
    elif classes is not None and examples.targets is not None:
        counts = (examples.targets == 1).sum(0)
        facts["counts"] = dict(zip(classes, counts.tolist(), strict=True))
    return facts


def _image_facts(scans: dict[str, SplitScan]) -> dict[str, Any]:
    headers = [header for scan in scans.values() for header in scan.headers if header is not None]
    if not headers:
        return {"sizes": None, "formats": {}, "channels": {}}
    extent = np.array([(header.width, header.height) for header in headers])
    sizes = {
        side: {"min": int(column.min()), "median": float(np.median(column)), "max": int(column.max())}
        for side, column in (("width", extent[:, 0]), ("height", extent[:, 1]))
    }
    formats, channels = (Counter(values) for values in zip(*((h.format, h.channels) for h in headers), strict=True))
    return {"sizes": sizes, "formats": dict(formats.most_common()), "channels": dict(channels.most_common())}


def _duplicates(parts: dict[str, ImageDataset]) -> dict[str, Any]:
    images = [(split, index) for split, examples in parts.items() for index in range(len(examples))]
    groups: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for image, first in zip(images, find_copies(JoinedExamples(list(parts.values()))).tolist(), strict=True):
        groups[first].append(image)
    same = [images for images in groups.values() if len(images) > 1]
    splits = [{name.removesuffix(_LOOSE) for name, _ in images} for images in same]
    classes = [{int(labels[i]) for name, i in images if (labels := parts[name].labels) is not None} for images in same]
    shown = sorted(range(len(same)), key=lambda group: -len(splits[group]))[:_SHOWN_GROUPS]  # across splits first
    return {
        "groups": len(same),
        "surplus": sum(len(images) - 1 for images in same),
        "across_splits": sum(len(names) > 1 for names in splits),
        "across_classes": sum(len(numbers) > 1 for numbers in classes),
        "examples": [[parts[split].names[i] for split, i in same[group][:4]] for group in shown],
    }


def _tables(data: dict[str, Any]) -> list[Table]:
    columns = ["split", "images", "classes", "fewest per class", "median", "most"]
    rows: list[list[object]] = []
    for split, facts in data["splits"].items():
        spread = facts.get("per_class")
        classes = sum(1 for count in facts["counts"].values() if count) if "counts" in facts else None
        rows.append([split, facts["images"], classes, *(spread.values() if spread else (None,) * 3)])
    rows += [[f"{split}{_LOOSE}", count, *(None,) * 4] for split, count in data["loose"].items()]
    classes = "no labels" if data["classes"] is None else f"{data['classes']:,} classes"
    unlabelled = sum(data["loose"].values())
    images = f"{data['images']:,} labelled and {unlabelled:,} unlabelled" if unlabelled else f"{data['images']:,}"
    tables = [Table(columns, rows, f"{data['data']}: {images} images, {classes}, {data['kind']}")]
    if data["sizes"]:
        extent = [[side, *(values[key] for key in ("min", "median", "max"))] for side, values in data["sizes"].items()]
        tables.append(Table(["pixels", "smallest", "median", "largest"], extent))
        kinds: list[list[object]] = [["format", name, count] for name, count in data["formats"].items()]
        kinds += [["channels", name, count] for name, count in data["channels"].items()]
        tables.append(Table(["what", "kind", "images"], kinds))
    if data["bad"]:
        listed = [[entry["name"], entry["reason"]] for entry in data["bad"][:_SHOWN_BAD]]
        tables.append(Table(["unreadable file", "reason"], listed, pluralize(len(data["bad"]), "unreadable file")))
    return tables


def _notes(data: dict[str, Any], source: DatasetSplits) -> list[str]:
    notes = list(source.notes)
    if len(data["bad"]) > _SHOWN_BAD:
        notes.append(f"{pluralize(len(data['bad']) - _SHOWN_BAD, 'more unreadable file')}: --json lists them all.")
    notes += absent_classes(source)
    duplicates = data["duplicates"]
    if duplicates is not None:
        if duplicates["groups"]:
            notes.append(f"{pluralize(duplicates['surplus'], 'exact copy')} of other images.")
            for across, what in (("classes", "delete the wrong copies"), ("splits", "scores on them are too high")):
                if number := duplicates[f"across_{across}"]:
                    notes.append(f"{pluralize(number, 'image')} in two or more {across}: {what}.")
            notes += ["  the same: " + " = ".join(group) for group in duplicates["examples"][:5]]
        else:
            notes.append("No two images have the same content.")
    decoded = data["decoded"]
    summary = {
        "all": f"Decoded {pluralize(decoded['images'], 'image')}",
        "sample": f"Read all headers and file ends, decoded {decoded['images']:,} images (--decode all: every image)",
        "headers": "Read only headers and file ends",
    }[decoded["mode"]]
    bad = pluralize(len(data["bad"]), "unreadable file") if data["bad"] else "no unreadable files"
    notes.append(f"{summary}; {bad}. {data['seconds']:.1f} s.")
    return notes
