"""Record which images a run used and skipped (data.json)."""

from collections.abc import Collection, Mapping, Sequence

from frugalvit.data.bad_images import SkippedFile
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.loader import BatchSource
from frugalvit.runs import layout
from frugalvit.runs.run_folder import RunFolder
from frugalvit.utils.files import utf8_safe

MOST_NAMED = 200  # the largest number of unreadable files that data.json names


def record_data_usage(run: RunFolder, notes: Sequence[str], parts: Mapping[str, ImageStore | BatchSource]) -> None:
    """Write which images the run uses; again at the end, because some are decoded, and unreadable, only in training."""
    unreadable = [SkippedFile(name, *entry) for name, part in parts.items() for entry in part.unreadable]
    used = {name: part.readable for name, part in parts.items() if part.readable is not None}
    write_data_usage(run, notes, used, unreadable, [name for name, part in parts.items() if part.decodes_on_demand])


def write_data_usage(
    run: RunFolder,
    notes: Sequence[str],
    used: Mapping[str, int],
    bad: Sequence[SkippedFile],
    while_training: Collection[str] = (),
) -> None:
    """Write data.json from the counts of readable images and a list of unreadable files.

    while_training: splits whose unreadable files show up in training; a resumed run may not see all of them again
    """
    if not run.writer:
        return
    used, bad = dict(used), list(bad)
    stored, seen = run.read_json(layout.DATA), {(split, utf8_safe(file)) for split, file, _ in bad}
    for entry in stored.get("left_out", {}).get("files", []):
        split, file = entry["split"], entry["name"]
        if split in while_training and (split, file) not in seen:
            bad.append(SkippedFile(split, file, entry["reason"]))
            used[split] -= 1
    named = [
        {"name": utf8_safe(file), "split": split, "reason": utf8_safe(reason)}
        for split, file, reason in bad[:MOST_NAMED]
    ]
    left_out = {"count": len(bad), "files": named}
    facts = {"notes": [utf8_safe(note) for note in notes], "used": used, "left_out": left_out}
    run.save_json(layout.DATA, stored | facts)
