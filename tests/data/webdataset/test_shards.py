"""Shards: written the same way twice, read at random or in passing, damage named, and nothing escapes its folder."""

from __future__ import annotations

import json
import pickle
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frugalvit.cli import main as cli
from frugalvit.data import open_data
from frugalvit.data.decode import UnreadableImage
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.webdataset.shards import expand, layout
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.tar import BadShard, members
from frugalvit.errors import UserError
from helpers.shards import photos, png, write_shards, write_tar

# ---- tar ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1, max_size=150).map(
            lambda name: name.strip("/") or "x"
        ),
        st.binary(max_size=1500),
        max_size=5,
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
)
def test_members_are_where_tarfile_finds_them(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], format_number: int
) -> None:
    path = write_tar(tmp_path_factory.getbasetemp() / "members.tar", files, format_number)
    found = list(members(path))
    content = path.read_bytes()
    with tarfile.open(path) as archive:
        expected = [(member.name, member.size, member.offset_data) for member in archive if member.isreg()]
    assert [(m.name.rstrip("/"), m.size, m.offset) for m in found] == expected
    assert [content[m.offset : m.offset + m.size] for m in found] == list(files.values())


def test_long_ustar_names_are_joined(tmp_path: Path) -> None:
    name = "/".join(["folder" * 8] * 4) + "/image.png"
    path = write_tar(tmp_path / "a.tar", {name: b"x"}, tarfile.USTAR_FORMAT)
    assert [member.name for member in members(path)] == [name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: b"", "empty"),
        (lambda content: content[:700], "truncated"),
        (lambda content: content[:-9000], "truncated|end mark"),
        (lambda content: b"\x1f\x8b" + content[2:], "compressed"),
        (lambda content: b"not a tar at all" * 100, "not a tar"),
        (lambda content: content[:1024] + b"\xff" * 512 + content[1536:], "damaged"),
    ],
)
def test_damage_is_recognised(tmp_path: Path, change, words: str) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{i}.png": png(i) for i in range(5)})
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadShard, match=words):
        list(members(path))


@settings(max_examples=80)
@given(st.binary(max_size=2000) | st.lists(st.tuples(st.integers(0, 3000), st.binary(max_size=8)), max_size=8))
def test_fuzzed_shards(tmp_path_factory: pytest.TempPathFactory, damage: bytes | list[tuple[int, bytes]]) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.tar"
    if isinstance(damage, bytes):
        path.write_bytes(damage)
    else:
        write_tar(path, {"a.png": png(1), "a.json": b'{"label": 1}', "b.png": png(2), "b.txt": b"x"})
        content = bytearray(path.read_bytes())
        for place, patch in damage:
            content[place : place + len(patch)] = patch
        path.write_bytes(bytes(content))
    try:
        for examples in open_data(path).splits.values():
            for i in range(len(examples)):
                examples.read(i)
    except UserError as error:
        message = str(error)
    else:
        message = "fine"
    assert "\n" not in message
    list(ShardStream([str(path)]).epoch())


# ---- reading --------------------------------------------------------------------------------------------------------


def test_ranges_expand() -> None:
    assert expand("a/{008..011}.tar") == [f"a/{n:03d}.tar" for n in (8, 9, 10, 11)]
    assert len(expand("{0..2}/{0..3}.tar")) == 12
    for wrong in ("{5..2}.tar", "{0..99999999}.tar"):
        with pytest.raises(UserError, match="is no range"):
            expand(wrong)


def test_random_access(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s")
    for place in (where, f"{tmp_path}/s", f"{tmp_path}/s/*.tar"):
        source = open_data(place, split="given")
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
    with pytest.raises(UserError, match="no images in readable shards"):
        open_data(str(middle))
    source = open_data(where.replace("002}", "003}"), split="given")
    assert "003.tar" in source.notes[0] and "No such file" in source.notes[0]


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        ({"json": [b'{"label": "cat"}', b'{"class": "dog"}', b'{"cls": "cat"}', b'{"target": "dog"}']}, ("cat", "dog")),
        ({"txt": [b"cat\n", b"dog\n", b"cat\n", b"dog\n"]}, ("cat", "dog")),
        ({"txt": [b"a cat on a mat", b"two dogs", b"a third picture", b"and a fourth"]}, None),
        ({"json": [b"{", b"[]", b"{}", b"1"]}, None),
        ({}, None),
    ],
)
def test_labels_of_every_kind(tmp_path: Path, labels: dict[str, list[bytes]], classes: tuple[str, ...] | None) -> None:
    files: dict[str, bytes] = {}
    for i in range(4):
        files[f"x/{i}.jpg"] = png(i)
        files |= {f"x/{i}.{kind}": texts[i] for kind, texts in labels.items()}
    source = open_data(write_tar(tmp_path / "a.tar", files), split="given")
    assert source.classes == classes and len(source) == 4


