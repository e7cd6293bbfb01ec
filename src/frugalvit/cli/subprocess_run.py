"""Run a command in a child process: for ``devices > 1`` from Python.

A run starts its other processes by starting the same program again. A notebook or a user's script must not be started
again, so a child process runs the command, and the caller waits for its JSON.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from frugalvit.config.base import Config
from frugalvit.errors import Interrupted, UserError


def run_in_subprocess(command: str, config: Config, *, quiet: bool) -> dict[str, Any]:
    """Return what ``frugalvit COMMAND --json`` prints in a child process; its errors are raised here."""
    if getattr(config, "nodes", 1) > 1:
        raise UserError("--nodes needs torchrun: start the script with 'torchrun --nnodes N' on every machine.")
    with tempfile.TemporaryDirectory(prefix="frugalvit_") as folder:
        options, output = Path(folder, "options.yaml"), Path(folder, "output.json")
        values = config.model_dump(mode="json", exclude_unset=True)  # the child resolves the others
        options.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
        words = [*command.split(), "--config", str(options), "--json", *(["--quiet"] if quiet else [])]
        status = _run_child([sys.executable, "-m", "frugalvit.cli", *words], output)
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        result = json.loads(lines[-1])
    except (IndexError, ValueError):  # it was killed
        result = {}
    message = result.get("error", f"'frugalvit {command}' ended with status {status} in a child process.")
    if status == 2:
        raise UserError(message)
    if status == 3 and "stopped" not in result:
        raise Interrupted
    if status in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if status not in (0, 3) or not result:
        raise RuntimeError(message)
    return {name: value for name, value in result.items() if name not in ("error", "status")}


def _run_child(command: list[str], output: Path) -> int:
    """Run the child and copy its messages; Ctrl-C reaches it once, from here. Return its exit status."""
    paths = [path or str(Path.cwd()) for path in sys.path]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    with output.open("wb") as file:  # a pipe would stay open as long as any grandchild
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
            process_group=0,
        )
    assert child.stderr is not None
    try:
        while True:
            try:
                for line in child.stderr:
                    sys.stderr.write(line)
                return child.wait()
            except KeyboardInterrupt:
                child.send_signal(signal.SIGINT)  # the first stops the run and saves, the second ends it at once
    finally:
        if child.poll() is None:
            child.terminate()
