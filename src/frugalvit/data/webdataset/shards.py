"""WebDataset shards: tar files in which neighbouring ``1.jpg`` and ``1.cls`` are one example.

This module indexes shards by their headers and reads any image directly, as from a file. It first fetches remote shards
(``https://``, ``s3://`` …) into the cache. ``streaming_dataset.py`` streams them instead.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from tarfile import TarInfo
from typing import NamedTuple, TypeVar

import numpy as np

from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import EXTENSIONS
from frugalvit.data.formats.csv import class_list
from frugalvit.data.formats.image_folder import SPLIT_NAMES, open_root, unknown_classes
from frugalvit.data.paths import cache_root, is_file, is_folder, local
from frugalvit.data.webdataset.index import INDEX, PackedIndex, PackedShard, read_index
from frugalvit.data.webdataset.remote import describe_error, fetch, is_remote, without_query
from frugalvit.data.webdataset.tar import BadShard, list_members
from frugalvit.errors import UserError
from frugalvit.utils.files import open_regular
from frugalvit.utils.text import pluralize, truncate_list

_MAX_IMAGE, _MAX_LABEL = 1 << 30, 1 << 20
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_SHARDS = 1_000_000
_LABEL_KIND = "cls"  # a .txt or .json is a caption or metadata
_MAX_FIELDS = 64  # images and labels of one sample; more names that share a key are a collision
T = TypeVar("T")


class Sample(NamedTuple):
    """One example of a shard: the location of its image, and its label."""

    key: str
    offset: int
    size: int
    label: str | None


Listed = list[tuple[int, Sample]]  # examples, each with the number of its shard


class Collisions(NamedTuple):
    """Names of images that share a key with others: each ``read`` as an example, or ``unused``."""

    read: list[str]
    unused: list[str]

    def notes(self, where: str) -> list[str]:
        """Return a line for each kind, for the user."""
        read = f"{where}: {{}} share their name up to the first dot ({{}}): each is read as one example."
        unused = f"{where}: {{}} not used, because the sample has another image ({{}})."
        pairs = ((read, self.read), (unused, self.unused))
        return [text.format(pluralize(len(names), "image"), truncate_list(names, 3)) for text, names in pairs if names]


class ShardExamples(ImageDataset):
    """Images inside tar files, read by their ``offsets``, int64 (N, 3): shard, offset, size."""

    per_image = ("offsets",)

    def __init__(
        self,
        shards: list[str],
        offsets: np.ndarray,
        keys: list[str],
        labels: np.ndarray | None,
        index: PackedIndex | None = None,
    ) -> None:
        names = [f"{shards[shard]}/{key}" for shard, key in zip(offsets[:, 0], keys, strict=True)]
        super().__init__(names, labels, keys)
        self.shards, self.offsets, self.index = shards, offsets, index

    def raw(self, index: int) -> bytes:
        return self._read_end(index, self.stored_size(index))

    def sample_bytes(self, index: int) -> bytes:
        return self._read_end(index, min(4096, self.stored_size(index)))

    def _read_end(self, index: int, size: int) -> bytes:
        shard, offset, stored = (int(value) for value in self.offsets[index])
        try:
            with open_regular(self.shards[shard]) as file:
                file.seek(offset + stored - size)
                content = file.read(size)
        except OSError as error:
            raise UnreadableImage(self.names[index], f"cannot read its shard: {error.strerror or error}") from None
        if len(content) < size:
            raise UnreadableImage(self.names[index], "its shard has become shorter")
        return content

    def stored_size(self, index: int) -> int:
        return int(self.offsets[index, 2])

    def _fingerprint_items(self, times: bool) -> Iterable[object]:
        shards = [_shard_fingerprint(shard, self.index, times) for shard in self.shards]
        return ((shards[shard], offset, size) for shard, offset, size in self.offsets.tolist())


def _shard_fingerprint(shard: str, index: PackedIndex | None, times: bool) -> tuple[object, ...]:
    """Return size and index checksum, which a copy keeps; without an index, size and time."""
    path = Path(shard)
    if not path.exists():
        return ("missing",)
    listed, status = index_entry(shard, index), path.stat()
    if listed is not None and listed.bytes == status.st_size:
        return (status.st_size, listed.sha256)
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns) if times else (status.st_size,)


def is_shards(where: str) -> bool:
    """True for tar files: a file, a ``{000..009}`` range, a ``*`` pattern, an address, or a folder of them."""
    if is_remote(where) and where.endswith(f"/{INDEX}"):
        return True
    path = local(where)
    if is_folder(path):
        return is_shard_folder(path)
    return without_query(where).lower().endswith((".tar", ".tar.gz", ".tgz")) and (
        is_remote(where) or bool(_RANGE.search(where)) or "*" in where or is_file(path)
    )


def is_shard_folder(path: Path) -> bool:
    """True if a folder holds tar files, and neither images nor other folders."""
    by_split = _shards_by_split(path)
    if not by_split:
        return False
    root = open_root(str(path))
    tar_folders = {str(Path(tar).parent) for tars in by_split.values() for tar in tars}
    return not root.images and all(folder in tar_folders for folder in root.folders)


def expand(where: str) -> list[str]:
    """Expand ``a/{000..002}.tar`` to three names and a local ``*`` to files. Several ranges multiply."""
    match = _RANGE.search(where)
    if match:
        first, last = match.groups()
        if int(last) < int(first) or int(last) - int(first) >= _MAX_SHARDS:
            raise UserError(f"{match.group()} in '{where}' is not a range: use two rising numbers below a million.")
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        return [name for n in numbers for name in expand(where[: match.start()] + n + where[match.end() :])]
    path = local(where)
    if "*" in path.name and not is_remote(where):
        return sorted(str(tar) for tar in path.parent.glob(path.name))
    return [where if is_remote(where) else str(path)]


def list_shards(where: str) -> tuple[dict[str, list[str]], PackedIndex | None]:
    """List the shards of every split of a folder, a pattern or an address, and the index beside them."""
    path = local(where)
    index = read_index(where)
    if is_remote(where) and where.endswith(f"/{INDEX}"):
        if index is None:
            raise UserError(f"{where} is missing, or not an index of 'frugalvit data pack'.")
        base = where.rpartition("/")[0]
        return {name: [f"{base}/{shard.file}" for shard in shards] for name, shards in index.splits.items()}, index
    if not is_remote(where) and path.is_dir():
        return _shards_by_split(path), index
    by_split = _by_split(expand(where))
    # Without train shards, all shards are read as train.
    return by_split if "train" in by_split else {"train": expand(where)}, index


def index_entry(shard: str, index: PackedIndex | None) -> PackedShard | None:
    """Return the entry of a shard in the index, by its file name without the query of an address."""
    name = without_query(shard).rpartition("/")[2] if is_remote(shard) else Path(shard).name
    return None if index is None else index.by_name.get(name)


def local_shard(shard: str, index: PackedIndex | None) -> str:
    """Return the path of a shard. A remote shard is fetched first, and again if the index has a new checksum."""
    if not is_remote(shard):
        return shard
    listed = index_entry(shard, index)
    return str(fetch(shard, listed.sha256 if listed else ""))


def open_shards(where: str) -> DatasetSplits:
    """Open every split of the shards; a damaged shard is left out and noted."""
    notes: list[str] = []
    by_split, index = list_shards(where)
    if index is not None and not is_remote(where) and local(where).is_dir():
        missing = sorted(set(index.by_name) - {Path(name).name for names in by_split.values() for name in names})
        if missing:
            notes.append(f"{where} lacks {len(missing)} of the shards in its {INDEX}: {truncate_list(missing)}.")
    if is_remote(where):
        by_split = {split: [local_shard(name, index) for name in names] for split, names in by_split.items()}
        notes.append(f"{sum(map(len, by_split.values())):,} remote shards are now in {cache_root() / 'shards'}.")
    listed = {split: list(index_shards(names, where, notes)) for split, names in by_split.items()}
    if not any(listed.values()):
        raise UserError(f"{where} has no images in readable shards.{' ' + notes[-1] if notes else ''}")

    counts = [Counter(sample.label for _, sample in part) for part in listed.values()]
    labelled = find_labels(counts, where, notes) is not None
    train = listed.get("train", next(iter(listed.values())))
    labels, names = class_names(class_list(sample.label for _, sample in train), index) if labelled else (None, [])
    splits: dict[str, ImageDataset] = {
        split: shard_examples(by_split[split], part, labels, f"{split} in {where}", index)
        for split, part in listed.items()
        if part
    }
    name = Path(where).resolve().name if not is_remote(where) else where
    return DatasetSplits(name, where, "shards", tuple(names) if labelled else None, splits, notes)


def index_shards(names: list[str], where: str, notes: list[str]) -> Iterator[tuple[int, Sample]]:
    """Yield the examples of all shards, each with its shard's number. Damaged shards are left out and noted."""
    damaged: list[str] = []
    collisions = Collisions([], [])
    for number, name in enumerate(names):
        try:
            samples = list(read_shard(name, collisions))
        except (BadShard, OSError) as error:
            damaged.append(f"{name} ({describe_error(error)})")
        else:
            yield from ((number, sample) for sample in samples)
    if damaged:
        notes.append(f"{len(damaged)} of {len(names)} shards of {where} are left out: {truncate_list(damaged)}.")
    notes += collisions.notes(where)


