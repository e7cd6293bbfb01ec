"""Shards read at random: splits, labels, damage named, and nothing escapes its folder."""

import pickle
from pathlib import Path

import pytest

from frugalvit.data import open_data
from frugalvit.data.unreadable import UnreadableImage
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.webdataset.shards import expand, list_shards
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.tar import list_members
from frugalvit.errors import UserError
from helpers.shards import png, write_shards, write_tar


def test_ranges_expand() -> None:
    assert expand("a/{008..011}.tar") == [f"a/{n:03d}.tar" for n in (8, 9, 10, 11)]
    assert len(expand("{0..2}/{0..3}.tar")) == 12
    for wrong in ("{5..2}.tar", "{0..99999999}.tar"):
        with pytest.raises(UserError, match="range"):
            expand(wrong)


def test_images_are_read_at_random(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s")
    for location in (where, f"{tmp_path}/s", f"{tmp_path}/s/*.tar"):
        source = open_data(location, split="given")
        train = source.splits["train"]
        assert source.classes == ("0", "1") and len(train) == 12 and source.kind == "shards"
        assert train.labels.tolist() == [0, 1] * 6 and [train.read(i)[0, 0, 0] for i in (11, 0, 5)] == [11, 0, 5]
    copy = pickle.loads(pickle.dumps(train.subset([7])))
    assert copy.read(0)[0, 0, 0] == 7 and copy.stored_size(0) == len(copy.raw(0)) and copy.names[0].endswith("0007")
    assert open_data(where, split="given").splits["train"].fingerprint() == train.fingerprint()
    (tmp_path / "s" / "000.tar").write_bytes(b"")
    with pytest.raises(UnreadableImage, match="shorter"):
        train.read(0)


def test_a_damaged_shard_is_named_and_left_out(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s")
    middle = tmp_path / "s" / "001.tar"
    middle.write_bytes(middle.read_bytes()[:900])
    source = open_data(where, split="given")
    assert len(source) == 8 and "1 of 3 shards" in source.notes[0] and "001.tar (truncated" in source.notes[0]
    with pytest.raises(UserError, match=r"001\.tar has no images"):
        open_data(str(middle))
    source = open_data(where.replace("002}", "003}"), split="given")
    assert "003.tar" in source.notes[0] and "No such file" in source.notes[0]


def test_labels_are_in_cls_members(tmp_path: Path) -> None:
    files = {f"x/{i}.{kind}": content for i in range(4) for kind, content in (("jpg", png(i)), ("txt", b"a caption"))}
    unlabelled = open_data(write_tar(tmp_path / "a.tar", files), split="given")
    assert unlabelled.classes is None and len(unlabelled) == 4 and ".cls" in unlabelled.notes[0]
    files = {f"{i}.{kind}": content for i in range(4) for kind, content in (("jpg", png(i)), ("cls", b"cat\n"))}
    assert open_data(write_tar(tmp_path / "b.tar", files), split="given").classes == ("cat",)


def test_members_never_escape_their_folder(tmp_path: Path) -> None:
    files = {"../../evil.png": png(1), "/etc/evil.png": png(2), "..\\evil.png": png(3), "../evil.cls": b"1"}
    path = write_tar(tmp_path / "deep" / "er" / "a.tar", files)
    before = sorted(tmp_path.rglob("*"))
    source = open_data(path, split="given")
    for i in range(len(source.splits["train"])):
        source.splits["train"].read(i)
    assert len(list(ShardStream([str(path)], [len(source)]).epoch())) == len(source)
    packed = tmp_path / "deep" / "packed"
    pack(source, packed)
    assert all(packed in (new, *new.parents) for new in tmp_path.rglob("*") if new not in before)
    names = [member.name for shard in packed.glob("*.tar") for member in list_members(shard)]
    assert names and not any("/" in name or "\\" in name or ".." in name for name in names)


def test_shards_belong_to_the_split_in_their_names(tmp_path: Path) -> None:
    for name in ("imagenet1k-train-00", "imagenet1k-train-01", "imagenet1k-validation-00", "train-00", "test_00", "0"):
        write_tar(tmp_path / f"{name}.tar", {"1.png": png(1), "1.cls": b"0"})
    for where in (str(tmp_path), f"{tmp_path}/*.tar"):
        splits = {split: [Path(name).stem for name in names] for split, names in list_shards(where)[0].items()}
        assert splits == {
            "train": ["0", "imagenet1k-train-00", "imagenet1k-train-01", "train-00"],
            "val": ["imagenet1k-validation-00"],
            "test": ["test_00"],
        }
    assert list(list_shards(f"{tmp_path}/imagenet1k-validation-{{00..00}}.tar")[0]) == ["train"]
