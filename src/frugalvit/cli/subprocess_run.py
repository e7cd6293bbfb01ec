"""A command in a process of its own, for a program that asks for several processes in Python.

The processes of a run are the same command started several times. Were the program itself that command, all of it would
run as often; a notebook could not be started again at all. So
``python -m frugalvit.cli.subprocess_run`` is, and the program waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from frugalvit.cli import main as cli
from frugalvit.config.base import Config
from frugalvit.errors import Interrupted, UserError
from frugalvit.utils import console
from frugalvit.utils.signals import stop_signals

_CALLER = "FRUGALVIT_CALLER"
_PRESSES = 3
"""Ctrl-C once stops and saves, twice leaves at once; from here on a run that does not is killed."""


def run_in_subprocess(words: str, values: dict[str, Any], config: Config, *, quiet: bool) -> dict[str, Any]:
    """What ``frugalvit WORDS --json`` prints, run in a process of its own; its mistakes are raised here.

    values: the options as they were given, of which ``config`` is made
    """
    devices = getattr(config, "devices", 1)
    _check_machines(config, devices)
    _check_networks(config, devices)
    with tempfile.TemporaryDirectory(prefix="frugalvit_") as folder:
        options, answers = Path(folder, "options.yaml"), Path(folder, "answer.json")
        options.write_text(_as_yaml(values, config, devices), encoding="utf-8")
        command = [sys.executable, "-m", __name__, *words.split(), "--config", str(options), "--json"]
        status, pressed = _waited_for([*command, *(["--quiet"] if quiet else [])], answers)
        answer = _answer_in(answers)
    return _outcome(f"frugalvit {words}", answer, status, pressed, devices)


# -- what the other process cannot know


def _with_torchrun(devices: int) -> str:
    return f"start the script with 'torchrun --nproc-per-node {devices} {_script()}'"


def _script() -> str:
    name = getattr(sys.modules.get("__main__"), "__file__", None)
    return console.shell_quote(Path(name).name) if isinstance(name, str) else "script.py"


def _check_machines(config: Config, devices: int) -> None:
    """Only the first machine's process answers, and the others' programs would wait for a result in vain."""
    if getattr(config, "nodes", 1) > 1:
        raise UserError(
            "Several processes on each of several machines are not started from Python: on every machine "
            f"{_with_torchrun(devices)}, and torchrun's --nnodes, --rdzv-backend and --rdzv-endpoint before the script."
        )


def _check_networks(config: Config, devices: int) -> None:
    """A network that the program itself has registered is not there in another process."""
    settings = config.named_settings().values() if hasattr(config, "named_settings") else ()  # type: ignore[attr-defined]
    for name in [getattr(config, "backbone", None), *(setting.get("backbone") for setting in settings)]:
        if isinstance(name, str) and _is_own(name):
            raise UserError(
                f"'{name}' is a network of this program, which the processes that devices={devices} starts do not "
                f"have: {_with_torchrun(devices)}."
            )


def _is_own(name: str) -> bool:
    if "timm" not in sys.modules:
        return False  # nobody can have registered anything
    from timm.models import is_model, model_entrypoint

    name = name.partition(".")[0]
    return is_model(name) and model_entrypoint(name).__module__.partition(".")[0] not in ("timm", "frugalvit")


def _as_yaml(values: dict[str, Any], config: Config, devices: int) -> str:
    """The options as they were given, so that what was not is decided there; of what is no plain value, what it means.

    A ``torch.device`` or a number of numpy's is a word or a number once it is checked; a class stays one.
    """
    checked = config.model_dump()

    def plain(value: Any, known: Any, name: str) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if value is None or type(value) in (str, int, float, bool):
            return value
        if isinstance(value, dict):
            inner = known if isinstance(known, dict) else {}
            return {str(key): plain(part, inner.get(key), f"{name}.{key}") for key, part in value.items()}
        if isinstance(value, list | tuple):
            parts = known if isinstance(known, list | tuple) and len(known) == len(value) else [None] * len(value)
            return [plain(part, other, name) for part, other in zip(value, parts, strict=True)]
        if known is not None and known is not value:
            return plain(known, None, name)
        raise UserError(
            f"{name} holds a {type(value).__name__}, which cannot be given to the processes that devices={devices} "
            f"starts: {_with_torchrun(devices)}."
        )

    given = {name: plain(value, checked.get(name), name) for name, value in values.items()}
    return yaml.safe_dump(given, sort_keys=False, allow_unicode=True)


# -- the other process


def _waited_for(command: list[str], answers: Path) -> tuple[int, int]:
    """Its exit status, and how often somebody has pressed Ctrl-C meanwhile."""
    if not sys.executable:
        raise UserError("There is no Python to start other processes with: sys.executable is empty.")
    with SignalForwarder() as forwarding, answers.open("wb") as output, _standard_error() as error:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,  # a file: a pipe would stay open as long as anybody whom the command has started
            stderr=error,
            env=_environment(),
            process_group=0
            if hasattr(os, "killpg")
            else None,  # so that Ctrl-C comes once, from here, however it came here
        )
        try:
            forwarding.to(child)
            return child.wait(), forwarding.pressed
        finally:
            if child.poll() is None:
                _send(child, signal.SIGTERM)


def _environment() -> dict[str, str]:
    """Ours; modules are found where they are here, and nowhere else."""
    places = [place or str(Path.cwd()) for place in sys.path if isinstance(place, str) and os.pathsep not in place]
    return os.environ | {"PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1", _CALLER: str(os.getpid())}


@contextlib.contextmanager
def _standard_error() -> Iterator[int | None]:
    """Where the command talks: to our standard error, which in a notebook is no file of the system."""
    try:
        itself = sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):
        itself = False
    if itself:
        sys.stderr.flush()
        yield None
        return
    reading, writing = os.pipe()
    thread = threading.Thread(target=_pass_on, args=(reading,), daemon=True)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        thread.join(5)  # whoever the command has started and left may have more to say, but nobody waits for it


def _pass_on(reading: int) -> None:
    with open(reading, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(Exception):  # words are not worth a run
                sys.stderr.write(line)
                sys.stderr.flush()


class SignalForwarder:
    """Signals that ask a run to stop go to the process that it is in, from the main thread, where alone they come."""

    def __init__(self) -> None:
        self.pressed = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalForwarder:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in stop_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child
        for number in self._early:
            _send(child, number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pressed += number == signal.SIGINT
        if self._child is None:
            self._early.append(number)
        elif self.pressed >= _PRESSES:
            _send(self._child, getattr(signal, "SIGKILL", signal.SIGTERM), everybody=True)
        else:
            _send(self._child, number)


def _send(child: subprocess.Popen[bytes], number: int, *, everybody: bool = False) -> None:
    """As a terminal does: Ctrl-C, and that it was closed, to all processes; the others to the first."""
    groups = hasattr(os, "killpg")
    with contextlib.suppress(OSError):
        if groups and (everybody or number in (signal.SIGINT, getattr(signal, "SIGHUP", None))):
            os.killpg(child.pid, number)
        elif groups or number != signal.SIGINT:  # Windows sends Ctrl-C to all that share a console
            child.send_signal(number)


# -- its answer


def _answer_in(path: Path) -> dict[str, Any] | None:
    """The last line that is a JSON object; a library of somebody else's may have printed lines of its own."""
    for line in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None