def read_shard(name: str, collisions: Collisions | None = None) -> Iterator[Sample]:
    """Yield the examples of one shard in order; members without an image are skipped."""
    with open_regular(name) as file:
        named = ((member.name, member) for member in list_members(name) if is_wanted(member))
        for key, image, member in group_members(named, collisions):
            label = None
            if member is not None:
                file.seek(member.offset_data)
                label = parse_label(file.read(member.size))
            yield Sample(key, image.offset_data, image.size, label)


def split_name(name: str) -> tuple[str, str]:
    """Split a member's path into key and kind at the first dot of its file name."""
    folder, slash, last = name.rpartition("/")
    stem, _, kind = last.partition(".")
    return (folder + slash + stem if stem and "__MACOSX" not in folder else ""), kind.lower()


def is_wanted(member: TarInfo) -> bool:
    """True if a member can belong to an example: an image or a label of a plausible size."""
    key, kind = split_name(member.name)
    ending = kind.rpartition(".")[2]
    limit = _MAX_IMAGE if f".{ending}" in EXTENSIONS else _MAX_LABEL if ending == _LABEL_KIND else -1
    return bool(key) and member.size <= limit


def group_members(
    named: Iterable[tuple[str, T]], collisions: Collisions | None = None
) -> Iterator[tuple[str, T, T | None]]:
    """Group neighbouring members into examples: key, first image, label. Groups without image are skipped.

    By WebDataset's rule a name up to its first dot is the key: ``1.jpg``, ``1.seg.png`` and ``1.cls`` are one example.
    Several images without ``1.jpg`` and ``1.cls``, as ``cat.0.jpg`` and ``cat.1.jpg``, are examples of their own, up to
    the last dot.
    """
    collisions = collisions or Collisions([], [])
    for key, members in itertools.groupby(named, key=lambda item: split_name(item[0])[0]):
        fields = list(itertools.islice(members, _MAX_FIELDS))
        if len(fields) == 1 or (len(fields) < _MAX_FIELDS and any(_last_stem(name) == key for name, _ in fields)):
            yield from _pick_image(key, fields, collisions)
            continue
        stems: list[str] = []
        for stem, part in itertools.groupby(itertools.chain(fields, members), key=lambda item: _last_stem(item[0])):
            for example in _pick_image(stem, part, collisions):
                stems.append(stem)
                yield example
        collisions.read.extend(stems if len(stems) > 1 else [])


