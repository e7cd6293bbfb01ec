"""Distillation equals its formula, written as loops; gradients included."""

import math

import pytest
import torch
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives import FeatureDistillation, ObjectiveContext, distillation_targets, get_objective


def normalize_slowly(vector: Tensor) -> Tensor:
    mean = sum(vector) / len(vector)
    variance = sum((value - mean) ** 2 for value in vector) / len(vector)
    return torch.stack([(value - mean) / (variance + 1e-5) ** 0.5 for value in vector])


def triangle_weights(size: int, out: int) -> list[list[float]]:
    """Bilinear weights of every input cell for every output cell; wider than a cell if the grid shrinks."""
    scale, rows = size / out, []
    for cell in range(out):
        center, reach = (cell + 0.5) * scale, max(scale, 1.0)
        weights = [max(0.0, 1 - abs(i + 0.5 - center) / reach) for i in range(size)]
        rows.append([weight / sum(weights) for weight in weights])
    return rows


def targets_slowly(teacher: Features, size: tuple[int, int]) -> Features:
    images, channels, height, width = teacher.grid.shape
    rows, columns = triangle_weights(height, size[0]), triangle_weights(width, size[1])
    grid = torch.zeros(images, channels, *size)
    for image in range(images):
        for i in range(height):
            for j in range(width):
                cell = normalize_slowly(teacher.grid[image, :, i, j])
                for y in range(size[0]):
                    for x in range(size[1]):
                        grid[image, :, y, x] += rows[y][i] * columns[x][j] * cell
    return Features(grid, torch.stack([normalize_slowly(vector) for vector in teacher.pooled]))


def smooth_l1_slowly(one: Tensor, other: Tensor) -> Tensor:
    gaps = [abs(a - b) for a, b in zip(one.flatten(), other.flatten(), strict=True)]
    return sum((gap**2 / 2 if gap < 1 else gap - 0.5 for gap in gaps), torch.zeros(())) / len(gaps)


def loss_slowly(head: FeatureDistillation, student: Features, targets: Features) -> Tensor:
    total = torch.zeros(())
    if head.grid_map is not None:
        answers = torch.zeros_like(targets.grid)
        for image, i, j in torch.cartesian_prod(*map(torch.arange, (len(answers), *answers.shape[2:]))).tolist():
            answers[image, :, i, j] = head.grid_map.weight @ student.grid[image, :, i, j] + head.grid_map.bias
        total = total + head.grid_weight * smooth_l1_slowly(answers, targets.grid)
    if head.pooled_map is not None:
        answers = torch.stack([head.pooled_map.weight @ vector + head.pooled_map.bias for vector in student.pooled])
        total = total + head.pooled_weight * smooth_l1_slowly(answers, targets.pooled)
    return total


def random_features(seed: int, channels: int, size: tuple[int, int], width: int, batch: int = 2) -> Features:
    generator = torch.Generator().manual_seed(seed)
    grid, pooled = torch.randn(batch, channels, *size, generator=generator), torch.randn(2, width, generator=generator)
    return Features(3 * grid + 1, 3 * pooled)


@pytest.mark.parametrize("size", [(3, 3), (4, 4), (2, 3), (7, 5), (1, 1)])
@pytest.mark.parametrize("own", [(4, 4), (6, 5), (1, 2)])
def test_targets_equal_loops(own: tuple[int, int], size: tuple[int, int]) -> None:
    teacher = random_features(0, 4, own, 5)
    torch.testing.assert_close(distillation_targets(teacher, size), targets_slowly(teacher, size), rtol=1e-4, atol=1e-5)


def test_targets_of_the_mirror_image_are_mirrored() -> None:
    """The cache relies on it: resampling is symmetric."""
    teacher = random_features(1, 4, (6, 7), 4)
    flipped = distillation_targets(Features(teacher.grid.flip(3), teacher.pooled), (3, 3)).grid
    torch.testing.assert_close(flipped.flip(3), distillation_targets(teacher, (3, 3)).grid)


@pytest.mark.parametrize(("grid_weight", "pooled_weight"), [(1.0, 1.0), (0.5, 2.0), (0.0, 1.0), (1.0, 0.0)])
def test_loss_and_gradients_equal_loops(grid_weight: float, pooled_weight: float) -> None:
    torch.manual_seed(0)
    head = FeatureDistillation(3, 4, 6, 5, grid_weight, pooled_weight)
    teacher = random_features(2, 4, (4, 6), 5)
    results = []
    for loss in (
        lambda student: head(student, ObjectiveContext(torch.zeros(2, 3, 8, 8), teacher=teacher)),
        lambda student: loss_slowly(head, student, targets_slowly(teacher, (2, 3))),
    ):
        student = Features(*(part.requires_grad_() for part in random_features(3, 3, (2, 3), 6)))
        head.zero_grad()
        value = loss(student)
        value.backward()
        found = [student.grid.grad, student.pooled.grad, *(parameter.grad for parameter in head.parameters())]
        results.append([value.detach(), *(part for part in found if part is not None)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_parts_are_logged_and_a_perfect_answer_costs_nothing() -> None:
    head = FeatureDistillation(4)
    for linear in (head.grid_map, head.pooled_map):
        torch.nn.init.eye_(linear.weight)  # type: ignore[union-attr]
        torch.nn.init.zeros_(linear.bias)  # type: ignore[union-attr]
    targets = distillation_targets(random_features(4, 4, (3, 3), 4), (3, 3))
    losses = head.losses(targets, targets)
    assert list(losses) == ["loss", "grid_loss", "pooled_loss"] and losses["loss"] == 0
    assert math.isclose(
        float(head.losses(Features(targets.grid + 2, targets.pooled), targets)["grid_loss"]), 1.5, rel_tol=1e-5
    )


def test_wrong_use() -> None:
    with pytest.raises(UserError, match="grid_weight 0"):
        FeatureDistillation(3, grid_weight=0, pooled_weight=0)
    with pytest.raises(UserError, match="needs a teacher"):
        get_objective("distillation")(3)(random_features(0, 3, (2, 2), 3), ObjectiveContext(torch.zeros(2, 3, 8, 8)))
