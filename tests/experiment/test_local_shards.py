"""Training from local WebDataset shards: resume, and damaged shards."""

import os
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
    """The position in the data is a part of what is resumed, for cached images and for those decoded on demand."""
    common = [verb, "shards/{000..003}.tar", "--config", f"{verb}.yaml", "--cache.location", where, "--workers", "0"]
    complete, resumed = server.folder / f"{verb}_complete", server.folder / f"{verb}_resumed"
    status, output = server.run(*common, "--out", str(complete))
    assert status == 0, output
    status, output = server.run(*common, "--out", str(resumed), kill_at=30, inside=resumed)
    assert status == -signal.SIGKILL, output
    status, output = server.run(verb, "--resume", str(resumed))
    assert status == 0 and "resuming" in output, output
    assert differences(complete, resumed) == []


def test_a_damaged_shard_is_skipped_by_name(server: ForkServer) -> None:
    shards = shard_images(server.folder / "damaged", server.folder / "images")
    os.truncate(shards / "002.tar", (shards / "002.tar").stat().st_size // 2)
    options = ["train", str(shards / "{000..003}.tar"), "--config", "train.yaml", "--out", "without", "--steps", "2"]
    status, output = server.run(*options)
    assert status == 0, output
    assert "1 of 4 shards" in output and "002.tar" in output and "Traceback" not in output
