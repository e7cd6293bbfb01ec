"""View matching equals Eq. 1 as loops and the released numbers; heads, center and health of the module."""

import copy
import math
import socket
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from torch import Tensor

from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives import (
    RegionMatching,
    ViewMatching,
    assigned_cross_entropy,
    match_regions,
    region_loss,
    update_center,
    view_loss,
)
from helpers.matching_oracles import crop_sets, features_of, golden_crops, view_oracle

EPOCHS_OF_STEPS = (0, 0, 10, 50)


@given(crops=crop_sets())
def test_equals_the_loops_with_gradients(crops: Any) -> None:
    student = [logits[:, 0].detach().requires_grad_() for logits in crops["student_logits"]]
    teacher = [logits[:, 0] for logits in crops["teacher_logits"]]
    expected = view_oracle(student, teacher, crops["center"], 0.1, 0.04)
    loss = view_loss(student, teacher, center=crops["center"], student_temp=0.1, teacher_temp=0.04)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, student, allow_unused=True)
    for got, want in zip(torch.autograd.grad(loss, student, allow_unused=True), wanted, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)  # None: no other crop


def test_released_numbers_over_four_steps(golden: Any) -> None:
    arrays = golden("b_ddino")
    crops = golden_crops(arrays)
    center = torch.zeros(1, 64)
    for step, epoch in enumerate(EPOCHS_OF_STEPS):
        student = [logits.clone().requires_grad_() for logits in crops["student_views"]]
        temperature = float(arrays["teacher_temp_schedule"][epoch])
        loss = view_loss(student, crops["teacher_views"], center=center, teacher_temp=temperature)
        grads = torch.cat(torch.autograd.grad(loss, student))
        center = update_center(center, crops["teacher_views"])
        assert loss.item() == pytest.approx(float(arrays[f"dino.step{step}.loss"]), abs=1e-5)
        torch.testing.assert_close(center, torch.from_numpy(arrays[f"dino.step{step}.center"]), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grads, torch.from_numpy(arrays[f"dino.step{step}.grad_s_cls"]), atol=1e-5, rtol=1e-5)


def test_released_number_of_mixed_crops(golden: Any) -> None:
    arrays = golden("b_ddino")
    crops = golden_crops(arrays)
    mixing = list(torch.from_numpy(arrays["dino_mixup.targets"]))
    loss = view_loss(crops["student_views"], crops["teacher_views"], center=torch.zeros(64), mixing=mixing)
    assert loss.item() == pytest.approx(float(arrays["dino_mixup.loss_epoch0"]), abs=1e-5)
    plain = view_loss(crops["student_views"], crops["teacher_views"], center=torch.zeros(64))
    identity = [torch.eye(3)] * 6
    mixed = view_loss(crops["student_views"], crops["teacher_views"], center=torch.zeros(64), mixing=identity)
    torch.testing.assert_close(mixed, plain)


def small(kind: type[ViewMatching] | type[RegionMatching] = ViewMatching, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"prototypes": 11, "hidden": 8, "bottleneck": 5} | options
    return kind(6, **options)


def two_and_two(batch: int = 3, seed: int = 1) -> tuple[list[Features], list[Features]]:
    torch.manual_seed(seed)
    grids = [torch.randn(batch, 6, *size) for size in ((4, 4), (4, 4), (2, 3), (2, 3))]
    return features_of(grids), features_of([grid + 0.1 * torch.randn_like(grid) for grid in grids[:2]])


@pytest.mark.parametrize("kind", [ViewMatching, RegionMatching])
def test_teacher_starts_as_the_student_and_is_an_ema(kind: Any) -> None:
    matching = small(kind)
    student_features, teacher_features = two_and_two()
    for student, teacher in zip(matching.student.parameters(), matching.teacher.parameters(), strict=True):
        assert torch.equal(student, teacher) and not teacher.requires_grad
    teacher_features[0].grid.requires_grad_()
    matching(student_features, teacher_features, 0.04).backward()
    assert teacher_features[0].grid.grad is None and all(p.grad is None for p in matching.teacher.parameters())
    assert matching.student.last_layer.weight_v.grad is not None
    matching.drop_last_layer_grads()
    assert matching.student.last_layer.weight_v.grad is None and matching.student.mlp[0].weight.grad is not None
    with torch.no_grad():
        matching.student.mlp[0].weight.add_(1.0)
    matching.update_teacher(0.75)
    difference = matching.student.mlp[0].weight - matching.teacher.mlp[0].weight
    torch.testing.assert_close(difference, torch.full_like(difference, 0.75))


