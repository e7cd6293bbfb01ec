"""Shards as a dataset to stream: its survey, its validation shards, and a sample of its images.

train   streamed; counts and labels come from the index that ``frugalvit data pack`` writes, or from reading all
        shards once (without labels a few remote shards are enough)
val     full shards: those of the index or the folder, or some of train; fetched once and indexed
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from frugalvit.data.dataset import DatasetSplits, ImageDataset, StreamedShards
from frugalvit.data.paths import is_folder, local
from frugalvit.data.webdataset.index import PackedIndex
from frugalvit.data.webdataset.remote import describe_error, is_remote, open_remote
from frugalvit.data.webdataset.shards import (
    LabelSummary,
    class_names,
    find_labels,
    index_entry,
    index_shards,
    is_shard_folder,
    is_shards,
    label_of,
    list_shards,
    local_shard,
    read_shard,
    shard_examples,
)
from frugalvit.data.webdataset.stream import SHARD_ERRORS, stream_texts
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import pluralize, truncate_list

_LARGE = 10**12  # bytes of local shards (some ten million photos) above which "auto" streams them
_SAMPLED_SHARDS, _SAMPLED_IMAGES = 4, 1024
_MAX_HELD = 8  # validation shards at most


class ShardSurvey(NamedTuple):
    """What is known of the training shards; a run stores it, so that a resumed run counts in the same way.

    counts: examples in each shard; None if ``total`` is an estimate from a few shards.
    labels: the raw labels; None without labels.
    held: positions, among all shards, of those held out for validation.
    """

    counts: list[int] | None
    total: int
    labels: list[str] | None
    held: list[int]


class StreamingDataset(ImageDataset):
    """Images that are streamed: only those of ``sample`` can be read one by one."""

    def __init__(
        self,
        shards: list[str],
        survey: ShardSurvey,
        raw_labels: list[str] | None,
        keep: frozenset[str] | None,
        sample: ImageDataset,
    ) -> None:
        super().__init__([], None)
        self.shards, self.survey, self.sample = shards, survey, sample
        self.streaming = StreamedShards(shards, survey.counts, keep, raw_labels)

    def __len__(self) -> int:
        return self.survey.total

    def sample_images(self) -> ImageDataset:
        return self.sample

    def run_facts(self) -> dict[str, Any]:
        return {"survey": self.survey._asdict()}

    def subset(self, indices: Any) -> ImageDataset:
        raise UserError("Streamed images cannot be selected one by one: use --stream false.")

    def fingerprint(self, *, times: bool = True) -> str:
        """Changes with the names of the shards, and for local shards with their sizes and times."""
        digest = hashlib.sha256()
        for shard in self.shards:
            facts = Path(shard).stat() if not is_remote(shard) and Path(shard).exists() else None
            written = [facts.st_mtime_ns] if facts is not None and times else []
            mark = "" if facts is None else (facts.st_size, *written)
            digest.update(f"{Path(shard).name if facts else shard}\0{mark}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:32]


def should_stream(where: str, stream: bool | str) -> bool:
    """Whether to stream ``where``: as requested, or ("auto") if the shards are remote or very large."""
    shards = is_shards(where) or (not is_remote(where) and is_folder(local(where)) and is_shard_folder(local(where)))
    if stream is True and not shards:
        raise UserError(f"--stream true needs WebDataset shards, and {where} is something else: leave --stream out.")
    if stream != "auto":
        return bool(stream)
    return shards and (is_remote(where) or _count_bytes(where) > _LARGE)


def _count_bytes(where: str) -> int:
    paths = [Path(name) for names in list_shards(where).splits.values() for name in names]
    return sum(path.stat().st_size for path in paths if path.exists())


def open_stream(
    where: str,
    *,
    labelled: bool,
    split: str = "auto",
    val_fraction: float = 0.1,
    hold_out: bool = True,
    readers: int = 1,
    classes: Sequence[str] | None = None,
    known: ShardSurvey | None = None,
    agree: Callable[[Callable[[], ShardSurvey]], ShardSurvey] = lambda survey: survey(),
) -> DatasetSplits:
    """Open shards as a source whose train split is streamed.

    Args:
        labelled: labels are needed, so shards without an index are all read once. Pretraining does not need them; if
            there are some, it holds out the same shards, because 'frugalvit train' will validate on them.
        hold_out: hold shards out for validation if there are none.
        readers: pretraining holds no shard out if fewer shards than this would be left.
        classes: labels (or class names of the index) to keep.
        known: the survey of the run that is resumed.
        agree: lets one of several processes make the survey, and broadcasts it.
    """
    notes: list[str] = []
    splits, index = list_shards(where)
    shards = splits.get("train", [])
    if not shards:
        raise UserError(f"{where} has no training shards, only {', '.join(splits) or 'nothing'}.")
    if split not in ("auto", "given"):
        raise UserError(f"--split {split} needs every image listed: use --stream false, or name the shards to use.")
    keep = None if classes is None else frozenset(_raw_labels(classes, index))
    makes_val = split == "auto" and "val" not in splits and hold_out

    def survey_shards() -> ShardSurvey:
        held: list[int] = []
        if makes_val and labelled:
            held = choose_val_shards(_index_counts(shards, index), len(shards), val_fraction, where)
        survey, has_labels = _survey(drop_shards(shards, held), index, keep, labelled, where, notes)
        if makes_val and has_labels and not labelled and len(shards) > 1:
            held = choose_val_shards(_index_counts(shards, index), len(shards), val_fraction, where)
            return _hold_out(survey, held, len(shards), readers, notes)
        return survey._replace(held=held)

    survey = agree(survey_shards) if known is None else check_survey(known, len(shards), where)
    train = drop_shards(shards, survey.held)
    raw_labels, names = class_names(survey.labels, index) if survey.labels is not None else (None, [])
    if keep is not None and raw_labels is not None:
        names = [name for label, name in zip(raw_labels, names, strict=True) if label in keep]
        raw_labels = [label for label in raw_labels if label in keep]

    def index_examples(paths: list[str], what: str) -> ImageDataset:
        local_paths = [local_shard(path, index) for path in paths]
        listed = [
            (number, sample)
            for number, sample in index_shards(local_paths, what, notes)
            if keep is None or sample.label in keep
        ]
        if not listed:
            raise UserError(f"There are no images in readable shards for {what}.{' ' + notes[-1] if notes else ''}")
        return shard_examples(local_paths, listed, raw_labels, what, index)

    sample = index_examples(_sample_shards(train, keep, index), f"train in {where}")
    opened: dict[str, ImageDataset] = {"train": StreamingDataset(train, survey, raw_labels, keep, sample)}
    if survey.held and (labelled or raw_labels is not None):
        opened["val"] = index_examples([shards[number] for number in survey.held], f"val in {where}")
    for name in ("val", "test"):
        if splits.get(name):
            opened[name] = index_examples(splits[name], f"{name} in {where}")
    if survey.held:
        notes.append(_describe_held(opened.get("val"), survey, len(shards)))
    about = "" if survey.counts is not None else "about "
    notes.append(f"Streaming {pluralize(len(train), 'shard')}: {about}{survey.total:,} images.")
    name = Path(where).resolve().name if not is_remote(where) else where
    return DatasetSplits(name, where, "stream", tuple(names) if raw_labels is not None else None, opened, notes)


def _raw_labels(classes: Sequence[str], index: PackedIndex | None) -> list[str]:
    """The raw labels of these classes: their names, or the numbers that an index gives them."""
    if index is None or index.classes is None:
        return list(classes)
    numbers = {name: str(number) for number, name in enumerate(index.classes)}
    unknown = [name for name in classes if name not in numbers]
    if unknown:
        raise UserError(f"The index has no class '{unknown[0]}'.")
    return [numbers[name] for name in classes]


# -- survey


class _ShardSummary(NamedTuple):
    labels: LabelSummary
    damage: str | None


def _survey(
    train: list[str],
    index: PackedIndex | None,
    keep: frozenset[str] | None,
    labelled: bool,
    where: str,
    notes: list[str],
) -> tuple[ShardSurvey, bool]:
    """Survey the training shards, and find out whether they have labels, even if only a few are read."""
    counts = _index_counts(train, index)
    if index is not None and keep is None and counts is not None:
        labels = None if index.classes is None else [str(number) for number in range(len(index.classes))]
        return ShardSurvey(counts, sum(counts), labels, []), labels is not None
    remote = any(map(is_remote, train))
    read_all = labelled or not remote
    chosen = train if read_all else [train[i] for i in np.linspace(0, len(train) - 1, _SAMPLED_SHARDS).astype(int)]
    if read_all and remote:
        console.info(
            f"{where} has no index: reading all {len(train):,} shards once for their labels "
            "('frugalvit data pack' writes an index)"
        )
    with ThreadPoolExecutor(8, thread_name_prefix="survey") as pool:
        results = pool.map(lambda shard: _summarize_shard(shard, keep), chosen)
        summaries = list(console.progress(results, total=len(chosen), label="reading shards"))
    damaged = [f"{shard} ({one.damage})" for shard, one in zip(chosen, summaries, strict=True) if one.damage]
    if damaged:
        notes.append(f"{len(damaged)} of {len(chosen)} shards of {where} are damaged: {truncate_list(damaged)}.")
    counts = [one.labels.count for one in summaries]
    total = sum(counts)
    if not total:
        raise UserError(f"{where} has no images in readable shards{': ' + damaged[0] if damaged else ''}.")
    labels = find_labels([one.labels for one in summaries], where, notes if read_all else [])
    if not read_all:
        return ShardSurvey(None, max(2, round(total * len(train) / len(chosen))), None, []), labels is not None
    return ShardSurvey(counts, total, labels, []), labels is not None


def _summarize_shard(shard: str, keep: frozenset[str] | None) -> _ShardSummary:
    """Count a shard's examples as streaming will read them: up to the damage, if there is any."""
    summary = LabelSummary()
    try:
        for label, may_be_caption in _read_labels(shard):
            if keep is None or label in keep:
                summary.add(label, may_be_caption)
    except SHARD_ERRORS as error:
        return _ShardSummary(summary, describe_error(error))
    return _ShardSummary(summary, None)


