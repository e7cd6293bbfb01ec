"""Chunked losses equal the plain ones, gradients too, and never store all logits."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from frugalvit.features import Features
from frugalvit.objectives import RegionMatching, ViewMatching, assigned_cross_entropy, should_chunk
from frugalvit.objectives import chunked as chunked_module
from helpers.matching_oracles import Crops, crop_sets, features_of, region_oracle, view_oracle

KINDS: list[Any] = [ViewMatching, RegionMatching]


def matching_of(kind: Any, norm_last: bool = True, prototypes: int = 7) -> Any:
    matching = kind(6, prototypes=prototypes, hidden=8, bottleneck=4, layers=2, norm_last=norm_last).double()
    with torch.no_grad():  # the teacher differs from the student, the center from zero
        for parameter in matching.teacher.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        matching.center.normal_(std=0.1)
    return matching.eval()


def loss_and_gradients(matching: Any, crops: Crops) -> tuple[Tensor, list[Tensor | None]]:
    grids = [grid.detach().clone().requires_grad_() for grid in crops["student_grids"]]
    loss = 0.5 * matching(features_of(grids), features_of(crops["teacher_grids"]), 0.05)
    wanted = [*grids, *(p for p in matching.student.parameters() if p.requires_grad)]
    return loss, list(torch.autograd.grad(loss, wanted, allow_unused=True))


@pytest.mark.parametrize("norm_last", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(crops=crop_sets())
def test_chunked_equals_plain_with_gradients(kind: Any, norm_last: bool, crops: Crops) -> None:
    plain = matching_of(kind, norm_last)
    plain.chunked = False
    chunked = copy.deepcopy(plain)
    chunked.chunked = True
    (loss, gradients), (expected, wanted) = loss_and_gradients(chunked, crops), loss_and_gradients(plain, crops)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(gradients, wanted, strict=True):
        if want is None:  # a crop without a pair
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", KINDS)
@given(crops=crop_sets(), rows=st.integers(1, 9))
def test_any_chunk_size_equals_the_loops_with_gradients(kind: Any, crops: Crops, rows: int) -> None:
    matching = matching_of(kind)
    student_features, teacher_features = features_of(crops["student_grids"]), features_of(crops["teacher_grids"])
    with torch.no_grad():
        student = matching._bottlenecks(matching.student, student_features)
        teacher = matching._bottlenecks(matching.teacher, teacher_features)
    sizes, teacher_sizes = (
        [matching._rows(crop).shape[1] for crop in crops] for crops in (student_features, teacher_features)
    )
    student.requires_grad_()
    weight = matching.student.weight().detach().requires_grad_()
    loss = assigned_cross_entropy(
        student,
        weight,
        teacher,
        matching.teacher.weight(),
        matching.assignment(student_features, teacher_features),
        center=matching.center,
        student_temp=0.1,
        teacher_temp=torch.tensor(0.05, dtype=torch.float64),
        rows=rows,
    )
    student_logits = (student @ weight.T).split(sizes, dim=1)
    teacher_logits = (teacher @ matching.teacher.weight().T).split(teacher_sizes, dim=1)
    if kind is ViewMatching:
        student_logits, teacher_logits = ([part[:, 0] for part in side] for side in (student_logits, teacher_logits))
        expected = view_oracle(student_logits, teacher_logits, matching.center[0], 0.1, 0.05)
    else:
        grids = crops["student_grids"], crops["teacher_grids"]
        expected = region_oracle(student_logits, teacher_logits, *grids, matching.center[0], 0.1, 0.05)
    torch.testing.assert_close(loss, expected, check_dtype=False)
    wanted = torch.autograd.grad(expected, (student, weight))
    for got, want in zip(torch.autograd.grad(loss, (student, weight)), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_assignment_weighs_all_pairs_equally(kind: Any) -> None:
    grids = [torch.randn(3, 6, *size) for size in ((2, 3), (4, 1), (1, 2))]
    assignment = matching_of(kind).assignment(features_of(grids), features_of(grids[:2]))
    assert assignment.sum().item() == pytest.approx(1)
    sizes = ([1, 1, 1], [1, 1]) if kind is ViewMatching else ([6, 4, 2], [6, 4])
    for t, block in enumerate(assignment.split(sizes[1], dim=2)):
        for s, pair in enumerate(block.split(sizes[0], dim=1)):
            assert pair.sum().item() == pytest.approx(0 if s == t else 1 / 4)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def largest_of(matching: Any, crops: tuple[list[Features], list[Features]]) -> int:
    with LargestTensor() as record:
        matching(*crops, 0.05).backward()
    return record.elements


def test_never_stores_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    prototypes, batch = 1024, 6
    grids = [torch.randn(batch, 6, *size) for size in ((4, 4), (4, 4), (2, 2), (2, 2))]
    crops = features_of(grids), features_of(grids[:2])
    rows = batch * 40
    matching = RegionMatching(6, prototypes=prototypes, hidden=8, bottleneck=4, chunked=False)
    assert largest_of(matching, crops) == rows * prototypes
    matching.chunked = True
    monkeypatch.setitem(chunked_module._CHUNK_ELEMENTS, "cpu", 16 * prototypes)
    assert largest_of(matching, crops) == 16 * prototypes


def test_auto_chooses_by_the_number_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert should_chunk(64 * 268, 65536) and should_chunk(64 * 12, 65536)
    assert not should_chunk(64 * 268, 1024) and not should_chunk(4 * 12, 65536)
    calls = []
    monkeypatch.setattr("frugalvit.objectives.esvit.should_chunk", lambda *sizes: calls.append(sizes) or False)
    crops = features_of([torch.randn(2, 6, 2, 2, dtype=torch.float64)] * 3)
    matching_of(RegionMatching)(crops, crops[:2], 0.05)
    assert calls == [(2 * (12 + 8), 7)]


def test_no_gradients_for_frozen_parameters() -> None:
    crops = features_of([torch.randn(2, 6, 2, 2, dtype=torch.float64)] * 2)
    matching = matching_of(RegionMatching)
    matching.chunked = True
    with torch.no_grad():
        assert matching(crops, crops, 0.05).item() == pytest.approx(matching(crops, crops, 0.05).item())
    matching.student.last_layer.requires_grad_(False)
    matching(crops, crops, 0.05).backward()
    assert matching.student.last_layer.weight_v.grad is None and matching.student.mlp[0].weight.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_products_stay_close_on_a_gpu(kind: Any) -> None:
    torch.manual_seed(0)
    grids = [torch.randn(4, 64, size, size, device="cuda") for size in (7, 7, 3, 3)]
    crops = features_of(grids), features_of(grids[:2])
    results = {}
    for chunked in (False, True):
        torch.manual_seed(1)
        matching = kind(64, prototypes=4096, hidden=64, bottleneck=64, chunked=chunked).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=chunked):
            loss = matching(*crops, 0.05)
        loss.backward()
        results[chunked] = loss, matching.student.last_layer.weight_v.grad, matching.student.mlp[0].weight.grad
    assert results[True][0].dtype == torch.float32
    assert results[True][0].item() == pytest.approx(results[False][0].item(), rel=1e-2)
    for got, want in zip(results[True][1:], results[False][1:], strict=True):
        assert torch.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
