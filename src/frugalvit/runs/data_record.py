"""What a run used of its data and what it left out, for whoever asks months later: kept in ``data.json``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from frugalvit.data.cache.store import ImageStore
from frugalvit.data.loader import BatchSource
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils.files import utf8_safe

MOST_NAMED = 200
"""Unreadable files that are kept by name; of more than these, their number."""


class SkippedFile(NamedTuple):
    """A file of a part of the data that could not be read, and why."""

    part: str
    file: str
    reason: str


def record_data_usage(run: RunFolder, notes: Sequence[str], parts: Mapping[str, ImageStore | BatchSource]) -> None:
    """Write down what was said when the data were read, how many images each part has, and which it could not read.

    Images that are decoded while training are found to be unreadable only then, so this is said again at the end; and a
    resumed run may not meet again what it had met before.
    """
    unreadable = [SkippedFile(name, *entry) for name, part in parts.items() for entry in part.unreadable]
    used = {name: part.readable for name, part in parts.items() if part.readable is not None}
    write_data_usage(run, notes, used, unreadable, [name for name, part in parts.items() if part.found_late])


def write_data_usage(
    run: RunFolder,
    notes: Sequence[str],
    used: Mapping[str, int],
    bad: Sequence[SkippedFile],
    under_way: Collection[str] = (),
) -> None:
    """The same of data that lie in no store: the images of each part that can be read, and the files that cannot.

    under_way: the parts whose unreadable files are met while training
    """
    if not run.writer:
        return
    used, bad = dict(used), list(bad)
    met = {(part, utf8_safe(file)) for part, file, _ in bad}
    for entry in run.read_json("data.json").get("left_out", {}).get("files", []):
        part, file = entry["split"], entry["name"]
        if part in under_way and (part, file) not in met:
            bad.append(SkippedFile(part, file, entry["reason"]))
            used[part] -= 1
    named = [
        {"name": utf8_safe(file), "split": part, "reason": utf8_safe(reason)} for part, file, reason in bad[:MOST_NAMED]
    ]
    left_out = {"count": len(bad), "files": named}
    facts = {"notes": [utf8_safe(note) for note in notes], "used": used, "left_out": left_out}
    run.save_json("data.json", run.read_json("data.json") | facts)
