"""--resume: continue a run with its stored options; only some may change."""

import math
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from frugalvit.config.base import flat_fields, option_extras
from frugalvit.config.dense import DetectConfig, SegmentConfig
from frugalvit.config.distil import DistilConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import FREE_ON_RESUME, RunConfig, TrainConfig, same_value
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.runs import layout
from frugalvit.runs.layout import find_run
from frugalvit.runs.run_folder import read_data_facts
from frugalvit.utils.console import shell_quote
from frugalvit.utils.launch_env import devices_and_nodes

C = TypeVar("C", bound=RunConfig)

_MACHINE = ("device", "devices", "nodes", "strategy", "plugin")
"""Always taken from the new command. Other free options are overridden only if the user sets them."""

_LOCATIONS = ("data", "unlabelled", "teacher")

COMMANDS: dict[str, type[RunConfig]] = {
    "train": TrainConfig,
    "pretrain": PretrainConfig,
    "distil": DistilConfig,
    "detect train": DetectConfig,
    "segment train": SegmentConfig,
}


def load_resumed_config(config: C) -> C:
    """Return the stored options of the run to resume, with the free ones of ``config``; raise if others change."""
    folder = find_run(str(config.resume))
    values = read_yaml(folder / layout.CONFIG)
    check_command(folder, values, type(config), "resume it with 'frugalvit {command} --resume {folder}'")
    if config.out and Path(config.out).resolve() != folder.resolve():
        raise UserError(f"A resumed run stays in its folder, {folder}. Drop --out {config.out}.")
    stored = type(config).from_stored(values)
    # The readers share the shards of a stream, so their number cannot change.
    free = [name for name in FREE_ON_RESUME if name != "workers" or stored.stream is not True]
    if stored.plugin and not config.plugin:  # never run code because a stored file names it
        names = " ".join(map(shell_quote, stored.plugin))
        raise UserError(f"{folder} uses --plugin {names}. Pass --plugin again: it runs that file's code.")
    now = math.prod(devices_and_nodes(config.devices, config.nodes))
    if stored.stream is True and (before := read_data_facts(folder).get("processes", now)) != now:
        raise UserError(  # the shards would be divided among other processes: images would repeat
            f"{folder} streams shards with {before} processes (--devices, --nodes), not {now}: the number cannot "
            f"change on resume. Use {before}, or start a new run from its weights with --init {shell_quote(folder)}."
        )
    _check_fixed_options(config, stored, folder, free)
    changes: dict[str, Any] = {"resume": str(folder)}
    for name in free:
        if name in _MACHINE or config.is_set(name):
            changes[name] = operator.attrgetter(name)(config)
    for name in _LOCATIONS:  # the data and the teacher may have moved
        if getattr(config, name, None):
            changes[name] = getattr(config, name)
    return stored.with_options(changes, type(stored))


def _check_fixed_options(config: RunConfig, stored: RunConfig, folder: Path, free: Iterable[str]) -> None:
    """Raise if the user set an option to another value than the run has."""
    for name, field in flat_fields(type(config)).items():
        if name in ("resume", "out", *_LOCATIONS, *free) or not config.is_set(name):
            continue
        wanted, before = (operator.attrgetter(name)(options) for options in (config, stored))
        if wanted == "auto" or same_value(name, wanted, before) or _was_adjusted(name, wanted, before, stored, folder):
            continue
        short = option_extras(field).get("short")
        flag = short if str(short).startswith("--") else f"--{name.replace('_', '-')}"
        started = f"started with {before}" if before not in (None, False, "auto") else "started without it"
        advice = f"start a new run from its weights with --init {shell_quote(folder)}"
        if name in ("steps", "epochs") and isinstance(config, PretrainConfig):
            advice = f"train longer in a new run with --continue {shell_quote(folder)}"
        raise UserError(f"Cannot change {flag} on resume ({folder} {started}). Drop it, or {advice}.")


def _was_adjusted(name: str, wanted: Any, before: Any, stored: RunConfig, folder: Path) -> bool:
    """Return whether the run itself changed this value: repeating the same command must work."""
    if name == "batch":
        facts = read_data_facts(folder)
        return wanted == facts.get("batch") or wanted > before == facts.get("images")
    return name == "accumulate" and stored.auto_batch


def check_command(folder: Path, options: Iterable[str], kind: type[RunConfig], hint: str) -> None:
    """Raise if the stored options are not those of ``kind``, with a hint that may contain {command} and {folder}."""
    unknown = set(options) - set(kind.model_fields)
    if not unknown:
        return
    command = find_command(options)
    if command is None:
        raise UserError(f"{folder}/{layout.CONFIG} has an unknown option '{min(unknown)}'.")
    hint = hint.format(command=command, folder=shell_quote(folder))
    raise UserError(
        f"{folder} is a run of 'frugalvit {command}': {hint}; --init {shell_quote(folder)} starts from its weights."
    )


def find_command(options: Iterable[str]) -> str | None:
    """Return the command that has all these options; None if no command has them."""
    return next((command for command, kind in COMMANDS.items() if set(options) <= set(kind.model_fields)), None)


def command_of(folder: Path) -> str | None:
    """Return the command that started the run in a folder; None if no command has its options."""
    return find_command(read_yaml(folder / layout.CONFIG))


def network_keywords(config: RunConfig) -> dict[str, Any]:
    """Return the network's keywords; a resumed run keeps those of its start: a later version may choose others."""
    if config.resume:
        return config.backbone_args | read_data_facts(config.resume).get("network", {})
    return config.backbone_args
