"""``--resume``: a run goes on with the options it was begun with, given by the command that began it."""

from __future__ import annotations

import json
import operator
from pathlib import Path
from typing import Any, TypeVar

from frugalvit.config.base import flat_fields, read_yaml
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.config.transfer import DetectConfig, SegmentConfig
from frugalvit.errors import UserError
from frugalvit.training.runs import find_run

C = TypeVar("C", bound=RunConfig)

_OF_NOW = ("resume", "out", "data", "device", "devices", "nodes")
"""Where a run goes on, which the machine of now decides."""

_NO_MATTER = ("track", "report", "peer_timeout")
"""What no weight depends on: what is given now counts."""


def stored_config(config: C) -> C:
    """What the run to resume was started with, on the hardware of now; a new run's configuration as it is."""
    if not config.resume:
        return config
    folder = find_run(config.resume)
    stored = type(config).from_yaml(folder / "config.yaml")
    moved = {"resume": str(folder), "device": config.device, "devices": config.devices, "nodes": config.nodes}
    moved |= {name: getattr(config, name) for name in _free(stored) if config.was_given(name)}
    if config.data:  # where it lies now
        moved["data"] = config.data
    return stored.model_copy(update=moved)


def check_resume(config: RunConfig) -> None:
    """A run is resumed by the command that began it and with the options it was begun with, or not at all."""
    folder = find_run(str(config.resume))
    check_kind(folder, type(config), "'frugalvit {verb} --resume {folder}' resumes it")
    if config.out and Path(config.out).resolve() != folder.resolve():
        raise UserError(f"A resumed run stays in its folder, {folder}: leave out --out {config.out}.")
    stored = type(config).from_yaml(folder / "config.yaml")
    for name, field in flat_fields(type(config)).items():
        if name in (*_OF_NOW, *_free(stored)) or not config.was_given(name):
            continue
        wanted, had = (operator.attrgetter(name)(part) for part in (config, stored))
        if wanted not in ("auto", had) and not _was_lowered(name, wanted, had, stored, folder):
            short = (field.json_schema_extra or {}).get("short")  # type: ignore[union-attr]
            flag = short if str(short).startswith("--") else f"--{name.replace('_', '-')}"
            begun = f"with {flag} {had}" if had not in (None, False) else f"without {flag}"
            raise UserError(
                f"{folder} was begun {begun} and goes on so: leave it out, or start a new run from its weights with "
                f"--init {folder}."
            )


def check_kind(folder: Path, kind: type[RunConfig], way: str) -> None:
    """Whether the run in a folder is one of the command that ``kind`` configures; ``way`` says what to do if not."""
    options = set(read_yaml(folder / "config.yaml"))
    if options <= set(kind.model_fields):
        return
    kinds: dict[str, type[RunConfig]] = {"train": TrainConfig, "pretrain": PretrainConfig}
    kinds |= {"detect train": DetectConfig, "segment train": SegmentConfig}
    verb = next((verb for verb, other in kinds.items() if options <= set(other.model_fields)), None)
    if verb is None:
        odd = min(options - set(kind.model_fields))
        raise UserError(f"{folder}/config.yaml has an option '{odd}', which this version of frugalvit does not know.")
    way = way.format(verb=verb, folder=folder)
    raise UserError(f"{folder} is a run of 'frugalvit {verb}': {way}; --init {folder} starts from its weights.")


def read_facts(folder: str | Path) -> dict[str, Any]:
    """What a run wrote down about its data; nothing where it was killed before that."""
    path = Path(folder) / "data.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _free(stored: RunConfig) -> tuple[str, ...]:
    """Options that may be others now; readers of shards share them out among themselves, so their number may not."""
    return _NO_MATTER if stored.stream is True else (*_NO_MATTER, "workers")


def _was_lowered(name: str, wanted: Any, had: Any, stored: RunConfig, folder: Path) -> bool:
    """Whether the run itself made another value of the one that is given again: the same words must do again."""
    if name == "batch":
        return wanted > had == read_facts(folder).get("images")
    return name == "accumulate" and stored.auto_batch
