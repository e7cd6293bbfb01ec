"""Grids, stages, blocks and attention of timm networks, which have no common interface for them.

The final grid comes from ``forward_features``, stages from ``forward_intermediates``, blocks and attention from hooks.
An unsupported network raises UserError.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from frugalvit.errors import UserError

Size = tuple[int, int]


# Grids


def to_grid(output: object, model: nn.Module, image: Size, channels: int | None = None) -> Tensor:
    """Return the output of ``forward_features`` or a block as (B, C, h, w); UserError if it is not one.

    channels: the width of the output, if known. It distinguishes (B, C, h, w) from (B, h, w, C).
    """
    if not isinstance(output, Tensor) or output.dim() not in (3, 4):
        raise UserError(f"{_name(model)} gives no single grid of tokens; choose a network that ends in one feature map")
    if output.dim() == 4:
        return output.permute(0, 3, 1, 2) if _is_channels_last(output, model, channels) else output
    if channels is not None and output.shape[2] != channels and output.shape[1] == channels:
        output = output.transpose(1, 2)
    prefix, size = _prefix_and_size(output.shape[1], model, image)
    return output[:, prefix:].transpose(1, 2).unflatten(2, size)


def _is_channels_last(output: Tensor, model: nn.Module, channels: int | None) -> bool:
    stated = str(getattr(model, "output_fmt", "")).upper()
    if stated:
        return stated.endswith("NHWC")
    return channels is not None and output.shape[3] == channels and output.shape[1] != channels


def _prefix_and_size(count: int, model: nn.Module, image: Size) -> tuple[int, Size]:
    """Return prefix and (h, w) such that prefix + h * w = count and h : w is close to the image's shape."""
    stated = prefix_tokens(model)
    prefixes = [0, 1, 2] if stated is None else [stated, 0]
    for prefix in prefixes:
        size = _closest_shape(count - prefix, image, reduction(model) or 32)
        if size is not None:
            return prefix, size
    raise UserError(
        f"{_name(model)} gives {count} tokens for {image[0]}x{image[1]} pixels, which is not a grid; "
        "choose a network that keeps one token per image region"
    )


