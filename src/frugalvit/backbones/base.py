"""Backbone: images -> Features, around any timm network; and what a network of our own offers besides being one.

A network written here (swin.py, cvt.py, cvt_windowed.py, t2t.py, vil.py) is first of all an ordinary timm model:
``@register_model``, ``forward_features``, ``forward_head(x, pre_logits)``, ``get_classifier``, ``reset_classifier``,
``set_grad_checkpointing``, ``num_features``, ``num_classes``, ``feature_info``; ``forward(x)`` is
``forward_head(forward_features(x))``. Its constructor takes at least ``img_size``, ``in_chans``, ``num_classes``,
``drop_path_rate`` and ``patch_size``: the pixels between two neighbouring tokens of the first stage (the stride of the
first embedding; a kernel wider than the stride keeps its width, so that weights still fit).

It further fulfils :class:`GridModel`, because the final grid, every block and the attention are then exact instead of
recovered by looking at module names.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from frugalvit.backbones import timm_features
from frugalvit.backbones.timm_features import SeveralGrids, Size, cell_sides, is_exporting, kept_cells, to_grid
from frugalvit.errors import UserError
from frugalvit.features import Features

BACKBONE_ONLY_KWARGS = ("mean", "std", "grid_norm", "drop_path", "keep_patch_size")
"""Keywords of a backbone that no network's constructor sees under these names."""


@runtime_checkable
class GridModel(Protocol):
    """A network that says itself where its tokens lie. B images, D = ``num_features``, final grid h x w."""

    family: str
    """The key under which recipes look the network up: "swin", "cvt", "t2t", "vil"."""

    num_features: int

    stage_ends: tuple[int, ...]
    """For every stage, fine to coarse, the index of its last block in ``forward_grid_blocks``."""

    def forward_grid(self, images: Tensor, norm: bool = True) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) -> final tokens (B, D, h, w) and pooled (B, D).

        ``norm=False`` gives the tokens before the final norm. ``pooled`` is in both cases what the classifier sees:
        ``get_classifier()(pooled)`` equals ``forward(images)`` in eval mode.
        """
        ...

    def forward_grid_blocks(self, images: Tensor) -> list[Tensor]:
        """Every block's output as (B, C_i, h_i, w_i), in order, without the final norm, without class tokens."""
        ...

    def final_norm(self, grid: Tensor) -> Tensor:
        """The final norm on a grid (B, D, h, w); the grid itself where a network has none."""
        ...

    def last_attention(self, images: Tensor) -> Tensor:
        """Softmax attention of the last block, (B, heads, T, T), rows sum to 1.

        T counts the real tokens: class or global tokens first, then the grid row by row. Windowed attention is
        scattered into the full T x T (zero between windows); padding attended to is left out and the row rescaled.
        A network whose last block is not an attention raises UserError.
        """
        ...

    def get_classifier(self) -> nn.Module: ...


