"""Training from local WebDataset shards: resume, and damaged shards."""

import signal

import pytest

from helpers.fork_server import ForkServer
from helpers.shards import shard_images
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, write_config, write_images


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ForkServer:
    folder = tmp_path_factory.mktemp("streams")
    shard_images(folder / "shards", write_images(folder / "images", train=20))
    write_config(folder / "train.yaml", TRAIN)
    write_config(folder / "pretrain.yaml", PRETRAIN)
    return ForkServer(folder)


@pytest.mark.parametrize(("verb", "where"), [("train", "ram"), pytest.param("pretrain", "off", marks=pytest.mark.slow)])
def test_killed_and_resumed_from_shards(server: ForkServer, verb: str, where: str) -> None:
    """Kept in memory, or decoded while training: the position in the data is part of what is resumed."""
    common = [verb, "shards/{000..003}.tar", "--config", f"{verb}.yaml", "--cache.where", where, "--workers", "0"]
    whole, broken = server.folder / f"{verb}_whole", server.folder / f"{verb}_broken"
    status, output = server.run(*common, "--out", str(whole))
    assert status == 0, output
    status, output = server.run(*common, "--out", str(broken), kill_at=30, inside=broken)
    assert status == -signal.SIGKILL, output
    status, output = server.run(verb, "--resume", str(broken))
    assert status == 0 and "resuming" in output, output
    assert differences(whole, broken) == []


def test_a_damaged_shard_is_skipped_by_name(server: ForkServer) -> None:
    shards = shard_images(server.folder / "damaged", server.folder / "images")
    whole = (shards / "002.tar").read_bytes()
    (shards / "002.tar").write_bytes(whole[: len(whole) // 2])
    words = ["train", str(shards / "{000..003}.tar"), "--config", "train.yaml", "--out", "without", "--steps", "2"]
    status, output = server.run(*words)
    assert status == 0, output
    assert "1 of 4 shards" in output and "002.tar" in output and "Traceback" not in output


def test_packed_shards_train_like_the_folder(server: ForkServer) -> None:
    """What ``frugalvit data pack`` writes has the splits and classes of what it read."""
    status, output = server.run("data", "pack", "images", "packed", "--shard-megabytes", "0.01")
    assert status == 0, output
    status, output = server.run("train", "packed", "--config", "train.yaml", "--out", "from_packed", "--steps", "2")
    assert status == 0 and "val: 10 images" in output, output
    assert len(list((server.folder / "packed").glob("train-*.tar"))) > 1


def test_no_readable_shard_is_one_line(server: ForkServer) -> None:
    folder = server.folder / "empty"
    folder.mkdir()
    (folder / "000.tar").write_bytes(b"this is no tar file" * 100)
    status, output = server.run("train", str(folder / "000.tar"), "--config", "train.yaml", "--out", "nothing")
    assert status == 2 and "no images in readable shards" in output and "Traceback" not in output
