"""Load weights of our files and of every released format into a backbone, and fit them to its size."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.backbones.base import Backbone
from frugalvit.backbones.timm_features import quiet_tables
from frugalvit.backbones.weights import convert
from frugalvit.backbones.weights.fit import Fitted, fit
from frugalvit.backbones.weights.model_config import WEIGHT_FILES, saved_network, weights_in
from frugalvit.backbones.weights.safe_load import read_checkpoint, read_with_metadata
from frugalvit.errors import UserError
from frugalvit.utils.text import truncate_list

__all__ = ["Heads", "LoadReport", "load_weights", "read_checkpoint", "read_heads"]

Source = str | Path | Mapping[str, Any]


@dataclass
class LoadReport:
    """Which tensors of a checkpoint were loaded.

    ``matched``, ``missing`` and ``resized`` (those of ``matched`` that had another size) are names of the backbone;
    ``unexpected`` and ``left_over`` are names of the file, with and without its training heads.
    """

    kind: str
    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    notes: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    left_over: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{len(self.matched)} tensors loaded, {len(self.missing)} missing, {len(self.unexpected)} left over"
        return "; ".join([f"{self.kind}: {counts}", *self.notes])

    __repr__ = __str__


@dataclass
class Heads:
    """The projection heads of a self-supervised checkpoint, for continued pretraining.

    Head tensors have the released names: ``mlp.{0,2,4}.weight|bias``, ``last_layer.weight_g``, ``last_layer.weight_v``.
    A level that the checkpoint does not have is empty, with center None.
    """

    view: dict[str, Tensor]
    region: dict[str, Tensor]
    view_center: Tensor | None
    region_center: Tensor | None


def load_weights(
    backbone: Backbone | nn.Module, source: Source, *, strict: bool = False, classifier: bool = True
) -> LoadReport:
    """Load a checkpoint file, a run's or model's folder, or a state dict into ``backbone``.

    Reads frugalvit, timm, EsViT, DINO, Microsoft Swin, T2T-ViT, VTs-Drloc and torchvision ResNet files (``.pth`` or
    safetensors). Relative-bias tables, position and patch embeddings of another size are resampled. A classifier with
    another number of classes is left out; ``classifier=False`` leaves out every one. ``notes`` list these changes.
    Code in a file never runs.

    Raises UserError if the file is unreadable, if its numbers are integer, complex or non-finite, or if it has fewer
    than half of the backbone's tensors (another architecture). ``strict`` also raises it if any tensor except training
    heads is missing or left over.
    """
    source = source if isinstance(source, Mapping) else weights_in(Path(source))
    contents, origin = _open(source)
    model: nn.Module = getattr(backbone, "model", backbone)  # type: ignore[assignment]
    own_name = getattr(backbone, "name", type(backbone).__name__)
    has_config = isinstance(source, Path) and source.name in WEIGHT_FILES
    saved = saved_network(source.parent) if has_config else None  # type: ignore[union-attr]
    best = max(_candidates(contents, model, saved, classifier), key=lambda fitted: len(fitted.tensors))
    required = [name for name in model.state_dict() if not convert.is_optional(name)]
    missing = [name for name in required if name not in best.tensors]
    if 2 * len(missing) > len(required):
        raise UserError(
            f"{origin} contains another architecture: it seems to be a {contents.layout.label}. Only "
            f"{len(required) - len(missing)} of {len(required)} tensors of {own_name} fit. "
            "Create the backbone of these weights."
        )
    heads = [*contents.heads, *contents.localization]
    if heads:
        best.notes.append(f"{len(heads)} tensors of training heads left out")
    if strict and (missing or best.unused):
        absent, unused = (truncate_list(names, 4) or "nothing" for names in (missing, best.unused))
        raise UserError(f"{origin} does not fit {own_name} exactly: missing {absent}; left over {unused}.")
    _check_numbers(best.tensors, model, origin)
    model.load_state_dict(best.tensors, strict=False)
    matched = [name for name in model.state_dict() if name in best.tensors]
    return LoadReport(contents.kind, matched, missing, [*best.unused, *heads], best.notes, best.resized, best.unused)


def read_heads(checkpoint: Source) -> Heads:
    """Read the teacher's projection heads and centers from an EsViT or DINO checkpoint."""
    raw = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
    heads = convert.open_contents(raw).heads
    view, region = (
        {name.removeprefix(level): tensor for name, tensor in heads.items() if name.startswith(level)}
        for level in ("head.", "head_dense.")
    )
    centers = raw.get("dino_loss") or {}
    return Heads(view, region, centers.get("center"), centers.get("center_grid"))


def _open(source: Path | Mapping[str, Any]) -> tuple[convert.Contents, str]:
    if isinstance(source, Mapping):
        raw, origin = source, "the state dict"
    else:
        tensors, metadata = read_with_metadata(source)
        raw, origin = tensors | {key: value for key, value in metadata.items() if key == "frugalvit"}, str(source)
    contents = convert.open_contents(raw)
    if not contents.network:
        keys = ", ".join(map(str, list(raw)[:6])) or "nothing"
        raise UserError(f"{origin} contains no weights of a network (its keys: {keys}).")
    return contents, origin


def _check_numbers(tensors: Mapping[str, Tensor], model: nn.Module, origin: str) -> None:
    target = model.state_dict()
    for name, tensor in tensors.items():
        if not target[name].is_floating_point():
            continue
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(f"{name} in {origin} has the type {kind}; use the floating-point weights.")
        if not bool(torch.isfinite(tensor.float()).all()):
            raise UserError(
                f"{name} in {origin} has non-finite values: its training failed; use an earlier checkpoint."
            )


def _candidates(
    contents: convert.Contents, model: nn.Module, saved: nn.Module | None, classifier: bool
) -> list[Fitted]:
    """Fit the tensors renamed by our rules and, if some stay unused, also those renamed by timm's filter."""
    candidates = [fit(convert.translate(contents), model, saved, classifier)]
    timm_filter = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    if timm_filter is not None and candidates[0].unused:
        try:
            with quiet_tables():
                renamed = timm_filter(dict(contents.network), model)
        except Exception:  # timm's filter fails on names it does not know
            return candidates
        if isinstance(renamed, dict) and all(isinstance(tensor, Tensor) for tensor in renamed.values()):
            offered = {name: (name, tensor) for name, tensor in renamed.items()}
            candidates.append(fit(offered, model, saved, classifier))
    return candidates
