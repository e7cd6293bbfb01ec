"""Fit a file's tensors to a network: take them unchanged, resample them to another size, or leave them out."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from frugalvit.backbones.architectures import cvt_windowed
from frugalvit.backbones.timm_features import Size
from frugalvit.backbones.weights import released_checkpoints, resample


@dataclass
class Fitted:
    """Tensors that fit a model, by its names, and the names of the file's unused tensors."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)


def fit(
    offered: Mapping[str, tuple[str, Tensor]], model: nn.Module, saved: nn.Module | None, classifier: bool
) -> Fitted:
    """Fit ``offered`` (our name -> the file's name, tensor) to ``model``.

    saved:      the network that the tensors were saved from, if known: it has the shapes of their tables
    classifier: False always leaves the file's classifier out
    """
    target = model.state_dict()
    own_classifier = classifier_name(model)
    fitted = Fitted()
    changes: Counter[str] = Counter()
    for name, (source_name, tensor) in offered.items():
        part = released_checkpoints.classifier_part(name)
        if part and name not in target:
            name = f"{own_classifier}.{part}"
        own = target.get(name)
        fits = own is not None and own.shape == tensor.shape and (classifier or not part)
        if fits and not _is_on_other_grid(name, tensor, model, saved):
            fitted.tensors[name] = tensor
            continue
        resized, how = (None, "") if own is None or part else _resize(name, tensor, own, model, saved)
        if resized is not None:
            fitted.tensors[name] = resized
            fitted.resized.append(name)
            changes[how] += 1
            continue
        if how:
            fitted.notes.append(how)
        if not released_checkpoints.is_optional(name):
            fitted.unused.append(source_name)
        if part == "weight" and tensor.ndim:
            classes = "" if own is None or not classifier else f" (this model has {len(own)})"
            fitted.notes.append(f"classifier of {len(tensor)} classes left out{classes}")
    _fill_absent_biases(fitted, model, changes)
    fitted.notes += [f"{count} {how}" for how, count in changes.items()]
    return fitted


def _fill_absent_biases(fitted: Fitted, model: nn.Module, changes: Counter[str]) -> None:
    """Set biases to zero that the file's network does not have: the result is the same."""
    target = model.state_dict()
    tables = [name for name in target if name.endswith("relative_position_bias_table")]
    without_tables = not any(name in fitted.tensors for name in tables)
    for name, tensor in target.items():
        if name in fitted.tensors:
            continue
        if name.endswith("attn.qkv.bias") and name[:-4] + "weight" in fitted.tensors:
            kind = "attention biases"
        # Only the released CvT was trained without tables.
        elif name in tables and without_tables and isinstance(_owner(model, name), cvt_windowed.WindowAttention):
            kind = "relative bias tables"
        else:
            continue
        fitted.tensors[name] = tensor.new_zeros(tensor.shape)
        changes[f"{kind} missing in the file set to zero"] += 1


def _is_on_other_grid(name: str, tensor: Tensor, model: nn.Module, saved: nn.Module | None) -> bool:
    """Whether a table of the right length was saved for another grid: 14 x 14 tokens are as many as 7 x 28."""
    if saved is None:
        return False
    if name.endswith("relative_position_bias_table"):
        return _table_sides(_owner(saved, name), len(tensor)) != _table_sides(_owner(model, name), len(tensor))
    if name.rpartition(".")[2] != "pos_embed" or tensor.ndim != 3:
        return False
    return _token_grid(saved, tensor.shape[1]) != _token_grid(model, tensor.shape[1])


