"""Blocks and attention of timm networks, which have no common name for either.

What is found here is exact (a hook sees what the network computes); what cannot be found is a UserError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from frugalvit.errors import UserError


def stage_blocks(model: nn.Module, name: str) -> list[list[nn.Module]]:
    """The blocks of every stage, fine to coarse. A plain ViT is one stage."""
    direct = getattr(model, "blocks", None)
    info = [entry for entry in (getattr(model, "feature_info", None) or []) if entry.get("module")]
    if isinstance(direct, nn.Sequential | nn.ModuleList) and len(direct):
        if all(isinstance(stage, nn.Sequential | nn.ModuleList) for stage in direct):
            return [list(stage) for stage in direct]  # type: ignore[arg-type]
        return _split_by_reduction(list(direct), info)
    stages = []
    for module in _stage_modules(model, info):
        blocks = _blocks_of(module)
        if blocks:
            stages.append(blocks)
    if not stages:
        raise UserError(f"{name} has no blocks that could be told apart; choose another network, or pooled features")
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
    simple = any(not list(child.children()) for child in children)  # convolutions and norms are no blocks
    alike = len({type(child) for child in children}) == 1
    return children if not simple and (isinstance(stage, nn.Sequential) or alike) else []


def _split_by_reduction(blocks: list[nn.Module], info: list[dict[str, Any]]) -> list[list[nn.Module]]:
    """Hiera-like networks hold all blocks in one list; ``feature_info`` names the last of every stage."""
    ends = [(int(entry["module"].split(".")[-1]), entry.get("reduction")) for entry in info if "." in entry["module"]]
    if len({step for _, step in ends}) <= 1:
        return [blocks]
    stages, start = [], 0
    for end, _ in ends:
        stages.append(blocks[start : end + 1])
        start = end + 1
    return stages


def block_grids(model: nn.Module, images: Tensor, name: str, run: Callable[[Tensor], object]) -> list[list[Tensor]]:
    """Every block's output as a grid, by stage. ``run`` is the forward pass to listen to."""
    stages = stage_blocks(model, name)
    flat = [block for stage in stages for block in stage]
    seen = _outputs(flat, lambda: run(images))
    if len(seen) < len(flat):
        raise UserError(
            f"{name} does not run its blocks one after the other; choose another network, or pooled features"
        )
    size = (images.shape[2], images.shape[3])
    grids = iter([to_grid(seen[number], model, size, _width(seen[number], model)) for number in range(len(flat))])
    found = [[next(grids) for _ in stage] for stage in stages]
    widths = {entry.get("num_chs") for entry in getattr(model, "feature_info", None) or []} | {model.num_features}
    if found[-1][-1].shape[1] not in widths:  # DenseNet's blocks give only what they add
        raise UserError(
            f"the blocks of {name} do not pass on the whole map; choose another network, or pooled features"
        )
    return found


def views_by_class_token(model: nn.Module) -> bool:
    """Whether this is a ViT that classifies by a class token which goes through all its blocks (CaiT's does not)."""
    return isinstance(model, Beit | Eva | VisionTransformer) and model.global_pool == "token"


def class_tokens(model: nn.Module, images: Tensor, name: str) -> list[Tensor]:
    """The class token (B, D) after each block of a ViT, through its final norm."""
    blocks = [block for stage in stage_blocks(model, name) for block in stage]
    seen = _outputs(blocks, lambda: model.forward_features(images))  # type: ignore[operator]
    norm = final_norm(model) or nn.Identity()
    return [norm(seen[number][:, :1])[:, 0] for number in range(len(blocks))]


