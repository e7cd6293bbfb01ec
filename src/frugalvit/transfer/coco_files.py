"""The JSON files of a COCO dataset: which is which split's, and what is in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from frugalvit.data.folders import SPLIT_NAMES
from frugalvit.errors import UserError
from frugalvit.transfer.coco_check import check_entries

_WORDS = list(SPLIT_NAMES)
"""Names of splits; where two files are of one split, the one with the earlier name is read."""


def find_annotations(where: Path) -> dict[str, Path]:
    """The JSON file of every split: ``instances_train.json``, ``annotations/instances_val2017.json``, ``train/…``."""
    if where.is_file():
        return {"train": where}
    if not where.is_dir():
        raise UserError(f"There is no folder or JSON file {where}.")
    candidates = sorted([*where.glob("*.json"), *where.glob("annotations/*.json"), *where.glob("*/*coco*.json")])
    named: list[tuple[bool, int, Path]] = []
    for path in candidates:
        words = path.stem.lower().replace("-", "_").rstrip("0123456789").split("_")
        words += [path.parent.name.lower()]
        word = next((_WORDS.index(word) for word in words if word in _WORDS), None)
        if word is not None and not {"captions", "keypoints", "panoptic", "stuff", "image", "names"} & set(words):
            named.append(("instances" not in path.stem, word, path))
    found: dict[str, Path] = {}
    for _, word, path in sorted(named):
        found.setdefault(SPLIT_NAMES[_WORDS[word]], path)
    if not found and len(candidates) == 1:
        found = {"train": candidates[0]}
    if not found:
        raise UserError(
            f"{where} holds no COCO annotations: there should be JSON files such as instances_train.json and "
            "instances_val.json in it or in its folder annotations."
        )
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def read(path: Path) -> dict[str, Any]:
    """The content of a file, every entry checked."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable JSON file ({' '.join(str(error).split())[:120]}).") from None
    needed = ("images", "annotations", "categories")
    missing = [key for key in needed if not isinstance(content, dict) or not isinstance(content.get(key), list)]
    if missing:
        raise UserError(f"{path} is not in COCO format: it has no list '{missing[0]}'.")
    check_entries(content, path)
    return content