def _resize(
    name: str, tensor: Tensor, target: Tensor, model: nn.Module, saved: nn.Module | None
) -> tuple[Tensor | None, str]:
    """Return the tensor in the shape of ``target`` and a note; None if it cannot be resized."""
    owner, _, leaf = name.rpartition(".")
    if leaf.endswith("relative_position_bias_table") and tensor.ndim == 2 and tensor.shape[1:] == target.shape[1:]:
        old, new = _table_sides(_owner(saved, name), len(tensor)), _table_sides(_owner(model, name), len(target))
        if old and new and _is_clamped(model, saved, old, new):
            return resample.inner_bias_table(tensor, new, old), f"relative bias tables cut to maps of {_window(new)}"
        if old and new:
            resized = resample.resample_bias_table(tensor, new, old)
            return resized, f"relative bias tables resampled {_window(old)} -> {_window(new)}"
    elif leaf == "pos_embed" and tensor.ndim == 3 and tensor.shape[2:] == target.shape[2:]:
        grid = _token_grid(model, target.shape[1])
        if grid:
            old = None if saved is None else _token_grid(saved, tensor.shape[1])
            prefix = target.shape[1] - grid[0] * grid[1]
            resized = resample.resample_position_embedding(tensor, grid, prefix, old)
            if resized is None:
                return None, f"position embedding of {tensor.shape[1]} rows cannot be resampled: its grid is not square"
            return resized, f"position embedding resampled to {grid[0]} x {grid[1]} tokens"
    elif name == next((n for n, t in model.state_dict().items() if t.ndim == 4), None):
        module = model.get_submodule(owner)
        patches = isinstance(module, nn.Conv2d) and module.stride == module.kernel_size
        resized = resample.fit_first_convolution(tensor, target.shape, patches)
        if resized is not None:
            return resized, f"first convolution fitted from {_shape(tensor)} to {_shape(target)}"
    return None, ""


def _owner(model: nn.Module | None, name: str) -> nn.Module | None:
    """Return the module that a tensor belongs to, or None."""
    return None if model is None else dict(model.named_modules()).get(name.rpartition(".")[0])


def _table_sides(attention: nn.Module | None, rows: int) -> Size | None:
    window = getattr(attention, "window_size", None)
    if isinstance(window, tuple) and len(window) == 2 and (2 * window[0] - 1) * (2 * window[1] - 1) == rows:
        return 2 * window[0] - 1, 2 * window[1] - 1
    return resample.square(rows)


def _is_clamped(model: nn.Module, saved: nn.Module | None, old: Size, new: Size) -> bool:
    """Whether a window is smaller only because its map is smaller: then it uses the inner offsets of the table."""
    window = ((old[0] + 1) // 2, (old[1] + 1) // 2) if saved is None else _largest_window(saved)
    return _largest_window(model) == window and new[0] <= old[0] and new[1] <= old[1]


def _largest_window(model: nn.Module) -> Size | None:
    """Return the window size of a network; stages with smaller maps have smaller windows, never larger."""
    if isinstance(window := getattr(model, "window_size", None), tuple):
        return window
    attentions = [module for module in model.modules() if hasattr(module, "relative_position_bias_table")]
    windows = [module.window_size for module in attentions if isinstance(module.window_size, tuple)]
    return (max(height for height, _ in windows), max(width for _, width in windows)) if windows else None


def _token_grid(model: nn.Module, tokens: int) -> Size | None:
    grid = getattr(getattr(model, "patch_embed", model), "grid_size", None)
    if grid and 0 <= tokens - grid[0] * grid[1] <= 16:
        return int(grid[0]), int(grid[1])
    prefix = int(getattr(model, "num_prefix_tokens", 1))
    return resample.square(tokens - prefix) or resample.square(tokens)


def classifier_name(model: nn.Module) -> str | None:
    """Return the name of the linear classifier, or None."""
    classifier: Any = model.get_classifier() if hasattr(model, "get_classifier") else None  # type: ignore[operator]
    first = classifier[0] if isinstance(classifier, tuple) else classifier
    return next((name for name, module in model.named_modules() if module is first and name), None)


def _window(sides: Size) -> str:
    """Return the window of a table with these sides, for messages: 7, or 4x2."""
    height, width = ((side + 1) // 2 for side in sides)
    return str(height) if height == width else f"{height}x{width}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))
