"""Loading weights into a backbone: ours and every released format, recognised by content, fitted to its size."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from frugalvit.backbones import remap, resample
from frugalvit.backbones.checkpoint import read_checkpoint, read_with_metadata
from frugalvit.errors import UserError

if TYPE_CHECKING:
    from frugalvit.backbones.factory import Backbone

__all__ = ["Heads", "LoadReport", "load_weights", "read_checkpoint", "read_heads", "read_localization"]

Source = str | Path | Mapping[str, Any]


@dataclass
class LoadReport:
    """What became of a checkpoint. Names are the backbone's in ``matched`` and ``missing``, the file's otherwise."""

    kind: str
    matched: list[str]
    missing: list[str]
    unexpected: list[str]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts = f"{len(self.matched)} tensors loaded, {len(self.missing)} missing, {len(self.unexpected)} left over"
        return "; ".join([f"{self.kind}: {counts}", *self.notes])


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


def load_weights(backbone: Backbone | nn.Module, source: Source, *, strict: bool = False) -> LoadReport:
    """Load a checkpoint file, a run's or model's folder, or a state dict into ``backbone``.

    Reads frugalvit, timm, EsViT, DINO, Microsoft Swin, T2T-ViT, VTs-Drloc and torchvision ResNet files (``.pth`` or
    safetensors). Relative-bias tables, position and patch embeddings of another size are resampled; a classifier of
    another class count is left out; both are said in ``notes``. Files are never executed.

    Raises UserError when the file is unreadable, when most of the backbone finds nothing in it (the wrong
    architecture), and with ``strict`` when anything is missing or left over, heads aside.
    """
    contents, where = _open(source)
    model: nn.Module = getattr(backbone, "model", backbone)  # type: ignore[assignment]
    best = max(_candidates(contents, model), key=lambda fitted: len(fitted.tensors))
    wanted = [name for name in model.state_dict() if not remap.is_optional(name)]
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
    model.load_state_dict(best.tensors, strict=False)
    matched = [name for name in model.state_dict() if name in best.tensors]
    return LoadReport(contents.kind, matched, missing, [*best.unused, *aside], best.notes)


def read_heads(checkpoint: Source, network: str = "teacher") -> Heads:
    """The projection heads and centres in an EsViT or DINO checkpoint, of its ``teacher`` or ``student``."""
    raw = checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint)
    view, region = remap.heads_of(remap.open_contents(raw, prefer=network))
    return Heads(view, region, *remap.centres_of(raw))


def read_localization(checkpoint: Source) -> dict[str, Tensor]:
    """Drloc's MLP in a VTs-Drloc checkpoint: ``layers.{0,2,4}.*`` (and ``unshared.*``); empty where there is none."""
    return remap.localization_mlp(_open(checkpoint)[0])


def _open(source: Source) -> tuple[remap.Contents, str]:
    if isinstance(source, Mapping):
        raw, where = source, "the given state dict"
    else:
        source = _weights_in(Path(source))
        raw, metadata = read_with_metadata(source)
        raw, where = {**raw, **({"frugalvit": metadata["frugalvit"]} if "frugalvit" in metadata else {})}, str(source)
    contents = remap.open_contents(raw)
    if not contents.network:
        keys = ", ".join(map(str, list(raw)[:6])) or "nothing"
        raise UserError(f"{where} holds no network's weights (its keys: {keys}).")
    return contents, where


def _weights_in(path: Path) -> Path:
    """The weights of a run's or an exported folder; any other path is itself."""
    inside = (path / "model" / "model.safetensors", path / "model.safetensors")
    return next((file for file in inside if path.is_dir() and file.is_file()), path)


@dataclass
class _Fitted:
    """Tensors that fit a model, by its names; the file's names that found no place."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _candidates(contents: remap.Contents, model: nn.Module) -> list[_Fitted]:
    """Our own reading of the names first; timm's, for the many formats it knows, where that finds more."""
    candidates = [_fit(remap.translate(contents), model)]
    theirs = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    if theirs is not None and candidates[0].unused:
        try:
            renamed = theirs(dict(contents.network), model)
        except Exception:  # a foreign filter meeting names it was not written for; our own reading stands
            return candidates
        if isinstance(renamed, dict) and all(isinstance(tensor, Tensor) for tensor in renamed.values()):
            candidates.append(_fit({name: (name, tensor) for name, tensor in renamed.items()}, model))
    return candidates