def test_members_never_escape(tmp_path: Path) -> None:
    files = {"../../evil.png": png(1), "/etc/evil.png": png(2), "..\\evil.png": png(3), "../evil.cls": b"1"}
    path = write_tar(tmp_path / "deep" / "er" / "a.tar", files)
    before = sorted(tmp_path.rglob("*"))
    source = open_data(path, split="given")
    for i in range(len(source.splits["train"])):
        source.splits["train"].read(i)
    assert len(list(ShardStream([str(path)]).epoch())) == len(source)
    pack(source, tmp_path / "deep" / "packed")
    new = [found for found in tmp_path.rglob("*") if found not in before]
    assert all((tmp_path / "deep" / "packed") in (found, *found.parents) for found in new)
    names = [member.name for shard in (tmp_path / "deep/packed").glob("*.tar") for member in members(shard)]
    assert names and not any("/" in name or "\\" in name or ".." in name for name in names)


# ---- packing --------------------------------------------------------------------------------------------------------


def test_packed_data_are_the_same_data(tmp_path: Path) -> None:
    source = open_data(photos(tmp_path / "photos"), split="given")
    pack(source, tmp_path / "a", shard_megabytes=0.005)
    pack(source, tmp_path / "b", shard_megabytes=0.005)
    assert len(list((tmp_path / "a").glob("train-*.tar"))) > 1
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    packed = open_data(tmp_path / "a", split="given")
    assert packed.classes == ("cat", "dog") and list(packed.splits) == ["train", "test"]
    for split, examples in source.splits.items():
        again = packed.splits[split]
        before = sorted((int(examples.labels[i]), examples.raw(i)) for i in range(len(examples)))
        after = sorted((int(again.labels[i]), again.raw(i)) for i in range(len(again)))
        assert before == after
    in_order = pack(source, tmp_path / "c", shuffle=False).data
    assert open_data(tmp_path / "c", split="given").splits["train"].labels.tolist() == [0] * 6 + [1] * 6
    assert in_order["splits"]["train"][0]["examples"] == 12


def test_several_labels_per_image_are_not_packed(tmp_path: Path) -> None:
    source = open_data(photos(tmp_path / "photos"), split="given")
    source.splits["test"].targets = np.ones((12, 2), dtype=np.int8)
    with pytest.raises(UserError, match="shards hold one class per image: use it as it is, or pack its images"):
        pack(source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_classes_of_shards_can_be_chosen(tmp_path: Path) -> None:
    pack(open_data(photos(tmp_path / "photos"), split="given"), tmp_path / "out")
    source = open_data(tmp_path / "out", split="given", classes=["dog"])
    assert source.classes == ("dog",) and source.splits["train"].labels.tolist() == [0] * 6
    whole = open_data(tmp_path / "photos", split="given", classes=["dog"]).splits["train"]
    shades = [sorted(images.read(i)[0, 0, 0] for i in range(6)) for images in (source.splits["train"], whole)]
    assert shades[0] == shades[1]
    source = open_data(write_shards(tmp_path / "plain"), classes=["1"], labels="ignore")
    assert source.classes is None and len(source) == 6


def test_other_tools_can_read_the_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    pack(open_data(photos(tmp_path / "photos"), split="given"), tmp_path / "out")
    shards = sorted(str(path) for path in (tmp_path / "out").glob("train-*.tar"))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False).decode("rgb8"))
    assert len(samples) == 12 and all(sample["png"].shape == (5, 6, 3) for sample in samples)
    assert sorted(sample["cls"] for sample in samples) == [0] * 6 + [1] * 6


