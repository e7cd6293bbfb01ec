"""Fit a file's tensors to a network: take them unchanged, resample them, or leave them out.

A table of relative biases has one value per head for every offset (dy, dx) between two tokens of a window. A position
embedding has one vector per token. Both are resized like images for another window or image size.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from timm.layers.patch_embed import resample_patch_embed
from timm.layers.pos_embed import resample_abs_pos_embed
from timm.models import adapt_input_conv
from torch import Tensor, nn
from torch.nn import functional as F

from frugalvit.backbones.architectures import cvt_windowed
from frugalvit.backbones.timm_features import Size, classifier_name
from frugalvit.backbones.weights import convert


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

    saved:      the network that the tensors come from, if known: it has the shapes of their tables
    classifier: False always leaves the file's classifier out
    """
    target = model.state_dict()
    own_classifier = classifier_name(model)
    fitted = Fitted()
    changes: Counter[str] = Counter()
    for name, (source_name, tensor) in offered.items():
        part = convert.classifier_part(name)
        if part and name not in target:
            name = f"{own_classifier}.{part}"
        own = target.get(name)
        fits = own is not None and own.shape == tensor.shape and (classifier or not part)
        if fits and not _is_on_other_grid(name, tensor, model, saved):
            fitted.tensors[name] = tensor
            continue
        resized, note = (None, "") if own is None or part else _resize(name, tensor, own, model, saved)
        if resized is not None:
            fitted.tensors[name] = resized
            fitted.resized.append(name)
            changes[note] += 1
            continue
        if note:
            fitted.notes.append(note)
        if not convert.is_optional(name):
            fitted.unused.append(source_name)
        if part == "weight" and tensor.ndim:
            classes = "" if own is None or not classifier else f" (this model has {len(own)})"
            fitted.notes.append(f"classifier of {len(tensor)} classes left out{classes}")
    _fill_absent_tables(fitted, model, changes)
    fitted.notes += [f"{count} {note}" for note, count in changes.items()]
    return fitted


def _fill_absent_tables(fitted: Fitted, model: nn.Module, changes: Counter[str]) -> None:
    """Set the tables of a CvT to zero if the file has none, as the released one. Its output stays the same."""
    state = model.state_dict()
    tables = [name for name in state if name.endswith("relative_position_bias_table")]
    if any(name in fitted.tensors for name in tables):
        return
    for name in tables:
        if isinstance(_owner(model, name), cvt_windowed.WindowAttention):
            fitted.tensors[name] = torch.zeros_like(state[name])
            changes["relative bias tables missing in the file set to zero"] += 1


def _is_on_other_grid(name: str, tensor: Tensor, model: nn.Module, saved: nn.Module | None) -> bool:
    """Whether a table of the right length is for another grid: 14 x 14 and 7 x 28 have equal lengths."""
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
    """Return the tensor in the shape of ``target``, or None if it cannot be resized, and a note."""
    owner, _, leaf = name.rpartition(".")
    if leaf.endswith("relative_position_bias_table") and tensor.ndim == 2 and tensor.shape[1:] == target.shape[1:]:
        old, new = _table_sides(_owner(saved, name), len(tensor)), _table_sides(_owner(model, name), len(target))
        if old and new and _is_clamped(model, saved, old, new):
            return inner_bias_table(tensor, new, old), f"relative bias tables cut to maps of {_window(new)}"
        if old and new:
            resized = resample_bias_table(tensor, new, old)
            return resized, f"relative bias tables resampled {_window(old)} -> {_window(new)}"
    elif leaf == "pos_embed" and tensor.ndim == 3 and tensor.shape[2:] == target.shape[2:]:
        grid = _token_grid(model, target.shape[1])
        if grid:
            old = None if saved is None else _token_grid(saved, tensor.shape[1])
            prefix = target.shape[1] - grid[0] * grid[1]
            resized = resample_position_embedding(tensor, grid, prefix, old)
            if resized is None:
                return None, f"position embedding of {tensor.shape[1]} rows cannot be resampled: its grid is not square"
            return resized, f"position embedding resampled to {grid[0]} x {grid[1]} tokens"
    elif name == next((n for n, t in model.state_dict().items() if t.ndim == 4), None):
        module = model.get_submodule(owner)
        patches = isinstance(module, nn.Conv2d) and module.stride == module.kernel_size
        resized = fit_first_convolution(tensor, target.shape, patches)
        if resized is not None:
            return resized, f"first convolution fitted from {_shape(tensor)} to {_shape(target)}"
    return None, ""


