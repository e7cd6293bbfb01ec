"""Training from streamed shards: over HTTP, through fsspec; killed, resumed, damaged."""

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.fork_server import ForkServer
from helpers.processes import finish, start, torchrun_variables
from helpers.shards import shard_images
from helpers.tiny_runs import PRETRAIN, TRAIN, differences, read_metrics, write_config, write_images
from helpers.web_server import serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> ForkServer:
    folder = tmp_path_factory.mktemp("streaming")
    write_images(folder / "images", train=20)
    shard_images(folder / "shards", folder / "images", count=6)
    write_config(folder / "train.yaml", TRAIN)
    write_config(folder / "pretrain.yaml", PRETRAIN)
    server = ForkServer(folder)
    status, output = server.run("data", "pack", "images", "packed", "--shard-megabytes", "0.008")
    assert status == 0, output
    return server


@pytest.fixture(scope="module")
def web(server: ForkServer) -> Iterator[str]:
    with serving(server.folder) as (address, _):
        yield address


def command(verb: str, where: str, out: Path, *more: str) -> list[str]:
    return [verb, where, "--config", f"{verb}.yaml", "--out", str(out), "--workers", "0", *more]


@pytest.mark.parametrize("verb", ["train", pytest.param("pretrain", marks=pytest.mark.slow)])
def test_killed_and_resumed_over_http(server: ForkServer, web: str, verb: str) -> None:
    """Ten steps of eight images, some thirty images an epoch: the run resumes in the middle of an epoch."""
    complete, resumed = server.folder / f"{verb}_complete", server.folder / f"{verb}_resumed"
    where = web + "/shards/{000..005}.tar"
    status, output = server.run(*command(verb, where, complete))
    assert status == 0 and "Streaming 5 shards" in output, output
    status, output = server.run(*command(verb, where, resumed), kill_at=30, inside=resumed)
    assert status == -signal.SIGKILL, output
    held = json.loads((resumed / "data.json").read_text())["survey"]["held"]
    assert held == [2], "train and pretrain hold out the same shards"
    status, output = server.run(verb, "--resume", str(resumed))
    assert status == 0 and "resuming" in output, output
    assert differences(complete, resumed) == []


def test_shards_with_an_index(server: ForkServer, web: str) -> None:
    """The index gives counts, classes and splits, so no shard is read beforehand."""
    out = server.folder / "indexed"
    status, output = server.run(*command("train", f"{web}/packed/index.json", out), kill_at=30, inside=out)
    assert status == -signal.SIGKILL, output
    assert "reading shards" not in output and "40 images" in output
    facts = json.loads((out / "data.json").read_text())
    assert facts["classes"] == ["cat", "dog"] and facts["images"] == 40 and sum(facts["survey"]["counts"]) == 40
    status, output = server.run("train", "--resume", str(out))
    assert status == 0, output
    assert json.loads((out / "summary.json").read_text())["scored_images"] == 10
    plain = server.folder / "indexed_complete"
    assert server.run(*command("train", f"{web}/packed/index.json", plain))[0] == 0
    assert differences(plain, out) == []


@pytest.mark.slow
def test_reader_processes_resume(server: ForkServer) -> None:
    """Reader processes read the same images, and end with their run."""
    complete, resumed = server.folder / "readers_complete", server.folder / "readers_resumed"
    status, output = server.run(*command("train", "packed", complete, "--stream", "true"))
    assert status == 0, output
    more = ["--stream", "true", "--workers", "1"]
    child = server.start(*command("train", "packed", resumed), *more, kill_at=30, inside=resumed)
    assert child.wait() == -signal.SIGKILL, child.output()
    until = time.monotonic() + 20
    while _readers_in(server.folder) and time.monotonic() < until:
        time.sleep(0.1)
    assert not _readers_in(server.folder), "readers were left behind"
    status, output = server.run("train", "--resume", str(resumed))
    assert status == 0, output
    assert differences(complete, resumed) == []


def test_two_processes_share_the_shards(server: ForkServer, web: str) -> None:
    out = server.folder / "two"
    variables = torchrun_variables(2)
    finish(start(server, variables, *command("train", web + "/shards/{000..005}.tar", out), "--steps", "4"))
    assert read_metrics(out)[-1]["step"] == 4


def test_resume_needs_the_same_number_of_processes(server: ForkServer) -> None:
    """With another number some images would come twice in an epoch, others never."""
    out = server.folder / "alone"
    status, output = server.run(*command("train", "packed", out, "--stream", "true"), kill_at=30, inside=out)
    assert status == -signal.SIGKILL, output
    facts = out / "data.json"
    assert json.loads(facts.read_text())["processes"] == 1
    status, output = server.run("train", "--resume", str(out), "--devices", "2")
    assert status == 2 and "1 processes (--devices, --nodes), not 2" in output and "Traceback" not in output, output
    facts.write_text("{")
    status, output = server.run("train", "--resume", str(out))
    assert status == 2 and "is not readable JSON" in output and "Traceback" not in output, output


def test_a_damaged_shard_is_named(server: ForkServer) -> None:
    folder = server.folder / "torn"
    shutil.copytree(server.folder / "shards", folder)
    shard = folder / "001.tar"
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with serving(folder) as (address, _):
        out = server.folder / "torn_run"
        status, output = server.run(*command("train", address + "/{000..005}.tar", out))
        assert status == 0, output
        assert "1 of 6 shards" in output and "001.tar" in output and "truncated" in output and "Traceback" not in output
        for name in ("001.tar", "002.tar", "003.tar"):
            (folder / name).write_bytes(b"nothing" * 100)
        out = server.folder / "torn_too_much"
        status, output = server.run(*command("pretrain", address + "/{000..005}.tar", out))
        assert (
            status == 2 and "shards cannot be read, more than --cache.max-bad" in output and "Traceback" not in output
        )


def test_fsspec(server: ForkServer) -> None:
    """Any address of fsspec."""
    pytest.importorskip("fsspec")
    where = f"file://{server.folder / 'shards'}/{{000..005}}.tar"
    status, output = server.run(*command("train", where, server.folder / "fsspec"))
    assert status == 0 and "Streaming" in output, output


def test_options_that_streams_cannot_do(server: ForkServer, web: str) -> None:
    where = web + "/shards/{000..005}.tar"
    for more, expected in (
        (["--labels", "0.5"], "--stream false"),
        (["--balance"], "--stream false"),
        (["--split", "train+val"], "--stream false"),
        (["--workers", "9"], "9 readers"),
        (["--classes", "names.txt"], "--stream false"),
    ):
        status, output = server.run(*command("train", where, server.folder / "wrong"), *more)
        assert status == 2 and expected in output and "Traceback" not in output, output
        shutil.rmtree(server.folder / "wrong", ignore_errors=True)
    status, output = server.run(*command("train", "images", server.folder / "wrong", "--stream", "true"))
    assert status == 2 and "--stream" in output
    status, output = server.run(*command("train", web + "/shards/000.tar", server.folder / "wrong"))
    assert status == 2 and "two shards" in output
    status, output = server.run(*command("train", web + "/nothing/{0..3}.tar", server.folder / "wrong"))
    assert status == 2 and "no images in readable shards" in output


def _readers_in(folder: Path) -> list[str]:
    """Spawned processes that work in ``folder``."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line, where = (process / "cmdline").read_bytes(), (process / "cwd").readlink()
        except OSError:
            continue
        if b"spawn_main" in line and where == folder:
            found.append(process.name)
    return found
