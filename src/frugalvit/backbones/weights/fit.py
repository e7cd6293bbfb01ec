"""A file's tensors into a network: which fits as it is, which is resampled to another size, which finds no place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from frugalvit.backbones.architectures import cvt_windowed
from frugalvit.backbones.timm_features import Size
from frugalvit.backbones.weights import checkpoint_formats, resample


@dataclass
class Fitted:
    """Tensors that fit a model, by its names; the file's names that found no place."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)


def fit(
    offered: Mapping[str, tuple[str, Tensor]], model: nn.Module, made: nn.Module | None, classifier: bool
) -> Fitted:
    """``offered`` (our name -> the file's name, tensor) fitted to ``model``.

    made:       the network the tensors were saved from, where that is known: it says how its tables lie
    classifier: False leaves the file's classifier out even where it would fit
    """
    target = model.state_dict()
    own_classifier = classifier_name(model)
    fitted = Fitted()
    changes: Counter[str] = Counter()
    for name, (source_name, tensor) in offered.items():
        part = checkpoint_formats.classifier_part(name)
        if part and name not in target:
            name = f"{own_classifier}.{part}"
        wanted = target.get(name)
        fits = wanted is not None and wanted.shape == tensor.shape and (classifier or not part)
        if fits and not _lies_otherwise(name, tensor, model, made):
            fitted.tensors[name] = tensor
            fitted.notes += _doubt(name, tensor, model, made)
            continue
        resized, how = (None, "") if wanted is None or part else _resize(name, tensor, wanted, model, made)
        if resized is not None:
            fitted.tensors[name] = resized
            fitted.resized.append(name)
            changes[how] += 1
            continue
        if how:
            fitted.notes.append(how)
        if not checkpoint_formats.is_optional(name):
            fitted.unused.append(source_name)
        if part == "weight" and tensor.ndim:
            mine = "" if wanted is None or fits or not classifier else f" (this model has {len(wanted)})"
            fitted.notes.append(f"classifier of {len(tensor)} classes left out{mine}")
    _fill_what_files_do_without(fitted, model, changes)
    fitted.notes += [f"{count} {how}" for how, count in changes.items()]
    return fitted


def _fill_what_files_do_without(fitted: Fitted, model: nn.Module, changes: Counter[str]) -> None:
    """Biases that the network of a file does not have at all are zero in one that has them: it computes the same."""
    target = model.state_dict()
    tables = [name for name in target if name.endswith("relative_position_bias_table")]
    without_tables = not any(name in fitted.tensors for name in tables)
    for name, tensor in target.items():
        if name in fitted.tensors:
            continue
        if name.endswith("attn.qkv.bias") and name[:-4] + "weight" in fitted.tensors:
            kind = "attention biases"
        # The released CvT was trained without tables; files of other networks have them, or something is wrong.
        elif name in tables and without_tables and isinstance(_owner(model, name), cvt_windowed.WindowAttention):
            kind = "relative bias tables"
        else:
            continue
        fitted.tensors[name] = tensor.new_zeros(tensor.shape)
        changes[f"{kind} the file does without set to zero"] += 1


def _lies_otherwise(name: str, tensor: Tensor, model: nn.Module, made: nn.Module | None) -> bool:
    """Whether a table of the wanted length is one of another grid: 14 x 14 tokens are as many as 7 x 28."""
    if made is None:
        return False
    if name.endswith("relative_position_bias_table"):
        theirs, ours = _owner(made, name), _owner(model, name)
        return theirs is not None and _table_sides(theirs, len(tensor)) != _table_sides(ours, len(tensor))
    if name.rpartition(".")[2] != "pos_embed" or tensor.ndim != 3:
        return False
    return _token_grid(made, tensor.shape[1]) not in (None, _token_grid(model, tensor.shape[1]))