def _owner(model: nn.Module | None, name: str) -> nn.Module | None:
    return None if model is None else dict(model.named_modules()).get(name.rpartition(".")[0])


def _table_sides(attention: nn.Module | None, rows: int) -> Size | None:
    window = getattr(attention, "window_size", None)
    if isinstance(window, tuple) and len(window) == 2 and (2 * window[0] - 1) * (2 * window[1] - 1) == rows:
        return 2 * window[0] - 1, 2 * window[1] - 1
    return square(rows)


def _is_clamped(model: nn.Module, saved: nn.Module | None, old: Size, new: Size) -> bool:
    """Whether a window is smaller only because of its map. Then it uses the inner offsets of the table."""
    window = ((old[0] + 1) // 2, (old[1] + 1) // 2) if saved is None else _largest_window(saved)
    return _largest_window(model) == window and new[0] <= old[0] and new[1] <= old[1]


def _largest_window(model: nn.Module) -> Size | None:
    """Return the window size of a network. Stages with small maps may have smaller windows."""
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
    return square(tokens - prefix) or square(tokens)


def _window(sides: Size) -> str:
    """Return the window of a table with these sides, for messages: 7, or 4x2."""
    height, width = ((side + 1) // 2 for side in sides)
    return str(height) if height == width else f"{height}x{width}"


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape))


# Resampling


def resample_bias_table(table: Tensor, new_sides: Size, old_sides: Size | None = None) -> Tensor:
    """Resize (rows, heads), with rows = y offsets times x offsets, to (new rows, heads), bicubic.

    A window of w tokens has 2 w - 1 offsets per side; without ``old_sides`` the old table is square.
    """
    rows, heads = table.shape
    height, width = old_sides or square(rows) or (0, 0)
    if height * width != rows:
        raise ValueError(f"a bias table of {rows} rows is not square")
    images = table.float().T.reshape(1, heads, height, width)
    resized = F.interpolate(images, size=new_sides, mode="bicubic", align_corners=False)
    return resized.reshape(heads, -1).T.to(table.dtype).contiguous()


def inner_bias_table(table: Tensor, new_sides: Size, old_sides: Size) -> Tensor:
    """Cut (rows, heads) to (new rows, heads): the offsets of a smaller window, unchanged."""
    top, left = (old_sides[0] - new_sides[0]) // 2, (old_sides[1] - new_sides[1]) // 2
    offsets = table.unflatten(0, old_sides)
    return offsets[top : top + new_sides[0], left : left + new_sides[1]].flatten(0, 1).contiguous()


def resample_position_embedding(
    embedding: Tensor, new_grid: Size, prefix: int, old_grid: Size | None = None
) -> Tensor | None:
    """Resize (1, P + N, D) to (1, prefix + h w, D), bicubic; None if N is not a grid for any P.

    ``prefix`` is the number of class and register tokens in the model's embedding. If the file has more (a distillation
    token), the last are dropped; if it has fewer, zeros are added. Without ``old_grid`` the old grid is square.
    """
    for tokens in dict.fromkeys((prefix, 1, 0, 2)):
        count = embedding.shape[1] - tokens
        grid = square(count) if old_grid is None or old_grid[0] * old_grid[1] != count else old_grid
        if grid is not None:
            break
    else:
        return None
    front, patches = embedding[:, :tokens], embedding[:, tokens:]
    resized = resample_abs_pos_embed(patches, list(new_grid), list(grid), num_prefix_tokens=0)
    if tokens < prefix:
        front = torch.cat([front, front.new_zeros(1, prefix - tokens, front.shape[2])], dim=1)
    return torch.cat([front[:, :prefix], resized], dim=1)


def fit_first_convolution(weight: Tensor, shape: Sequence[int], patches: bool) -> Tensor | None:
    """Fit (D, 3, k, k) to another number of channels and, if ``patches``, to another patch size."""
    if weight.ndim != 4 or len(shape) != 4 or weight.shape[0] != shape[0]:
        return None
    if weight.shape[1] != shape[1]:
        if weight.shape[1] != 3:
            return None
        weight = adapt_input_conv(shape[1], weight)
    if tuple(weight.shape[2:]) != tuple(shape[2:]):
        if not patches:
            return None
        weight = resample_patch_embed(weight.float(), list(shape[2:])).to(weight.dtype)
    return weight


def square(count: int) -> Size | None:
    """Return (s, s) if ``count`` = s * s with s > 0, else None."""
    side = math.isqrt(count) if count > 0 else 0
    return (side, side) if side and side * side == count else None
