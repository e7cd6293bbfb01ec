"""Every command from Python: its options as keywords, what ``--json`` prints as a dictionary.

outcome = fv.train("photos/", epochs=50, localization={"weight": 1.0})
fv.run("probe knn", outcome["run"], "photos/")["top1"]
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pkgutil
import sys
import threading
import typing
from collections.abc import Iterator
from typing import Any

from frugalvit.cli.main import find_command
from frugalvit.config.base import Config, flat_fields, merge, set_dotted
from frugalvit.errors import GUARD, UserError
from frugalvit.utils import console, launch_env

Place = str | os.PathLike[str]


_running = threading.RLock()


def _wait_for_nobody() -> None:
    global _running
    _running = threading.RLock()


if hasattr(os, "register_at_fork"):  # a forked child is without the thread that had the lock, and would wait for ever
    os.register_at_fork(after_in_child=_wait_for_nobody)


def run(command: str, *arguments: Any, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Run ``frugalvit COMMAND`` here, and return what it prints with ``--json``; a mistake is a ``UserError``.

    One at a time: of several threads the others wait, since random numbers and settings are the whole process's.

    Args:
        command: its words: "train", "probe knn", "look explore" …
        arguments: what stands before the options on a command line, in the same order.
        quiet: no progress and no messages on standard error; warnings still are.
        options: as on a command line, with underscores for dashes (``img_size=64``) and dictionaries for groups
            (``localization={"weight": 1.0}``, or ``**{"localization.weight": 1.0}``); ``--continue`` is
            ``continue_from``, and there is no ``--config``: ``**yaml.safe_load(…)`` does the same.
    """
    words = command.split()
    verb = find_command(words) if words else None
    if verb is None or verb.words != " ".join(words):
        raise UserError(f"There is no command '{command}': see 'frugalvit --help'.")
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # spawned, and still reading the main module
        raise UserError(f"{GUARD[0].upper()}{GUARD[1:]}: this is one of them, and must not begin the work anew.")
    with _running, console.quiet() if quiet else contextlib.nullcontext():
        wanted = pkgutil.resolve_name(verb.config)
        values = _values(wanted, arguments, options)
        config = wanted.parse(values)
        if verb.distributed and config.devices > 1 and launch_env.needs_launch():
            from frugalvit.cli import subprocess_run

            return subprocess_run.run_in_subprocess(verb.words, values, config, quiet=quiet)
        function = pkgutil.resolve_name(verb.function)  # brings torch, where the command needs it: to be remembered too
        with _environment_as_it_was(), _torch_as_it_was():
            data = function(config).data
            if verb.distributed:
                _meet_the_others(config)
            return data


def _meet_the_others(config: Any) -> None:
    """A program goes on in every process that torchrun has started, and may read at once what the first one writes."""
    if math.prod(launch_env.devices_and_nodes(config.devices, config.nodes)) > 1:
        from frugalvit.engine.distributed import barrier

        barrier()


@contextlib.contextmanager
def _environment_as_it_was() -> Iterator[None]:
    """A command says in the environment what the processes that it starts must know; that is not the caller's."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@contextlib.contextmanager
def _torch_as_it_was() -> Iterator[None]:
    """A command seeds torch and sets what its device wants; the caller's own work goes on as if it had not."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    from frugalvit.engine import hardware  # with torch, which it needs

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices), hardware.preserve_onednn(), _plain_torch(torch):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def _plain_torch(torch: Any) -> Iterator[None]:
    """The modes in which a command finds torch on the command line, whatever the caller's own work is done in.

    What is already so is left alone: a mode that has to be entered costs every call of torch a little.
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        modes.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


def train(data: Place | None = None, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Train a classifier or fine-tune one: ``frugalvit train``. ``["run"]`` is its folder, ``["top1"]`` its accuracy.

    ``fv.load(outcome["run"])`` gives the model. Options are those of ``frugalvit train --help``; see :func:`run`.
    """
    return run("train", *([] if data is None else [data]), quiet=quiet, **options)


def pretrain(data: Place | None = None, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Learn features without labels: ``frugalvit pretrain``. ``["run"]`` is its folder, for ``init`` of :func:`train`.

    Options are those of ``frugalvit pretrain --help``; see :func:`run`.
    """
    return run("pretrain", *([] if data is None else [data]), quiet=quiet, **options)


def _values(model: type[Config], arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The values of a configuration, from a call."""
    values: dict[str, Any] = {}
    left = list(arguments)
    for name, field in flat_fields(model).items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        if not extra.get("positional") or not left:
            continue
        if typing.get_origin(field.annotation) is list and not isinstance(left[0], list):
            values[name], left = left, []  # the last one takes all there are, as IMAGE… does
        else:
            values[name] = left.pop(0)
    if left:
        raise UserError(f"There is no place for {left[0]!r}: give options by their names.")
    for name, value in options.items():
        if name in values:
            raise UserError(f"'{name}' is given twice.")
        given: dict[str, Any] = {}
        set_dotted(given, name, value)
        values = merge(values, given)
    return values
