"""Training from shards in passing: what is known about them before, and a few of them to look at.

train   read in passing; their number and labels come from the index that ``frugalvit data pack`` writes, or from
        one look through the shards (all of them where labels are needed, else a few)
val     whole shards: those of the index or the folder, or some of train's held out; fetched once and indexed
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.formats.table import class_list
from frugalvit.data.paths import is_folder, local
from frugalvit.data.webdataset.index import PackedIndex
from frugalvit.data.webdataset.remote import FAULTS, is_remote, open_remote, reason_of
from frugalvit.data.webdataset.shards import (
    Sample,
    at_hand,
    class_names,
    index_shards,
    is_shard_folder,
    is_shards,
    label_of,
    layout,
    listed_as,
    read_shard,
    shard_examples,
)
from frugalvit.data.webdataset.stream import ShardStream, texts_in_passing
from frugalvit.data.webdataset.tar import BadShard
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import pluralize, truncate_list

T = TypeVar("T")
_LARGE = 10**12  # bytes of local shards (some ten million photos) from which on an index of them gets too large
_LOOKED, _AT_HAND = 4, 1024  # shards looked at, images to look at


class StreamingDataset(ImageDataset):
    """Images that are read in passing: there are about so many, and only those of ``sample`` can be looked at."""

    streamed = True

    def __init__(
        self,
        shards: list[str],
        survey: ShardSurvey,
        texts: list[str] | None,
        keep: frozenset[str] | None,
        sample: ImageDataset,
    ) -> None:
        super().__init__([], None)
        self.shards, self.survey, self.keep, self.sample = shards, survey, keep, sample
        self.texts = texts  # the labels as written, in the order of the classes

    def __len__(self) -> int:
        return self.survey.total

    def sample_images(self) -> ImageDataset:
        return self.sample

    def stream(self, seed: int) -> ShardStream:
        """The images, in passing."""
        return ShardStream(self.shards, seed=seed, counts=self.survey.counts, keep=self.keep, warn=None)

    def subset(self, indices: Any) -> ImageDataset:
        raise UserError("Images that are read in passing cannot be chosen one by one: use --stream false.")

    def fingerprint(self, *, times: bool = True) -> str:
        """Changes with the shards' names, and where they lie on this machine with their sizes and times."""
        digest = hashlib.sha256()
        for shard in self.shards:
            facts = Path(shard).stat() if not is_remote(shard) and Path(shard).exists() else None
            written = [facts.st_mtime_ns] if facts is not None and times else []
            mark = "" if facts is None else (facts.st_size, *written)
            digest.update(f"{Path(shard).name if facts else shard}\0{mark}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:32]


def should_stream(where: str, wanted: bool | str) -> bool:
    """Whether to read ``where`` in passing: as asked for, or (auto) shards elsewhere and very large ones."""
    shards = is_shards(where) or (not is_remote(where) and is_folder(local(where)) and is_shard_folder(local(where)))
    if wanted is True and not shards:
        raise UserError(f"--stream reads WebDataset shards in passing, and {where} is none: leave it out.")
    if wanted != "auto":
        return bool(wanted)
    return shards and (is_remote(where) or _bytes(where) > _LARGE)


def open_stream(
    where: str,
    *,
    labelled: bool,
    split: str = "auto",
    val_fraction: float = 0.1,
    whole: bool = False,
    readers: int = 1,
    classes: Sequence[str] | None = None,
    known: ShardSurvey | None = None,
    agree: Callable[[Callable[[], ShardSurvey]], ShardSurvey] = lambda look: look(),
) -> DatasetSplits:
    """Shards as a source whose train split is read in passing.

    Args:
        labelled: labels are needed, so that shards without an index are all looked through. Where they are not needed
            but there, the same shards are held out: who pre-trains may not see what training will validate on.
        whole: hold nothing out.
        readers: what pre-training leaves to train feeds so many; else it holds nothing out.
        classes: labels (or names of the index) to keep.
        known: what an earlier look found: a resumed run must count as it did at its start.
        agree: lets one of several processes look, and tells the others.
    """
    notes: list[str] = []
    splits, index = layout(where)
    train = splits.get("train", [])
    if not train:
        raise UserError(f"{where} has no training shards: found only {', '.join(splits) or 'nothing'}.")
    if split not in ("auto", "given"):
        raise UserError(f"--split {split} needs an index of the images: use --stream false, or give the shards to use.")
    keep = None if classes is None else frozenset(_as_written(classes, index))
    makes_val = split == "auto" and "val" not in splits and not whole
    every = train

    def hold() -> list[int]:
        return choose_val_shards(counts_of(every, index), len(every), val_fraction, where)

    def look() -> ShardSurvey:
        held = hold() if makes_val and labelled else []
        survey, has_labels = _survey(without(every, held), index, keep, labelled, where, notes)
        if makes_val and has_labels and not labelled and len(every) > 1:
            survey, held = remaining_shards(survey, hold(), len(every), readers)
            if not held:
                notes.append("No shard is held out, so few are they: 'frugalvit train' will validate on some of these.")
        return survey._replace(held=held)

    # Of old runs that did not note it, only those that needed labels held something out.
    begun = partial(
        restore_survey, shards=len(every), fraction=val_fraction, makes_val=makes_val and labelled, where=where
    )
    survey = agree(look) if known is None else begun(known)
    held = survey.held or []
    train = without(every, held)
    texts, names = class_names(survey.labels, index) if survey.labels is not None else ([], [])
    if keep is not None:
        texts, names = [t for t in texts if t in keep], [n for t, n in zip(texts, names, strict=True) if t in keep]
    named = texts if survey.labels is not None else None
    sample = _at_hand(train, named, keep, index, where, notes)
    found: dict[str, ImageDataset] = {"train": StreamingDataset(train, survey, named, keep, sample)}
    for name in ("val", "test"):
        if splits.get(name):
            found[name] = _indexed(splits[name], named, keep, index, f"{name} in {where}", notes)
    if held and (labelled or named is not None):
        val = _indexed([every[place] for place in held], named, keep, index, f"val in {where}", notes)
        found = {"train": found.pop("train"), "val": val, **found}
    if held:
        note_held(found.get("val"), len(held), survey.total, len(every), val_fraction if labelled else 0, notes)
    about = "" if survey.counts is not None else "about "
    notes.append(f"{pluralize(len(train), 'shard')} read in passing: {about}{survey.total:,} images.")
    name = Path(where).resolve().name if not is_remote(where) else where
    return DatasetSplits(name, where, "stream", tuple(names) if named is not None else None, found, notes)


def _as_written(classes: Sequence[str], index: PackedIndex | None) -> list[str]:
    """The labels that mean these classes: their names, or the numbers an index gives them."""
    if index is None or index.classes is None:
        return list(classes)
    numbers = {name: str(number) for number, name in enumerate(index.classes)}
    unknown = [name for name in classes if name not in numbers]
    if unknown:
        raise UserError(f"The index has no class '{unknown[0]}'.")
    return [numbers[name] for name in classes]


# -- looking through


def _note_others(shards: list[str], index: PackedIndex, where: str, notes: list[str]) -> None:
    """A word about shards that are not those of which the index tells: more than it counts is not read."""
    here = ((shard, listed_as(shard, index)) for shard in shards if not is_remote(shard) and Path(shard).is_file())
    others = [Path(shard).name for shard, known in here if known and known.bytes != Path(shard).stat().st_size]
    if others:
        notes.append(
            f"The index of {where} knows {pluralize(len(others), 'shard')} with another size ({truncate_list(others)}): no more "
            "examples are read of each than it counts. Pack them anew, or remove the index."
        )


class _Seen(NamedTuple):
    count: int
    bare: int  # examples without a label
    captions: int
    labels: set[str]
    fault: str | None


def _survey(
    train: list[str],
    index: PackedIndex | None,
    keep: frozenset[str] | None,
    labelled: bool,
    where: str,
    notes: list[str],
) -> tuple[ShardSurvey, bool]:
    """What train holds, and whether it has labels: known to be there even where a few shards only are looked at."""
    counts = counts_of(train, index)
    if index is not None and keep is None and counts is not None:
        _note_others(train, index, where, notes)
        labels = None if index.classes is None else [str(number) for number in range(len(index.classes))]
        return ShardSurvey(counts, sum(counts), labels), labels is not None
    whole = labelled or (not any(map(is_remote, train)) and len(train) <= 256)
    chosen = train if whole else [train[i] for i in np.linspace(0, len(train) - 1, _LOOKED).astype(int)]
    if whole and any(map(is_remote, train)):
        console.info(
            f"{where} has no index: its {len(train):,} shards are looked through once for their labels "
            "('frugalvit data pack' writes an index)"
        )
    with ThreadPoolExecutor(8, thread_name_prefix="survey") as pool:
        looked = pool.map(lambda shard: _look_through(shard, keep), chosen)
        seen = list(console.progress(looked, total=len(chosen), label="looking through shards"))
    bad = [f"{shard} ({one.fault})" for shard, one in zip(chosen, seen, strict=True) if one.fault]
    if bad:
        notes.append(f"{len(bad)} of {len(chosen)} shards of {where} are damaged: {truncate_list(bad)}.")
    total = sum(one.count for one in seen)
    if not total:
        raise UserError(f"{where} holds no images in readable shards{': ' + bad[0] if bad else ''}.")
    labels = _labels(seen, total, where, notes if whole else [])
    if not whole:
        return ShardSurvey(None, max(2, round(total * len(train) / len(chosen))), None), labels is not None
    return ShardSurvey([one.count for one in seen], total, labels), labels is not None


def _look_through(shard: str, keep: frozenset[str] | None) -> _Seen:
    """Count a shard's examples as reading in passing will find them: up to the damage, if there is one."""
    count = bare = captions = 0
    labels: set[str] = set()
    fault = None
    try:
        for label, caption in _labels_in(shard):
            if keep is not None and label not in keep:
                continue
            count, captions, bare = count + 1, captions + caption, bare + (label is None)
            if label is not None and len(labels) < 1_000_000:
                labels.add(label)
    except (BadShard, ValueError, *FAULTS) as error:
        fault = reason_of(error)
    return _Seen(count, bare, captions, labels, fault)


def _labels_in(shard: str) -> Iterator[tuple[str | None, bool]]:
    if not is_remote(shard):
        yield from ((sample.label, sample.caption) for sample in read_shard(shard))
        return
    with open_remote(shard) as file:
        yield from (label_of(texts) for texts in texts_in_passing(file))


def _labels(seen: list[_Seen], total: int, where: str, notes: list[str]) -> list[str] | None:
    """The labels, or None: without any, with some missing, or where texts read like captions."""
    labels = class_list(label for one in seen for label in one.labels)
    bare = sum(one.bare for one in seen)
    if not labels or bare:
        notes.append(f"{where}: {bare:,} of {total:,} examples have no label: read as unlabelled.")
        return None
    wordy = any(len(label) > 100 or "\n" in label for label in labels)
    if sum(one.captions for one in seen) and (len(labels) > total / 2 or wordy):
        notes.append(f"{where}: the .txt members read like captions, not labels: read as unlabelled.")
        return None
    return labels


# -- what can be looked at


def _indexed(
    shards: list[str],
    texts: list[str] | None,
    keep: frozenset[str] | None,
    index: PackedIndex | None,
    what: str,
    notes: list[str],
) -> ImageDataset:
    local = [at_hand(shard, index) for shard in shards]
    listed: list[tuple[int, Sample]] = [
        (number, sample) for number, sample in index_shards(local, what, notes) if keep is None or sample.label in keep
    ]
    if not listed:
        raise UserError(f"There are no images in readable shards for {what}.{' ' + notes[-1] if notes else ''}")
    return shard_examples(local, listed, texts, what, index)


def _at_hand(
    train: list[str],
    texts: list[str] | None,
    keep: frozenset[str] | None,
    index: PackedIndex | None,
    where: str,
    notes: list[str],
) -> ImageDataset:
    """A few whole shards of train, fetched where they lie elsewhere: as many as it takes to see a thousand images."""
    looked: list[str] = []
    count = 0
    for shard in (train[i] for i in dict.fromkeys(np.linspace(0, len(train) - 1, min(16, len(train))).astype(int))):
        try:
            local = at_hand(shard, index)
            found = sum(1 for sample in read_shard(local) if keep is None or sample.label in keep)
        except (BadShard, OSError, UserError) as error:
            console.warning(f"shard {shard} cannot be looked at: {reason_of(error)}")
            continue
        if found:
            looked, count = [*looked, local], count + found
        if count >= _AT_HAND or len(looked) >= _LOOKED:
            break
    return _indexed(looked, texts, keep, index, f"train in {where}", notes)


def _bytes(where: str) -> int:
    paths = [Path(name) for names in layout(where).splits.values() for name in names]
    return sum(path.stat().st_size for path in paths if path.exists())


_HELD, _FEW = 8, 100  # shards held out at most, images of val that are few


class ShardSurvey(NamedTuple):
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


def choose_val_shards(counts: list[int] | None, shards: int, fraction: float, where: str) -> list[int]:
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


def restore_survey(known: ShardSurvey, shards: int, fraction: float, makes_val: bool, where: str) -> ShardSurvey:
    """What a run knew at its start, for it to go on with the val it had: never with its val to learn from."""
    held = known.held
    if held is None:  # begun by an earlier version, which chose them so, beginning with the last
        number = min(max(1, round(fraction * shards)), _HELD) if makes_val and shards > 1 else 0
        places = np.linspace(shards - 1, shards // (2 * max(number, 1)), number)
        held = sorted({round(place) for place in places})
    if known.counts is not None and len(known.counts) + len(held) != shards:
        raise UserError(
            f"{where} has {pluralize(shards, 'shard')} for training now, and {len(known.counts) + len(held):,} when the "
            "run began: put them back, or start a new run from its weights with --init."
        )
    return known._replace(held=held)


def without(shards: list[str], held: Sequence[int]) -> list[str]:
    """The shards whose places are not among those held out."""
    out = frozenset(held)
    return [shard for place, shard in enumerate(shards) if place not in out]


def remaining_shards(survey: ShardSurvey, held: list[int], shards: int, readers: int) -> tuple[ShardSurvey, list[int]]:
    """What a look through all shards says of those left, and the places held out: none where too few would be left."""
    if shards - len(held) < readers:
        return survey, []
    if survey.counts is None:
        return survey._replace(total=max(2, round(survey.total * (1 - len(held) / shards)))), held
    counts = [count for place, count in enumerate(survey.counts) if place not in held]
    return (survey._replace(counts=counts, total=sum(counts)), held) if sum(counts) > 1 else (survey, [])


def note_held(val: ImageDataset | None, shards: int, rest: int, whole: int, fraction: float, notes: list[str]) -> None:
    verb = "is" if shards == 1 else "are"
    said = f"val is made from train: {shards} of {whole:,} shards {verb} held out"
    if val is None:
        notes.append(f"{said}, those that 'frugalvit train' validates on; --images train+val takes them too.")
        return
    few = len(val) < min(_FEW, fraction * (len(val) + rest) / 2)
    hint = ": few to choose the best weights by; write smaller shards, or use --stream false" if few else ""
    notes.append(f"{said}, {pluralize(len(val), 'image')}{hint}.")