def test_pack_leaves_out_bad_files_and_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = photos(tmp_path / "photos")
    (root / "train" / "cat" / "bad.png").write_bytes(png(1)[:40])
    assert cli.main(["data", "pack", str(root), str(tmp_path / "out"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["bad"]) == 1 and data["splits"]["train"][0]["examples"] == 12
    assert cli.main(["data", "pack", str(root), str(tmp_path / "out")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert cli.main(["data", "pack", str(root), str(tmp_path / "other")]) == 0
    assert "1 bad file\n" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    (tmp_path / "out" / "test-000000.tar").unlink()
    assert "lacks 1 of the shards" in open_data(tmp_path / "out").notes[0]


def test_shards_are_not_laid_among_the_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of images with shards in it is neither the one nor the other."""
    root = photos(tmp_path / "photos")
    (tmp_path / "link").symlink_to(root, target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    (root / "train" / "away").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    before = sorted(root.rglob("*"))
    for home, data, out in [
        (".", "photos", "photos/shards"), (".", "photos", "photos/train/cat/x"), (".", "link", "photos/shards"),
        (".", "photos", "link/shards"), ("photos", ".", "shards"), ("photos/train", "..", "new"),
        (".", "photos", "photos/train/away"),
    ]:  # fmt: skip
        monkeypatch.chdir(tmp_path / home)
        assert cli.main(["data", "pack", data, out]) == 2
        assert f"{out} lies among the images of {data}: choose a folder outside" in capsys.readouterr().err
    assert sorted(root.rglob("*")) == before
    (root / "train" / "away").unlink()
    monkeypatch.chdir(root)
    assert cli.main(["data", "pack", ".", "../photos_packed"]) == 0


def test_a_stopped_pack_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_data(photos(tmp_path / "photos"), split="given")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("frugalvit.data.webdataset.pack._add", full)
    with pytest.raises(UserError, match=r"No space left on device\): choose another folder"):
        pack(source, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]


def test_arrays_are_packed_as_png(tmp_path: Path) -> None:
    from frugalvit.data.dataset import ArrayExamples, DatasetSplits

    pixels = np.random.default_rng(0).integers(0, 256, (5, 8, 8), dtype=np.uint8)
    source = DatasetSplits("x", "x", "arrays", ("a",), {"train": ArrayExamples(pixels, np.zeros(5), "x")})
    pack(source, tmp_path / "out", shuffle=False)
    train = open_data(tmp_path / "out", split="given").splits["train"]
    np.testing.assert_array_equal(train.read(3)[:, :, 0], pixels[3])


# ---- streams --------------------------------------------------------------------------------------------------------


def test_streams_give_every_example_once_over_all_parts(tmp_path: Path) -> None:
    shards = expand(write_shards(tmp_path, shards=5))
    stream = ShardStream(shards, seed=3, buffer=6)
    keys = [[s.key for s in stream.epoch(1, part=part, parts=2)] for part in range(2)]
    assert sorted(keys[0] + keys[1]) == [f"{i:04d}" for i in range(20)]
    assert keys[0] == [s.key for s in ShardStream(shards, seed=3, buffer=6).epoch(1, part=0, parts=2)]
    assert keys[0] != [s.key for s in stream.epoch(2, part=0, parts=2)]
    resumed = [s.key for s in stream.epoch(1, part=1, parts=2, skip=5)]
    assert resumed == keys[1][5:]
    plain = list(ShardStream(shards, shuffle=False).epoch())
    assert [s.key for s in plain] == [f"{i:04d}" for i in range(20)] and plain[3].label == "1"
    assert plain[3].content == png(3)
    with pytest.raises(UserError, match="cannot be divided"):
        list(stream.epoch(parts=6))


def test_a_stream_leaves_damage_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = expand(write_shards(tmp_path))
    path = Path(shards[1])
    path.write_bytes(path.read_bytes()[:2100])
    stream = ShardStream([*shards, str(tmp_path / "missing.tar")], shuffle=False)
    keys = [sample.key for sample in stream.epoch()]
    assert {*keys} >= {f"{i:04d}" for i in (0, 1, 2, 3, 8, 9, 10, 11)}
    assert [Path(name).name for name, _ in stream.damaged] == ["001.tar", "missing.tar"]
    assert "001.tar is damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_shards_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_shards(tmp_path / "web")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "web"))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        urls = expand(address + "/{000..002}.tar")
        assert len(list(ShardStream(urls).epoch())) == 12
        source = open_data(address + "/{000..002}.tar", split="given")
        assert len(source) == 12 and source.splits["train"].read(9)[0, 0, 0] == 9
        with pytest.raises(UserError, match="cannot be fetched"):
            open_data(address + "/nothing.tar")
    finally:
        server.shutdown()
        server.server_close()
    assert len(open_data(address + "/{000..002}.tar", split="given")) == 12  # from the cache, no server any more


def test_shards_belong_to_the_split_in_their_names(tmp_path: Path) -> None:
    """Wherever the name has it, in a folder and in a pattern; nothing but test shards are what was asked for."""
    for name in ("imagenet1k-train-00", "imagenet1k-train-01", "imagenet1k-validation-00", "train-00", "test_00", "0"):
        write_tar(tmp_path / f"{name}.tar", {"1.png": png(1), "1.cls": b"0"})
    for where in (str(tmp_path), f"{tmp_path}/*.tar"):
        found = {split: [Path(name).stem for name in names] for split, names in layout(where).splits.items()}
        assert found == {
            "train": ["0", "imagenet1k-train-00", "imagenet1k-train-01", "train-00"],
            "val": ["imagenet1k-validation-00"],
            "test": ["test_00"],
        }
    assert list(layout(f"{tmp_path}/imagenet1k-validation-{{00..00}}.tar").splits) == ["train"]
    write_tar(tmp_path / "lab" / "lab-dev-00.tar", {"1.png": png(1), "1.cls": b"0"})
    assert list(layout(str(tmp_path / "lab")).splits) == ["train"]
