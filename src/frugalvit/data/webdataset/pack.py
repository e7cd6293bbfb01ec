"""``frugalvit data pack DATA OUT``: write a dataset as WebDataset shards, images byte for byte, with an index."""

import hashlib
import io
import json
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from frugalvit.config.data import PackConfig
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import PHOTO
from frugalvit.data.open import open_data
from frugalvit.data.paths import is_inside, local
from frugalvit.data.webdataset.index import FORMAT, INDEX
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import utf8_safe, working_folder
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

_ENDINGS = {"JPEG": "jpg", "TIFF": "tif", "JPEG2000": "jp2", "MPO": "jpg", "array": "png", "DIB": "bmp"}


def command(config: PackConfig) -> CommandResult:
    out = local(config.out)
    check_free(out)
    if is_inside(out, config.data):
        raise UserError(f"{config.out} is inside the dataset {config.data}: choose a folder outside of it.")
    source = open_data(
        config.data, split=config.split, seed=config.seed, val_fraction=config.val_fraction, labels=config.label_source,
        classes=config.classes, root=config.root,
    )  # fmt: skip
    if (pixels := next(iter(source.splits.values())).pixels) != PHOTO:
        raise UserError(f"{config.data} holds {pixels}. Shards hold {PHOTO} only: train on the folder or the table.")
    return pack(source, out, shard_megabytes=config.shard_megabytes, shuffle=config.shuffle, seed=config.seed)


def pack(
    source: DatasetSplits, out: Path, *, shard_megabytes: float = 256.0, shuffle: bool = True, seed: int = 0
) -> CommandResult:
    """Write ``train-000000.tar`` … and ``index.json``. The same source and seed give the same bytes.

    All files go to a temporary folder, which is renamed at the end: a killed process leaves no partial dataset.
    """
    start = time.monotonic()
    check_free(out)
    if any(examples.targets is not None for examples in source.splits.values()):
        raise UserError(
            f"{source.location} has several labels per image, and shards hold one class per image: use the dataset "
            "without packing, or pack its images alone with --label-source ignore."
        )
    bad: list[dict[str, str]] = []
    try:
        with working_folder(out.resolve()) as staging:
            splits: dict[str, list[dict[str, Any]]] = {}
            for number, (split, examples) in enumerate(source.splits.items()):
                order = np.arange(len(examples))
                if shuffle:
                    np.random.default_rng([seed, number]).shuffle(order)
                splits[split] = _write_split(staging, split, examples, order, shard_megabytes * 1e6, bad)
            index: dict[str, Any] = {
                "format": FORMAT,
                "name": source.name,
                "classes": None if source.classes is None else list(source.classes),
                "splits": splits,
                "bad": bad,
            }
            _write_index(staging, index)
            move_into(staging, out)
    except OSError as error:
        raise UserError(f"Cannot write shards to {out} ({error.strerror or error}): choose another folder.") from None
    return _result(source, out, index, time.monotonic() - start)


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps(index, indent=1, ensure_ascii=True), encoding="utf-8")


def check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty, or not a folder: choose another folder for the shards.")


def move_into(staging: Path, out: Path) -> None:
    """Rename the finished folder to ``out``, which may be an empty folder."""
    folder = out.resolve()
    if folder.exists():
        folder.rmdir()  # an error if another process has written to it
    staging.rename(folder)


def _write_split(
    folder: Path, split: str, examples: ImageDataset, order: np.ndarray, limit: float, bad: list[dict[str, str]]
) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = []
    archive: tarfile.TarFile | None = None
    written = 0
    width = max(8, len(str(len(order))))
    for number, index in enumerate(console.progress(order, total=len(order), label=f"packing {split}")):
        try:
            image_format = examples.header(int(index)).format
            content = examples.raw(int(index))
        except UnreadableImage as error:
            bad.append({"name": utf8_safe(error.name), "reason": utf8_safe(error.reason)})
            continue
        if archive is None or written >= limit:
            _finish(archive, folder, shards)
            shards.append({"file": f"{split}-{len(shards):06d}.tar", "examples": 0})
            archive = tarfile.open(folder / shards[-1]["file"], "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
            written = 0
        # Only letters, digits and dashes, so that the member cannot be a path.
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(examples.keys[index]).stem)[:60].strip("-") or "image"
        key = f"{number:0{width}d}-{stem}"
        written += _add(archive, f"{key}.{_ENDINGS.get(image_format, image_format.lower())}", content)
        if examples.labels is not None:
            written += _add(archive, f"{key}.cls", str(int(examples.labels[index])).encode())
        shards[-1]["examples"] += 1
    _finish(archive, folder, shards)
    return shards


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> int:
    """Add a member and return its size. It has no owner or time, so that equal data give equal shards."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
    return 512 + len(content)


def _finish(archive: tarfile.TarFile | None, folder: Path, shards: list[dict[str, Any]]) -> None:
    if archive is None:
        return
    archive.close()
    path = folder / shards[-1]["file"]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    shards[-1] |= {"bytes": path.stat().st_size, "sha256": digest}


def _result(source: DatasetSplits, out: Path, index: dict[str, Any], seconds: float) -> CommandResult:
    splits, bad = index["splits"], index["bad"]
    rows: list[list[object]] = [
        [split, len(shards), sum(s["examples"] for s in shards), round(sum(s["bytes"] for s in shards) / 1e6, 1)]
        for split, shards in splits.items()
    ]
    tables = [Table(["split", "shards", "examples", "megabytes"], rows, str(out))]
    if bad:
        listed: list[list[object]] = [[entry["name"], entry["reason"]] for entry in bad[:200]]
        tables.append(Table(["left out", "reason"], listed, pluralize(len(bad), "unreadable file")))
    data = {"out": str(out), "data": source.location, "splits": splits, "bad": bad, "seconds": round(seconds, 2)}
    verb = "train" if source.classes else "pretrain"
    advice = f"Train on the shards: frugalvit {verb} {console.shell_quote(out)}"
    return CommandResult(data, tables, [*source.notes, advice])