def padded_sizes(model: nn.Module, size: Size, img_size: Size) -> list[Size]:
    """Sizes to pad images of ``size`` to until the network, built for ``img_size``, takes them; the least first."""
    info = list(getattr(model, "feature_info", None) or [])
    step = (info[-1].get("reduction") if info else 0) or 32
    published = (getattr(model, "pretrained_cfg", None) or {}).get("input_size") or (3, *img_size)
    units = [(1, 1), (step, step), (32, 32), (64, 64), img_size, tuple(published[1:])]
    sizes = [(-(-size[0] // unit[0]) * unit[0], -(-size[1] // unit[1]) * unit[1]) for unit in units]
    return list(dict.fromkeys(sizes))


def stage_maps(model: nn.Module, images: Tensor, name: str) -> list[Tensor]:
    """What ``feature_info`` lists, as (B, C_i, h_i, w_i), without final norm."""
    if hasattr(model, "forward_intermediates"):
        return model.forward_intermediates(images, norm=False, intermediates_only=True)  # type: ignore[operator]
    modules = dict(model.named_modules())
    info = [entry for entry in getattr(model, "feature_info", None) or [] if entry.get("reduction")]
    if not info or any(entry.get("module") not in modules for entry in info):
        return [stage[-1] for stage in block_grids(model, images, name, model.forward_features)]  # type: ignore[arg-type]
    seen = _outputs([modules[entry["module"]] for entry in info], lambda: model.forward_features(images))  # type: ignore[operator]
    size = (images.shape[2], images.shape[3])
    return [to_grid(seen[number], model, size, entry["num_chs"]) for number, entry in enumerate(info)]


def _outputs(modules: Sequence[nn.Module], run: Callable[[], object]) -> dict[int, Any]:
    """What each of these modules gave while the network ran."""
    seen: dict[int, Any] = {}
    hooks = [module.register_forward_hook(_keep_output(seen, number)) for number, module in enumerate(modules)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _keep_output(seen: dict[int, object], number: int) -> Callable[..., None]:
    def keep(_module: nn.Module, _arguments: object, output: object) -> None:
        seen[number] = output

    return keep


def _width(output: object, model: nn.Module) -> int | None:
    """The width of a block's output where the network lists the widths of its stages."""
    if not isinstance(output, Tensor) or output.dim() != 4:
        return None
    widths = {entry.get("num_chs") for entry in getattr(model, "feature_info", None) or []}
    fits = [axis for axis in (1, 3) if output.shape[axis] in widths]
    return output.shape[fits[0]] if len(fits) == 1 else None


def final_norm(model: nn.Module) -> nn.Module | None:
    """The norm at the end of ``forward_features``, if the network has one."""
    norm = getattr(model, "norm", None)
    return norm if isinstance(norm, nn.Module) and any(True for _ in norm.parameters()) else None


def apply_norm(norm: nn.Module, grid: Tensor) -> Tensor:
    """A norm over channels on (B, C, h, w), whether it wants channels first or last."""
    if isinstance(norm, nn.BatchNorm2d | nn.GroupNorm) or type(norm).__name__.lower().endswith("2d"):
        return norm(grid)
    return norm(grid.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def last_attention(model: nn.Module, images: Tensor, name: str, run: Callable[[Tensor], object]) -> Tensor:
    """Softmax of the last block's attention, (B, heads, T, T): prefix tokens first, then the grid row by row.

    timm's attention modules send the softmax through ``attn_drop`` whenever they do not use the fused kernel. That
    one module is asked to compute openly for this one pass; every other module, and every other pass, stays fused.
    """
    attention = _last_attention_module(model, name)
    caught: list[Tensor] = []

    def catch(_module: nn.Module, arguments: Sequence[Tensor]) -> None:
        caught.append(arguments[0])

    hook = attention.attn_drop.register_forward_pre_hook(catch)  # type: ignore[union-attr]
    try:
        with _unfused(attention):
            output = run(images)
    finally:
        hook.remove()
    weights = caught[-1] if caught else None
    grid = to_grid(output, model, (images.shape[2], images.shape[3]), model.num_features)  # type: ignore[arg-type]
    if weights is None or not _over_all_tokens(weights, images.shape[0], grid.shape[2] * grid.shape[3], model):
        raise UserError(
            f"the last block of {name} does not attend from every token to every token; use a ViT or one of our Swins"
        )
    return weights


def _over_all_tokens(weights: Tensor, batch: int, places: int, model: nn.Module) -> bool:
    """(B, heads, T, T) with T = prefix + grid and rows that sum to 1: no windows, no channels, no mixed heads."""
    if weights.dim() != 4 or weights.shape[0] != batch or weights.shape[2] != weights.shape[3]:
        return False
    stated = prefix_tokens(model)
    prefix = weights.shape[3] - places
    if prefix not in ((0, 1, 2) if stated is None else (0, stated)):
        return False
    return bool((weights.sum(-1) - 1).abs().max() < 1e-2)


def _last_attention_module(model: nn.Module, name: str) -> nn.Module:
    try:
        block = stage_blocks(model, name)[-1][-1]
    except UserError:
        block = None
    for candidate in ("attn", "mixer", "token_mixer"):
        attention = getattr(block, candidate, None)
        over_channels = type(attention).__name__ == "XCA"  # XCiT attends between channels, not tokens
        if (
            isinstance(attention, nn.Module)
            and not over_channels
            and isinstance(getattr(attention, "attn_drop", None), nn.Module)
        ):
            return attention
    raise UserError(f"the last block of {name} has no attention to look at; use a ViT, a DeiT or one of our Swins")


@contextmanager
def _unfused(attention: nn.Module) -> Iterator[None]:
    before = getattr(attention, "fused_attn", None)
    if before is not None:
        attention.fused_attn = False  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is not None:
            attention.fused_attn = before


@contextmanager
def eval_no_grad(model: nn.Module) -> Iterator[None]:
    """Eval mode and no gradients for a look at shapes; every module's mode comes back as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


Size = tuple[int, int]


def prefix_tokens(model: nn.Module) -> int | None:
    """How many tokens stand before the grid, or None where the network does not say."""
    count = getattr(model, "num_prefix_tokens", None)
    return int(count) if isinstance(count, int) else None


def reduction(model: nn.Module) -> int | None:
    """Pixels between two neighbouring tokens of the final grid, as the network's ``feature_info`` has it."""
    info = getattr(model, "feature_info", None)
    last = list(info)[-1] if info else {}
    return last.get("reduction") or None


def cell_sides(model: nn.Module, image: Size, grid: Size) -> tuple[float, float]:
    """Height and width in pixels of a region of the final grid; the last ones may reach beyond the image.

    What ``feature_info`` states, or halves of it where the stem was slowed; where none of these gives this grid, as
    many shares of the image as there are regions.
    """
    stated = int(reduction(model) or 0)
    steps = [stated / 2**halved for halved in range(stated.bit_length())]

    def side(pixels: int, count: int) -> float:
        # Padding makes one region more of what is left over, cutting leaves it out; never is it a whole region.
        return next((step for step in steps if abs(pixels / step - count) < 1), pixels / count)

    return side(image[0], grid[0]), side(image[1], grid[1])


def kept_cells(grid: Size, image: Size, padded: Size) -> Size:
    """Rows and columns of the grid of a padded image that hold any of the image itself."""
    return -(-image[0] * grid[0] // padded[0]), -(-image[1] * grid[1] // padded[1])


class SeveralGrids(UserError):
    """A network that ends in several maps (CoaT, CrossViT): any one of them would be but a part of what it learned."""


def to_grid(output: object, model: nn.Module, image: Size, channels: int | None = None) -> Tensor:
    """``output`` of ``forward_features`` (or of a block) as (B, C, h, w); UserError where it holds no grid.

    channels: the width of the output where known; tells (B, C, h, w) from (B, h, w, C).
    """
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        sizes = [part for part in output[1:] if isinstance(part, list | tuple) and len(part) == 2]
        if len(output) == 1 + len(sizes):  # (tokens, (h, w)), as MViT's blocks give
            return _tokens_to_grid(output[0], model, image, channels, tuple(sizes[0]) if sizes else None)
    if not isinstance(output, Tensor) or output.dim() not in (3, 4):
        kind = SeveralGrids if isinstance(output, list) else UserError
        raise kind(f"{_name(model)} gives no single grid of tokens; choose a network that ends in one feature map")
    if output.dim() == 3:
        return _tokens_to_grid(output, model, image, channels, None)
    if _is_channels_last(output, model, channels):
        return output.permute(0, 3, 1, 2)
    return output


def _is_channels_last(output: Tensor, model: nn.Module, channels: int | None) -> bool:
    stated = str(getattr(model, "output_fmt", "")).upper()
    if stated:
        return stated.endswith("NHWC")
    return channels is not None and output.shape[3] == channels and output.shape[1] != channels


def _tokens_to_grid(tokens: Tensor, model: nn.Module, image: Size, channels: int | None, size: Size | None) -> Tensor:
    if channels is not None and tokens.shape[2] != channels and tokens.shape[1] == channels:
        tokens = tokens.transpose(1, 2)
    count = tokens.shape[1]
    if size is None:
        prefix, size = _prefix_and_size(count, model, image)
    else:
        prefix = count - size[0] * size[1]
    return tokens[:, prefix:].transpose(1, 2).unflatten(2, size)


def chosen_stages(
    model: Any, grids: list[Tensor], indices: int | Sequence[int] | None, norm: bool, output_fmt: str
) -> list[Tensor]:
    """Of all blocks' grids (B, C, h, w) what timm's ``forward_intermediates`` asks for: the last so many stages, those
    of these numbers, or all. ``norm`` is the final norm, on the last stage."""
    if output_fmt != "NCHW":
        raise UserError(f"{_name(model)} gives its stages as NCHW only; ask for output_fmt='NCHW'.")
    stages = [grids[end] for end in model.stage_ends]
    if norm:
        stages[-1] = model.final_norm(stages[-1])
    count = len(stages)
    wanted = range(count) if indices is None else range(count - indices, count) if isinstance(indices, int) else indices
    return [stages[index] for index in wanted]


def _prefix_and_size(count: int, model: nn.Module, image: Size) -> tuple[int, Size]:
    """Prefix tokens and (h, w), such that prefix + h * w = count and h : w is close to the image's shape."""
    stated = prefix_tokens(model)
    prefixes = [0, 1, 2] if stated is None else [stated, 0]
    step = reduction(model)
    if step:
        expected = {(image[0] // step, image[1] // step), (-(-image[0] // step), -(-image[1] // step))}
        for prefix in prefixes:
            for size in expected:
                if size[0] * size[1] == count - prefix > 0:
                    return prefix, size
    for prefix in prefixes:
        size = _closest_shape(count - prefix, image)
        if size is not None:
            return prefix, size
    raise UserError(
        f"{_name(model)} gives {count} tokens for {image[0]}x{image[1]} pixels, which is no grid; "
        "choose a network that keeps its tokens where they lie"
    )


def _closest_shape(count: int, image: Size) -> Size | None:
    """The factors (h, w) of ``count`` closest to the image's aspect; None if none is within a step of rounding."""
    if count < 1:
        return None
    shapes = [(height, count // height) for height in range(1, count + 1) if count % height == 0]
    aspect = image[0] / image[1]
    height, width = min(shapes, key=lambda shape: abs(math.log(shape[0] / shape[1] / aspect)))
    if count == 1 and max(image) >= 64:  # a lone token of a large image is a class token, not a grid
        return None
    low, high = (height - 0.5) / (width + 0.5), (height + 0.5) / max(width - 0.5, 0.5)
    return (height, width) if low <= aspect <= high else None


def _name(model: nn.Module) -> str:
    configuration = getattr(model, "pretrained_cfg", None) or {}
    return configuration.get("architecture") or type(model).__name__


def is_exporting() -> bool:
    """Whether ``torch.export`` records this. PyTorch 2.11 says so of every graph that ``torch.compile`` makes, too."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