@pytest.mark.parametrize("kind", [ViewMatching, RegionMatching])
def test_center_is_updated_after_the_loss(kind: Any) -> None:
    matching = small(kind)
    student_features, teacher_features = two_and_two()
    fresh = copy.deepcopy(matching)
    first = matching(student_features, teacher_features, 0.05)
    logits = [matching.teacher(matching._rows(crop)) for crop in teacher_features]
    torch.testing.assert_close(matching.center, update_center(torch.zeros(1, 11), logits, 0.9))
    assert matching(student_features, teacher_features, 0.05) != first
    fresh.eval()
    torch.testing.assert_close(fresh(student_features, teacher_features, 0.05), first)
    assert not fresh.center.any()


@pytest.mark.parametrize("kind", [ViewMatching, RegionMatching])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_move_center_equals_update_center(kind: Any, momentum: float) -> None:
    """``move_center`` uses bottlenecks, ``update_center`` all logits."""
    matching, center = small(kind), torch.linspace(-1, 1, 11)[None]
    matching.center_momentum = momentum
    matching.center.copy_(center)
    for batch in (2, 3):
        student_features, teacher_features = two_and_two(batch=batch)
        matching(student_features, teacher_features, 0.05, hold_center=True)
        matching.move_center()
        logits = [matching.teacher(matching._rows(crop)) for crop in teacher_features]
        center = update_center(center, logits, momentum)
        torch.testing.assert_close(matching.center, center)


@pytest.mark.parametrize("kind", [ViewMatching, RegionMatching])
def test_accumulated_halves_give_the_same_center(kind: Any) -> None:
    full, halves = small(kind), small(kind)
    crops = two_and_two(batch=4)
    full(*crops, 0.05)
    for part in (slice(0, 2), slice(2, 4)):
        halves(*([Features(c.grid[part], c.pooled[part]) for c in side] for side in crops), 0.05, hold_center=True)
    assert not halves.center.any()
    halves.move_center()
    torch.testing.assert_close(halves.center, full.center)
    with pytest.raises(RuntimeError, match="move_center"):
        halves.move_center()


