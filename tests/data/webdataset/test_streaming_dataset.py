"""Shards to stream: when, what is known of them, and which are held out for validation."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.data import open_data
from frugalvit.data.dataset import DatasetSplits
from frugalvit.data.webdataset.pack import pack
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.streaming_dataset import ShardSurvey, choose_val_shards, open_stream, should_stream
from frugalvit.errors import UserError
from frugalvit.tasks.pretraining import train as pretrain
from helpers.shards import photos, png, write_shards, write_tar
from helpers.web_server import serving


def val_shards(source: DatasetSplits) -> list[int]:
    val: Any = source.splits["val"]
    return [int(Path(shard).stem.rpartition("-")[2]) for shard in val.shards]


def pack_photos(folder: Path, count: int = 9, megabytes: float = 0.004) -> tuple[str, list[int]]:
    """Shards of equal size and a last, smaller one; returns the folder and the counts."""
    source = open_data(photos(folder / "photos", count), split="given")
    pack(source, folder / "packed", shard_megabytes=megabytes)
    shards = json.loads((folder / "packed" / "index.json").read_text())["splits"]["train"]
    return str(folder / "packed"), [shard["examples"] for shard in shards]


def test_when_shards_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = write_shards(tmp_path / "s")
    assert not should_stream(where, "auto") and should_stream(where, True) and should_stream(str(tmp_path / "s"), True)
    assert should_stream("https://far/{0..3}.tar", "auto") and not should_stream("https://far/{0..3}.tar", False)
    assert should_stream("pipe:cat x", "auto") and should_stream("https://far/index.json", "auto")
    assert not should_stream(str(tmp_path), "auto")
    with pytest.raises(UserError, match="--stream"):
        should_stream(str(tmp_path), True)
    monkeypatch.setattr("frugalvit.data.webdataset.streaming_dataset._LARGE", 100)
    assert should_stream(where, "auto")


def test_the_survey_is_exact_with_labels_and_an_estimate_without(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    source = open_stream(where, labelled=True, val_fraction=0.2)
    train: Any = source.splits["train"]
    val: Any = source.splits["val"]
    assert source.classes == ("0", "1") and len(source.splits["train"]) == 32 and len(val) == 8
    assert train.survey.counts == train.streaming.counts == [4] * 8
    assert train.sample.labels is not None and len(train.sample) == 16
    held = {Path(shard).name for shard in val.shards}
    assert len(held) == 2 and held.isdisjoint(Path(shard).name for shard in train.shards)
    assert train.fingerprint() == open_stream(where, labelled=True, val_fraction=0.2).splits["train"].fingerprint()
    with serving(tmp_path / "s") as (address, _):
        remote = open_stream(address + "/{000..009}.tar", labelled=False)
    assert list(remote.splits) == ["train"] and remote.classes is None and len(remote.splits["train"]) == 36
    assert remote.splits["train"].run_facts()["survey"]["counts"] is None


def test_a_damaged_shard_counts_up_to_the_damage(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=4, each=6)
    shard = tmp_path / "s" / "001.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    local: Any = open_stream(where, labelled=True, split="given").splits["train"]
    with serving(tmp_path / "s") as (address, _):
        remote: Any = open_stream(address + "/{000..003}.tar", labelled=True, split="given").splits["train"]
    streamed = [len(list(ShardStream([shard], warn=None).epoch())) for shard in local.shards]
    assert local.survey.counts == remote.survey.counts == streamed and 0 < streamed[1] < 6


def test_the_last_small_shard_is_not_held_out(tmp_path: Path) -> None:
    where, counts = pack_photos(tmp_path)
    assert counts == [4, 4, 4, 4, 2]
    source = open_stream(where, labelled=True)
    assert val_shards(source) == [2] and len(source.splits["val"]) == 4 and len(source.splits["train"]) == 14
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
def test_val_shards_hold_about_the_fraction(counts: list[int] | None, fraction: float, expected: list[int]) -> None:
    assert choose_val_shards(counts, 5 if counts is None else len(counts), fraction, "here") == expected


@given(st.integers(2, 60), st.floats(0.001, 0.999), st.lists(st.integers(0, 50), min_size=60, max_size=60))
def test_val_shards_are_few_and_valid(shards: int, fraction: float, counts: list[int]) -> None:
    for known in (None, counts[:shards]):
        held = choose_val_shards(known, shards, fraction, "here")
        assert held == sorted(set(held)) and 1 <= len(held) <= min(8, shards - 1)
        assert held[0] >= 0 and held[-1] < shards


def test_a_resumed_run_keeps_its_val_shards(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    started = open_stream(where, labelled=True, val_fraction=0.2)
    assert val_shards(started) == [2, 7]
    stored = json.loads(json.dumps(started.splits["train"].run_facts()))["survey"]
    for held in ([2, 7], [0, 4]):
        known = ShardSurvey(**{**stored, "held": held})
        assert val_shards(open_stream(where, labelled=True, val_fraction=0.2, known=known)) == held
    more = write_shards(tmp_path / "s", shards=11)
    with pytest.raises(UserError, match="11 training shards now and had 10"):
        open_stream(more, labelled=True, known=ShardSurvey(**stored))


def test_pretraining_holds_out_what_train_validates_on(tmp_path: Path) -> None:
    """With an index, with all shards read, and with only a few of the remote shards read."""
    write_shards(tmp_path / "s", shards=10)
    with serving(tmp_path / "s") as (address, _):
        for where in (pack_photos(tmp_path)[0], str(tmp_path / "s"), address + "/{000..009}.tar"):
            supervised: Any = open_stream(where, labelled=True).splits["train"]
            source = open_stream(where, labelled=False)
            train: Any = source.splits["train"]
            assert train.shards == supervised.shards and train.survey.held == supervised.survey.held != []
            assert len(train) == len(supervised) and any("held out" in note for note in source.notes), where
            assert not any("best weights" in note for note in source.notes)
            every: Any = open_stream(where, labelled=False, hold_out=False).splits["train"]
            assert len(every.shards) > len(train.shards)
            assert ("val" in source.splits) == (source.classes is not None), "fetched only if it can be evaluated"


def test_pretraining_without_labels_holds_nothing_out(tmp_path: Path) -> None:
    for shard in range(4):
        write_tar(tmp_path / "bare" / f"{shard:03d}.tar", {f"{i}.png": png(i) for i in range(4)})
    for where in (str(tmp_path / "bare"), write_shards(tmp_path / "single", shards=1)):
        source = open_stream(where, labelled=False)
        assert list(source.splits) == ["train"] and source.splits["train"].run_facts()["survey"]["held"] == []


@pytest.mark.parametrize(("readers", "held"), [(9, 1), (10, 0)])
def test_pretraining_leaves_a_shard_for_every_reader(tmp_path: Path, readers: int, held: int) -> None:
    source = open_stream(write_shards(tmp_path / "s", shards=10), labelled=False, readers=readers)
    train: Any = source.splits["train"]
    assert (len(train.survey.held), len(train.shards)) == (held, 10 - held) and len(train) == 4 * (10 - held)
    assert any("will validate on some of these" in note for note in source.notes) == (held == 0)


@pytest.mark.parametrize(("survey", "images"), [({"held": []}, 40), ({"held": [4]}, 36), (None, 36)])
def test_continued_pretraining_validates_on_nothing_it_trained_on(
    tmp_path: Path, survey: dict[str, Any] | None, images: int
) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "config.yaml").write_text(PretrainConfig(data=where, stream=True, steps=8).to_yaml())
    (tmp_path / "before" / "data.json").write_text(json.dumps({} if survey is None else {"survey": survey}))
    config = PretrainConfig(data=where, stream=True, continue_from=str(tmp_path / "before"))
    source = pretrain.PretrainExperiment(config).open_data(None)
    assert len(source.splits["train"]) == images and ("val" in source.splits) == (images < 40)


@pytest.mark.parametrize("options", [{"images": "train+val"}, {"images": "all"}, {"labels": "ignore"}, {}])
def test_pretraining_on_all_images_holds_nothing_out(tmp_path: Path, options: dict[str, Any]) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    config = PretrainConfig(data=where, stream=True, **options)
    train = pretrain._choose_images(pretrain.PretrainExperiment(config).open_data(None), config.images)
    assert len(train) == (40 if options else 36)


def test_one_process_surveys_for_all(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    first: Any = open_stream(where, labelled=True).splits["train"]
    broadcast = first.survey._replace(held=[7])
    assert val_shards(open_stream(where, labelled=True, agree=lambda survey: broadcast)) == [7]


def test_an_index_serves_signed_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))
    _, counts = pack_photos(tmp_path)
    with serving(tmp_path / "packed") as (address, server):
        source = open_stream(address + "/train-{000000..000004}.tar?sig=abc", labelled=True)
        train: Any = source.splits["train"]
        assert train.survey.counts == [4, 4, 4, 2] and source.classes == ("cat", "dog") and sum(counts) == 18
        assert len([path for path, _ in server.requests if ".tar" in path]) <= 5, "each shard at most once"
