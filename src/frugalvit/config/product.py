"""Options of ``frugalvit doctor``, ``advise`` and ``completion``."""

from __future__ import annotations

from typing import Literal

from frugalvit.config.base import Config, option
from frugalvit.config.kinds import Device


class DoctorConfig(Config):
    """Versions, devices, what is missing, and what the caches take."""

    cache: bool = option(True, "add up the cache folder (a walk over its files)")


class AdviseConfig(Config):
    """What to do with a dataset on this machine, why, and how long it takes."""

    data: str = option(help="a folder, a table, shards, or the name of a dataset", positional=True)
    device: Device = option("auto", "where to compute")
    trial: int = option(3, "steps to measure each training with, for the expected time; 0: no times", ge=0)


class CompletionConfig(Config):
    """A script that completes the command's words and options in a shell."""

    shell: Literal["bash", "zsh", "fish"] = option(help="bash, zsh or fish", positional=True)
