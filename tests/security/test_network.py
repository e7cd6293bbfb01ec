"""A run in one process opens no network socket."""

import socket
from pathlib import Path

import pytest

from frugalvit.cli import main as cli
from helpers.fork_server import ForkServer
from helpers.tiny_runs import PRETRAIN, TRAIN, write_config, write_images


@pytest.mark.parametrize(("verb", "values"), [("train", TRAIN), ("pretrain", PRETRAIN)])
def test_no_socket_is_bound_or_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, values: dict
) -> None:
    calls: list[str] = []

    def refuse(name: str):
        def call(self: socket.socket, *arguments: object) -> None:
            if self.family != getattr(socket, "AF_UNIX", None):
                calls.append(f"{name}{arguments}")
            raise OSError("no network in this test")

        return call

    for name in ("bind", "listen", "connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse(name))
    images = write_images(tmp_path / "images")
    config = write_config(tmp_path / "config.yaml", values, steps=2, report=True)
    words = [verb, str(images), "--config", str(config), "--out", str(tmp_path / "run"), "--device", "cpu", "--quiet"]
    assert cli.main(words) == 0
    assert calls == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_the_kernel_sees_no_listening_socket(tmp_path: Path) -> None:
    """Also sockets outside of Python: the kernel's table has none of this process."""
    server = ForkServer(tmp_path)
    write_images(tmp_path / "images")
    config = write_config(tmp_path / "config.yaml", TRAIN, steps=100000, cache={"where": "off"}, workers=0)
    child = server.start("train", "images", "--config", str(config), "--out", "run")
    child.wait_for(tmp_path / "run" / "checkpoints" / "last.pt")
    inodes = _sockets(child.pid)
    listening = {line.split()[9] for name in ("tcp", "tcp6", "udp", "udp6") for line in _table(name)}
    child.send(9)  # type: ignore[arg-type]
    child.wait()
    assert not inodes & listening


def _sockets(pid: int) -> set[str]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _table(name: str) -> list[str]:
    path = Path("/proc/net") / name
    return path.read_text().splitlines()[1:] if path.exists() else []
