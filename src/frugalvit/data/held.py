"""Shards that are read in passing and have no val: which of them are held out for it, and what is left of train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from frugalvit.data.examples import Examples
from frugalvit.data.packed import PackedIndex
from frugalvit.data.shards import listed_as
from frugalvit.errors import UserError
from frugalvit.words import counted

_HELD, _FEW = 8, 100  # shards held out at most, images of val that are few


class Survey(NamedTuple):
    """What a look through train's shards found.

    counts: examples in each shard, None where only a few were looked at and ``total`` is an estimate.
    labels: the labels as they are written, None without labels.
    held: places of the shards that were held out for val, among all; None: an earlier version's run did not note them.
    """

    counts: list[int] | None
    total: int
    labels: list[str] | None
    held: list[int] | None = None


def counts_of(shards: list[str], index: PackedIndex | None) -> list[int] | None:
    """Examples in each of the shards, where an index lists them all."""
    listed = [listed_as(shard, index) for shard in shards]
    counts = [shard.examples for shard in listed if shard is not None]
    return counts if len(counts) == len(shards) else None


def held_out(counts: list[int] | None, shards: int, fraction: float, where: str) -> list[int]:
    """Places of whole shards for validation, evenly spread: about a share of all, at most ``_HELD`` of them."""
    if shards < 2:
        raise UserError(
            f"{where} is one shard, and there is none to validate on: give more shards, or use --stream false."
        )
    most = min(_HELD, shards - 1)
    if counts is None:
        return _spread(min(max(1, round(fraction * shards)), most), shards)
    # What a spread leaves counts too: of two shards the other may be the better one to hold out.
    spreads = [_spread(number, shards) for number in range(1, most + 1)]
    rests = [sorted({*range(shards)} - {*places}) for places in spreads if shards - len(places) <= most]
    wanted = fraction * sum(counts)

    def distance(places: list[int]) -> tuple[bool, float]:
        found = sum(counts[place] for place in places)
        return found == 0, abs(found - wanted)

    return min([*spreads, *rests], key=distance)


def _spread(number: int, shards: int) -> list[int]:
    """Places in the middle of as many equal parts: the last shard, a remainder that may hold one image, comes last."""
    return [-(-(2 * part + 1) * shards // (2 * number)) - 1 for part in range(number)]


def as_begun(known: Survey, shards: int, fraction: float, makes_val: bool, where: str) -> Survey:
    """What a run knew at its start, for it to go on with the val it had: never with its val to learn from."""
    held = known.held
    if held is None:  # begun by an earlier version, which chose them so, beginning with the last
        number = min(max(1, round(fraction * shards)), _HELD) if makes_val and shards > 1 else 0
        places = np.linspace(shards - 1, shards // (2 * max(number, 1)), number)
        held = sorted({round(place) for place in places})
    if known.counts is not None and len(known.counts) + len(held) != shards:
        raise UserError(
            f"{where} has {counted(shards, 'shard')} for training now, and {len(known.counts) + len(held):,} when the "
            "run began: put them back, or start a new run from its weights with --init."
        )
    return known._replace(held=held)


def without(shards: list[str], held: Sequence[int]) -> list[str]:
    """The shards whose places are not among those held out."""
    out = frozenset(held)
    return [shard for place, shard in enumerate(shards) if place not in out]


def left_of(survey: Survey, held: list[int], shards: int, readers: int) -> tuple[Survey, list[int]]:
    """What a look through all shards says of those left, and the places held out: none where too few would be left."""
    if shards - len(held) < readers:
        return survey, []
    if survey.counts is None:
        return survey._replace(total=max(2, round(survey.total * (1 - len(held) / shards)))), held
    counts = [count for place, count in enumerate(survey.counts) if place not in held]
    return (survey._replace(counts=counts, total=sum(counts)), held) if sum(counts) > 1 else (survey, [])


def note_held(val: Examples | None, shards: int, rest: int, whole: int, fraction: float, notes: list[str]) -> None:
    verb = "is" if shards == 1 else "are"
    said = f"val is made from train: {shards} of {whole:,} shards {verb} held out"
    if val is None:
        notes.append(f"{said}, those that 'frugalvit train' validates on; --images train+val takes them too.")
        return
    few = len(val) < min(_FEW, fraction * (len(val) + rest) / 2)
    hint = ": few to choose the best weights by; write smaller shards, or use --stream false" if few else ""
    notes.append(f"{said}, {counted(len(val), 'image')}{hint}.")
