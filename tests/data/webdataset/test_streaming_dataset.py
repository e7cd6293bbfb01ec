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
from frugalvit.data.webdataset.streaming_dataset import ShardSurvey, choose_val_shards, open_stream, should_stream
from frugalvit.errors import UserError
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.tasks.pretraining.train import choose_images
from helpers.shards import photos, png, write_shards, write_tar
from helpers.web_server import serving


def val_shards(source: DatasetSplits) -> list[int]:
    val: Any = source.splits["val"]
    return [int(Path(shard).stem.rpartition("-")[2]) for shard in val.shards]


def test_when_shards_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = write_shards(tmp_path / "s")
    assert not should_stream(where, "auto") and should_stream(where, True) and should_stream(str(tmp_path / "s"), True)
    assert should_stream("https://far/{0..3}.tar", "auto") and not should_stream("https://far/{0..3}.tar", False)
    assert should_stream("https://far/a.tar?part=1", "auto")
    assert not should_stream(str(tmp_path), "auto")
    with pytest.raises(UserError, match="--stream"):
        should_stream(str(tmp_path), True)
    monkeypatch.setattr("frugalvit.data.webdataset.streaming_dataset._LARGE", 100)
    assert should_stream(where, "auto")


def test_shards_without_index_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    source = open_stream(where, val_fraction=0.2)
    assert "data pack" in capsys.readouterr().err
    train: Any = source.splits["train"]
    val: Any = source.splits["val"]
    assert source.classes == ("0", "1") and len(train) == 32 and len(val) == 8
    assert train.survey.counts == train.streaming.counts == [4] * 8
    assert train.sample.labels is not None and len(train.sample) == 16
    held = {Path(shard).name for shard in val.shards}
    assert len(held) == 2 and held.isdisjoint(Path(shard).name for shard in train.shards)
    assert train.fingerprint() == open_stream(where, val_fraction=0.2).splits["train"].fingerprint()
    with serving(tmp_path / "s") as (address, _):
        remote: Any = open_stream(address + "/{000..009}.tar", val_fraction=0.2).splits["train"]
    assert remote.survey == train.survey


def test_damaged_shard_counts_up_to_the_damage(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=4, each=6)
    shard = tmp_path / "s" / "001.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    local = open_stream(where, split="given")
    with serving(tmp_path / "s") as (address, _):
        remote = open_stream(address + "/{000..003}.tar", split="given")
    counts = [source.splits["train"].run_facts["survey"]["counts"] for source in (local, remote)]
    assert counts[0] == counts[1] and counts[0][0] == 6 > counts[0][1] > 0
    assert "1 of 4 shards" in local.notes[0] and "001.tar" in local.notes[0]


def test_index_replaces_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))
    pack(open_data(photos(tmp_path / "photos", 9), split="given"), tmp_path / "packed", shard_megabytes=0.004)
    with serving(tmp_path / "packed") as (address, server):
        for where in (str(tmp_path / "packed"), address + "/train-{000000..000004}.tar?sig=abc"):
            source = open_stream(where)
            train: Any = source.splits["train"]
            assert source.classes == ("cat", "dog")
            assert train.survey.counts == [4, 4, 4, 2] and len(train) == 14 and val_shards(source) == [2]
        assert len([path for path, _ in server.requests if ".tar" in path]) <= 5, "each shard at most once"
    assert any(note.startswith("val is made from train: 1 of 5 shards") for note in source.notes)


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
        ([100], 0.1, []),
    ],
)
def test_val_shards_hold_about_the_fraction(counts: list[int], fraction: float, expected: list[int]) -> None:
    assert choose_val_shards(counts, fraction) == expected


@given(st.lists(st.integers(0, 50), min_size=2, max_size=60), st.floats(0.001, 0.999))
def test_val_shards_are_few_and_valid(counts: list[int], fraction: float) -> None:
    held = choose_val_shards(counts, fraction)
    assert held == sorted(set(held)) and 1 <= len(held) <= min(8, len(counts) - 1)
    assert held[0] >= 0 and held[-1] < len(counts)


def test_resumed_run_keeps_its_val_shards(tmp_path: Path) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    started = open_stream(where, val_fraction=0.2)
    assert val_shards(started) == [2, 7]
    stored = json.loads(json.dumps(started.splits["train"].run_facts))["survey"]
    for held in ([2, 7], [0, 4]):
        known = ShardSurvey(**{**stored, "held": held})
        assert val_shards(open_stream(where, known=known)) == held
        assert val_shards(open_stream(where, agree=lambda _, known=known: known)) == held, "broadcast by rank 0"
    more = write_shards(tmp_path / "s", shards=11)
    with pytest.raises(UserError, match="11 training shards now and had 10"):
        open_stream(more, known=ShardSurvey(**stored))


def test_unlabelled_or_single_shards_are_not_held_out(tmp_path: Path) -> None:
    for shard in range(4):
        write_tar(tmp_path / "bare" / f"{shard:03d}.tar", {f"{i}.png": png(i) for i in range(4)})
    for where in (str(tmp_path / "bare"), write_shards(tmp_path / "single", shards=1)):
        source = open_stream(where)
        assert list(source.splits) == ["train"] and source.splits["train"].run_facts["survey"]["held"] == []


@pytest.mark.parametrize("options", [{"images": "train+val"}, {"images": "all"}, {"label_source": "ignore"}, {}])
def test_pretraining_on_all_images_holds_nothing_out(tmp_path: Path, options: dict[str, Any]) -> None:
    where = write_shards(tmp_path / "s", shards=10)
    config = PretrainConfig(data=where, stream=True, **options)
    train = choose_images(pretrain.PretrainExperiment(config).open_data(None), config.images)
    assert len(train) == (40 if options else 36)
