"""WebDataset shards: tar files whose neighbouring members with one stem are one example (``0001.jpg``, ``0001.cls``).

Here shards are indexed by their headers and read at random, like files; those that lie elsewhere (``https://``,
``s3://`` …) are fetched once into the cache first. Training reads them in passing instead (``streaming.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import UnreadableImage
from frugalvit.data.file_types import EXTENSIONS
from frugalvit.data.formats.folder import SPLIT_NAMES, open_root, unknown_classes
from frugalvit.data.formats.table import LABEL_COLUMNS, class_list
from frugalvit.data.paths import local
from frugalvit.data.webdataset.index import INDEX, Attached, DecodedFile, PackedIndex, PackedShard, index_beside
from frugalvit.data.webdataset.remote import fetch, is_pipe, is_remote, without_query
from frugalvit.data.webdataset.tar import BadShard, Member, members
from frugalvit.errors import UserError
from frugalvit.utils.files import utf8_safe
from frugalvit.utils.text import truncate_list

_MAX_IMAGE, _MAX_TEXT = 1 << 30, 1 << 20
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_SHARDS = 1_000_000


class Sample(NamedTuple):
    """One example of a shard: where its image lies, and its label."""

    key: str
    offset: int
    size: int
    label: str | None
    caption: bool


class ShardExamples(ImageDataset):
    """Images inside tar files, read by their offsets."""

    def __init__(
        self,
        shards: list[str],
        places: np.ndarray,
        keys: list[str],
        labels: np.ndarray | None,
        index: PackedIndex | None = None,
    ) -> None:
        names = [f"{shards[shard]}/{key}" for shard, key in zip(places[:, 0], keys, strict=True)]
        super().__init__(names, labels, keys)
        self.shards, self.places = shards, places  # places: int64 (N, 3): shard, offset, size
        self.index = index

    def attach(self, files: list[DecodedFile], folder: Path) -> None:
        """Files of decoded images that lie beside the shards of this whole split."""
        here = [(folder / file.file, file) for file in files if (folder / file.file).is_file()]
        self.decoded = Attached(here, self.fingerprint()) if here else None

    def raw(self, index: int) -> bytes:
        shard, offset, size = (int(value) for value in self.places[index])
        try:
            with Path(self.shards[shard]).open("rb") as file:
                file.seek(offset)
                content = file.read(size)
        except OSError as error:
            raise UnreadableImage(self.names[index], f"its shard cannot be read: {error.strerror or error}") from None
        if len(content) < size:
            raise UnreadableImage(self.names[index], "its shard has become shorter")
        return content

    def stored_size(self, index: int) -> int:
        return int(self.places[index, 2])

    def _select(self, full: ImageDataset, chosen: np.ndarray) -> None:
        assert isinstance(full, ShardExamples)
        self.places = full.places[chosen]
        self.split_rows = chosen if full.split_rows is None else full.split_rows[chosen]

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        facts = [_facts(shard, self.index, times) for shard in self.shards]
        return ((facts[shard], offset, size) for shard, offset, size in self.places.tolist())


def _facts(shard: str, index: PackedIndex | None, times: bool) -> tuple[object, ...]:
    """What changes when a shard does: what its index says, so that a copy stays the same, or size and time."""
    path = Path(shard)
    if not path.exists():
        return ("missing",)
    known, size = listed_as(shard, index), path.stat().st_size
    if known is not None and known.bytes == size:
        return (size, known.sha256)
    return (size, path.stat().st_mtime_ns) if times else (size,)


def is_shards(where: str) -> bool:
    """Whether ``where`` names tar files: one, a ``{000..009}`` range, a ``*`` pattern, or remote ones."""
    if is_pipe(where):
        return True
    if is_remote(where) and where.endswith(f"/{INDEX}"):
        return True
    return without_query(where).lower().endswith((".tar", ".tar.gz", ".tgz")) and (
        is_remote(where) or bool(_RANGE.search(where)) or "*" in where or local(where).is_file()
    )


def is_shard_folder(path: Path) -> bool:
    """Whether a folder holds shards: tar files, and neither images nor folders of anything else beside them."""
    by_split = _shards_by_split(path)
    if not by_split:
        return False
    found = open_root(str(path))
    homes = {str(Path(tar).parent) for tars in by_split.values() for tar in tars}
    return not found.images and all(folder in homes for folder in found.folders)


def expand(where: str) -> list[str]:
    """``a/{000..002}.tar`` -> three names; several ranges multiply; ``*`` is looked up on disk."""
    match = _RANGE.search(where)
    if match:
        first, last = match.groups()
        if int(last) < int(first) or int(last) - int(first) >= _MAX_SHARDS:
            raise UserError(
                f"{match.group()} in '{where}' is no range: it must rise, over fewer than a million shards."
            )
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        return [name for n in numbers for name in expand(where[: match.start()] + n + where[match.end() :])]
    path = local(where)
    if "*" in path.name and not is_remote(where):
        return sorted(str(found) for found in path.parent.glob(path.name))
    return [where if is_remote(where) else str(path)]


class Layout(NamedTuple):
    """Where the shards of every split lie, and the index beside them if there is one."""

    splits: dict[str, list[str]]
    index: PackedIndex | None


def layout(where: str) -> Layout:
    """The shards that ``where`` means: a folder of them, a pattern, an address, or the address of an index."""
    path = local(where)
    index = index_beside(where)
    if is_remote(where) and where.endswith(f"/{INDEX}"):
        if index is None:
            raise UserError(f"{where} is not to be had, or is no index that 'frugalvit data pack' writes.")
        base = where.rpartition("/")[0]
        return Layout({name: [f"{base}/{s.file}" for s in shards] for name, shards in index.splits.items()}, index)
    if not is_remote(where) and path.is_dir():
        return Layout(_shards_by_split(path), index)
    by_split = _by_split(expand(where))
    # Whoever names nothing but test shards wants those.
    return Layout(by_split if "train" in by_split else {"train": expand(where)}, index)


def listed_as(shard: str, index: PackedIndex | None) -> PackedShard | None:
    """What an index says of a shard, by its file name: the query of an address is no part of that."""
    name = without_query(shard).rpartition("/")[2] if is_remote(shard) else Path(shard).name
    return None if index is None else index.shard(name)


def at_hand(shard: str, index: PackedIndex | None) -> str:
    """The path of a shard, fetched first where it lies elsewhere; the index tells a newer one from the one we have."""
    if not is_remote(shard):
        return shard
    if index is None:
        return str(fetch(shard))
    listed = listed_as(shard, index)
    return str(fetch(shard, version=index.version, sha256=listed.sha256 if listed else ""))


def open_shards(where: str) -> DatasetSplits:
    """Every split of the shards; a damaged shard is left out and named."""
    notes: list[str] = []
    by_split, index = layout(where)
    if index is not None and not is_remote(where) and local(where).is_dir():
        listed = {shard.file for shards in index.splits.values() for shard in shards}
        missing = sorted(listed - {Path(name).name for names in by_split.values() for name in names})
        if missing:
            notes.append(
                f"{where} lacks {len(missing)} of the shards that its {INDEX} lists: {truncate_list(missing)}."
            )
    if is_remote(where):
        by_split = {split: [at_hand(name, index) for name in names] for split, names in by_split.items()}
        count, place = sum(map(len, by_split.values())), next(iter(by_split.values()))[0]
        notes.append(f"{count:,} remote shards lie in {Path(place).parent} now.")
    found: dict[str, tuple[list[str], list[tuple[int, Sample]]]] = {}
    for split, names in by_split.items():
        found[split] = (names, list(index_shards(names, where, notes)))
    if not any(samples for _, samples in found.values()):
        why = f" {notes[-1]}" if notes else ""
        raise UserError(f"{where} holds no images in readable shards.{why}")
    return _source(where, found, notes, index)


def index_shards(names: list[str], where: str, notes: list[str]) -> Iterator[tuple[int, Sample]]:
    """Shard number and example, one after the other; a damaged shard is left out whole, and noted."""
    bad: list[str] = []
    for number, name in enumerate(names):
        try:
            samples = list(read_shard(name))
        except BadShard as error:
            bad.append(f"{name} ({error})")
        except OSError as error:
            bad.append(f"{name} ({error.strerror or error})")
        else:
            yield from ((number, sample) for sample in samples)
    if bad:
        notes.append(f"{len(bad)} of {len(names)} shards of {where} are left out: {truncate_list(bad)}.")


def read_shard(name: str) -> Iterator[Sample]:
    """The examples of one shard, in order; members without an image are passed over."""
    with Path(name).open("rb") as file:
        for key, parts in _grouped(filter(is_wanted, members(name))):
            image = next((part for kind, part in parts.items() if is_image_kind(kind)), None)
            if image is None:
                continue
            texts: dict[str, bytes] = {}
            for kind, part in parts.items():
                if is_text(kind):
                    file.seek(part.offset)
                    texts[kind] = file.read(part.size)
            label, caption = label_of(texts)
            yield Sample(key, image.offset, image.size, label, caption)


def split_name(name: str) -> tuple[str, str]:
    """Key and kind of a member: its path up to the first dot of its last part, and what follows that dot."""
    folder, slash, last = name.rpartition("/")
    stem, _, kind = last.partition(".")
    return (folder + slash + stem if stem and "__MACOSX" not in folder else ""), kind.lower()


def is_image_kind(kind: str) -> bool:
    return f".{kind.rpartition('.')[2]}" in EXTENSIONS


def is_text(kind: str) -> bool:
    return kind in ("cls", "json", "txt")


def is_wanted(member: Member) -> bool:
    """Whether a member can belong to an example: an image or a label, of a believable size."""
    key, kind = split_name(member.name)
    limit = _MAX_IMAGE if is_image_kind(kind) else _MAX_TEXT if is_text(kind) else -1
    return bool(key) and member.size <= limit


def _grouped(listed: Iterable[Member]) -> Iterator[tuple[str, dict[str, Member]]]:
    """Neighbours with the same key, by their kind."""
    current, parts = "", {}
    for member in listed:
        key, kind = split_name(member.name)
        if not key:
            continue
        if key != current and parts:
            yield current, parts
            parts = {}
        current = key
        parts[kind] = member
    if parts:
        yield current, parts


def label_of(texts: dict[str, bytes]) -> tuple[str | None, bool]:
    """The label among the text members of an example, and whether it may be a caption instead."""
    if "cls" in texts:
        return texts["cls"].decode("utf-8", "replace").strip() or None, False
    if "json" in texts:
        try:
            record = json.loads(texts["json"])
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict):
            for key in ("cls", *LABEL_COLUMNS):
                if isinstance(record.get(key), str | int) and str(record[key]).strip():
                    return utf8_safe(str(record[key]).strip()), False
    if "txt" in texts:
        return texts["txt"].decode("utf-8", "replace").strip() or None, True
    return None, False


def _source(
    where: str,
    found: dict[str, tuple[list[str], list[tuple[int, Sample]]]],
    notes: list[str],
    index: PackedIndex | None,
) -> DatasetSplits:
    samples = [sample for _, listed in found.values() for _, sample in listed]
    labelled = _are_labels(samples, where, notes)
    train = found.get("train", next(iter(found.values())))[1]
    texts, names = class_names(class_list(sample.label for _, sample in train), index) if labelled else ([], [])
    splits: dict[str, ShardExamples] = {}
    for split in ("train", "val", "test"):
        shards, listed = found.get(split, ([], []))
        if listed:
            splits[split] = shard_examples(shards, listed, texts if labelled else None, f"{split} in {where}", index)
            if index is not None and shards:
                splits[split].attach([f for f in index.decoded if f.split == split], Path(shards[0]).parent)
    name = Path(where).resolve().name if not is_remote(where) else where
    return DatasetSplits(name, where, "shards", tuple(names) if labelled else None, dict(splits), notes)


def class_names(labels: list[str], index: PackedIndex | None) -> tuple[list[str], list[str]]:
    """Labels as written and what people call them: an index gives names to numbers, also to those nobody has."""
    if index is not None and index.classes is not None:
        numbers = [str(number) for number in range(len(index.classes))]
        if set(labels) <= set(numbers):
            return numbers, list(index.classes)
    return labels, labels


def shard_examples(
    shards: list[str],
    listed: list[tuple[int, Sample]],
    texts: list[str] | None,
    what: str,
    index: PackedIndex | None,
) -> ShardExamples:
    """Indexed examples, their labels as positions in ``texts``."""
    numbers = None
    if texts is not None:
        place = {label: number for number, label in enumerate(texts)}
        unknown = class_list(sample.label for _, sample in listed if sample.label not in place)
        if unknown:
            raise unknown_classes(what, "train", unknown, what.split()[0])
        numbers = np.array([place[sample.label or ""] for _, sample in listed])
    places = np.array([(number, sample.offset, sample.size) for number, sample in listed], dtype=np.int64)
    return ShardExamples(shards, places, [sample.key for _, sample in listed], numbers, index)


def _are_labels(samples: list[Sample], where: str, notes: list[str]) -> bool:
    labelled = [sample for sample in samples if sample.label]
    if not labelled:
        notes.append(f"No member of {where} is a label (.cls, .json or .txt): read as unlabelled.")
        return False
    if any(sample.caption for sample in labelled):
        texts = {sample.label or "" for sample in labelled}
        if len(texts) > len(samples) / 2 or any(len(text) > 100 or "\n" in text for text in texts):
            notes.append(f"{where}: the .txt members read like captions, not labels: read as unlabelled.")
            return False
    if len(labelled) < len(samples):
        bare = next(sample.key for sample in samples if not sample.label)
        notes.append(f"{where}: {len(samples) - len(labelled):,} examples have no label, {bare} first: unlabelled.")
        return False
    return True


def _shards_by_split(folder: Path) -> dict[str, list[str]]:
    """Tar files in the folder by their names, ``train/000000.tar`` by the folder's."""
    by_split = _by_split([str(tar) for tar in sorted(folder.glob("*.tar"))])
    for word, split in SPLIT_NAMES.items():
        if inside := sorted(folder.glob(f"{word}/*.tar")):
            by_split.setdefault(split, []).extend(map(str, inside))
    return by_split


def _by_split(shards: list[str]) -> dict[str, list[str]]:
    """``train-000000.tar`` and ``imagenet1k-validation-00.tar`` by the first split in their names; others are train.

    Where none would be, only a name's first word counts: ``lab-dev-00.tar`` alone are images to learn from.
    """
    names = [PurePosixPath(without_query(shard).replace("\\", "/")).name.lower() for shard in shards]
    by_split: dict[str, list[str]] = {}
    for most in (None, 1):
        by_split = {}
        for shard, name in zip(shards, names, strict=True):
            words = re.split(r"[-_.]", name)[:most]
            split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "train")
            by_split.setdefault(split, []).append(shard)
        if "train" in by_split:
            break
    return by_split