def _doubt(name: str, tensor: Tensor, model: nn.Module, made: nn.Module | None) -> list[str]:
    """A word where nothing says on which grid a position table was learned, and it may have been a square one."""
    if made is not None or name.rpartition(".")[2] != "pos_embed" or tensor.ndim != 3:
        return []
    grid = _token_grid(model, tensor.shape[1])
    if grid is None or grid[0] == grid[1] or resample.square(grid[0] * grid[1]) is None:
        return []
    return [f"position embedding taken as one of {grid[0]} x {grid[1]} tokens: the file does not say of which grid"]


def _resize(
    name: str, tensor: Tensor, wanted: Tensor, model: nn.Module, made: nn.Module | None
) -> tuple[Tensor | None, str]:
    """The tensor in the wanted shape and how it came about, or why it did not; None where they are different things."""
    owner, _, leaf = name.rpartition(".")
    if leaf.endswith("relative_position_bias_table") and tensor.ndim == 2 and tensor.shape[1:] == wanted.shape[1:]:
        old, new = _table_sides(_owner(made, name), len(tensor)), _table_sides(_owner(model, name), len(wanted))
        if old and new and _is_clamped(model, made, old, new):
            return resample.inner_bias_table(tensor, new, old), f"relative bias tables cut to maps of {_window(new)}"
        if old and new:
            resized = resample.resample_bias_table(tensor, new, old)
            return resized, f"relative bias tables resampled {_window(old)} -> {_window(new)}"
    elif leaf == "pos_embed" and tensor.ndim == 3 and tensor.shape[2:] == wanted.shape[2:]:
        grid = _token_grid(model, wanted.shape[1])
        if grid:
            old = None if made is None else _token_grid(made, tensor.shape[1])
            prefix = wanted.shape[1] - grid[0] * grid[1]
            resized = resample.resample_position_embedding(tensor, grid, prefix, old)
            if resized is None:
                return None, f"position embedding of {tensor.shape[1]} rows cannot be resampled: of no square grid"
            return resized, f"position embedding resampled to {grid[0]} x {grid[1]} tokens"
    elif name == next((n for n, t in model.state_dict().items() if t.ndim == 4), None):
        module = model.get_submodule(owner)
        patches = isinstance(module, nn.Conv2d) and module.stride == module.kernel_size
        resized = resample.fit_first_convolution(tensor, wanted.shape, patches)
        if resized is not None:
            return resized, f"first convolution fitted from {_shape(tensor)} to {_shape(wanted)}"
    return None, ""


def _owner(model: nn.Module | None, name: str) -> nn.Module | None:
    """The module a tensor belongs to, by its name; None where there is no such module."""
    return None if model is None else dict(model.named_modules()).get(name.rpartition(".")[0])


def _table_sides(attention: nn.Module | None, rows: int) -> Size | None:
    window = getattr(attention, "window_size", None)
    if isinstance(window, tuple) and len(window) == 2 and (2 * window[0] - 1) * (2 * window[1] - 1) == rows:
        return 2 * window[0] - 1, 2 * window[1] - 1
    return resample.square(rows)


def _is_clamped(model: nn.Module, made: nn.Module | None, old: Size, new: Size) -> bool:
    """Whether a window is smaller only because its map is: the network computes with the inner offsets of its table."""
    theirs = ((old[0] + 1) // 2, (old[1] + 1) // 2) if made is None else _largest_window(made)
    return _largest_window(model) == theirs and new[0] <= old[0] and new[1] <= old[1]


def _largest_window(model: nn.Module) -> Size | None:
    """The window a network was made with: maps that are smaller make theirs smaller, never larger."""
    if isinstance(made := getattr(model, "window_size", None), tuple):
        return made
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
    """The name of the linear layer that classifies, None where the model has none."""
    classifier: Any = model.get_classifier() if hasattr(model, "get_classifier") else None  # type: ignore[operator]
    first = classifier[0] if isinstance(classifier, tuple) else classifier
    return next((name for name, module in model.named_modules() if module is first and name), None)


def _window(sides: Size) -> str:
    """The window of a table, from its sides: 7, or 4x2 where it is oblong."""
    height, width = ((side + 1) // 2 for side in sides)
    return str(height) if height == width else f"{height}x{width}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))
