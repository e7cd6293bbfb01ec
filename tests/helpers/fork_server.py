"""Run commands as real processes in milliseconds: one process imports everything and forks a child per run.

``ForkServer.start`` runs ``frugalvit ARGV`` in a child that accepts signals. With ``kill_at`` the child sends itself
SIGKILL, or other signals, at its n-th file operation below ``inside`` (open to write, rename, link, remove, make a
folder). A timer would not hit such moments, for example between a file and its rename.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

_EVENTS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.truncate")
_MODULES = (
    "frugalvit.cli.main",
    "frugalvit.cli.parser",
    "frugalvit.tasks.classification.train",
    "frugalvit.tasks.pretraining.train",
    "frugalvit.probing.knn",
    "frugalvit.probing.registry",
    "rich.console",
    "rich.progress",
    "scipy.optimize",
    "scipy.stats",
    "torch._dynamo",
    "torch.utils.tensorboard",
)
"""What a run imports. A child would import the rest each time, scipy alone for more than a second."""


@dataclass
class Child:
    """A running command."""

    pid: int
    log: Path
    server: ForkServer

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Return the exit status; minus the signal's number if a signal ended it."""
        return self.server.request({"wait": self.pid})["status"]

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    def wait_for_output(self, text: str) -> None:
        self._wait_until(lambda: text in self.output(), f"'{text}' was not printed")

    def wait_for(self, path: Path) -> None:
        """Wait until ``path`` exists."""
        self._wait_until(path.exists, f"{path} did not appear")

    def _wait_until(self, condition: Callable[[], bool], failure: str) -> None:
        until = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < until, f"{failure}\n{self.output()}"
            time.sleep(0.005)


class ForkServer:
    """Starts commands in ``folder``. All servers of a test session share one process that forks."""

    _process: ClassVar[subprocess.Popen[str] | None] = None

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        if ForkServer._process is None:
            ForkServer._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def start(
        self,
        *argv: str,
        kill_at: int | None = None,
        inside: Path | None = None,
        signals: Sequence[int] = (signal.SIGKILL,),
        **variables: str,
    ) -> Child:
        self.count += 1
        log = self.folder / f"log_{self.count}.txt"
        variables = {"FRUGALVIT_CACHE": str(self.folder / "cache")} | variables
        order = {"argv": argv, "log": str(log), "cwd": str(self.folder), "variables": variables}
        order |= {"kill_at": kill_at, "inside": str(inside or self.folder), "signals": list(signals)}
        return Child(self.request(order)["pid"], log, self)

    def run(self, *argv: str, **more: Any) -> tuple[int, str]:
        """Run a command to its end; return its exit status and its output."""
        child = self.start(*argv, **more)
        return child.wait(), child.output()

    def request(self, order: dict[str, Any]) -> dict[str, Any]:
        process = ForkServer._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())


@atexit.register
def _close() -> None:
    if ForkServer._process is not None and ForkServer._process.stdin is not None:
        ForkServer._process.stdin.close()
        ForkServer._process.wait()


def skip_waiting_for_disks() -> None:
    """A killed process loses no data that was written; only a power cut does. A bad descriptor stays an error."""
    os.fsync = os.fstat  # type: ignore[assignment]


def _serve() -> None:
    import importlib

    from PIL import Image

    skip_waiting_for_disks()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    for module in _MODULES:
        importlib.import_module(module)
    Image.init()  # imports Pillow's formats
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = {"status": _wait_status(order["wait"])}
        else:
            pid = os.fork()
            if pid == 0:
                _run_command(order)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


def _wait_status(pid: int, seconds: float = 120.0) -> int:
    """Wait for a child; kill it after ``seconds``, so that a test fails instead of hanging."""
    until = time.monotonic() + seconds
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def _run_command(order: dict[str, Any]) -> None:
    """Run the command in the child and exit."""
    status = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(order["cwd"])
        os.environ.update(order["variables"])
        if order["kill_at"] is not None:
            _kill_self_at(order["kill_at"], order["inside"], order["signals"])
        from frugalvit.cli import main as cli

        sys.argv = ["frugalvit", *order["argv"]]
        status = cli.main(list(order["argv"]))
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _kill_self_at(operation: int, inside: str, signals: list[int]) -> None:
    left = operation

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in _EVENTS or not arguments or not str(arguments[0]).startswith(inside):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        left -= 1
        if left == -1:
            for number in signals:
                os.kill(os.getpid(), number)

    sys.addaudithook(watch)


if __name__ == "__main__":
    _serve()
