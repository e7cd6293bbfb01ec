"""frugalvit: train vision transformers when images, labels or compute are scarce.

Public names are imported on first use, so that ``import frugalvit`` and ``frugalvit --help`` are fast.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

from frugalvit.utils.import_hooks import run_after_import

__version__ = "0.1.0"

_NAMES = {
    "frugalvit.features": ("Features",),
    "frugalvit.backbones": ("Backbone", "create_backbone", "list_models"),
    "frugalvit.backbones.weights.load": ("load_weights",),
    "frugalvit.objectives": (
        *("RelativeLocalization", "DenseLocalization", "ProjectionHead"),
        *("ViewMatching", "RegionMatching", "InstanceClassification"),
        *("view_loss", "region_loss", "match_regions"),
    ),
    "frugalvit.data": ("open_data",),
    "frugalvit.data.save_data": ("save_data",),
    "frugalvit.api": (
        *("train", "pretrain", "distil", "run", "compare", "evaluate", "predict"),
        *("probe_knn", "probe_linear", "probe_logistic", "probe_suite", "embed", "export", "report", "advise"),
        *("look_correspond", "look_attend", "detect_train", "detect_evaluate", "detect_predict"),
        *("segment_train", "segment_evaluate", "segment_predict", "look_explore", "data", "data_pack"),
        *("pretrain_compare", "detect_compare", "segment_compare", "list_datasets", "list_recipes"),
        *("demo", "bench", "bench_step", "reproduce", "doctor", "serve"),
    ),
    "frugalvit.export.inference_model": ("load",),
    "frugalvit.tasks.dense.predictors": ("load_detector", "load_segmenter"),
    "frugalvit.errors": ("UserError",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

if TYPE_CHECKING:
    from frugalvit.api import *  # noqa: F403
    from frugalvit.backbones import Backbone as Backbone
    from frugalvit.backbones import create_backbone as create_backbone
    from frugalvit.backbones import list_models as list_models
    from frugalvit.backbones.weights.load import load_weights as load_weights
    from frugalvit.data import open_data as open_data
    from frugalvit.data.save_data import save_data as save_data
    from frugalvit.errors import UserError as UserError
    from frugalvit.export.inference_model import load as load
    from frugalvit.features import Features as Features
    from frugalvit.objectives import DenseLocalization as DenseLocalization
    from frugalvit.objectives import InstanceClassification as InstanceClassification
    from frugalvit.objectives import ProjectionHead as ProjectionHead
    from frugalvit.objectives import RegionMatching as RegionMatching
    from frugalvit.objectives import RelativeLocalization as RelativeLocalization
    from frugalvit.objectives import ViewMatching as ViewMatching
    from frugalvit.objectives import match_regions as match_regions
    from frugalvit.objectives import region_loss as region_loss
    from frugalvit.objectives import view_loss as view_loss
    from frugalvit.tasks.dense.predictors import load_detector as load_detector
    from frugalvit.tasks.dense.predictors import load_segmenter as load_segmenter

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'frugalvit' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


class _CallablePackage(types.ModuleType):
    """A package with the name of a command: ``fv.export("runs/RUN")`` works, and so does ``frugalvit.export.onnx``."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        function = getattr(importlib.import_module("frugalvit.api"), self.__name__.rpartition(".")[2])
        return function(*arguments, **options)


def __dir__() -> list[str]:
    return sorted(__all__)


for _package in ("frugalvit.export", "frugalvit.report", "frugalvit.data"):
    run_after_import(_package, lambda name=_package: setattr(sys.modules[name], "__class__", _CallablePackage))

# Register our models when timm is imported: timm.create_model("cvt_13") works, and ``frugalvit --help`` skips timm.
run_after_import("timm", lambda: importlib.import_module("frugalvit.backbones"))
