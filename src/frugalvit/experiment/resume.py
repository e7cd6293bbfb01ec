"""``--resume``: a run goes on with the options it was begun with, given by the command that began it."""

from __future__ import annotations

import math
import operator
from pathlib import Path
from typing import Any, TypeVar

from lightning_fabric import Fabric

from frugalvit.config.base import flat_fields, set_dotted
from frugalvit.config.dense import DetectConfig, SegmentConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.run import FREE_ON_RESUME, same_value
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.engine import distributed
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import find_run
from frugalvit.utils.console import shell_quote
from frugalvit.utils.files import read_json

C = TypeVar("C", bound=RunConfig)

_OF_NOW = ("device", "devices", "nodes")
"""What the machine of now decides, said or not; of the other options that do not matter, what is said now counts."""


def load_resumed_config(config: C) -> C:
    """What the run to resume was started with, on the hardware of now; a new run's configuration as it is."""
    if not config.resume:
        return config
    folder = find_run(config.resume)
    stored = type(config).from_run(folder / "config.yaml")
    values = stored.model_dump() | {"resume": str(folder)}
    for name in _free(stored):
        if name in _OF_NOW or config.is_set(name):
            set_dotted(values, name, operator.attrgetter(name)(config))
    if config.data:  # where it lies now
        values["data"] = config.data
    return stored.with_values(values)


def moved_data_hint(config: RunConfig, command: str) -> str:
    """What to do where data is gone from the place that the run to resume, or to continue, had it in; else empty."""
    if config.resume and not config.data:
        run, data, flag = config.resume, load_resumed_config(config).data, "--resume"
    elif isinstance(config, PretrainConfig) and config.continue_from and not config.requested("data", None):
        run, data, flag = config.continue_from, config.data, "--continue"
    else:
        return ""
    if Path(str(data)).exists():
        return ""
    return f" {run} had it there. If it lies elsewhere now: frugalvit {command} PLACE {flag} {shell_quote(run)}"


def check_resume(config: RunConfig) -> None:
    """A run is resumed by the command that began it and with the options it was begun with, or not at all."""
    folder = find_run(str(config.resume))
    check_kind(folder, type(config), "'frugalvit {verb} --resume {folder}' resumes it")
    if config.out and Path(config.out).resolve() != folder.resolve():
        raise UserError(f"A resumed run stays in its folder, {folder}: leave out --out {config.out}.")
    stored = type(config).from_run(folder / "config.yaml")
    _check_readers(config, stored, folder)
    for name, field in flat_fields(type(config)).items():
        if name in ("resume", "out", "data", *_free(stored)) or not config.is_set(name):
            continue
        wanted, had = (operator.attrgetter(name)(part) for part in (config, stored))
        if wanted == "auto" or same_value(name, wanted, had):
            continue
        if not _was_changed(name, wanted, had, stored, folder):
            short = (field.json_schema_extra or {}).get("short")  # type: ignore[union-attr]
            flag = short if str(short).startswith("--") else f"--{name.replace('_', '-')}"
            begun = f"with {flag} {had}" if had not in (None, False, "auto") else f"without {flag}"
            way = f"start a new run from its weights with --init {shell_quote(folder)}"
            longer = name in ("steps", "epochs") and wanted is not None and (had in (None, "auto") or wanted > had)
            if longer and isinstance(config, PretrainConfig):
                way = f"go on for longer in a new run with --continue {shell_quote(folder)} {flag} {wanted:.15g}"
            raise UserError(f"{folder} was begun {begun} and goes on so: leave it out, or {way}.")


def check_ranks_agree(config: RunConfig, fabric: Fabric) -> None:
    """Each process has looked for itself whether ``--resume auto`` finds a run: all must have found the same."""
    if not distributed.all_ranks_equal(fabric, int(bool(config.resume))):
        raise UserError(
            f"Some processes find a run in {config.out}, and others do not: it must lie on a file system that all "
            "machines share."
        )


def check_kind(folder: Path, kind: type[RunConfig], way: str) -> None:
    """Whether the run in a folder is one of the command that ``kind`` configures; ``way`` says what to do if not."""
    options = set(read_yaml(folder / "config.yaml"))
    if options <= set(kind.model_fields):
        return
    verb = verb_of(folder)
    if verb is None:
        odd = min(options - set(kind.model_fields))
        raise UserError(f"{folder}/config.yaml has an option '{odd}', which this version of frugalvit does not know.")
    way = way.format(verb=verb, folder=shell_quote(folder))
    raise UserError(
        f"{folder} is a run of 'frugalvit {verb}': {way}; --init {shell_quote(folder)} starts from its weights."
    )


def verb_of(folder: Path) -> str | None:
    """The command that began a run, by the options it has; None where no command has them all."""
    options = set(read_yaml(folder / "config.yaml"))
    kinds: dict[str, type[RunConfig]] = {"train": TrainConfig, "pretrain": PretrainConfig}
    kinds |= {"detect train": DetectConfig, "segment train": SegmentConfig}
    return next((verb for verb, kind in kinds.items() if options <= set(kind.model_fields)), None)


def network_keywords(config: RunConfig) -> dict[str, Any]:
    """The keywords of a run's network; of one that goes on or is continued, with all that was chosen when it began.

    What small images want is a matter of measuring: a later version may choose otherwise, and its network would not
    take the run's weights. Runs of versions that did not write it down are made as new ones are.
    """
    if config.resume:
        return config.backbone_args | read_facts(config.resume).get("network", {})
    if isinstance(config, PretrainConfig) and config.continue_from:
        folder = find_run(config.continue_from)
        theirs = PretrainConfig.from_run(folder / "config.yaml")
        if (config.backbone, config.img_size) == (theirs.backbone, theirs.img_size):
            return read_facts(folder).get("network", {}) | config.backbone_args
    return config.backbone_args


def read_facts(folder: str | Path) -> dict[str, Any]:
    """What a run wrote down about its data; nothing where it was killed before that."""
    return read_json(Path(folder) / "data.json", dict) or {}


def _check_readers(config: RunConfig, stored: RunConfig, folder: Path) -> None:
    """Shards read in passing are shared out among the processes: another number would repeat and skip images."""
    if stored.stream is not True:
        return
    now = math.prod(distributed.devices_and_nodes(config.devices, config.nodes))
    begun = read_facts(folder).get("processes")
    if begun is None:  # an earlier frugalvit wrote down only what it was asked for
        begun, now = stored.devices * stored.nodes, config.devices * config.nodes
    if begun != now:
        raise UserError(
            f"{folder} reads shards in passing, shared out among the processes it was begun with, and goes on with as "
            f"many: {begun} (--devices, --nodes), not {now}; or start a new run from its weights with --init "
            f"{shell_quote(folder)}."
        )


def _free(stored: RunConfig) -> tuple[str, ...]:
    """Options that may be others now; readers of shards share them out among themselves, so their number may not."""
    return tuple(name for name in FREE_ON_RESUME if name != "workers" or stored.stream is not True)


def _was_changed(name: str, wanted: Any, had: Any, stored: RunConfig, folder: Path) -> bool:
    """Whether the run itself made another value of the one that is given again: the same words must do again."""
    if name == "batch":
        facts = read_facts(folder)
        return wanted == facts.get("batch") or wanted > had == facts.get("images")
    return name == "accumulate" and stored.auto_batch
