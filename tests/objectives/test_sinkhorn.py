"""Sinkhorn-Knopp centring and KoLeo equal their loops, gradients too, on one process and on two."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from frugalvit.errors import UserError
from frugalvit.objectives import RegionMatching, ViewMatching, koleo_loss, sinkhorn_center
from frugalvit.objectives import chunked as chunked_module
from helpers.matching_oracles import Crops, crop_sets, features_of, region_oracle, view_oracle
from helpers.processes import free_port

KINDS: list[Any] = [ViewMatching, RegionMatching]


def sinkhorn_oracle(logits: Tensor, temperature: float, iterations: int = 3) -> Tensor:
    """Algorithm 1 of SwAV as DINOv2 has it: (N, K) -> assignments (N, K)."""
    shares = (logits.double() / temperature).exp()
    rows, prototypes = shares.shape
    shares = shares / shares.sum()
    for _ in range(iterations):
        for k in range(prototypes):
            shares[:, k] = shares[:, k] / shares[:, k].sum() / prototypes
        for n in range(rows):
            shares[n] = shares[n] / shares[n].sum() / rows
    return shares * rows


def koleo_oracle(features: Tensor) -> Tensor:
    unit = [row / row.norm() for row in features]
    terms = []
    for i, one in enumerate(unit):
        terms.append(-min((one - other).norm() for j, other in enumerate(unit) if j != i).log())
    return torch.stack(terms).mean()


def draw_rows(rows: int, prototypes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(rows, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(prototypes, 5, generator=generator, dtype=torch.float64)
    return nn.functional.normalize(vectors, dim=1), nn.functional.normalize(weight, dim=1)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 10), st.integers(0, 999))
def test_center_equals_the_loops(rows: int, prototypes: int, iterations: int, per_chunk: int, seed: int) -> None:
    vectors, weight = draw_rows(rows, prototypes, seed)
    center = sinkhorn_center(vectors, weight, torch.tensor(0.05).double(), iterations=iterations, rows=per_chunk)
    logits = vectors @ weight.T
    torch.testing.assert_close(((logits - center) / 0.05).softmax(1), sinkhorn_oracle(logits, 0.05, iterations))


@pytest.mark.parametrize("temperature", [0.04, 0.001])
def test_fp32_is_enough(temperature: float) -> None:
    """Logits of ±1,000 overflow an exponential; a prototype far from every row stays in use."""
    vectors, weight = draw_rows(64, 300, seed=1)
    vectors[:, 0], weight[7] = vectors[:, 0].abs(), torch.tensor([-1.0, 0, 0, 0, 0])
    exact = sinkhorn_center(vectors, weight, temperature)
    center = sinkhorn_center(vectors.float(), weight.float(), temperature)
    assert center.dtype == torch.float32 and center.isfinite().all()
    torch.testing.assert_close(center.double(), exact, atol=1e-5, rtol=1e-4)


def make_matching(kind: Any, chunked: bool, **options: Any) -> Any:
    options = {"prototypes": 7, "hidden": 8, "bottleneck": 4, "layers": 2} | options
    matching = kind(6, centering="sinkhorn", chunked=chunked, **options).double()
    with torch.no_grad():
        for parameter in matching.teacher.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return matching


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@given(crops=crop_sets())
def test_loss_equals_the_loops_with_gradients(kind: Any, chunked: bool, crops: Crops) -> None:
    """The oracles take logits and a temperature of 1: log q of Sinkhorn's assignments q gives q back."""
    matching = make_matching(kind, chunked)
    grids = [grid.requires_grad_() for grid in crops["student_grids"]]
    student_features, teacher_features = features_of(grids), features_of(crops["teacher_grids"])
    with torch.no_grad():
        logits = [matching.teacher(matching._rows(crop)) for crop in teacher_features]
        shares = sinkhorn_oracle(torch.cat([part.flatten(0, 1) for part in logits]), 0.05)
        parts = shares.split([part.shape[:2].numel() for part in logits])
        targets = [part.log().view_as(like) for part, like in zip(parts, logits, strict=True)]
    student = [matching.student(matching._rows(crop)) / 0.1 for crop in student_features]
    zero = torch.zeros(7, dtype=torch.float64)
    if kind is ViewMatching:
        expected = view_oracle([s[:, 0] for s in student], [t[:, 0] for t in targets], zero, 1.0, 1.0)
    else:
        expected = region_oracle(student, targets, grids, crops["teacher_grids"], zero, 1.0, 1.0)
    loss = matching(student_features, teacher_features, 0.05)
    torch.testing.assert_close(loss, expected, check_dtype=False)
    learned = [*grids, *(p for p in matching.student.parameters() if p.requires_grad)]
    wanted = torch.autograd.grad(expected, learned, allow_unused=True)
    for got, want in zip(torch.autograd.grad(loss, learned, allow_unused=True), wanted, strict=True):
        if want is None:  # a crop without a pair
            assert got is None or not got.any()
        else:
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


