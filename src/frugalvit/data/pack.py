"""``frugalvit data pack DATA OUT``: write any dataset as WebDataset shards, the images byte for byte as they were."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from frugalvit import console
from frugalvit.config.inspect import PackConfig
from frugalvit.data.decode import BadImage
from frugalvit.data.examples import DataSource, Examples
from frugalvit.data.inspect import clean
from frugalvit.data.shards import FORMAT, INDEX
from frugalvit.data.sources import open_data
from frugalvit.errors import UserError
from frugalvit.results import Result, Table

_ENDINGS = {"JPEG": "jpg", "TIFF": "tif", "JPEG2000": "jp2", "MPO": "jpg", "array": "png", "DIB": "bmp"}


def command(config: PackConfig) -> Result:
    """``frugalvit data pack``."""
    out = Path(config.out).expanduser()
    _check_free(out)
    source = open_data(
        config.data, split=config.split, seed=config.seed, val_fraction=config.val_fraction, labels=config.labels,
        classes=config.classes, root=config.root,
    )  # fmt: skip
    return pack(source, out, shard_megabytes=config.shard_megabytes, shuffle=config.shuffle, seed=config.seed)


def pack(
    source: DataSource, out: Path, *, shard_megabytes: float = 256.0, shuffle: bool = True, seed: int = 0
) -> Result:
    """Write ``train-000000.tar`` … and ``index.json``. The same source and seed give the same bytes.

    Everything is written beside ``out`` first and renamed at the end: a kill leaves no half a dataset.
    """
    began = time.monotonic()
    _check_free(out)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    bad: list[dict[str, str]] = []
    try:
        partial.mkdir(parents=True)
        splits: dict[str, list[dict[str, Any]]] = {}
        for number, (split, examples) in enumerate(source.splits.items()):
            order = np.arange(len(examples))
            if shuffle:
                np.random.default_rng([seed, number]).shuffle(order)
            splits[split] = _write_split(partial, split, examples, order, shard_megabytes * 1e6, bad)
        index = {
            "format": FORMAT,
            "name": source.name,
            "classes": None if source.classes is None else list(source.classes),
            "splits": splits,
            "bad": bad,
        }
        (partial / INDEX).write_text(json.dumps(index, indent=1, ensure_ascii=True), encoding="utf-8")
        if out.exists():
            out.rmdir()  # empty, as was checked
        partial.rename(out)
    except OSError as error:
        raise UserError(f"Cannot write shards to {out} ({error.strerror or error}).") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return _result(source, out, splits, bad, time.monotonic() - began)


def _check_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is there already and not empty: choose another folder for the shards.")


def _write_split(
    folder: Path, split: str, examples: Examples, order: np.ndarray, limit: float, bad: list[dict[str, str]]
) -> list[dict[str, Any]]:
    shards: list[dict[str, Any]] = []
    archive: tarfile.TarFile | None = None
    written, count = 0, 0
    width = max(8, len(str(len(order))))
    for number, index in enumerate(console.progress(order, total=len(order), label=f"packing {split}")):
        try:
            content, ending = _image(examples, int(index))
        except BadImage as error:
            bad.append({"name": clean(error.name), "reason": clean(error.reason)})
            continue
        if archive is None or written >= limit:
            _finish(archive, folder, shards, count)
            shards.append({"file": f"{split}-{len(shards):06d}.tar"})
            archive = tarfile.open(folder / shards[-1]["file"], "w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
            written, count = 0, 0
        key = f"{number:0{width}d}-{_plain(examples.keys[index])}"
        written += _add(archive, f"{key}.{ending}", content)
        if examples.labels is not None:
            written += _add(archive, f"{key}.cls", str(int(examples.labels[index])).encode())
        count += 1
    _finish(archive, folder, shards, count)
    return shards


def _image(examples: Examples, index: int) -> tuple[bytes, str]:
    form = examples.header(index).format
    return examples.raw(index), _ENDINGS.get(form, form.lower())


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> int:
    """One member without owner or time, so that equal data give equal shards."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
    return 512 + len(content)


def _finish(archive: tarfile.TarFile | None, folder: Path, shards: list[dict[str, Any]], count: int) -> None:
    if archive is None:
        return
    archive.close()
    path = folder / shards[-1]["file"]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    shards[-1] |= {"examples": count, "bytes": path.stat().st_size, "sha256": digest}


def _plain(key: str) -> str:
    """A file's stem as a part of a member's name: letters, digits and dashes only, so that it can mean no path."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(key).stem)[:60].strip("-") or "image"


def _result(
    source: DataSource, out: Path, splits: dict[str, list[dict[str, Any]]], bad: list[dict[str, str]], seconds: float
) -> Result:
    rows: list[list[object]] = [
        [split, len(shards), sum(s["examples"] for s in shards), round(sum(s["bytes"] for s in shards) / 1e6, 1)]
        for split, shards in splits.items()
    ]
    tables = [Table(["split", "shards", "examples", "megabytes"], rows, str(out))]
    if bad:
        listed: list[list[object]] = [[entry["name"], entry["reason"]] for entry in bad[:200]]
        tables.append(Table(["left out", "reason"], listed, f"{len(bad):,} bad files"))
    data = {"out": str(out), "data": source.location, "splits": splits, "bad": bad, "seconds": round(seconds, 2)}
    return Result(data, tables, [*source.notes, f"Train on them with: frugalvit train {out}"])