def _fit(offered: Mapping[str, tuple[str, Tensor]], model: nn.Module) -> _Fitted:
    target = model.state_dict()
    classifier = classifier_name(model)
    fitted = _Fitted()
    changes: Counter[str] = Counter()
    for name, (source_name, tensor) in offered.items():
        part = remap.classifier_part(name)
        if part and name not in target:
            name = f"{classifier}.{part}"
        wanted = target.get(name)
        if wanted is not None and wanted.shape == tensor.shape:
            fitted.tensors[name] = tensor
            continue
        resized, how = (None, "") if wanted is None or part else _resize(name, tensor, wanted, model)
        if resized is not None:
            fitted.tensors[name] = resized
            changes[how] += 1
            continue
        if not remap.is_optional(name):
            fitted.unused.append(source_name)
        if part == "weight":
            mine = "" if wanted is None else f" (this model has {len(wanted)})"
            fitted.notes.append(f"classifier of {len(tensor)} classes left out{mine}")
    for name, tensor in target.items():
        if name.endswith("attn.qkv.bias") and name not in fitted.tensors and name[:-4] + "weight" in fitted.tensors:
            fitted.tensors[name] = tensor.new_zeros(tensor.shape)
            changes["attention biases the file does without set to zero"] += 1
    fitted.notes += [f"{count} {how}" for how, count in changes.items()]
    return fitted


def _resize(name: str, tensor: Tensor, wanted: Tensor, model: nn.Module) -> tuple[Tensor | None, str]:
    """The tensor in the wanted shape and how it came about; None where the two are different things."""
    owner, _, leaf = name.rpartition(".")
    if leaf.endswith("relative_position_bias_table") and tensor.ndim == 2 and tensor.shape[1:] == wanted.shape[1:]:
        old, new = resample.square(len(tensor)), _table_sides(model.get_submodule(owner), len(wanted))
        if old and new:
            windows = f"{(old[0] + 1) // 2} -> {(new[0] + 1) // 2}"
            return resample.resample_bias_table(tensor, new), f"relative bias tables resampled {windows}"
    elif leaf == "pos_embed" and tensor.ndim == 3 and tensor.shape[2:] == wanted.shape[2:]:
        grid = _token_grid(model, wanted.shape[1])
        if grid:
            resized = resample.resample_position_embedding(tensor, grid, wanted.shape[1] - grid[0] * grid[1])
            return resized, f"position embedding resampled to {grid[0]} x {grid[1]} tokens"
    elif name == next((n for n, t in model.state_dict().items() if t.ndim == 4), None):
        module = model.get_submodule(owner)
        patches = isinstance(module, nn.Conv2d) and module.stride == module.kernel_size
        resized = resample.fit_first_convolution(tensor, wanted.shape, patches)
        return resized, f"first convolution fitted from {_shape(tensor)} to {_shape(wanted)}"
    return None, ""


def _table_sides(attention: nn.Module, rows: int) -> tuple[int, int] | None:
    window = getattr(attention, "window_size", None)
    if isinstance(window, tuple) and len(window) == 2 and (2 * window[0] - 1) * (2 * window[1] - 1) == rows:
        return 2 * window[0] - 1, 2 * window[1] - 1
    return resample.square(rows)


def _token_grid(model: nn.Module, tokens: int) -> tuple[int, int] | None:
    grid = getattr(getattr(model, "patch_embed", model), "grid_size", None)
    if grid and 0 <= tokens - grid[0] * grid[1] <= 16:
        return int(grid[0]), int(grid[1])
    prefix = int(getattr(model, "num_prefix_tokens", 1))
    return resample.square(tokens - prefix) or resample.square(tokens)


def classifier_name(model: nn.Module) -> str | None:
    """The name of the linear layer that classifies, None where the model has none."""
    classifier: Any = model.get_classifier() if hasattr(model, "get_classifier") else None  # type: ignore[operator]
    first = classifier[0] if isinstance(classifier, tuple) else classifier
    return next((name for name, module in model.named_modules() if module is first and name), None)


def _wrong_architecture(contents: remap.Contents, where: str, backbone: nn.Module, fits: int, wanted: int) -> str:
    size = sum(tensor.numel() for tensor in contents.network.values()) / 1e6
    mine = sum(parameter.numel() for parameter in backbone.parameters()) / 1e6
    return (
        f"{where} holds another architecture: it seems to be a {contents.label} with {size:.1f} M values"
        f"{remap.shape_in_words(contents)}, the backbone is {_name(backbone)} with {mine:.1f} M, and {fits} of its "
        f"{wanted} tensors fit; create the backbone these weights were made for."
    )


def _name(backbone: nn.Module) -> str:
    return str(getattr(backbone, "name", type(backbone).__name__))


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") or "nothing"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))