def _half(rank: int, port: int, folder: str) -> None:
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    matching = small()
    # Unequal shares: three images here, one there.
    part = slice(0, 3) if rank == 0 else slice(3, 4)
    matching(*([Features(c.grid[part], c.pooled[part]) for c in side] for side in two_and_two(batch=4)), 0.05)
    torch.save(matching.center, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_share_one_center(tmp_path: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Fork: the children do not import torch again.
    mp.start_processes(_half, args=(port, str(tmp_path)), nprocs=2, start_method="fork")
    full = small()
    full(*two_and_two(batch=4), 0.05)
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt", weights_only=True), full.center)


def health_of(weights: Tensor, vectors: Tensor, teacher_temp: float = 0.04) -> dict[str, float]:
    prototypes, dim = weights.shape
    matching: Any = ViewMatching(dim, prototypes=prototypes, hidden=4, bottleneck=dim)
    matching.student.mlp = matching.teacher.mlp = torch.nn.Identity()
    for head in (matching.student, matching.teacher):
        head.last_layer.weight_v.data.copy_(weights)
    crops = [Features(v[:, :, None, None], v) for v in (vectors, vectors)]
    return {name: value.item() for name, value in matching.health(crops, crops, teacher_temp).items()}


def test_health_shows_both_kinds_of_collapse() -> None:
    axes = torch.eye(8)
    alive = health_of(axes, axes)
    assert alive["agreement"] == 1 and alive["dominant"] == pytest.approx(1 / 8)
    assert alive["prototypes_used"] == pytest.approx(8, rel=1e-3) and alive["teacher_entropy"] < 0.1
    assert alive["teacher_kl"] == pytest.approx(math.log(8) - alive["teacher_entropy"])
    one = health_of(axes, axes[:1].expand(8, -1))
    assert one["dominant"] == 1 and one["prototypes_used"] < 1.1
    uniform = health_of(axes, torch.ones(8, 8))
    assert uniform["teacher_kl"] == pytest.approx(0, abs=1e-5) and uniform["prototypes_used"] == pytest.approx(8)


def test_health_by_hand() -> None:
    """Two images with two crops each; without the center every teacher row has one prototype."""
    matching: Any = small(ViewMatching)
    student_features, teacher_features = two_and_two(batch=2)
    own = torch.nn.functional.one_hot(torch.tensor([[0, 1], [2, 1]]), 11).float()
    common = 1.5 * torch.nn.functional.one_hot(torch.tensor(3), 11)
    predicted = torch.nn.functional.one_hot(torch.tensor([[1, 0], [2, 2]]), 11).float()
    matching.teacher.forward, matching.student.forward = lambda rows: own + common, lambda rows: predicted
    matching.center.copy_(common[None])
    health = {name: value.item() for name, value in matching.health(student_features[:2], teacher_features).items()}
    used = math.exp(-2 * 0.25 * math.log(0.25) - 0.5 * math.log(0.5))  # shares of 1/4, 1/2 and 1/4
    expected = {"prototypes_used": used, "dominant": 0.5, "agreement": 0.75, "teacher_entropy": 0.0}
    assert health == pytest.approx(expected | {"teacher_kl": math.log(11)}, abs=1e-4)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", [ViewMatching, RegionMatching])
def test_wrong_crops_raise_user_error(kind: Any, chunked: bool) -> None:
    matching = small(kind, chunked=chunked)
    student, teacher = two_and_two(batch=4)
    for call in (matching, matching.health):
        with pytest.raises(UserError, match=r"crop 0: shape .* the same images"):
            call(student, two_and_two(batch=1)[1])
    narrow = [Features(crop.grid[:, :-1], crop.pooled[:, :-1]) for crop in student]
    with pytest.raises(UserError, match="a width of"):
        matching(narrow, teacher)
    with pytest.raises(UserError, match="list of Features"):
        matching([crop.grid for crop in student], teacher)
    empty = [Features(crop.grid[:0], crop.pooled[:0]) for crop in student]
    with pytest.raises(UserError, match="at least 1"):
        matching(empty, empty)


def test_wrong_logits_raise_user_error() -> None:
    logits, grids = [torch.randn(2, 4, 8)] * 2, [torch.randn(2, 6, 2, 2)] * 2
    fewer, center, views = [part[:1] for part in logits], torch.zeros(8), [torch.randn(2, 8)] * 2
    with pytest.raises(UserError, match="8 prototypes"):
        view_loss(views, views, center=torch.zeros(1))
    with pytest.raises(UserError, match="teacher_logits, crop 0"):
        view_loss(views, [part[:1] for part in views], center=center)
    with pytest.raises(UserError, match="student_logits, crop 0"):
        view_loss(views[0], views[0], center=center)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="student_logits, crop 0"):
        view_loss(logits, logits, center=center)
    with pytest.raises(UserError, match="teacher_logits, crop 0"):
        region_loss(logits, fewer, grids, [grid[:1] for grid in grids], center=center)
    with pytest.raises(UserError, match="one grid per crop"):
        region_loss(logits, logits, grids[:1], grids, center=center)
    with pytest.raises(UserError, match="teacher grids, crop 0"):
        match_regions(grids[0], grids[0][:1])


def test_wrong_options_raise_user_error() -> None:
    with pytest.raises(UserError, match="at least two crops"):
        view_loss([torch.randn(2, 5)], [torch.randn(2, 5)], center=torch.zeros(5))
    with pytest.raises(UserError, match="student_temp"):
        small(student_temp=0.0)
    with pytest.raises(UserError, match="chunked='yes'"):
        small(chunked="yes")
    with pytest.raises(UserError, match="from 0 to 1"):
        small().update_teacher(math.nan)


@pytest.mark.parametrize("kind", [ViewMatching, RegionMatching])
def test_compiles_in_one_graph(kind: Any) -> None:
    matching, crops = small(kind, chunked=False).eval(), two_and_two()
    compiled = torch.compile(matching, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*crops), matching(*crops))


@pytest.mark.parametrize("wrong", [{"student_temp": 0.0}, {"teacher_temp": -0.04}], ids=str)
def test_temperatures_below_zero_are_refused(wrong: dict[str, float]) -> None:
    logits, grids = [torch.randn(2, 4, 5)] * 2, [torch.randn(2, 6, 2, 2)] * 2
    temperatures: dict[str, Any] = {"student_temp": 0.1, "teacher_temp": 0.04} | wrong
    (name,) = wrong
    with pytest.raises(UserError, match=name):
        view_loss(
            [part[:, 0] for part in logits], [part[:, 0] for part in logits], center=torch.zeros(5), **temperatures
        )
    with pytest.raises(UserError, match=name):
        region_loss(logits, logits, grids, grids, center=torch.zeros(5), **temperatures)
    vectors, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    with pytest.raises(UserError, match=name):
        assigned_cross_entropy(
            vectors, weight, vectors, weight, torch.ones(2, 3, 3), center=torch.zeros(5), **temperatures
        )
