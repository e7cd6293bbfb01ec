"""Drloc: predict from two final tokens how far apart they are in the image.

Liu et al., "Efficient Training of Visual Transformers with Small Datasets" (NeurIPS 2021), section 4 and supplement,
sections 1 and 2. A small MLP f reads the embeddings of two grid positions, concatenated, and predicts their offset:

    t_u = |i - p| / k,  t_v = |j - h| / k                          (1)
    L_drloc = Σ_{x in B} E_pairs [ |(t_u, t_v) - f(e_ij, e_ph)|_1 ]   (2)

This module takes the mean over batch, pairs and coordinates, so that the weight λ does not depend on the batch size:
Eq. 2 is 2·B times our loss (the factor 2 because the L1 norm sums the two coordinates). The classification forms
(Eq. 5, 6) sum the two axes, as the paper does, and average over batch and pairs: Eq. 5 and 6 are B times our loss.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from frugalvit.errors import UserError, did_you_mean, to_count
from frugalvit.features import Features
from frugalvit.objectives.registry import Objective, ObjectiveContext, register_objective

Variant = Literal["l1", "signed", "ce", "reg"]
Form = Literal["paper", "released"]
Precision = Literal["fp32", "autocast"]
Size = tuple[int, int]
Device = torch.device | str | None
Prediction = tuple[tuple[Tensor, Tensor], Tensor, Size]
"""The MLP's output per axis, the offsets (B, m, 2) of the pairs, and the grid's size."""

ALPHA = 0.001  # weight of the variance term, Eq. 6
VARIANCE_FLOOR = 1e-8  # avoids division by zero for a posterior with all mass on one class


def draw_pairs(
    batch: int, size: Size, pairs: int, *, generator: Generator | None = None, device: Device = None
) -> tuple[Tensor, Tensor]:
    """Draw ``pairs`` pairs of grid positions per image, with replacement: two (B, m, 2) of (row, col).

    Positions are uniform. They are drawn on ``device``, or on the generator's device and then moved.
    """
    source = generator.device if generator is not None else device
    cells = draw_cells(batch, size, pairs, generator, source)
    first, second = positions(cells, size[1]).to(device=device, non_blocking=True)
    return first, second


def draw_cells(batch: int, size: Size, pairs: int, generator: Generator | None, device: Device) -> Tensor:
    """Draw the cells of the pairs' first and second positions, numbered row by row: (2, B, m)."""
    cells, shape = size[0] * size[1], (2, batch, pairs)
    if generator is None:  # with the keyword generator=None, torch.compile refuses a dynamic batch size
        return torch.randint(cells, shape, device=device)
    return torch.randint(cells, shape, generator=generator, device=device)


