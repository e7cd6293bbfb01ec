"""Backbone turns images into Features with any timm network; GridModel is the interface of ours.

A network in ``architectures/`` is first an ordinary timm model: ``@register_model``, ``forward_features``,
``forward_head(x, pre_logits)``, ``get_classifier``, ``reset_classifier``, ``set_grad_checkpointing``, ``num_features``,
``num_classes``, ``feature_info``; ``forward(x)`` is ``forward_head(forward_features(x))``. Its constructor takes at
least ``img_size``, ``in_chans``, ``num_classes``, ``drop_path_rate`` and ``patch_size``, the stride of the first
embedding. It also implements :class:`GridModel`: the final grid, the blocks and the attention need no module names.
"""

import itertools
import operator
from collections.abc import Iterable
from typing import Any, Protocol, Self, runtime_checkable

import torch
from timm.layers.drop import DropPath
from torch import Tensor, nn
from torch.nn import functional

from frugalvit.backbones import timm_features
from frugalvit.backbones.timm_features import Size, cell_sides, cells_in_image, is_exporting, to_grid
from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.utils.text import short_message

BACKBONE_ONLY_KWARGS = (
    "mean", "std", "pixel_type", "eval_crop", "grid_norm", "drop_path", "keep_patch_size", "knn_head",
)  # fmt: skip
"""Keywords of a backbone that are not passed to the network's constructor under these names."""


def default_crop(img_size: Size) -> dict[str, Any]:
    """Return the crop of a network without its own: 224/256 of the shorter edge, and all of it up to 64 pixels."""
    return {"crop_pct": 1.0 if max(img_size) <= 64 else 0.875, "interpolation": "bicubic", "squash": False}


@runtime_checkable
class GridModel(Protocol):
    """A network that returns its final grid itself. B images, D = ``num_features``, final grid h x w."""

    family: str
    """The key of its default options: "swin", "cvt", "t2t", "vil"."""

    num_features: int

    stage_ends: tuple[int, ...]
    """For every stage, fine to coarse, the index of its last block in ``forward_grid_blocks``."""

    def forward_grid(self, images: Tensor, norm: bool = True) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) -> final tokens (B, D, h, w) and pooled (B, D).

        ``norm=False`` returns the tokens before the final norm. ``pooled`` is in both cases the classifier's input:
        ``get_classifier()(pooled)`` equals ``forward(images)`` in eval mode.
        """
        ...

    def forward_grid_blocks(self, images: Tensor) -> list[Tensor]:
        """Return every block's output (B, C_i, h_i, w_i) in order, without final norm and class tokens."""
        ...

    def final_norm(self, grid: Tensor) -> Tensor:
        """Apply the final norm to a grid (B, D, h, w); a network without one returns the grid."""
        ...

    def last_attention(self, images: Tensor) -> Tensor:
        """Softmax attention of the last block, (B, heads, T, T), rows sum to 1.

        T counts the real tokens: class or global tokens first, then the grid row by row. Windowed attention fills the
        full T x T with zeros between windows; attention to padding is dropped and the row rescaled. A network whose
        last block has no attention raises UserError.
        """
        ...

    def get_classifier(self) -> nn.Module: ...