def test_chunks_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, weight = draw_rows(100, 64, seed=2)
    sizes: list[tuple[int, ...]] = []
    product = chunked_module._product
    monkeypatch.setattr(chunked_module, "_product", lambda *args: sizes.append(args[0].shape) or product(*args))
    monkeypatch.setitem(chunked_module._CHUNK_ELEMENTS, "cpu", 16 * 64)
    sinkhorn_center(vectors, weight, 0.05)
    assert sizes == 3 * ([(16, 5)] * 6 + [(4, 5)])


@pytest.mark.parametrize("kind", KINDS)
def test_health_shows_a_collapse_that_sinkhorn_hides(kind: Any) -> None:
    """Equal rows: the targets use all prototypes, the metrics show that the teacher tells nothing apart."""
    matching = make_matching(kind, chunked=False, center_momentum=0.0)
    equal = features_of([torch.ones(4, 6, 2, 2, dtype=torch.float64)] * 2)
    matching(equal, equal, 0.05)
    assert matching.health(equal, equal, 0.05)["teacher_kl"].item() == pytest.approx(0, abs=1e-4)
    generator = torch.Generator().manual_seed(0)
    varied = features_of([torch.randn(4, 6, 2, 2, generator=generator, dtype=torch.float64)] * 2)
    matching(varied, varied, 0.05)
    health = matching.health(varied, varied, 0.05)
    assert health["teacher_kl"].item() > 0.1 and health["prototypes_used"].item() < 6.9


@given(st.integers(2, 7), st.integers(1, 5), st.integers(0, 999))
def test_koleo_equals_the_loops_with_gradients(batch: int, dim: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, dim + 1, generator=generator, dtype=torch.float64).requires_grad_()
    loss, expected = koleo_loss(features), koleo_oracle(features)
    torch.testing.assert_close(loss, expected)
    wanted = torch.autograd.grad(expected, features)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, features)[0], wanted, rtol=1e-5, atol=1e-6)


def test_koleo_of_equal_features_is_finite() -> None:
    features = torch.ones(3, 4, requires_grad=True)
    koleo_loss(features).backward()
    assert features.grad is not None and features.grad.isfinite().all()
    with pytest.raises(UserError, match="--batch"):
        koleo_loss(features[:1])


def test_wrong_centering_raises_user_error() -> None:
    with pytest.raises(UserError, match="centering='median'"):
        ViewMatching(6, prototypes=7, centering="median")  # type: ignore[arg-type]


# -- two processes


def _gradients(part: slice) -> dict[str, Tensor]:
    """Loss and gradients of Sinkhorn and KoLeo on a part of four images, with equal weights everywhere."""
    torch.manual_seed(0)
    results: dict[str, Tensor] = {}
    grids = [torch.randn(4, 6, 3, 3, dtype=torch.float64)[part] for _ in range(3)]
    for kind in KINDS:
        matching = make_matching(kind, chunked=kind is RegionMatching)
        loss = matching(features_of(grids), features_of(grids[:2]), 0.05)
        loss.backward()
        results |= {f"{kind.__name__} loss": loss.detach(), kind.__name__: matching.student.mlp[0].weight.grad}
    layer = nn.Linear(6, 5).double()
    loss = koleo_loss(layer(grids[0].mean((2, 3))))
    loss.backward()
    assert layer.weight.grad is not None
    return results | {"koleo loss": loss.detach(), "koleo": layer.weight.grad}


def _half(rank: int, port: int, folder: str) -> None:
    wait = timedelta(seconds=60)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", wait, rank=rank, world_size=2)
    if rank == 0:  # evaluation does not wait for other processes: --auto-batch may run out of memory on one
        crops = features_of([torch.randn(2, 6, 2, 2, dtype=torch.float64)] * 2)
        make_matching(ViewMatching, chunked=False).eval()(crops, crops)
        koleo_loss(crops[0].pooled, all_processes=False)
    torch.save(_gradients(slice(2 * rank, 2 * rank + 2)), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_equal_one(tmp_path: Path) -> None:
    """As data-parallel training does, losses and gradients are averaged over the processes."""
    mp.start_processes(_half, args=(free_port(), str(tmp_path)), nprocs=2, start_method="fork")
    one, other = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, expected in _gradients(slice(0, 4)).items():
        torch.testing.assert_close(
            (one[name] + other[name]) / 2, expected, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_with_the_softmax_kernel(kind: Any) -> None:
    torch.manual_seed(0)
    grids = [torch.randn(4, 64, size, size, device="cuda") for size in (7, 7, 3, 3)]
    losses = {}
    for device, precision in (("cpu", None), ("cuda", None), ("cuda", torch.bfloat16)):
        torch.manual_seed(1)
        options: dict[str, Any] = {"prototypes": 4096, "hidden": 64, "bottleneck": 64, "chunked": True}
        matching = kind(64, centering="sinkhorn", **options).to(device)
        crops = features_of([grid.to(device) for grid in grids])
        with torch.autocast(device, torch.bfloat16, enabled=precision is not None):
            losses[device, precision] = matching(crops, crops[:2], 0.05).item()
    assert losses["cuda", None] == pytest.approx(losses["cpu", None], rel=1e-3)
    assert losses["cuda", torch.bfloat16] == pytest.approx(losses["cpu", None], rel=1e-2)
