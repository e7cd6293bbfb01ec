"""Loading weights into a backbone: ours and every released format, recognised by content, fitted to its size."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frugalvit.backbones.base import Backbone
from frugalvit.backbones.weights import checkpoint_formats
from frugalvit.backbones.weights.fit import Fitted, fit
from frugalvit.backbones.weights.model_config import WEIGHT_FILES, saved_network, weights_in
from frugalvit.backbones.weights.resample import quiet_tables
from frugalvit.backbones.weights.safe_load import read_checkpoint, read_with_metadata
from frugalvit.errors import UserError
from frugalvit.utils.text import truncate_list

__all__ = ["Heads", "LoadReport", "load_weights", "read_checkpoint", "read_heads", "read_localization"]

Source = str | Path | Mapping[str, Any]


@dataclass
class LoadReport:
    """What became of a checkpoint.

    Names are the backbone's in ``matched``, ``missing`` and ``resized`` (those of ``matched`` that had another size),
    the file's in ``unexpected``, which counts the training heads too; ``left_over`` does not.
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

    def __repr__(self) -> str:
        odd = [f"{what}: {_some(names)}" for what, names in self._odd().items() if names]
        counts = [f"{len(self.matched)} matched", *[f"{len(names)} {what}" for what, names in self._odd().items()]]
        return f"LoadReport({self.kind!r}, {'; '.join([', '.join(counts), *odd])})"

    def _odd(self) -> dict[str, list[str]]:
        return {"missing": self.missing, "unexpected": self.unexpected}


@dataclass
class Heads:
    """The projection heads of a label-free checkpoint, for continued pre-training.

    Head tensors have the released names: ``mlp.{0,2,4}.weight|bias``, ``last_layer.weight_g``, ``last_layer.weight_v``.
    A level the checkpoint lacks is empty, its centre None.
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
    safetensors). Relative-bias tables, position and patch embeddings of another size are resampled; a classifier of
    another class count is left out, and so is every classifier with ``classifier=False``; ``notes`` say it all. Files
    are never executed.

    Raises UserError when the file is unreadable, when its numbers are no weights (integers, complex or undefined ones),
    when most of the backbone finds nothing in it (the wrong architecture), and with ``strict`` when anything is missing
    or left over, heads aside.
    """
    if not isinstance(source, Mapping):
        source = weights_in(Path(source))
    contents, where = _open(source)
    model: nn.Module = getattr(backbone, "model", backbone)  # type: ignore[assignment]
    made = _saved_from(source, backbone)
    best = max(_candidates(contents, model, made, classifier), key=lambda fitted: len(fitted.tensors))
    wanted = [name for name in model.state_dict() if not checkpoint_formats.is_optional(name)]
    fits = sum(name in best.tensors for name in wanted)
    if fits * 2 < len(wanted):
        raise UserError(_wrong_architecture(contents, where, backbone, fits, len(wanted)))
    missing = [name for name in wanted if name not in best.tensors]
    aside = [*contents.heads, *contents.localization]
    if aside:
        best.notes.append(f"{len(aside)} tensors of training heads left out")
    if strict and (missing or best.unused):
        raise UserError(
            f"{where} does not fit {_name(backbone)} exactly: missing {_some(missing)}; left over {_some(best.unused)}."
        )
    _check_numbers(best.tensors, model, where)
    model.load_state_dict(best.tensors, strict=False)
    matched = [name for name in model.state_dict() if name in best.tensors]
    unexpected = [*best.unused, *aside]
    return LoadReport(contents.kind, matched, missing, unexpected, best.notes, best.resized, best.unused)


def read_heads(checkpoint: Source, network: str = "teacher") -> Heads:
    """The projection heads and centres in an EsViT or DINO checkpoint, of its ``teacher`` or ``student``."""
    raw = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
    view, region = checkpoint_formats.heads_of(checkpoint_formats.open_contents(raw, prefer=network))
    return Heads(view, region, *checkpoint_formats.centres_of(raw))


def read_localization(checkpoint: Source) -> dict[str, Tensor]:
    """Drloc's MLP in a VTs-Drloc checkpoint: ``layers.{0,2,4}.*`` (and ``unshared.*``); empty where there is none."""
    return checkpoint_formats.localization_mlp(_open(checkpoint)[0])


def _open(source: Source) -> tuple[checkpoint_formats.Contents, str]:
    if isinstance(source, Mapping):
        raw, where = source, "the given state dict"
    else:
        source = weights_in(Path(source))
        raw, metadata = read_with_metadata(source)
        raw, where = {**raw, **({"frugalvit": metadata["frugalvit"]} if "frugalvit" in metadata else {})}, str(source)
    contents = checkpoint_formats.open_contents(raw)
    if not contents.network:
        keys = ", ".join(map(str, list(raw)[:6])) or "nothing"
        raise UserError(f"{where} holds no network's weights (its keys: {keys}).")
    return contents, where


def _saved_from(source: Source, backbone: Backbone | nn.Module) -> nn.Module | None:
    """The network that the weights of a model's folder were saved from; None where nothing beside them says it."""
    if isinstance(source, Mapping) or Path(source).name not in WEIGHT_FILES:
        return None
    return saved_network(Path(source).parent, backbone)


def _check_numbers(tensors: Mapping[str, Tensor], model: nn.Module, where: str) -> None:
    target = model.state_dict()
    for name, tensor in tensors.items():
        if not target[name].is_floating_point():
            continue
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{where} holds {kind} numbers ({name}), which no network here computes with; give the weights as they "
                "were before they were converted."
            )
        if not bool(torch.isfinite(tensor.float()).all()):
            raise UserError(
                f"{where} holds infinite or undefined numbers ({name}): its training has failed; give an earlier "
                "checkpoint."
            )


def _candidates(
    contents: checkpoint_formats.Contents, model: nn.Module, made: nn.Module | None, classifier: bool
) -> list[Fitted]:
    """Our own reading of the names first; timm's, for the many formats it knows, where that finds more."""
    candidates = [fit(checkpoint_formats.translate(contents), model, made, classifier)]
    theirs = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    if theirs is not None and candidates[0].unused:
        try:
            with quiet_tables():
                renamed = theirs(dict(contents.network), model)
        except Exception:  # a foreign filter meeting names it was not written for; our own reading stands
            return candidates
        if isinstance(renamed, dict) and all(isinstance(tensor, Tensor) for tensor in renamed.values()):
            offered = {name: (name, tensor) for name, tensor in renamed.items()}
            candidates.append(fit(offered, model, made, classifier))
    return candidates


def _wrong_architecture(
    contents: checkpoint_formats.Contents, where: str, backbone: nn.Module, fits: int, wanted: int
) -> str:
    size = sum(tensor.numel() for tensor in contents.network.values()) / 1e6
    mine = sum(parameter.numel() for parameter in backbone.parameters()) / 1e6
    return (
        f"{where} holds another architecture: it seems to be a {contents.label} with {size:.1f} M values"
        f"{checkpoint_formats.shape_in_words(contents)}, the backbone is {_name(backbone)} with {mine:.1f} M, "
        f"and {fits} of its {wanted} tensors fit; create the backbone these weights were made for."
    )


def _name(backbone: nn.Module) -> str:
    return str(getattr(backbone, "name", type(backbone).__name__))


def _some(names: list[str]) -> str:
    return truncate_list(names, 4) or "nothing"