def _read_labels(shard: str) -> Iterator[tuple[str | None, bool]]:
    if not is_remote(shard):
        yield from ((sample.label, sample.may_be_caption) for sample in read_shard(shard))
        return
    with open_remote(shard) as file:
        yield from (label_of(texts) for texts in stream_texts(file))


def _sample_shards(train: list[str], keep: frozenset[str] | None, index: PackedIndex | None) -> list[str]:
    """Choose a few readable shards of train, evenly spread, with about a thousand images together."""
    chosen: list[str] = []
    count = 0
    for shard in (train[i] for i in dict.fromkeys(np.linspace(0, len(train) - 1, min(16, len(train))).astype(int))):
        try:
            samples = read_shard(local_shard(shard, index))
            readable = sum(1 for sample in samples if keep is None or sample.label in keep)
        except (*SHARD_ERRORS, UserError) as error:
            console.warning(f"cannot sample shard {shard}: {describe_error(error)}")
            continue
        if readable:
            chosen, count = [*chosen, shard], count + readable
        if count >= _SAMPLED_IMAGES or len(chosen) >= _SAMPLED_SHARDS:
            break
    return chosen


# -- validation shards


def _index_counts(shards: list[str], index: PackedIndex | None) -> list[int] | None:
    """Examples in each of the shards; None unless an index lists them all."""
    entries = [index_entry(shard, index) for shard in shards]
    counts = [entry.examples for entry in entries if entry is not None]
    return counts if len(counts) == len(shards) else None


