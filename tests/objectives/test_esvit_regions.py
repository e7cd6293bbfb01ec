"""Region matching equals Eq. 2 as loops, and the numbers of the released code."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given

from frugalvit.features import Features
from frugalvit.objectives import RegionMatching, ViewMatching, match_regions, region_loss, update_center, view_loss
from helpers.matching_oracles import best_match, crop_sets, features_of, golden_crops, region_oracle

EPOCHS_OF_STEPS = (0, 0, 10, 50)


@given(crops=crop_sets())
def test_equals_the_loops_with_gradients(crops: Any) -> None:
    student = crops["student_logits"]
    inputs = [student, crops["teacher_logits"], crops["student_grids"], crops["teacher_grids"]]
    expected = region_oracle(*inputs, crops["center"], 0.1, 0.04)
    loss = region_loss(*inputs, center=crops["center"], student_temp=0.1, teacher_temp=0.04)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, student, allow_unused=True)
    for got, want in zip(torch.autograd.grad(loss, student, allow_unused=True), wanted, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)  # None: no other crop


@given(crops=crop_sets())
def test_matches_are_the_most_similar_regions(crops: Any) -> None:
    student, teacher = crops["student_grids"][-1], crops["teacher_grids"][0]
    expected = [[best_match(region, t) for region in s.flatten(1).T] for s, t in zip(student, teacher, strict=True)]
    assert match_regions(student, teacher).tolist() == expected


def test_matching_ignores_length_and_autocast() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 6, 3, 4), torch.randn(2, 6, 5, 2)
    lengths = torch.rand(2, 1, 5, 2) + 0.1
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(match_regions(student, teacher * lengths), match_regions(student, teacher))


def test_half_precision_grids_are_matched_in_fp32() -> None:
    """Similar regions differ by less than the resolution of bf16, which would match most of them wrongly."""
    torch.manual_seed(0)
    common = torch.randn(4, 32, 1, 1)
    student, teacher = ((common + 0.1 * torch.randn(4, 32, 7, 7)).bfloat16() for _ in range(2))
    assert torch.equal(match_regions(student, teacher), match_regions(student.float(), teacher.float()))
    assert torch.equal(match_regions(student.double(), teacher), match_regions(student.float(), teacher.float()))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", [ViewMatching, RegionMatching])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_modules_in_other_precisions(
    kind: type[ViewMatching | RegionMatching], dtype: torch.dtype, chunked: bool
) -> None:
    """Losses are computed at least in single precision, even if everything is cast."""
    torch.manual_seed(0)
    single = kind(6, prototypes=16, hidden=8, bottleneck=4, chunked=chunked)
    cast = copy.deepcopy(single).to(dtype)
    grids = [torch.randn(2, 6, 3, 3).to(dtype).requires_grad_() for _ in range(2)]
    losses = []
    for module, precision in ((single, torch.float32), (cast, dtype)):
        crops = [Features(grid.to(precision), grid.to(precision).mean((2, 3))) for grid in grids]
        losses.append(module(crops, [Features(crop.grid.detach(), crop.pooled.detach()) for crop in crops]))
    losses[1].backward()
    assert losses[1].dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(losses[0], losses[1], rtol=0.05, atol=0.05, check_dtype=False)
    assert cast.student.last_layer.weight_v.grad is not None and grids[0].grad is not None
    assert cast.student.last_layer.weight_v.grad.dtype == grids[0].grad.dtype == dtype


def test_released_numbers_over_four_steps(golden: Any) -> None:
    """½ view + ½ region, with both centers, as in the released code."""
    arrays = golden("b_ddino")
    crops = golden_crops(arrays)
    grids = [grid.requires_grad_() for grid in crops["student_grids"]]
    view_center, region_center = torch.zeros(1, 64), torch.zeros(1, 64)
    for step, epoch in enumerate(EPOCHS_OF_STEPS):
        views = [logits.clone().requires_grad_() for logits in crops["student_views"]]
        regions = [logits.clone().requires_grad_() for logits in crops["student_regions"]]
        temperature = float(arrays["teacher_temp_schedule"][epoch])
        view_level = view_loss(views, crops["teacher_views"], center=view_center, teacher_temp=temperature)
        region_level = region_loss(
            regions,
            crops["teacher_regions"],
            grids,
            crops["teacher_grids"],
            center=region_center,
            teacher_temp=temperature,
        )
        loss = 0.5 * view_level + 0.5 * region_level
        loss.backward()
        view_center = update_center(view_center, crops["teacher_views"])
        region_center = update_center(region_center, crops["teacher_regions"])
        name = f"ddino.step{step}"
        assert loss.item() == pytest.approx(float(arrays[f"{name}.loss"]), abs=1e-5)
        for got, key in (
            (view_center, "center"),
            (region_center, "center_grid"),
            (torch.cat([logits.grad for logits in views]), "grad_s_cls"),  # type: ignore[misc]
        ):
            torch.testing.assert_close(got, torch.from_numpy(arrays[f"{name}.{key}"]), atol=1e-5, rtol=1e-5)
        region_grad = torch.cat([logits.grad.flatten(0, 1) for logits in regions])  # type: ignore[union-attr]
        assert region_grad.norm().item() == pytest.approx(float(arrays[f"{name}.grad_s_reg_norm"]), rel=1e-5)
        if f"{name}.grad_s_reg_first8" in arrays:
            wanted = torch.from_numpy(arrays[f"{name}.grad_s_reg_first8"])
            torch.testing.assert_close(region_grad[:8], wanted, atol=1e-5, rtol=1e-5)
        assert all(grid.grad is None for grid in grids) and bool(arrays[f"{name}.grad_s_fea_is_none"])


def test_released_matches(golden: Any) -> None:
    arrays = golden("b_ddino")
    crops = golden_crops(arrays)
    student, teacher = crops["student_grids"], crops["teacher_grids"]
    assert match_regions(student[1], teacher[0]).tolist() == arrays["match_t0_s1"].tolist()
    assert match_regions(student[2], teacher[1]).tolist() == arrays["match_t1_s2"].tolist()


def test_released_number_of_global_crops_alone(golden: Any) -> None:
    arrays = golden("b_ddino")
    crops = golden_crops(arrays)
    center = torch.zeros(64)
    views = view_loss(crops["student_views"][:2], crops["teacher_views"], center=center)
    regions = region_loss(
        crops["student_regions"][:2],
        crops["teacher_regions"],
        crops["student_grids"][:2],
        crops["teacher_grids"],
        center=center,
    )
    assert (0.5 * views + 0.5 * regions).item() == pytest.approx(float(arrays["ddino_2crop.loss_epoch0"]), abs=1e-5)


def test_match_entropy_of_health() -> None:
    torch.manual_seed(0)
    matching = RegionMatching(9, prototypes=4, hidden=8, bottleneck=3)
    distinct = torch.eye(9).view(1, 9, 3, 3)
    spread = matching.health(features_of([distinct] * 2), features_of([distinct] * 2), 0.04)
    assert spread["match_entropy"].item() == pytest.approx(1, abs=1e-5)
    same = torch.ones(1, 9, 3, 3)
    stuck = matching.health(features_of([same] * 2), features_of([distinct] * 2), 0.04)
    assert stuck["match_entropy"].item() == pytest.approx(0, abs=1e-5)
    # A small crop of four regions can hit four of nine: that is as even as it gets.
    small = distinct.flatten(2)[..., :4].view(1, 9, 2, 2)
    few = matching.health(features_of([distinct, small, small]), features_of([distinct]), 0.04)
    assert few["match_entropy"].item() == pytest.approx(1, abs=1e-5)
    single = features_of([torch.randn(2, 9, 1, 1)] * 2)
    assert "match_entropy" not in matching.health(single, single, 0.04)
