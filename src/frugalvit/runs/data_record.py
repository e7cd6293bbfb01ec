"""Record which images a run used and skipped (data.json)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from frugalvit.data.bad_images import SkippedFile
from frugalvit.runs import layout
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils.files import utf8_safe

MOST_NAMED = 200  # the largest number of unreadable files that data.json names


class DataPart(Protocol):
    """Images of a split: cached, streamed, or read one by one."""

    @property
    def unreadable(self) -> Sequence[tuple[str, str]]: ...  # (file, reason)
    @property
    def readable(self) -> int | None: ...
    @property
    def decodes_on_demand(self) -> bool: ...


def record_data_usage(
    run: RunFolder, notes: Sequence[str], parts: Mapping[str, DataPart], bad: Sequence[SkippedFile] = ()
) -> None:
    """Write the notes on the data, the number of images of each split, and the skipped files (``bad`` ones too).

    Some images are decoded only in training, so call this again at the end: more may be unreadable. A resumed run may
    not see all of them again.
    """
    if not run.writer:
        return
    skipped = [*bad, *(SkippedFile(name, *entry) for name, part in parts.items() for entry in part.unreadable)]
    used = {name: part.readable for name, part in parts.items() if part.readable is not None}
    stored, seen = run.read_json(layout.DATA), {(split, utf8_safe(file)) for split, file, _ in skipped}
    for entry in stored.get("left_out", {}).get("files", []):
        split, file = entry["split"], entry["name"]
        if split in parts and parts[split].decodes_on_demand and (split, file) not in seen:
            skipped.append(SkippedFile(split, file, entry["reason"]))
            used[split] -= 1
    named = [
        {"name": utf8_safe(file), "split": split, "reason": utf8_safe(reason)}
        for split, file, reason in skipped[:MOST_NAMED]
    ]
    left_out = {"count": len(skipped), "files": named}
    facts = {"notes": [utf8_safe(note) for note in notes], "used": used, "left_out": left_out}
    run.save_json(layout.DATA, stored | facts)
