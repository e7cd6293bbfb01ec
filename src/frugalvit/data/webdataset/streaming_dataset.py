"""A streamed dataset of shards: its survey, its validation shards and a sample of its images.

train   streamed; counts and labels come from the index that ``frugalvit data pack`` writes, or from reading all
        shards once
val     full shards: those of the index or the folder, or some of train; fetched once and indexed
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from frugalvit.data.dataset import DatasetSplits, ImageDataset, StreamedShards
from frugalvit.data.formats.csv import class_list
from frugalvit.data.webdataset.index import PackedIndex
from frugalvit.data.webdataset.remote import describe_error, is_remote
from frugalvit.data.webdataset.shards import (
    Collisions,
    Listed,
    class_names,
    find_labels,
    index_entry,
    index_shards,
    is_shards,
    list_shards,
    local_shard,
    read_shard,
    shard_examples,
)
from frugalvit.data.webdataset.stream import SHARD_ERRORS, check_damaged, read_samples
from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.text import pluralize, truncate_list

_LARGE = 10**12  # bytes of local shards (some ten million photos) above which "auto" streams them
_SAMPLED_SHARDS, _SAMPLED_IMAGES = 4, 1024
_MAX_HELD_OUT = 8  # validation shards at most


class ShardSurvey(NamedTuple):
    """Facts about the training shards. A run stores them, so that a resumed run counts the same way.

    counts: examples in each shard that is not held out; ``total`` is their sum.
    labels: the raw labels; None without labels.
    held: positions, among all shards, of those held out for validation.
    """

    counts: list[int]
    total: int
    labels: list[str] | None
    held: list[int]


class StreamingDataset(ImageDataset):
    """Streamed images. Only those of ``sample`` can be read by index."""

    def __init__(
        self, shards: list[str], survey: ShardSurvey, raw_labels: list[str] | None, sample: ImageDataset
    ) -> None:
        super().__init__([], None)
        self.shards, self.survey, self.sample = shards, survey, sample
        self.streaming = StreamedShards(shards, survey.counts, raw_labels)
        self.run_facts = {"survey": survey._asdict()}

    def __len__(self) -> int:
        return self.survey.total

    def sample_images(self) -> ImageDataset:
        return self.sample

    def subset(self, indices: Any) -> ImageDataset:
        raise UserError("Streamed images cannot be selected one by one: use --stream false.")

    def fingerprint(self, *, times: bool = True, labels: bool = True) -> str:
        """Hash the names of the shards, and the sizes and times of local shards."""
        digest = hashlib.sha256()
        for shard in self.shards:
            facts = Path(shard).stat() if not is_remote(shard) and Path(shard).exists() else None
            written = [facts.st_mtime_ns, facts.st_ctime_ns] if facts is not None and times else []
            mark = "" if facts is None else (facts.st_size, *written)
            digest.update(f"{Path(shard).name if facts else shard}\0{mark}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:32]


def should_stream(where: str, stream: bool | str) -> bool:
    """Decide whether to stream: as requested, or for "auto" if the shards are remote or very large."""
    shards = is_shards(where)
    if stream is True and not shards:
        raise UserError(f"--stream true needs WebDataset shards, and {where} is something else: leave --stream out.")
    if stream != "auto":
        return bool(stream)
    if not shards or is_remote(where):
        return shards
    paths = [Path(name) for names in list_shards(where)[0].values() for name in names]
    return sum(path.stat().st_size for path in paths if path.exists()) > _LARGE


def open_stream(
    where: str,
    *,
    split: str = "auto",
    val_fraction: float = 0.1,
    hold_out: bool = True,
    max_bad: float = 0.05,
    known: ShardSurvey | None = None,
    agree: Callable[[Callable[[], ShardSurvey]], ShardSurvey] = lambda survey: survey(),
) -> DatasetSplits:
    """Open shards as a source whose train split is streamed.

    Args:
        hold_out: hold out training shards for validation if they have labels and no validation shards exist.
        max_bad: without an index, a larger share of damaged shards is an error.
        known: the survey of the resumed run.
        agree: runs the survey on rank 0 and broadcasts it.
    """
    notes: list[str] = []
    splits, index = list_shards(where)
    shards = splits.get("train", [])
    if not shards:
        raise UserError(f"{where} has no training shards; splits: {', '.join(splits) or 'none'}.")
    if split not in ("auto", "given"):
        raise UserError(f"--split {split} needs every image listed: use --stream false, or name the shards to use.")
    fraction = val_fraction if split == "auto" and "val" not in splits and hold_out else 0.0
    survey = known or agree(lambda: _survey(shards, index, fraction, max_bad, where, notes))
    if len(survey.counts) + len(survey.held) != len(shards):  # otherwise it could train on validation images
        raise UserError(
            f"{where} has {pluralize(len(shards), 'training shard')} now and had "
            f"{len(survey.counts) + len(survey.held):,} when the run started: restore them, or start a new run from "
            "its weights with --init."
        )
    raw_labels, names = class_names(survey.labels, index) if survey.labels is not None else (None, [])

    def index_examples(paths: list[str], title: str) -> ImageDataset:
        local_paths = [local_shard(path, index) for path in paths]
        listed = list(index_shards(local_paths, title, notes))
        if not listed:
            raise UserError(f"There are no images in readable shards for {title}.{' ' + notes[-1] if notes else ''}")
        return shard_examples(local_paths, listed, raw_labels, title, index)

    train = [shard for number, shard in enumerate(shards) if number not in survey.held]
    paths, listed = _sample_shards(train, index)
    if not listed:
        raise UserError(f"{where} has no images in readable shards.")
    sample = shard_examples(paths, listed, raw_labels, f"train in {where}", index)
    opened: dict[str, ImageDataset] = {"train": StreamingDataset(train, survey, raw_labels, sample)}
    if survey.held:
        opened["val"] = index_examples([shards[number] for number in survey.held], f"val in {where}")
        notes.append(
            f"val is made from train: {len(survey.held)} of {pluralize(len(shards), 'shard')} held out, "
            f"{pluralize(len(opened['val']), 'image')}."
        )
    for name in ("val", "test"):
        if splits.get(name):
            opened[name] = index_examples(splits[name], f"{name} in {where}")
    notes.append(f"Streaming {pluralize(len(train), 'shard')}: {survey.total:,} images.")
    name = Path(where).resolve().name if not is_remote(where) else where
    return DatasetSplits(name, where, "stream", tuple(names) if raw_labels is not None else None, opened, notes)


def _survey(
    shards: list[str], index: PackedIndex | None, fraction: float, max_bad: float, where: str, notes: list[str]
) -> ShardSurvey:
    """Count examples and labels of all shards. If they have labels, hold out a ``fraction`` for validation."""
    entries = [index_entry(shard, index) for shard in shards]
    counts = [entry.examples for entry in entries if entry is not None]
    parts: list[Counter[str | None]] = []
    if index is not None and len(counts) == len(shards):
        labels = None if index.classes is None else [str(number) for number in range(len(index.classes))]
    else:
        parts = _count_labels(shards, max_bad, where, notes)
        counts = [part.total() for part in parts]
        labels = find_labels(parts, where, notes)
    held = choose_val_shards(counts, fraction) if fraction and labels is not None else []
    if held and parts:
        labels = class_list(label for number, part in enumerate(parts) if number not in held for label in part)
    counts = [count for number, count in enumerate(counts) if number not in held]
    return ShardSurvey(counts, sum(counts), labels, held)


def _count_labels(shards: list[str], max_bad: float, where: str, notes: list[str]) -> list[Counter[str | None]]:
    """Read all shards once, up to any damage as in streaming, and count the examples of each label."""
    console.info(
        f"no index lists all shards of {where}: reading {pluralize(len(shards), 'shard')} once ('frugalvit data pack' "
        "writes an index)"
    )
    damaged: list[tuple[str, str]] = []
    collisions = Collisions([], [])

    def count(shard: str) -> Counter[str | None]:
        counts: Counter[str | None] = Counter()
        try:
            read = read_samples if is_remote(shard) else read_shard  # read_shard reads headers only
            samples = read(shard, collisions)
            counts.update(sample.label for sample in samples)
        except SHARD_ERRORS as error:
            damaged.append((shard, describe_error(error)))
        return counts

    with ThreadPoolExecutor(8, thread_name_prefix="survey") as pool:
        parts = list(console.progress(pool.map(count, shards), total=len(shards), label="reading shards"))
    if not any(parts):
        raise UserError(f"{where} has no images in readable shards{': ' + ': '.join(damaged[0]) if damaged else ''}.")
    check_damaged(damaged, len(shards), max_bad)
    notes += collisions.notes(where)
    if damaged:
        listed = truncate_list([f"{shard} ({reason})" for shard, reason in sorted(damaged)])
        notes.append(f"{len(damaged)} of {len(shards)} shards of {where} are damaged: {listed}.")
    return parts


def _sample_shards(train: list[str], index: PackedIndex | None) -> tuple[list[str], Listed]:
    """Index a few evenly spread readable shards of train, together about a thousand images."""
    paths: list[str] = []
    listed: Listed = []
    for position in dict.fromkeys(np.linspace(0, len(train) - 1, min(16, len(train))).astype(int)):
        try:
            path = local_shard(train[position], index)
            samples = list(read_shard(path))
        except (*SHARD_ERRORS, UserError) as error:
            console.warning(f"cannot sample shard {train[position]}: {describe_error(error)}")
            continue
        if samples:
            listed += [(len(paths), sample) for sample in samples]
            paths.append(path)
        if len(listed) >= _SAMPLED_IMAGES or len(paths) >= _SAMPLED_SHARDS:
            break
    return paths, listed


def choose_val_shards(counts: Sequence[int], fraction: float) -> list[int]:
    """Choose evenly spread shards with about ``fraction`` of the examples; of a single shard choose none."""
    shards, wanted = len(counts), fraction * sum(counts)
    if shards == 2:
        choices = [[0], [1]]
    else:
        choices = [_spread(number, shards) for number in range(1, min(_MAX_HELD_OUT, shards - 1) + 1)]

    def distance(held: list[int]) -> tuple[bool, float]:
        total = sum(counts[number] for number in held)
        return total == 0, abs(total - wanted)

    return min(choices, key=distance, default=[])


def _spread(number: int, shards: int) -> list[int]:
    """Return the middle positions of ``number`` equal parts. It avoids the last shard, a small remainder."""
    return [-(-(2 * part + 1) * shards // (2 * number)) - 1 for part in range(number)]