def choose_val_shards(counts: list[int] | None, shards: int, fraction: float, where: str) -> list[int]:
    """Choose evenly spread shards for validation: about ``fraction`` of the examples, at most ``_MAX_HELD`` shards."""
    if shards < 2:
        raise UserError(f"{where} is one shard, so there is none to validate on: give more, or use --stream false.")
    limit = min(_MAX_HELD, shards - 1)
    if counts is None:
        return _spread(min(max(1, round(fraction * shards)), limit), shards)
    # The complement of a spread counts too: of two shards the other may be the better one to hold out.
    spreads = [_spread(number, shards) for number in range(1, limit + 1)]
    complements = [sorted({*range(shards)} - {*held}) for held in spreads if shards - len(held) <= limit]
    wanted = fraction * sum(counts)

    def distance(held: list[int]) -> tuple[bool, float]:
        total = sum(counts[number] for number in held)
        return total == 0, abs(total - wanted)

    return min([*spreads, *complements], key=distance)


def _spread(number: int, shards: int) -> list[int]:
    """Positions in the middle of ``number`` equal parts; the last shard, a small remainder, is chosen last."""
    return [-(-(2 * part + 1) * shards // (2 * number)) - 1 for part in range(number)]


def check_survey(known: ShardSurvey, shards: int, where: str) -> ShardSurvey:
    """Check that a resumed run still has its shards: with others it would train on its validation images."""
    if known.counts is not None and len(known.counts) + len(known.held) != shards:
        raise UserError(
            f"{where} has {pluralize(shards, 'training shard')} now and had {len(known.counts) + len(known.held):,} "
            "when the run started: restore them, or start a new run from its weights with --init."
        )
    return known


def drop_shards(shards: list[str], held: Sequence[int]) -> list[str]:
    """The shards that are not held out."""
    return [shard for number, shard in enumerate(shards) if number not in held]


def _hold_out(survey: ShardSurvey, held: list[int], shards: int, readers: int, notes: list[str]) -> ShardSurvey:
    """The survey without the validation shards of 'frugalvit train'; unchanged if too few shards would be left."""
    if survey.counts is None:
        counts, total = None, max(2, round(survey.total * (1 - len(held) / shards)))
    else:
        counts = [count for number, count in enumerate(survey.counts) if number not in held]
        total = sum(counts)
    if shards - len(held) < readers or total < 2:
        notes.append("No shard is held out, because there are few: 'frugalvit train' will validate on some of these.")
        return survey
    return survey._replace(counts=counts, total=total, held=held)


def _describe_held(val: ImageDataset | None, survey: ShardSurvey, shards: int) -> str:
    verb = "is" if len(survey.held) == 1 else "are"
    text = f"val is made from train: {len(survey.held)} of {shards:,} shards {verb} held out"
    if val is None:
        return f"{text}, those that 'frugalvit train' validates on; --images train+val takes them too."
    return f"{text}, {pluralize(len(val), 'image')}."
