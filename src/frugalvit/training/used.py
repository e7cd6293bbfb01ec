"""What a run used of its data and what it left out, for whoever asks months later: kept in ``data.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from frugalvit.data.lazy import LazyStore
from frugalvit.data.loader import Batches, Store
from frugalvit.data.streamed import StreamedBatches
from frugalvit.files import storable
from frugalvit.training.runs import Run

MOST_NAMED = 200
"""Unreadable files that are kept by name; of more than these, their number."""


def note_used(run: Run, notes: Sequence[str], parts: Mapping[str, Store | Batches | StreamedBatches]) -> None:
    """Write down what was said when the data were read, how many images each part has, and which it could not read.

    Images that are decoded while training are found to be unreadable only then, so this is said again at the end.
    """
    if not run.writer:
        return
    held = {name: part.store if isinstance(part, Batches) else part for name, part in parts.items()}
    bad = [(name, file, reason) for name, part in held.items() for file, reason in part.bad]
    used = {name: _count(part) for name, part in held.items() if not isinstance(part, StreamedBatches)}
    named = [
        {"name": storable(file), "split": name, "reason": storable(reason)} for name, file, reason in bad[:MOST_NAMED]
    ]
    facts = {"notes": [storable(note) for note in notes], "used": used, "left_out": {"count": len(bad), "files": named}}
    run.save_json("data.json", run.read_json("data.json") | facts)


def _count(store: Store) -> int:
    """Images that can be read; a store that decodes while training counts the others too."""
    return len(store) - len(store.bad) if isinstance(store, LazyStore) else len(store)
