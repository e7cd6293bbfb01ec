"""Shards that are read in passing and have no val: which of them are held out, and that a run keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.data import open_data
from frugalvit.data.dataset import DatasetSplits
from frugalvit.data.webdataset.index import index_beside
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.webdataset.streaming_dataset import ShardSurvey, choose_val_shards, open_stream
from frugalvit.errors import UserError
from frugalvit.tasks.pretraining import train as pretrain
from helpers.shards import photos, png, write_shards, write_tar
from helpers.web_server import serving


def places(source: DatasetSplits) -> list[int]:
    """Which shards val is made of."""
    val: Any = source.splits["val"]
    return [int(Path(shard).stem.rpartition("-")[2]) for shard in val.shards]


def packed(folder: Path, count: int = 9, megabytes: float = 0.004) -> tuple[str, list[int]]:
    """Shards of some images and a last one of what remains, and how many each holds."""
    source = open_data(photos(folder / "photos", count), split="given")
    pack(source, folder / "packed", shard_megabytes=megabytes)
    shards = json.loads((folder / "packed" / "index.json").read_text())["splits"]["train"]
    return str(folder / "packed"), [shard["examples"] for shard in shards]


def test_the_remainder_is_not_what_is_validated_on(tmp_path: Path) -> None:
    """The last shard of a packed dataset holds what was left over: one image chose the best weights."""
    where, counts = packed(tmp_path)
    assert counts == [4, 4, 4, 4, 2]
    source = open_stream(where, labelled=True)
    assert places(source) == [2] and len(source.splits["val"]) == 4 and len(source.splits["train"]) == 14
    assert "val is made from train: 1 of 5 shards is held out, 4 images." in source.notes


@pytest.mark.parametrize(
    ("counts", "fraction", "expected"),
    [
        ([100] * 10 + [1], 0.1, [5]),
        ([100] * 20, 0.1, [4, 14]),
        ([300] * 10 + [20] * 10, 0.1, [4, 14]),
        ([100] * 1000, 0.1, [62, 187, 312, 437, 562, 687, 812, 937]),
        ([100, 1], 0.1, [1]),
        ([1, 100], 0.1, [0]),
        ([0, 0, 0, 50, 50], 0.1, [1, 3]),
        ([100] * 4, 0.5, [0, 2]),
        (None, 0.1, [2]),
    ],
)
def test_about_the_share_that_was_asked_for(counts: list[int] | None, fraction: float, expected: list[int]) -> None:
    assert choose_val_shards(counts, 5 if counts is None else len(counts), fraction, "here") == expected


@given(st.integers(2, 60), st.floats(0.001, 0.999), st.lists(st.integers(0, 50), min_size=60, max_size=60))
def test_any_shards(shards: int, fraction: float, counts: list[int]) -> None:
    for known in (None, counts[:shards]):
        held = choose_val_shards(known, shards, fraction, "here")
        assert held == sorted(set(held)) and 1 <= len(held) <= min(8, shards - 1)
        assert held[0] >= 0 and held[-1] < shards


def test_few_images_are_said(tmp_path: Path) -> None:
    """Of two shards the second holds a remainder: whichever is held out, one of the two parts is small."""
    where, counts = packed(tmp_path, count=20, megabytes=0.0425)
    assert counts == [39, 1]
    source = open_stream(where, labelled=True)
    assert places(source) == [1]
    assert any("held out, 1 image: few to choose the best weights by; write smaller" in note for note in source.notes)


def test_a_resumed_run_keeps_its_val(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    begun = open_stream(where, labelled=True, val_fraction=0.2)
    train: Any = begun.splits["train"]
    assert places(begun) == [2, 7] and train.survey.held == [2, 7]
    stored = json.loads(json.dumps(train.survey._asdict()))
    assert places(open_stream(where, labelled=True, val_fraction=0.2, known=ShardSurvey(**stored))) == [2, 7]
    other = ShardSurvey(**{**stored, "held": [0, 4]})
    assert places(open_stream(where, labelled=True, val_fraction=0.2, known=other)) == [0, 4]
    del stored["held"]  # as an earlier version wrote it, which held out the last one and some before it
    source = open_stream(where, labelled=True, val_fraction=0.2, known=ShardSurvey(**stored))
    assert places(source) == [2, 9]


def test_other_shards_than_at_the_start_are_refused(tmp_path: Path) -> None:
    """Their counts and places would be those of others, and the run would learn from its val."""
    where = write_shards(tmp_path / "s", shards=10)
    train: Any = open_stream(where, labelled=True).splits["train"]
    more = write_shards(tmp_path / "s", shards=11)
    with pytest.raises(UserError, match=r"has 11 shards for training now, and 10 when the run began: put them back"):
        open_stream(more, labelled=True, known=train.survey)


def test_pretraining_does_not_see_what_training_validates_on(tmp_path: Path) -> None:
    """With an index, by a look through the shards, and where only a few of those elsewhere are looked at."""
    write_shards(tmp_path / "s", shards=10)
    with serving(tmp_path / "s") as (address, _):
        for where in (packed(tmp_path)[0], str(tmp_path / "s"), address + "/{000..009}.tar"):
            supervised: Any = open_stream(where, labelled=True).splits["train"]
            source = open_stream(where, labelled=False)
            train: Any = source.splits["train"]
            assert train.shards == supervised.shards and train.survey.held == supervised.survey.held != []
            assert len(train) == len(supervised) and any("held out" in note for note in source.notes), where
            assert not any("best weights" in note for note in source.notes)
            whole: Any = open_stream(where, labelled=False, whole=True).splits["train"]
            assert len(whole.shards) > len(train.shards)
            assert ("val" in source.splits) == (source.classes is not None), "fetched only where it can be watched"


def test_pretraining_sees_all_where_nothing_is_to_be_validated_on(tmp_path: Path) -> None:
    files = {f"{i}.png": png(i) for i in range(4)}
    for shard in range(4):
        write_tar(tmp_path / "bare" / f"{shard:03d}.tar", files)
    single = write_shards(tmp_path / "single", shards=1)
    for where in (str(tmp_path / "bare"), single):
        source = open_stream(where, labelled=False)
        train: Any = source.splits["train"]
        assert list(source.splits) == ["train"] and train.survey.held == []


@pytest.mark.parametrize(("readers", "held"), [(9, 1), (10, 0)])
def test_pretraining_holds_out_only_what_its_readers_can_spare(tmp_path: Path, readers: int, held: int) -> None:
    source = open_stream(write_shards(tmp_path / "s", shards=10), labelled=False, readers=readers)
    train: Any = source.splits["train"]
    assert (len(train.survey.held), len(train.shards)) == (held, 10 - held) and len(train) == 4 * (10 - held)
    assert any("will validate on some of these" in note for note in source.notes) == (held == 0)


@pytest.mark.parametrize(
    ("survey", "images"), [({"held": []}, 40), ({"held": None}, 40), ({"held": [4]}, 36), (None, 36)]
)
def test_a_continued_pretraining_validates_on_nothing_it_has_learned(
    tmp_path: Path, survey: dict[str, Any] | None, images: int
) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "data.json").write_text(json.dumps({} if survey is None else {"survey": survey}))
    config = PretrainConfig(data=where, stream=True, continue_from=str(tmp_path / "before"))
    source = pretrain._open(config, SimpleNamespace(world_size=1))  # type: ignore[arg-type]
    assert len(source.splits["train"]) == images and ("val" in source.splits) == (images < 40)


def test_a_pretraining_that_began_with_all_shards_keeps_them(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    begun: Any = open_stream(where, labelled=False, whole=True).splits["train"]
    for held in ([], None):  # as it was noted, and as earlier versions noted it
        survey = begun.survey._replace(held=held)
        train: Any = open_stream(where, labelled=False, known=survey).splits["train"]
        assert train.shards == begun.shards


@pytest.mark.parametrize("words", [{"images": "train+val"}, {"images": "all"}, {"labels": "ignore"}, {}])
def test_who_asks_for_all_images_gets_them(tmp_path: Path, words: dict[str, Any]) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    config = PretrainConfig(data=where, stream=True, **words)
    train = pretrain._images(pretrain._open(config, SimpleNamespace(world_size=1)), config.images)  # type: ignore[arg-type]
    assert len(train) == (40 if words else 36)


def test_one_process_decides_for_all(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    first: Any = open_stream(where, labelled=True).splits["train"]
    elsewhere = first.survey._replace(held=[7])
    assert places(open_stream(where, labelled=True, agree=lambda look: elsewhere)) == [7]


def test_addresses_with_a_query_have_an_index_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed addresses were looked through from beginning to end, though an index lay beside them."""
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))
    _, counts = packed(tmp_path)
    with serving(tmp_path / "packed") as (address, server):
        source = open_stream(address + "/train-{000000..000004}.tar?sig=abc", labelled=True)
        train: Any = source.splits["train"]
        assert train.survey.counts == [4, 4, 4, 2] and source.classes == ("cat", "dog") and sum(counts) == 18
        assert len([path for path, _ in server.asked if ".tar" in path]) <= 5, "each shard was asked for once at most"


def test_shards_that_the_index_does_not_know_are_noted(tmp_path: Path) -> None:
    """More than it counts is not read, which should not surprise anybody."""
    where, _ = packed(tmp_path)
    assert not any("with another size" in note for note in open_stream(where, labelled=True).notes)
    with (Path(where) / "train-000000.tar").open("ab") as shard:
        shard.write(bytes(10240))
    notes = open_stream(where, labelled=True).notes
    assert any("knows 1 shard with another size (train-000000.tar)" in note for note in notes)


@pytest.mark.parametrize("query", ["", "?sig=abc", "?sig=ab/cd="])
def test_the_index_lies_beside_signed_shards(query: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("frugalvit.data.webdataset.index.read_small", lambda where: asked.append(where))
    assert index_beside(f"https://host/set/train-{{000..003}}.tar{query}") is None
    assert asked == ["https://host/set/index.json"]
