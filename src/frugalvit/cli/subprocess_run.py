"""Run a command in a child process: for ``devices > 1`` from Python.

A run starts its other processes by starting the same program again. A notebook or a user's script must not be started
again, so the child ``python -m frugalvit.cli.subprocess_run`` is that program, and the caller waits for its JSON.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import yaml

from frugalvit.cli import main as cli
from frugalvit.config.base import Config
from frugalvit.errors import Interrupted, UserError
from frugalvit.utils import console

_CALLER = "FRUGALVIT_CALLER"
_KILL_AT = 3
"""The first Ctrl-C stops the run and saves, the second ends it at once, the third kills it."""


def run_in_subprocess(command: str, values: dict[str, Any], config: Config, *, quiet: bool) -> dict[str, Any]:
    """Return what ``frugalvit COMMAND --json`` prints in a child process; its errors are raised here.

    values: the options that the caller passed; ``config`` is made of them
    """
    devices = getattr(config, "devices", 1)
    _check_runs_elsewhere(config, devices)
    with tempfile.TemporaryDirectory(prefix="frugalvit_") as folder:
        options, output = Path(folder, "options.yaml"), Path(folder, "output.json")
        options.write_text(_to_yaml(values, devices), encoding="utf-8")
        arguments = [*command.split(), "--config", str(options), "--json", *(["--quiet"] if quiet else [])]
        status, interrupts = _run_child([sys.executable, "-m", __name__, *arguments], output)
        result = _read_result(output)
    return _check_result(f"frugalvit {command}", result, status, interrupts)


# -- what a child process cannot run


def _torchrun_hint(devices: int) -> str:
    return f"Start the script with 'torchrun --nproc-per-node {devices} SCRIPT'"


def _check_runs_elsewhere(config: Config, devices: int) -> None:
    """Reject several machines, and networks that only the calling program has registered."""
    if getattr(config, "nodes", 1) > 1:
        raise UserError(
            f"--nodes needs torchrun when called from Python. {_torchrun_hint(devices)} on every machine, "
            "with --nnodes, --rdzv-backend and --rdzv-endpoint before the script."
        )
    settings = config.named_settings().values() if hasattr(config, "named_settings") else ()  # type: ignore[attr-defined]
    for name in [getattr(config, "backbone", None), *(setting.get("backbone") for setting in settings)]:
        if isinstance(name, str) and _is_registered_by_caller(name):
            raise UserError(f"'{name}' is registered in this program only. {_torchrun_hint(devices)}.")


def _is_registered_by_caller(name: str) -> bool:
    if "timm" not in sys.modules:
        return False
    from timm.models import is_model, model_entrypoint

    name = name.partition(".")[0]
    return is_model(name) and model_entrypoint(name).__module__.partition(".")[0] not in ("timm", "frugalvit")


def _to_yaml(values: dict[str, Any], devices: int) -> str:
    """Write the options as the caller passed them, so that the child resolves the others."""

    class Dumper(yaml.SafeDumper):
        pass

    def represent(dumper: yaml.SafeDumper, value: Any) -> yaml.Node:
        """Write a path, a number of numpy or a ``torch.device`` as YAML has it."""
        if isinstance(value, os.PathLike):
            return dumper.represent_data(os.fspath(value))
        if hasattr(value, "item"):
            return dumper.represent_data(value.item())
        if type(value).__name__ == "device":
            return dumper.represent_data(value.type)
        raise UserError(
            f"{value!r} ({type(value).__name__}) cannot be passed to the processes of devices={devices}. "
            f"{_torchrun_hint(devices)}."
        )

    Dumper.add_multi_representer(object, represent)
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True)


# -- the child process


def _run_child(command: list[str], output: Path) -> tuple[int, int]:
    """Run the child; return its exit status and the number of Ctrl-C meanwhile."""
    paths = [path or str(Path.cwd()) for path in sys.path if isinstance(path, str) and os.pathsep not in path]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1", _CALLER: str(os.getpid())}
    interrupts = 0
    with output.open("wb") as file:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,  # a pipe would stay open as long as any grandchild
            stderr=None if _has_standard_error() else subprocess.PIPE,
            env=os.environ | variables,
            process_group=0 if hasattr(os, "killpg") else None,  # Ctrl-C reaches it once, from here
        )
        copier = threading.Thread(target=_copy_lines, args=(child.stderr or (),), daemon=True)
        copier.start()
        try:
            while True:
                try:
                    status = child.wait()
                    break
                except KeyboardInterrupt:
                    interrupts += 1
                    if hasattr(os, "killpg"):  # Windows sends Ctrl-C to all that share a console
                        os.killpg(child.pid, signal.SIGINT if interrupts < _KILL_AT else signal.SIGKILL)
            copier.join(5)  # a grandchild may keep the pipe open
            return status, interrupts
        finally:
            if child.poll() is None:
                child.terminate()


def _has_standard_error() -> bool:
    """True if the child can inherit standard error; a notebook's is not a file of the system."""
    try:
        return sys.stderr.fileno() == 2
    except (AttributeError, OSError, ValueError):
        return False


def _copy_lines(stream: Any) -> None:
    for line in stream:
        with contextlib.suppress(Exception):  # a closed notebook must not end the run
            sys.stderr.write(line.decode("utf-8", "replace"))
            sys.stderr.flush()


# -- its result


def _read_result(path: Path) -> dict[str, Any] | None:
    """Return the last line that is a JSON object; a library may print lines of its own."""
    for line in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None


def _check_result(command: str, result: dict[str, Any] | None, status: int, interrupts: int) -> dict[str, Any]:
    """Return the result, or raise the error of the child process."""
    if result is not None and status == result.get("exit", 0):
        if "stopped" in result:  # these two explain the exit status to shells
            result = {name: value for name, value in result.items() if name not in ("error", "status")}
        return result
    message = "" if result is None else str(result.get("error", ""))
    if status == 2 and message:
        raise UserError(message)
    if status == 3 and message:
        raise Interrupted
    if interrupts and (status == 130 or status < 0):
        raise KeyboardInterrupt
    reason = f"signal {-status}" if status < 0 else f"status {status}"
    raise RuntimeError(f"'{command}' ended with {reason} in a child process{': ' + message if message else ''}.")


# -- inside the child process


def _main() -> int:
    caller = int(os.environ.pop(_CALLER, None) or 0)  # removed: the processes that this one starts have another caller
    if caller:
        console.suppress_final_error()
        threading.Thread(target=_stop_without_caller, args=(caller,), daemon=True).start()
    return cli.main()


def _stop_without_caller(caller: int) -> None:
    """Stop and save the run if the calling program is gone: the run would block the devices."""
    while os.getppid() == caller:
        time.sleep(1)
    console.warning("the program that started this run is gone")
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(_main())