class Backbone(nn.Module):
    """A network that turns images of any size into :class:`Features`. Made by ``create_backbone``.

    model       the timm network itself, with its classifier if ``num_classes`` > 0
    dim         D of ``Features.grid``; ``pooled_dim`` is that of ``Features.pooled`` (they differ only in networks
                that widen between map and classifier, such as MobileNetV3)
    mean, std   for normalizing images, one number per channel
    pixel_type  uint8: photos, whose mean and std are for values from 0 to 1; float32: the values of files
    notes       what was changed automatically for small images, and why
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        architecture: str,
        family: str,
        img_size: Size,
        in_chans: int,
        num_classes: int,
        keywords: dict[str, Any],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        pixel_type: str = "uint8",
        grid_norm: bool = True,
        notes: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.name = name
        self.architecture = architecture
        self.family = family
        self.img_size = img_size
        self.in_chans = in_chans
        self.num_classes = num_classes
        self.keywords = keywords
        self.mean = mean
        self.std = std
        self.pixel_type = pixel_type
        self.grid_norm = grid_norm
        self.notes = list(notes or [])
        self.is_grid_model = isinstance(model, GridModel)
        self._padded_sizes: dict[Size, Size] = {}  # image size -> the size that the network accepts
        self._grid_sizes: dict[Size, Size] = {}
        # forward_features applies the final norm, forward_intermediates need not.
        self._use_intermediates = not grid_norm and timm_features.final_norm(model) is not None
        self.dim = self.pooled_dim = int(model.num_features)  # type: ignore[arg-type]
        if not self.is_grid_model:
            features = self._run_zeros(img_size)
            self.dim, self.pooled_dim = features.grid.shape[1], features.pooled.shape[1]
            self._check_classifier(features.pooled)

    def forward(self, images: Tensor) -> Features:
        """(B, C, H, W) -> grid (B, dim, h, w) and pooled (B, pooled_dim)."""
        self._check(images)
        if self.is_grid_model:
            return Features(*self.model.forward_grid(images, norm=self.grid_norm))  # type: ignore[operator]
        padded, size = self._pad(images)
        output, grid = self._forward_timm(padded)
        if padded is not images:  # cells of pure padding count neither in the grid nor in the mean over a map
            if isinstance(output, Tensor) and output.dim() == 4:
                channels_last = output.shape[1:3] == grid.shape[2:]
                rows, columns = self._crop(grid, size, padded).shape[2:]
                output = output[:, :rows, :columns] if channels_last else output[:, :, :rows, :columns]
            grid = self._crop(grid, size, padded)
        return Features(grid, self._pool(output))

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the network block by block. Equal blocks share their code, so that depth costs no time."""
        device = next(self.model.parameters()).device
        for module in list(self.model.modules()):
            for name, child in module.named_children():
                if type(child) is DropPath and child.drop_prob > 0 and child.scale_by_keep:
                    setattr(module, name, SharedDropPath(child.drop_prob, device))
        for region in self._regions():
            _compile_region(region, *arguments, **options)

    def _regions(self) -> Iterable[nn.Module]:
        """Return the modules to compile: the blocks, or the network itself if it does not name them."""
        if self.is_grid_model:
            return self.model.regions() if hasattr(self.model, "regions") else [self]  # type: ignore[operator]
        try:
            return itertools.chain(*timm_features.stage_blocks(self.model, self.name))
        except UserError:
            return [self]

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, pooled_dim) -> logits. ``classify(backbone(images).pooled)`` equals ``model(images)`` in eval mode."""
        if self.num_classes == 0:
            raise UserError(f"{self.name} has no classifier; pass num_classes to create_backbone")
        heads = self.model.get_classifier()  # type: ignore[operator]
        if isinstance(heads, nn.Conv2d):
            return heads(pooled[:, :, None, None]).flatten(1)
        if not isinstance(heads, tuple | list | nn.ModuleList):
            return heads(pooled)
        # Distilled networks average two classifiers: DeiT's read one token each, LeViT's the same features.
        parts = pooled.chunk(2, 1) if self._has_two_tokens() else (pooled, pooled)
        return (heads[0](parts[0]) + heads[1](parts[1])) / 2

    @torch.no_grad()
    def set_classifier(self, weight: Tensor, bias: Tensor) -> None:
        """Set the linear classifier: weight (classes, pooled_dim), bias (classes,)."""
        head = self.linear_classifier()
        head.weight.copy_(weight.reshape(head.weight.shape))
        head.bias.copy_(bias)

    def linear_classifier(self) -> Any:
        """Return the classifier, one linear layer with weight and bias on the pooled features."""
        head = self.model.get_classifier()  # type: ignore[operator]
        shape = self.num_classes * self.pooled_dim
        if not isinstance(head, nn.Linear | nn.Conv2d) or head.weight.numel() != shape or head.bias is None:
            raise UserError(f"{self.name} has no single linear classifier on its pooled features, which could be set.")
        return head

    def stages(self, images: Tensor) -> list[Tensor]:
        """Return the output of every stage without final norm, (B, C_i, h_i, w_i), fine to coarse.

        A network with more than four resolutions (counting its stem) returns the four coarsest. A plain ViT has one
        resolution and returns one map.
        """
        if self.is_grid_model:
            blocks = self.blocks(images)
            return [blocks[end] for end in self.model.stage_ends]  # type: ignore[union-attr]
        self._check(images)
        padded, size = self._pad(images)
        if not hasattr(self.model, "forward_intermediates"):
            raise UserError(
                f"{self.name} has no forward_intermediates, so its stages are unknown; choose another network"
            )
        maps = self.model.forward_intermediates(padded, norm=False, intermediates_only=True)  # type: ignore[operator]
        info = list(self.model.feature_info)  # type: ignore[arg-type]
        steps = [entry["reduction"] for entry in info] if len(info) == len(maps) else [grid.shape[2] for grid in maps]
        last = dict(zip(steps, maps, strict=True))
        return [self._crop(grid, size, padded) for grid in last.values()][-4:]

    def blocks(self, images: Tensor) -> list[Tensor]:
        """Return every block's output (B, C_i, h_i, w_i) without final norm, in order: Drloc Eq. 7."""
        return [grid for stage in self._blocks_by_stage(images) for grid in stage]

    def block_dims(self) -> list[int]:
        """Return the channels of every block's grid."""
        with timm_features.eval_no_grad(self.model):  # the statistics of batch norms must not change
            return [grid.shape[1] for grid in self.blocks(self._zeros(self.img_size))]

    def last_blocks(self, images: Tensor, n: int = 4, *, class_token: bool = False) -> Tensor:
        """Return the token means of the last ``n`` blocks: (B, sum of dims), input of EsViT's linear probe.

        Blocks of the last stage pass through the final norm; earlier ones have another width and do not. All blocks of
        a plain ViT are its last stage. ``class_token=True`` takes the class token of a ViT instead of the mean, as
        EsViT does (§2.2).
        """
        if class_token and timm_features.uses_class_token(self.model):
            features = timm_features.class_tokens(self.model, self._pad(images)[0], self.name)
        else:
            *earlier, last = self._blocks_by_stage(images)
            grids = [grid for stage in earlier for grid in stage] + [self._final_norm(grid) for grid in last]
            features = [grid.mean((2, 3)) for grid in grids]
        if not 0 < n <= len(features):
            raise UserError(
                f"last_blocks(n={n}): {self.name} has {len(features)} blocks; choose a smaller n (--blocks), "
                "or --features pooled"
            )
        return torch.cat(features[-n:], 1)

    def attention(self, images: Tensor) -> Tensor:
        """Return the last block's softmax attention (B, heads, T, T) as :meth:`GridModel.last_attention` does."""
        self._check(images)
        if self.is_grid_model:
            return self.model.last_attention(images)  # type: ignore[operator]
        padded, size = self._pad(images)
        if padded is not images:
            raise UserError(f"{self.name} pads {size[0]}x{size[1]} pixels; choose an image size without padding")
        return timm_features.last_attention(self.model, images, self.name)

    def block_attention(self, images: Tensor, block: int) -> tuple[Tensor, Size]:
        """Return the softmax attention (B, heads, T, T) of a block, counted from 1, and the (h, w) of its grid."""
        self._check(images)
        if self.is_grid_model:
            ends: Any = self.model.stage_ends
            count = int(ends[-1]) + 1
        else:
            count = sum(map(len, timm_features.stage_blocks(self.model, self.name)))
        if not 1 <= block <= count:
            raise UserError(f"--block {block}: {self.name} has blocks 1 to {count}.")
        if self.is_grid_model:
            return self.model.block_attention(images, block)  # type: ignore[operator]
        attention = timm_features.last_attention(self.model, self._pad(images)[0], self.name, block - count)
        return attention, self.grid_size((images.shape[2], images.shape[3]))

    def grid_size(self, img_size: int | Size) -> Size:
        """Return (h, w) of the final grid for images of this size."""
        size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
        if size not in self._grid_sizes:
            height, width = self._run_zeros(size).grid.shape[2:]
            self._grid_sizes[size] = (height, width)
        return self._grid_sizes[size]

    def cell_size(self, img_size: Size) -> tuple[float, float]:
        """Return a cell's height and width in pixels. The last cells may extend beyond images of this size."""
        padded = img_size if self.is_grid_model else self._padded_size(img_size)
        return cell_sides(self.model, padded, self.grid_size(padded))

    def spec(self) -> dict[str, Any]:
        """Return all arguments of ``create_backbone`` for this network, as plain values for JSON and YAML.

        ``create_backbone(name, img_size, num_classes, in_chans, **keywords)``.
        """
        height, width = self.img_size
        return {
            "name": self.name,
            "img_size": height if height == width else [height, width],
            "num_classes": self.num_classes,
            "in_chans": self.in_chans,
            "keywords": dict(self.keywords),
        }

    @property
    def eval_crop(self) -> dict[str, Any]:
        """The crop of evaluations, as keywords of ``EvalTransform``: that of the weights, or the default."""
        return default_crop(self.img_size) | self.keywords.get("eval_crop", {})

    def architecture_kwargs(self) -> dict[str, Any]:
        """Return keywords for the same network, with the same patches and windows, at any image size.

        They leave out stochastic depth and ``grid_norm``, which each run chooses.
        """
        fixed = {key: value for key, value in self.keywords.items() if key not in ("drop_path", "grid_norm")}
        return fixed | {"keep_patch_size": True}

    def _check(self, images: Tensor) -> None:
        """Check only type and shape, because reading values would wait for the device."""
        is_batch = isinstance(images, Tensor) and images.is_floating_point() and images.dim() == 4
        if is_batch and images.shape[0] > 0 and images.shape[1] == self.in_chans:
            return
        kind = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise UserError(
            f"{self.name} takes normalized floats (batch, {self.in_chans}, height, width), not {kind}. "
            "in_chans of create_backbone sets the channels; a model from frugalvit.load takes images (predict)."
        )

    def _forward_timm(self, images: Tensor) -> tuple[Any, Tensor]:
        """Return the input of ``forward_head``, and the grid."""
        size = (images.shape[2], images.shape[3])
        if self._use_intermediates:
            output, maps = self.model.forward_intermediates(images, indices=1, norm=False)  # type: ignore[operator]
            return output, maps[-1]
        output = self.model.forward_features(images)  # type: ignore[operator]
        return output, to_grid(output, self.model, size, self.model.num_features)  # type: ignore[arg-type]

    def _check_classifier(self, pooled: Tensor) -> None:
        """Raise UserError if the classifier reads more than ``pooled``, as VOLO's: training would be wrong."""
        if self.num_classes == 0 or self._padded_size(self.img_size) != self.img_size:
            return
        with timm_features.eval_no_grad(self.model):
            logits = self.model(self._zeros(self.img_size))
            same = isinstance(logits, Tensor) and torch.allclose(self.classify(pooled), logits, rtol=1e-3, atol=1e-4)
        if not same:
            raise UserError(
                f"the classifier of {self.name} reads more than the pooled features; "
                "use num_classes=0, or choose another network"
            )

    def _pool(self, output: Any) -> Tensor:
        if self._has_two_tokens() and self.num_classes:
            return output[:, :2].flatten(1)
        return self.model.forward_head(output, pre_logits=True).flatten(1)  # type: ignore[operator]

    def _has_two_tokens(self) -> bool:
        return hasattr(self.model, "dist_token") and hasattr(self.model, "head_dist")

    def _final_norm(self, grid: Tensor) -> Tensor:
        if self.is_grid_model:
            return self.model.final_norm(grid)  # type: ignore[operator]
        norm = timm_features.final_norm(self.model)
        return grid if norm is None or grid.shape[1] != self.dim else timm_features.apply_norm(norm, grid)

    def _blocks_by_stage(self, images: Tensor) -> list[list[Tensor]]:
        self._check(images)
        if self.is_grid_model:
            grids = self.model.forward_grid_blocks(images)  # type: ignore[operator]
            starts = [0, *[end + 1 for end in self.model.stage_ends]]  # type: ignore[union-attr]
            return [grids[start:stop] for start, stop in itertools.pairwise(starts)]
        padded, size = self._pad(images)
        stages = timm_features.block_grids(self.model, padded, self.name)
        return [[self._crop(grid, size, padded) for grid in stage] for stage in stages]

    def _zeros(self, size: Size) -> Tensor:
        parameter = next(self.model.parameters())
        return torch.zeros(1, self.in_chans, *size, device=parameter.device, dtype=parameter.dtype)

    def _run_zeros(self, size: Size) -> Features:
        """Run one image of zeros through the network, for its shapes."""
        with timm_features.eval_no_grad(self.model):
            return self.forward(self._zeros(size))

    def _pad(self, images: Tensor) -> tuple[Tensor, Size]:
        """Pad images (bottom and right) to a size that the network accepts. Also returns their own size."""
        size = (images.shape[2], images.shape[3])
        padded = self._padded_size(size)
        if padded == size:
            return images, size
        return functional.pad(images, (0, padded[1] - size[1], 0, padded[0] - size[0])), size

    @staticmethod
    def _crop(grid: Tensor, size: Size, padded: Tensor) -> Tensor:
        """Drop the cells of a grid that contain only padding."""
        rows, columns = cells_in_image((grid.shape[2], grid.shape[3]), size, (padded.shape[2], padded.shape[3]))
        return grid[:, :, :rows, :columns]

    def _padded_size(self, size: Size) -> Size:
        """Return the size that images of ``size`` are padded to."""
        if is_exporting():  # an export must not record trial runs
            return self._padded_sizes.get(size, size)
        # A compiled graph is for one size. PyTorch 2.11 cannot compare a constant tuple, so unpack two numbers.
        height, width = self._find_padded_size((operator.index(size[0]), operator.index(size[1])))
        return height, width

    @torch.compiler.assume_constant_result
    def _find_padded_size(self, size: Size) -> Size:
        if size in self._padded_sizes:
            return self._padded_sizes[size]
        reason = ""
        for padded in timm_features.padded_sizes(self.model, size, self.img_size):
            try:
                with timm_features.eval_no_grad(self.model):
                    self._forward_timm(self._zeros(padded))
            except (torch.OutOfMemoryError, UserError):
                raise
            except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
                reason = reason or short_message(error)
                continue
            self._padded_sizes[size] = padded
            return padded
        raise UserError(
            f"{self.name}, created for {self.img_size[0]}x{self.img_size[1]} pixels, does not accept "
            f"{size[0]}x{size[1]} ({reason}); create it with another img_size, or choose another network"
        )


class SharedDropPath(nn.Module):
    """timm's DropPath with its rate in a tensor: a number would make the compiled code of every block another one."""

    def __init__(self, rate: float, device: torch.device) -> None:
        super().__init__()
        self.keep = torch.tensor(1 - rate, device=device)  # not a buffer: the EMA's network keeps timm's module

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand((len(x), *[1] * (x.dim() - 1)), device=x.device) < self.keep
        return x * (kept / self.keep).to(x.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.keep = fn(self.keep)
        return super()._apply(fn, recurse)


def _compile_region(region: Any, *arguments: Any, **options: Any) -> None:
    """Compile a module for training steps; evaluations have other shapes and are not worth a compilation."""
    mode, compiled = region.training, torch.compile(region._call_impl, *arguments, **options)

    def call(*inputs: Any, **keywords: Any) -> Any:
        in_step = region.training == mode and not torch.is_inference_mode_enabled()
        return (compiled if in_step else region._call_impl)(*inputs, **keywords)

    region._compiled_call_impl = call  # nn.Module.compile sets it too; a deep copy drops it