class Backbone(nn.Module):
    """A network that turns images of any size into :class:`Features`. Made by ``create_backbone``.

    model       the timm network itself, with its classifier when ``num_classes`` > 0
    dim         D of ``Features.grid``; ``pooled_dim`` is that of ``Features.pooled`` (the same for all but a few
                networks that widen between map and classifier, such as MobileNetV3)
    mean, std   what images are normalised with, one number per channel
    notes       what "auto" decided for small images, and why
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
        self.grid_norm = grid_norm
        self.notes = list(notes or [])
        self.is_grid_model = isinstance(model, GridModel)
        self._fits: dict[Size, Size] = {}  # image size -> the size it is padded to, for networks that are choosy
        self._grids: dict[Size, Size] = {}
        self._ask_intermediates = False
        self.dim = self.pooled_dim = int(model.num_features)  # type: ignore[arg-type]
        if not self.is_grid_model:
            self._choose_forward()
            features = self._probe(img_size)
            self.dim, self.pooled_dim = features.grid.shape[1], features.pooled.shape[1]
            self._check_classifier(features.pooled)

    def forward(self, images: Tensor) -> Features:
        """(B, C, H, W) -> grid (B, dim, h, w) and pooled (B, pooled_dim)."""
        self._check(images)
        if self.is_grid_model:
            return Features(*self.model.forward_grid(images, norm=self.grid_norm))  # type: ignore[operator]
        size = (images.shape[2], images.shape[3])
        fit = self._padded_size(size)
        output, grid = self._forward_timm(self._pad(images, fit))
        if fit != size:  # what stems from padding alone is seen neither by the grid nor by an average over a map
            kept = kept_cells((grid.shape[2], grid.shape[3]), size, fit)
            if isinstance(output, Tensor) and output.dim() == 4:
                last = output.shape[1:3] == grid.shape[2:]
                output = output[:, : kept[0], : kept[1]] if last else output[:, :, : kept[0], : kept[1]]
            grid = grid[:, :, : kept[0], : kept[1]]
        return Features(grid, self._pool(output))

    def classify(self, pooled: Tensor) -> Tensor:
        """(B, pooled_dim) -> logits. ``classify(backbone(images).pooled)`` equals ``model(images)`` in eval mode."""
        if self.num_classes == 0:
            raise UserError(f"{self.name} was created without classifier; pass num_classes to create_backbone")
        heads = self.model.get_classifier()  # type: ignore[operator]
        if isinstance(heads, nn.Conv2d):
            return heads(pooled[:, :, None, None]).flatten(1)
        if not isinstance(heads, tuple | list | nn.ModuleList):
            return heads(pooled)
        # Distilled networks have two classifiers and average them; DeiT's look at a token each, LeViT's at the same.
        parts = pooled.chunk(2, 1) if self._two_tokens() else (pooled, pooled)
        return (heads[0](parts[0]) + heads[1](parts[1])) / 2

    def stages(self, images: Tensor) -> list[Tensor]:
        """The output of every stage without final norm, (B, C_i, h_i, w_i), fine to coarse.

        Networks with more resolutions than four (those that count their stem) give the four coarsest; a plain ViT,
        which has one resolution, gives one map.
        """
        if self.is_grid_model:
            blocks = self.blocks(images)
            return [blocks[end] for end in self.model.stage_ends]  # type: ignore[union-attr]
        self._check(images)
        size = (images.shape[2], images.shape[3])
        fit = self._padded_size(size)
        maps = timm_features.stage_maps(self.model, self._pad(images, fit), self.name)
        info = list(self.model.feature_info)  # type: ignore[arg-type]
        steps = [entry["reduction"] for entry in info] if len(info) == len(maps) else [grid.shape[2] for grid in maps]
        last = dict(zip(steps, maps, strict=True))
        return [self._crop(grid, size, fit) for grid in last.values()][-4:]

    def blocks(self, images: Tensor) -> list[Tensor]:
        """Every block's output (B, C_i, h_i, w_i) without final norm, in order: the grids of Drloc Eq. 7."""
        return [grid for stage in self._blocks_by_stage(images) for grid in stage]

    def block_dims(self) -> list[int]:
        """Channels of every block's grid."""
        parameter = next(self.model.parameters())
        image = torch.zeros(1, self.in_chans, *self.img_size, device=parameter.device, dtype=parameter.dtype)
        with timm_features.eval_no_grad(self.model):  # a look must not move the statistics of batch norms
            return [grid.shape[1] for grid in self.blocks(image)]

    def last_blocks(self, images: Tensor, n: int = 4, *, class_token: bool = False) -> Tensor:
        """Token means of the last ``n`` blocks, concatenated: (B, sum of dims), EsViT's input to the linear probe.

        Blocks of the last stage go through the final norm, earlier ones cannot (their width differs) and do not. All
        blocks of a plain ViT are its last stage. ``class_token``: the class token of a ViT, as EsViT has it (§2.2),
        which else is not among the tokens averaged.
        """
        if class_token and timm_features.views_by_class_token(self.model):
            fitted = self._pad(images, self._padded_size((images.shape[2], images.shape[3])))
            return torch.cat(self._last(n, timm_features.class_tokens(self.model, fitted, self.name)), 1)
        *earlier, last = self._blocks_by_stage(images)
        grids = [grid for stage in earlier for grid in stage] + [self._final_norm(grid) for grid in last]
        return torch.cat([grid.mean((2, 3)) for grid in self._last(n, grids)], 1)

    def _last(self, n: int, found: list[Tensor]) -> list[Tensor]:
        if not 0 < n <= len(found):
            number = f"{self.name} has {len(found)} block{'s' * (len(found) != 1)}"
            raise UserError(f"last_blocks(n={n}): {number}; choose n (--blocks) up to that, or --features pooled")
        return found[-n:]

    def attention(self, images: Tensor) -> Tensor:
        """Softmax attention of the last block, (B, heads, T, T), rows sum to 1; UserError where there is none.

        T counts class, distillation and register tokens first, then the grid row by row. Attention within windows is
        spread over all tokens, with zeros between windows.
        """
        self._check(images)
        if self.is_grid_model:
            return self.model.last_attention(images)  # type: ignore[operator]
        size = (images.shape[2], images.shape[3])
        if self._padded_size(size) != size:
            raise UserError(
                f"{self.name} pads {size[0]}x{size[1]} pixels; look at its attention at a size it takes whole"
            )
        return timm_features.last_attention(self.model, images, self.name, self.model.forward_features)  # type: ignore[arg-type]

    def grid_size(self, img_size: int | Size) -> Size:
        """(h, w) of the final grid for images of this size."""
        size = (img_size, img_size) if isinstance(img_size, int) else (img_size[0], img_size[1])
        if size not in self._grids:
            height, width = self._probe(size).grid.shape[2:]
            self._grids[size] = (height, width)
        return self._grids[size]

    def cell_size(self, img_size: Size) -> tuple[float, float]:
        """Height and width in pixels of a region of the final grid; the last may reach beyond images of this size."""
        fit = img_size if self.is_grid_model else self._padded_size(img_size)
        return cell_sides(self.model, fit, self.grid_size(fit))

    def spec(self) -> dict[str, Any]:
        """All that ``create_backbone`` needs to build the same network: plain values, safe in JSON and YAML.

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

    def architecture_kwargs(self) -> dict[str, Any]:
        """The keywords with which other images of any size see the same network, shape and all.

        Stochastic depth and which grid is given are for each run to choose.
        """
        lasting = {key: value for key, value in self.keywords.items() if key not in ("drop_path", "grid_norm")}
        return lasting | {"keep_patch_size": True}

    def extra_repr(self) -> str:
        return f"name={self.name!r}, img_size={self.img_size}, dim={self.dim}, num_classes={self.num_classes}"

    def _check(self, images: Tensor) -> None:
        """By type and shape alone, so that no device is waited for."""
        if not isinstance(images, Tensor) or not images.is_floating_point():
            given = f"{images.dtype} numbers" if isinstance(images, Tensor) else type(images).__name__
            raise UserError(
                f"{self.name} takes a tensor of floats, normalised with its mean and std, not {given}; a model from "
                "frugalvit.load makes one of pictures (transform) or takes them as they are (predict)"
            )
        if images.dim() != 4 or images.shape[1] != self.in_chans:
            raise UserError(
                f"{self.name} takes images (batch, {self.in_chans}, height, width), not {tuple(images.shape)}; "
                "in_chans of create_backbone sets the channels"
            )
        if images.shape[0] == 0:
            raise UserError(f"{self.name} was given a batch of 0 images; leave it out")

    def _forward_timm(self, images: Tensor) -> tuple[Any, Tensor]:
        """What ``forward_head`` takes, and the grid."""
        size = (images.shape[2], images.shape[3])
        if self._ask_intermediates:
            output, maps = self.model.forward_intermediates(images, indices=1, norm=self.grid_norm)  # type: ignore[operator]
            return output, maps[-1]
        output = self.model.forward_features(images)  # type: ignore[operator]
        return output, to_grid(output, self.model, size, self.model.num_features)  # type: ignore[arg-type]

    def _choose_forward(self) -> None:
        """``forward_features`` has the grid, except before a final norm and where only the class token comes out."""
        can_ask = hasattr(self.model, "forward_intermediates")
        if not self.grid_norm and timm_features.final_norm(self.model) is not None:
            if not can_ask:
                raise UserError(f"{self.name} cannot give tokens before its final norm; leave grid_norm at True")
            self._ask_intermediates = True
            return
        try:
            self._probe(self.img_size)
        except UserError as error:
            if not can_ask or isinstance(error, SeveralGrids):
                raise
            self._ask_intermediates = True

    def _check_classifier(self, pooled: Tensor) -> None:
        """A classifier that sees more than ``pooled`` (VOLO's auxiliary head) would be trained wrongly in silence."""
        if self.num_classes == 0 or self._padded_size(self.img_size) != self.img_size:
            return
        with timm_features.eval_no_grad(self.model):
            logits = self.model(torch.zeros(1, self.in_chans, *self.img_size, device=pooled.device, dtype=pooled.dtype))
            same = isinstance(logits, Tensor) and torch.allclose(self.classify(pooled), logits, rtol=1e-3, atol=1e-4)
        if not same:
            raise UserError(
                f"the classifier of {self.name} sees more than the pooled features; "
                "use it with num_classes=0, or choose another network"
            )

    def _pool(self, output: Any) -> Tensor:
        if self._two_tokens() and self.num_classes:
            return output[:, :2].flatten(1)
        return self.model.forward_head(output, pre_logits=True).flatten(1)  # type: ignore[operator]

    def _two_tokens(self) -> bool:
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
        size = (images.shape[2], images.shape[3])
        fit = self._padded_size(size)
        run = self.model.forward_features
        stages = timm_features.block_grids(self.model, self._pad(images, fit), self.name, run)  # type: ignore[arg-type]
        return [[self._crop(grid, size, fit) for grid in stage] for stage in stages]

    def _probe(self, size: Size) -> Features:
        """One grey image through the network, for its shapes."""
        parameter = next(self.model.parameters())
        with timm_features.eval_no_grad(self.model):
            return self.forward(torch.zeros(1, self.in_chans, *size, device=parameter.device, dtype=parameter.dtype))

    def _padded_size(self, size: Size) -> Size:
        """The size images of ``size`` are padded to (bottom and right) so that the network takes them."""
        if is_exporting():  # nothing can be tried out while a program is recorded
            return self._fits.get(size, size)
        height, width = self._find_padded_size(
            (operator.index(size[0]), operator.index(size[1]))
        )  # a compiled graph is for one size
        return height, width  # two numbers to the compiler of PyTorch 2.11, too, which compares no constant tuple

    @torch.compiler.assume_constant_result
    def _find_padded_size(self, size: Size) -> Size:
        if size in self._fits:
            return self._fits[size]
        parameter = next(self.model.parameters())
        reason, no_grid = "", None
        for fit in timm_features.padded_sizes(self.model, size, self.img_size):
            image = torch.zeros(1, self.in_chans, *fit, device=parameter.device, dtype=parameter.dtype)
            try:
                with timm_features.eval_no_grad(self.model):
                    self._forward_timm(image)
            except torch.OutOfMemoryError:
                raise
            except UserError as error:  # taken, but there is no grid in what comes out
                no_grid = error
                continue
            except (AssertionError, RuntimeError, ValueError, TypeError, IndexError) as error:
                reason = reason or (str(error).strip().splitlines() or [type(error).__name__])[0]
                continue
            self._fits[size] = fit
            return fit
        if no_grid is not None:
            raise no_grid
        if size == self.img_size:
            raise UserError(f"{self.name} cannot be used at {size[0]}x{size[1]} pixels: {reason}; choose another size")
        raise UserError(
            f"{self.name}, created for {self.img_size[0]}x{self.img_size[1]} pixels, does not take "
            f"{size[0]}x{size[1]}; create it with img_size={max(size)} or choose another network ({reason})"
        )

    @staticmethod
    def _pad(images: Tensor, fit: Size) -> Tensor:
        down, right = fit[0] - images.shape[2], fit[1] - images.shape[3]
        return functional.pad(images, (0, right, 0, down)) if down or right else images

    @staticmethod
    def _crop(grid: Tensor, size: Size, fit: Size) -> Tensor:
        rows, columns = kept_cells((grid.shape[2], grid.shape[3]), size, fit)
        return grid[:, :, :rows, :columns]