def _closest_shape(count: int, image: Size, step: int) -> Size | None:
    """Return the factors (h, w) of ``count`` closest to the image's aspect; None if they do not fit it."""
    if count < 1 or (count == 1 and max(image) >= max(64, 2 * step)):  # one token of a large image: a class token
        return None
    shapes = [(height, count // height) for height in range(1, count + 1) if count % height == 0]
    aspect = image[0] / image[1]
    height, width = min(shapes, key=lambda shape: abs(math.log(shape[0] / shape[1] / aspect)))
    low, high = (height - 0.5) / (width + 0.5), (height + 0.5) / max(width - 0.5, 0.5)
    return (height, width) if low <= aspect <= high else None


def prefix_tokens(model: nn.Module) -> int | None:
    """Return the number of tokens before the grid (class, registers); None if not stated."""
    count = getattr(model, "num_prefix_tokens", None)
    return int(count) if isinstance(count, int) else None


def reduction(model: nn.Module) -> int | None:
    """Return the pixels between neighbouring tokens of the final grid, as ``feature_info`` states."""
    info = getattr(model, "feature_info", None)
    last = list(info)[-1] if info else {}
    return last.get("reduction") or None


def cell_sides(model: nn.Module, image: Size, grid: Size) -> tuple[float, float]:
    """Return a cell's height and width in pixels. The last cells may extend beyond the image.

    This is the stated reduction, or a half, a quarter … of it for a smaller stem stride. If no such value gives
    this grid, the image is divided by the number of cells.
    """
    stated = int(reduction(model) or 0)
    steps = [stated / 2**halvings for halvings in range(stated.bit_length())]

    def side(pixels: int, count: int) -> float:
        # Padding adds one partial cell and cropping drops one; the difference is always below one cell.
        return next((step for step in steps if abs(pixels / step - count) < 1), pixels / count)

    return side(image[0], grid[0]), side(image[1], grid[1])


def cells_in_image(grid: Size, image: Size, padded: Size) -> Size:
    """Return the rows and columns of a padded image's grid that contain pixels of the image."""
    return -(-image[0] * grid[0] // padded[0]), -(-image[1] * grid[1] // padded[1])


def padded_sizes(model: nn.Module, size: Size, img_size: Size) -> list[Size]:
    """Return the sizes to try, in order, to pad images of ``size`` for a network of ``img_size``."""
    step = reduction(model) or 32
    published = (getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, *img_size)
    units = [(1, 1), (step, step), (32, 32), (64, 64), img_size, tuple(published[1:])]
    sizes = [(-(-size[0] // unit[0]) * unit[0], -(-size[1] // unit[1]) * unit[1]) for unit in units]
    return list(dict.fromkeys(sizes))


# Blocks


def stage_blocks(model: nn.Module, name: str) -> list[list[nn.Module]]:
    """Return the blocks of every stage, fine to coarse. A plain ViT is one stage."""
    info = [entry for entry in (getattr(model, "feature_info", None) or []) if entry.get("module")]
    direct = getattr(model, "blocks", None)
    if isinstance(direct, nn.Sequential | nn.ModuleList) and len(direct):
        if all(isinstance(stage, nn.Sequential | nn.ModuleList) for stage in direct):
            return [list(stage) for stage in direct]  # type: ignore[arg-type]
        if len({entry.get("reduction") for entry in info}) <= 1:
            return [list(direct)]
        stages = []  # Hiera lists the blocks of all stages together
    else:
        stages = [blocks for stage in _stage_modules(model, info) if (blocks := _blocks_of(stage))]
    if not stages:
        raise UserError(f"{name} has no list of blocks; choose another network, or pooled features")
    return stages


def _stage_modules(model: nn.Module, info: list[dict[str, Any]]) -> list[nn.Module]:
    for attribute in ("stages", "layers"):
        container = getattr(model, attribute, None)
        if isinstance(container, nn.Sequential | nn.ModuleList):
            return list(container)
    modules = dict(model.named_modules())
    return [modules[entry["module"]] for entry in info if entry["module"] in modules]


def _blocks_of(stage: nn.Module) -> list[nn.Module]:
    blocks = getattr(stage, "blocks", None)
    if isinstance(blocks, nn.Sequential | nn.ModuleList):
        return list(blocks)
    children = list(stage.children())
    has_layers = any(not list(child.children()) for child in children)  # single convolutions and norms are not blocks
    alike = len({type(child) for child in children}) == 1
    return children if not has_layers and (isinstance(stage, nn.Sequential) or alike) else []


def block_grids(model: nn.Module, images: Tensor, name: str) -> list[list[Tensor]]:
    """Return every block's output as a grid, by stage."""
    size = (images.shape[2], images.shape[3])
    stages = _block_outputs(model, images, name)
    result = [[to_grid(output, model, size, _width(output, model)) for output in stage] for stage in stages]
    widths = {entry.get("num_chs") for entry in getattr(model, "feature_info", None) or []} | {model.num_features}
    if result[-1][-1].shape[1] not in widths:  # DenseNet's blocks output only the channels they add
        raise UserError(
            f"the blocks of {name} output only a part of the map; choose another network, or pooled features"
        )
    return result


def uses_class_token(model: nn.Module) -> bool:
    """Whether a ViT classifies by a class token that passes all its blocks (CaiT's does not)."""
    is_vit = isinstance(model, Beit | Eva | VisionTransformer) and model.global_pool == "token"
    return is_vit or getattr(model, "has_class_token", False)


def class_tokens(model: nn.Module, images: Tensor, name: str) -> list[Tensor]:
    """Return the class token (B, D) after each block of a ViT, with the final norm applied."""
    outputs = [output for stage in _block_outputs(model, images, name) for output in stage]
    norm = final_norm(model) or nn.Identity()
    tokens = [output[0] if isinstance(output, tuple) else output for output in outputs]
    return [norm(part[:, :1])[:, 0] for part in tokens]


def _block_outputs(model: nn.Module, images: Tensor, name: str) -> list[list[Any]]:
    """Run ``forward_features`` and return the output of every block, by stage."""
    stages = stage_blocks(model, name)
    outputs: dict[nn.Module, Any] = {}

    def record(block: nn.Module, _arguments: object, output: object) -> None:
        outputs[block] = output

    hooks = [block.register_forward_hook(record) for stage in stages for block in stage]
    try:
        model.forward_features(images)  # type: ignore[operator]
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) < len(hooks):
        raise UserError(f"{name} does not run its blocks in sequence; choose another network, or pooled features")
    return [[outputs[block] for block in stage] for stage in stages]


def _width(output: object, model: nn.Module) -> int | None:
    """Return the width of a block's output, if ``feature_info`` lists it."""
    if not isinstance(output, Tensor) or output.dim() != 4:
        return None
    widths = {entry.get("num_chs") for entry in getattr(model, "feature_info", None) or []}
    axes = [axis for axis in (1, 3) if output.shape[axis] in widths]
    return output.shape[axes[0]] if len(axes) == 1 else None


def final_norm(model: nn.Module) -> nn.Module | None:
    """Return the norm at the end of ``forward_features``, or None."""
    norm = getattr(model, "norm", None)
    return norm if isinstance(norm, nn.Module) and any(True for _ in norm.parameters()) else None


def apply_norm(norm: nn.Module, grid: Tensor) -> Tensor:
    """Apply a norm over channels to (B, C, h, w); the norm may expect channels first or last."""
    if isinstance(norm, nn.BatchNorm2d | nn.GroupNorm) or type(norm).__name__.lower().endswith("2d"):
        return norm(grid)
    return norm(grid.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


# Attention


def last_attention(model: nn.Module, images: Tensor, name: str, from_last: int = 0) -> Tensor:
    """Return a block's softmax, (B, heads, T, T): prefix tokens first, then the grid row by row.

    from_last: 0 is the last block, -1 the one before it

    timm's attention modules pass the softmax through ``attn_drop`` unless they use the fused kernel. So this pass turns
    the fused kernel of that module off.
    """
    attention = _attention_module(model, name, from_last)
    recorded: list[Tensor] = []

    def record(_module: nn.Module, arguments: Sequence[Tensor]) -> None:
        recorded.append(arguments[0])

    hook = attention.attn_drop.register_forward_pre_hook(record)  # type: ignore[union-attr]
    fused = getattr(attention, "fused_attn", None)
    try:
        if fused is not None:
            attention.fused_attn = False  # type: ignore[assignment]
        output = model.forward_features(images)  # type: ignore[operator]
    finally:
        if fused is not None:
            attention.fused_attn = fused
        hook.remove()
    grid = to_grid(output, model, (images.shape[2], images.shape[3]), model.num_features)  # type: ignore[arg-type]
    if not recorded or not _covers_all_tokens(recorded[-1], len(images), grid.shape[2] * grid.shape[3], model):
        raise UserError(
            f"this block of {name} does not attend from every token to every token; use a ViT or one of our Swins"
        )
    return recorded[-1]


def _covers_all_tokens(weights: Tensor, batch: int, cells: int, model: nn.Module) -> bool:
    """Whether weights are (B, heads, T, T), T = prefix + grid, with rows that sum to 1: no windows."""
    if weights.dim() != 4 or weights.shape[0] != batch or weights.shape[2] != weights.shape[3]:
        return False
    stated = prefix_tokens(model)
    prefix = weights.shape[3] - cells
    if prefix not in ((0, 1, 2) if stated is None else (0, stated)):
        return False
    return bool((weights.sum(-1) - 1).abs().max() < 1e-2)


def _attention_module(model: nn.Module, name: str, from_last: int) -> nn.Module:
    attentions = [module for module in model.modules() if isinstance(getattr(module, "attn_drop", None), nn.Module)]
    if not attentions:
        raise UserError(f"{name} has no attention over tokens; use a ViT, a DeiT or one of our Swins")
    if -from_last >= len(attentions):
        raise UserError(f"this block of {name} has no attention; choose a later --block")
    return attentions[from_last - 1]


# Contexts


@contextmanager
def quiet_tables() -> Iterator[None]:
    """Suppress warnings about timm's own indexing when it resizes bias tables: users cannot fix them."""
    with warnings.catch_warnings():
        for message in ("Using a non-tuple sequence", r"torch.searchsorted\(\): input value tensor is non-contiguous"):
            warnings.filterwarnings("ignore", message, UserWarning, module=r"timm\.layers\.interpolate")
        yield


@contextmanager
def eval_no_grad(model: nn.Module) -> Iterator[None]:
    """Run the body in eval mode without gradients, then restore the mode of every module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """Build a network without memory for its weights.

    A constructor that computes with tensor values (RegNet's) may not run on the meta device; it runs on the CPU.
    """
    try:
        with torch.device("meta"):
            return make()
    except (NotImplementedError, UserError) as error:
        if not isinstance(error if isinstance(error, NotImplementedError) else error.__cause__, NotImplementedError):
            raise
        with torch.device("cpu"):
            return make()


def is_exporting() -> bool:
    """Whether ``torch.export`` is tracing. PyTorch 2.11 reports exporting inside ``torch.compile`` too."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _name(model: nn.Module) -> str:
    configuration = getattr(model, "pretrained_cfg", None) or {}
    return configuration.get("architecture") or type(model).__name__


def classifier_name(model: nn.Module) -> str | None:
    """Return the name of the linear classifier, or None."""
    classifier: Any = model.get_classifier() if hasattr(model, "get_classifier") else None  # type: ignore[operator]
    first = classifier[0] if isinstance(classifier, tuple) else classifier
    return next((name for name, module in model.named_modules() if module is first and name), None)