def _outcome(command: str, answer: dict[str, Any] | None, status: int, pressed: int, devices: int) -> dict[str, Any]:
    if answer is not None and status == answer.get("exit", 0):
        if "stopped" in answer:  # why the status is not 0, which is said to shells alone
            answer = {name: value for name, value in answer.items() if name not in ("error", "status")}
        return answer
    message = "" if answer is None else str(answer.get("error", ""))
    if status == 2 and message:
        # A run that it begins from, or goes on with, may have a network that only this program knows.
        own = next((word for word in re.findall(r"\w+", message) if _is_own(word)), None)
        more = "" if own is None else f" '{own}' is a network of this program: {_with_torchrun(devices)}."
        raise UserError(message + more)
    if status == 3 and message:
        raise Interrupted
    if pressed and (status == 130 or status < 0):
        raise KeyboardInterrupt
    how = f"was ended by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
    raise RuntimeError(f"'{command}', in a process of its own, {how}{': ' + message if message else ''}.")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- there


def _main() -> int:
    caller = int(os.environ.pop(_CALLER, None) or 0)  # not for the processes that this one starts: it is theirs
    if caller:
        console.suppress_final_error()
        threading.Thread(target=_mind, args=(caller,), daemon=True, name="mind the caller").start()
    return cli.main()


def _mind(caller: int) -> None:
    """A program that is killed must not leave a run behind that holds the devices: it stops, saved."""
    while os.getppid() == caller:
        time.sleep(1)
    console.warning("the program that asked for this run is gone")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_main())