def positions(cells: Tensor, width: int) -> Tensor:
    """Convert cell numbers (...) of a grid of this width to (row, col): (..., 2)."""
    return torch.stack((cells // width, cells % width), dim=-1)


class RelativeLocalization(nn.Module):
    """The dense relative localization loss over a grid of tokens (B, D, h, w), square or not.

    variant:   ``l1`` (Eq. 2), ``signed`` (Eq. 3: offsets keep their sign), ``ce`` (Eq. 4-5: one class c per offset and
               axis, -log p(c)), ``reg`` (Eq. 6: (c - μ)² / σ² + α log σ, mean and variance of that posterior p)
    pairs:     m pairs per image, or ``"all"``: every ordered pair of positions, which is the expectation itself
    hidden:    width of the MLP's two hidden layers
    grid_size: a finer axis is average-pooled to this size, without parameters (14 -> 7 is the paper's 2×2 mean); a
               coarser one stays. ``None`` never pools; only ``l1`` and ``signed`` allow it
    form:      ``paper``, or ``released``: the published code. There targets are raw offsets (``normalize=True``:
               divided by their largest value) and signed ones start at 0. ``ce`` and ``reg`` have 2k-1 classes
               (``absolute=True``, its recipe and the default: k classes of |offset|), one more linear layer, and log σ²
               instead of log σ. A grid twice as fine is pooled 3×3, stride 2
    precision: ``fp32``: everything in fp32, even under autocast; matrix products follow
               ``torch.set_float32_matmul_precision``. ``autocast``: hidden layers follow the autocast; outputs and loss
               are fp32

    Offsets are first minus second, over height and width; each is divided by its axis' k. Parameters have the names of
    released checkpoints: ``drloc.layers.*`` and ``drloc.unshared.*`` (or ``drloc.0.…``) are ``layers.*`` and
    ``unshared.*`` here.
    """

    def __init__(
        self,
        dim: int,
        variant: Variant = "l1",
        pairs: int | Literal["all"] = 64,
        hidden: int = 512,
        grid_size: int | tuple[int, int] | None = 7,
        form: Form = "paper",
        *,
        absolute: bool | None = None,
        normalize: bool = False,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        _check_choice("variant", variant, get_args(Variant))
        _check_choice("form", form, get_args(Form))
        _check_choice("precision", precision, get_args(Precision))
        dim, hidden = to_count("dim", dim), to_count("hidden", hidden)
        self.variant: Variant = variant
        self.form: Form = form
        self.precision: Precision = precision
        self.pairs: int | Literal["all"] = "all" if pairs == "all" else to_count("pairs", pairs)
        self.grid_size = None if grid_size is None else _to_sides(grid_size)
        self.classifies = variant in ("ce", "reg")
        self.absolute = self._resolve_absolute(absolute)
        if normalize and (form == "paper" or self.classifies):
            raise UserError("normalize=True needs form='released' with variant 'l1' or 'signed'; remove it.")
        self.normalize = normalize

        layers = [nn.Linear(2 * dim, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()]
        if not self.classifies:
            layers.append(nn.Linear(hidden, 2))
        elif form == "released":
            layers.append(nn.Linear(hidden, hidden))
        self.layers = nn.Sequential(*layers)
        if self.classifies:
            self.unshared = nn.ModuleList(nn.Linear(hidden, self._classes(axis)) for axis in (0, 1))

    def forward(self, grid: Tensor, generator: Generator | None = None) -> Tensor:
        """Return the loss of a grid (B, D, h, w) over newly drawn pairs."""
        return self.measure(grid, generator)[0]

    def measure(self, grid: Tensor, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the loss, and for the log the mean absolute error of the offsets in grid cells (no gradient)."""
        prediction = self._predict(grid, generator)
        return self._loss(*prediction), self._error(*prediction)

    def loss_at(self, grid: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """Return the loss at the positions (B, m, 2), (row, col) on the grid after pooling."""
        return self.measure_at(grid, first, second)[0]

    def measure_at(self, grid: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``loss_at`` and the mean absolute error in grid cells."""
        prediction = self._predict_at(grid, first, second)
        return self._loss(*prediction), self._error(*prediction)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile ``measure`` and ``measure_at``: a training step and :meth:`forward` call these."""
        self.measure = torch.compile(self.measure, *args, **options)
        self.measure_at = torch.compile(self.measure_at, *args, **options)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the compiled functions, like ``nn.Module``: a copy is not compiled."""
        return {name: value for name, value in super().__getstate__().items() if name not in ("measure", "measure_at")}

    def pooled_size(self, height: int, width: int) -> Size:
        """Return the size of the grid after pooling."""
        if self.grid_size is None:
            return height, width
        return min(height, self.grid_size[0]), min(width, self.grid_size[1])

    def constant_baseline_error(self, height: int, width: int) -> float:
        """Return the mean absolute error (cells) of the best constant prediction for a grid of this size."""
        errors = []
        for k in self.pooled_size(height, width):
            offsets = torch.arange(k)[:, None] - torch.arange(k)
            offsets = (offsets.abs() if self.absolute else offsets).float()
            errors.append((offsets - offsets.median()).abs().mean())
        return float(sum(errors) / 2)

    # Targets

    def _resolve_absolute(self, absolute: bool | None) -> bool:
        implied = {"l1": True, "signed": False}.get(self.variant, False if self.form == "paper" else None)
        if implied is None:
            return True if absolute is None else absolute
        if absolute not in (None, implied):
            raise UserError(
                f"absolute={absolute} contradicts variant={self.variant!r}, form={self.form!r}; "
                "choose variant 'l1' or 'signed', or form='released' with 'ce' or 'reg'."
            )
        return implied

    def _classes(self, axis: int) -> int:
        if self.grid_size is None:
            raise UserError(f"variant={self.variant!r} has one class per offset: set grid_size to the largest grid.")
        k = self.grid_size[axis]
        if self.form == "paper":
            return 2 * k + 1
        return k if self.absolute else 2 * k - 1

    def _shift_and_scale(self, axis: int, size: Size) -> Size:
        """Return shift and scale of an axis' target (offset + shift) / scale, with |offset| if ``absolute``."""
        k = size[axis]
        if self.classifies:
            assert self.grid_size is not None
            k = self.grid_size[axis]  # a class has the same offset on a smaller grid
            return (k if self.form == "paper" else 0 if self.absolute else k - 1), 1
        if self.form == "paper":
            return 0, k
        shift = 0 if self.absolute else k - 1
        largest = (k - 1) if self.absolute else 2 * (k - 1)
        return shift, max(1, largest) if self.normalize else 1

    # The MLP over pairs

    def _predict(self, grid: Tensor, generator: Generator | None) -> Prediction:
        self._check(grid)
        if self.pairs != "all":
            size = self.pooled_size(*grid.shape[-2:])
            ends = draw_pairs(len(grid), size, self.pairs, generator=generator, device=grid.device)
            return self._predict_at(grid, *ends, trusted=True)
        with self._autocast(grid.device):
            tokens, size = self._tokens(grid)
            projected = self._project_tokens(tokens).unflatten(1, (-1, 2))  # (B, T, 2, hidden)
            as_first, as_second = projected.unbind(2)
            hidden = ((as_first + self._first.bias)[:, :, None] + as_second[:, None]).flatten(1, 2)  # (B, T·T, hidden)
            cells = torch.arange(size[0] * size[1], device=grid.device)
            position = positions(cells, size[1])
            offset = (position[:, None] - position[None]).flatten(0, 1).expand(len(grid), -1, -1)
            return self._heads(hidden), offset, size

    def _predict_at(self, grid: Tensor, first: Tensor, second: Tensor, trusted: bool = False) -> Prediction:
        self._check(grid)
        with self._autocast(grid.device):
            tokens, size = self._tokens(grid)
            if not trusted:
                _check_positions(first, second, len(grid), size)
                first, second = first.long(), second.long()
            start, end = (position[..., 0] * size[1] + position[..., 1] for position in (first, second))
            # Products with 0/1 matrices select tokens: unlike a gather, their gradients are added in a fixed order.
            if start.shape[1] < tokens.shape[1]:
                chosen = torch.cat((start, end), dim=1)[..., None]
                ends = tokens.new_zeros(*chosen.shape[:2], tokens.shape[1]).scatter_(2, chosen, 1.0) @ tokens
                hidden = self._first(torch.cat(ends.chunk(2, dim=1), dim=-1))
            else:
                # Fewer tokens than pairs: W1 [e1; e2] = W1a e1 + W1b e2, so project every token once.
                projected = self._project_tokens(tokens)
                chosen = torch.stack((2 * start, 2 * end + 1), dim=-1)
                selection = projected.new_zeros(*start.shape, projected.shape[1]).scatter_(2, chosen, 1.0)
                hidden = selection @ projected + self._first.bias
            return self._heads(hidden), first - second, size

    def _autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Set the precision of the hidden layers."""
        return torch.autocast(device.type, enabled=False) if self.precision == "fp32" else nullcontext()

    @property
    def _first(self) -> nn.Linear:
        layer = self.layers[0]
        assert isinstance(layer, nn.Linear)
        return layer

    def _check(self, grid: Tensor) -> None:
        if not isinstance(grid, Tensor):
            raise UserError(f"localization needs a grid of tokens, not {type(grid).__name__}: use features.grid.")
        if grid.ndim != 4 or grid.shape[1] * 2 != self._first.in_features or grid.shape[0] == 0:
            expected = f"(B, {self._first.in_features // 2}, h, w) with at least one image"
            raise UserError(f"a grid of shape {tuple(grid.shape)} does not fit: use {expected}.")

    def _tokens(self, grid: Tensor) -> tuple[Tensor, Size]:
        """Return the pooled grid as tokens (B, T, D) in the MLP's precision, and its size."""
        native = (grid.shape[2], grid.shape[3])
        size = self.pooled_size(*native)
        if size == (1, 1):
            raise UserError(
                f"a {native[0]}x{native[1]} grid has one position, so there is nothing to localize; "
                "use larger images, a smaller patch or stride, or a localization weight of 0."
            )
        grid = grid.to(self._first.weight.dtype)
        if self.form == "released" and native == (2 * size[0], 2 * size[1]):
            grid = F.avg_pool2d(grid, 3, stride=2, padding=1, count_include_pad=False)
        elif native != size:
            grid = F.adaptive_avg_pool2d(grid, size)
        return grid.flatten(2).transpose(1, 2), size

    def _project_tokens(self, tokens: Tensor) -> Tensor:
        """(B, T, D) -> (B, 2T, hidden): row 2t is W1a e_t, token t as a pair's first; row 2t+1 is W1b e_t."""
        weight = self._first.weight.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 1)
        return F.linear(tokens, weight).unflatten(2, (2, -1)).flatten(1, 2)

    def _heads(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Map the first layer's output (B, m, hidden) to predictions (B, m) or logits (B, m, C) per axis."""
        layers = list(self.layers)[1:]
        output = None if self.classifies else layers.pop()
        for layer in layers:
            hidden = layer(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(self._first.weight.dtype)
            rows, cols = output(hidden).unbind(-1) if output else (head(hidden) for head in self.unshared)
        precision = torch.promote_types(rows.dtype, torch.float32)
        return rows.to(precision), cols.to(precision)

    # Loss and error

    def _loss(self, outputs: tuple[Tensor, Tensor], offset: Tensor, size: Size) -> Tensor:
        with torch.autocast(offset.device.type, enabled=False):
            terms = [self._axis_loss(outputs[axis], self._target(offset, axis, size), axis, size) for axis in (0, 1)]
            return terms[0] + terms[1] if self.classifies else (terms[0] + terms[1]) / 2

    def _target(self, offset: Tensor, axis: int, size: Size) -> Tensor:
        """Return the target before scaling; for the classifying variants this is the class."""
        distance = offset[..., axis].abs() if self.absolute else offset[..., axis]
        return distance + self._shift_and_scale(axis, size)[0]

    def _axis_loss(self, output: Tensor, target: Tensor, axis: int, size: Size) -> Tensor:
        if self.variant == "ce":
            return F.cross_entropy(output.flatten(0, 1), target.flatten())
        if self.variant == "reg":
            mean, variance = _moments(output)
            # α log σ in the paper, α log σ² in the released code
            regularizer = ALPHA * (0.5 if self.form == "paper" else 1.0) * variance.log()
            return ((target - mean).square() / variance + regularizer).mean()
        scale = self._shift_and_scale(axis, size)[1]
        return (output - target / scale).abs().mean()

    @torch.no_grad()
    def _error(self, outputs: tuple[Tensor, Tensor], offset: Tensor, size: Size) -> Tensor:
        errors = []
        for axis in (0, 1):
            output = outputs[axis].detach()
            if self.variant == "ce":
                predicted = output.argmax(-1)
            elif self.variant == "reg":
                predicted = _moments(output)[0]
            else:
                predicted = output * self._shift_and_scale(axis, size)[1]
            errors.append((predicted - self._target(offset, axis, size)).abs().to(outputs[0].dtype).mean())
        return (errors[0] + errors[1]) / 2


def _moments(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the class index under softmax(logits): (…, C) -> (…), (…)."""
    posterior = logits.softmax(-1)
    classes = torch.arange(logits.shape[-1], device=logits.device, dtype=logits.dtype)
    mean = (posterior * classes).sum(-1)
    variance = (posterior * (classes - mean[..., None]).square()).sum(-1) + VARIANCE_FLOOR
    return mean, variance


def _to_sides(grid_size: Any) -> Size:
    try:
        height, width = grid_size if isinstance(grid_size, tuple | list) else (grid_size, grid_size)
    except ValueError:
        raise UserError(f"grid_size={grid_size!r}: use an integer, (height, width), or None for no pooling.") from None
    return to_count("grid_size", height), to_count("grid_size", width)


def _check_choice(name: str, value: str, options: Sequence[str]) -> None:
    if value not in options:
        raise UserError(f"{name}={value!r} is not one of {', '.join(options)}.{did_you_mean(str(value), options)}")


def _check_positions(first: Tensor, second: Tensor, batch: int, size: Size) -> None:
    """Check shapes. Check values only where reading them does not wait: on the CPU, if not compiled."""
    shapes, expected = (first.shape, second.shape), (batch, *first.shape[1:2], 2)
    if shapes != (expected, expected) or first.is_floating_point() or second.is_floating_point():
        raise UserError(f"positions of shapes {[*map(tuple, shapes)]}: use integers (B={batch}, m, 2).")
    if torch.compiler.is_compiling() or first.device.type != "cpu":
        return
    limits = torch.tensor(size)
    if any(bool(((position < 0) | (position >= limits)).any()) for position in (first, second)):
        raise UserError(f"a position is outside the {size[0]}x{size[1]} grid of pairs.")


class DenseLocalization(nn.Module):
    """Eq. 7: the sum of the loss over every block (or stage) l, each with its own MLP.

    dims:       channels of each grid, in the order of ``forward``
    grid_sizes: ``grid_size`` of :class:`RelativeLocalization` per grid; ``None``, as in the paper, never pools
    options:    the other options of :class:`RelativeLocalization`
    """

    def __init__(
        self,
        dims: Sequence[int],
        variant: Variant = "l1",
        *,
        grid_sizes: Sequence[int | tuple[int, int] | None] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = [None] * len(dims) if grid_sizes is None else list(grid_sizes)
        if not dims or len(sizes) != len(dims):
            raise UserError(f"{len(dims)} dims and {len(sizes)} grid_sizes: use one of each per grid, at least one.")
        self.levels = nn.ModuleList(
            RelativeLocalization(dim, variant, grid_size=size, **options) for dim, size in zip(dims, sizes, strict=True)
        )

    def forward(self, grids: Sequence[Tensor], generator: Generator | None = None) -> Tensor:
        """Return the summed loss of the grids (B, C_l, h_l, w_l)."""
        return self.measure(grids, generator)[0]

    def measure(self, grids: Sequence[Tensor], generator: Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the summed loss, and the mean absolute error in cells of the last grid."""
        return self.apply_per_level(grids, lambda level, grid: level.measure(grid, generator))

    def apply_per_level(
        self, grids: Sequence[Tensor], measure: Callable[[RelativeLocalization, Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss of ``measure(level, grid)`` over the grids, and the error of the last grid."""
        if isinstance(grids, Features | Tensor):
            raise UserError("dense localization needs several grids: use a list, such as backbone.blocks(images).")
        if len(grids) != len(self.levels):
            raise UserError(f"{len(grids)} grids for {len(self.levels)} localization heads: use one grid per head.")
        losses, errors = [], []
        for level, grid in zip(self.levels, grids, strict=True):
            assert isinstance(level, RelativeLocalization)
            loss, error = measure(level, grid)
            losses.append(loss)
            errors.append(error)
        return torch.stack(losses).sum(), errors[-1]

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile every level."""
        for level in self.levels:
            level.compile(*args, **options)


@register_objective("localization")
class LocalizationObjective(Objective):
    """:class:`RelativeLocalization` of ``Features.grid``; the options are the same."""

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__(dim)
        self.localization = RelativeLocalization(dim, **options)

    def forward(self, features: Features, context: ObjectiveContext) -> Tensor:
        return self.localization(features.grid)


# The pairs of one batch in a task. They are drawn for the full batch, and each rank takes the pairs of its images. So N
# ranks use the same pairs as one rank, and a resumed run uses the same pairs as before.

Pairs = Tensor | None  # cells of the first and second tokens of the pairs, (2, B, m); None if all pairs are used


def draw_batch_pairs(
    head: RelativeLocalization,
    grid_size: Size,
    images: int,
    generator: Generator,
    *,
    rank: int = 0,
    world: int = 1,
    views: int = 1,
) -> Pairs:
    """Draw the pairs of this rank's ``images`` (views · B) on grids of ``grid_size``."""
    if head.pairs == "all":
        return None
    size = head.pooled_size(*grid_size)
    drawn = draw_cells(images * world, size, head.pairs, generator, generator.device)
    if world == 1:
        return drawn
    batch = images // views
    own_images = slice(rank * batch, (rank + 1) * batch)
    return drawn.unflatten(1, (views, -1))[:, :, own_images].flatten(1, 2)


def loss_at_pairs(head: RelativeLocalization, grid: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return loss and error (in cells) of a grid (B, D, h, w) at these pairs."""
    if pairs is None:
        return head.measure(grid)
    first, second = positions(pairs, head.pooled_size(grid.shape[2], grid.shape[3])[1])
    return head.measure_at(grid, first, second)
