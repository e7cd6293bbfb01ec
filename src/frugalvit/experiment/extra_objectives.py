"""--objectives and --plugin: losses from the registry that a training task adds to its own."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives.registry import ObjectiveContext, get_objective

_RESERVED = ("loss", "cross_entropy", "view_loss", "region_loss", "localization_error", "guide_loss")


class ExtraObjectives(nn.Module):
    """Weighted objectives by name. ``step`` is the current optimizer step; the task sets it."""

    def __init__(self, options: Mapping[str, Mapping[str, Any]], dim: int) -> None:
        super().__init__()
        self.step = 0
        self.weights = {name: float(values["weight"]) for name, values in options.items()}
        for name, values in options.items():
            keywords = {key: value for key, value in values.items() if key != "weight"}
            try:
                self.add_module(name, get_objective(name)(dim, **keywords))
            except TypeError as error:
                raise UserError(f"--objectives {name}: wrong options ({error}).") from None

    def forward(
        self,
        losses: dict[str, Tensor],
        features: Sequence[Features],
        images: Sequence[Tensor],
        labels: Tensor | None = None,
        teacher: Sequence[Features | None] = (None,),
    ) -> dict[str, Tensor]:
        """Return the losses with the objectives added, each the mean over the views; lists have one entry per view."""
        losses = dict(losses)
        for name, weight in self.weights.items():
            views = zip(features, images, teacher, strict=True)
            values = [
                self.get_submodule(name)(view, ObjectiveContext(pixels, labels, target, self.step))
                for view, pixels, target in views
            ]
            loss = torch.stack(values).mean()
            losses["loss"] = losses["loss"] + weight * loss
            losses[name] = loss.detach()
        return losses


def make_objectives(
    options: Mapping[str, Mapping[str, Any]], dim: int, reserved: Iterable[str] = ()
) -> ExtraObjectives | None:
    """Build the objectives for grids of ``dim`` channels, or None. ``reserved``: further names that the task logs."""
    for name in options:
        if name in (*_RESERVED, *reserved):
            raise UserError(f"--objectives {name}: this command already logs a value of that name.")
    return ExtraObjectives(options, dim) if options else None


def load_plugins(plugins: Iterable[str]) -> None:
    """Import Python files or modules. This runs their code, which registers objectives, networks and the like."""
    for plugin in plugins:
        path = Path(plugin)
        try:
            if path.suffix == ".py":
                _import_file(path)
            else:
                importlib.import_module(plugin)
        except UserError:
            raise
        except Exception as error:  # any code may run there
            raise UserError(f"--plugin {plugin} failed: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> None:
    """Import a file once, under a module name of its own."""
    name = f"frugalvit_plugin_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and Path(str(loaded.__file__)).resolve() == path.resolve():
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"--plugin {path}: there is no such Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
