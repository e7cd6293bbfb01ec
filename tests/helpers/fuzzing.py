"""Random and damaged input: how many inputs, what counts as an answer, and ways to damage a file."""

import json
import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from frugalvit.cli.main import format_line
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.errors import UserError

_TIMES = int(os.environ.get("FRUGALVIT_FUZZ", "1"))
MAX_MEMORY = 3 << 30  # bytes that a test may use


def fuzz(count: int):
    return settings(max_examples=count * _TIMES, suppress_health_check=list(HealthCheck), deadline=60_000)


def is_answered(function: Any, *arguments: Any) -> bool:
    """True for a result or a one-line error; any other exception fails the test."""
    try:
        function(*arguments)
    except (UserError, UnreadableImage) as error:
        line = format_line(str(error)).strip()
        return bool(line) and "\n" not in line
    return True


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """Truncate, change or replace the bytes."""
    how = data.draw(st.sampled_from(["cut", "changed", "other", "inserted"]))
    if how == "cut":
        return content[: data.draw(st.integers(0, len(content)))]
    if how == "other":
        return data.draw(st.binary(max_size=300))
    patched = bytearray(content)
    patches = st.tuples(st.integers(0, len(content) - 1), st.binary(max_size=6))
    for position, patch in data.draw(st.lists(patches, max_size=6)):
        patched[position : position + (len(patch) if how == "changed" else 0)] = patch
    return bytes(patched)


def is_json(value: Any) -> bool:
    try:
        json.dumps(value, default=str)
    except (TypeError, ValueError):
        return False
    return True