def _last_stem(name: str) -> str:
    return name.rpartition(".")[0]


def _pick_image(
    key: str, members: Iterable[tuple[str, T]], collisions: Collisions
) -> Iterator[tuple[str, T, T | None]]:
    """Yield the example of some members, if one of them is an image."""
    image: T | None = None
    label: T | None = None
    for name, item in members:
        if name.lower().endswith(f".{_LABEL_KIND}"):
            label = item if _last_stem(name) == key else label
        elif image is None:
            image = item
        else:
            collisions.unused.append(name)
    if image is not None:
        yield key, image, label


def parse_label(content: bytes | None) -> str | None:
    """Return the label in a ``.cls`` member; None if it is missing or empty."""
    return (content or b"").decode("utf-8", "replace").strip() or None


def class_names(labels: list[str], index: PackedIndex | None) -> tuple[list[str], list[str]]:
    """Return raw labels and class names. An index also names classes without images."""
    if index is not None and index.classes is not None:
        numbers = [str(number) for number in range(len(index.classes))]
        if set(labels) <= set(numbers):
            return numbers, list(index.classes)
    return labels, labels


def shard_examples(
    shards: list[str], listed: Listed, labels: list[str] | None, what: str, index: PackedIndex | None
) -> ShardExamples:
    """Make a dataset of listed examples. Each label becomes its position in ``labels``."""
    numbers = None
    if labels is not None:
        number_of = {label: number for number, label in enumerate(labels)}
        unknown = class_list(sample.label for _, sample in listed if sample.label not in number_of)
        if unknown:
            raise unknown_classes(what, "train", unknown)
        numbers = np.array([number_of[sample.label or ""] for _, sample in listed])
    offsets = np.array([(number, sample.offset, sample.size) for number, sample in listed], dtype=np.int64)
    return ShardExamples(shards, offsets, [sample.key for _, sample in listed], numbers, index)


def find_labels(parts: Sequence[Counter[str | None]], where: str, notes: list[str]) -> list[str] | None:
    """Return the sorted labels of counted examples; None, with a note, if an example has no label."""
    unlabelled = sum(part[None] for part in parts)
    if unlabelled:
        count = sum(part.total() for part in parts)
        notes.append(f"{where}: {unlabelled:,} of {count:,} examples have no label (.cls): read as unlabelled.")
        return None
    return class_list(label for part in parts for label in part)


def _shards_by_split(folder: Path) -> dict[str, list[str]]:
    """Assign the tar files of a folder to splits by name, and ``train/000000.tar`` by its folder."""
    by_split = _by_split([str(tar) for tar in sorted(folder.glob("*.tar"))])
    for name, split in SPLIT_NAMES.items():
        if inside := sorted(folder.glob(f"{name}/*.tar")):
            by_split.setdefault(split, []).extend(map(str, inside))
    return by_split


def _by_split(shards: list[str]) -> dict[str, list[str]]:
    """Assign shards to splits by their names, such as ``imagenet1k-validation-00.tar``; else train."""
    by_split: dict[str, list[str]] = {}
    for shard in shards:
        name = PurePosixPath(without_query(shard).replace("\\", "/")).name.lower()
        split = next((SPLIT_NAMES[word] for word in re.split(r"[-_.]", name) if word in SPLIT_NAMES), "train")
        by_split.setdefault(split, []).append(shard)
    return by_split
