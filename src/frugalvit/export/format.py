"""The interface of an export format: write a model to a folder, and run what was written."""

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from frugalvit.config.tools import ExportConfig
from frugalvit.errors import UserError
from frugalvit.export.inference_model import ReadyModel

Run = Callable[[Tensor], Sequence[Tensor]]
"""Runs an exported model with its own library: images (B, C, H, W) -> outputs."""


@dataclass(frozen=True)
class ExportJob:
    """A model to export, and the empty folder for its files."""

    config: ExportConfig
    model: ReadyModel
    folder: Path
    meta: dict[str, Any]  # what config.json records of the training
    settings: dict[str, Any]  # config.yaml of the run; empty if the model is not a run
    resized: bool  # the model's scores were measured at another image size


class ExportFormat(abc.ABC):
    """One choice of ``frugalvit export --to``; ``EXPORTS`` in config/tools.py lists all."""

    options: ClassVar[frozenset[str]] = frozenset()
    """The options among --output, --license and --int8 that the format reads; the others are refused."""

    def check_options(self, config: ExportConfig) -> None:
        """Raise an error, before any work, if an option or a package does not fit."""
        for name, default in (("output", "auto"), ("license", "unknown"), ("int8", False)):
            if getattr(config, name) != default and name not in self.options:
                raise UserError(f"--{name} has no effect with --to {config.to}. Remove the option.")

    @abc.abstractmethod
    def write(self, job: ExportJob) -> tuple[nn.Module, Run]:
        """Write the files. Return the network that they must agree with, and a function that runs the files."""
