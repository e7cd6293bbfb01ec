"""Drloc equals the paper's formulas as loops, and the numbers of the released code."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from frugalvit.config.defaults import LOCALIZATION_WEIGHTS
from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.objectives import DenseLocalization, RelativeLocalization, draw_pairs

FORMS: list[dict[str, Any]] = [
    {"variant": "l1"},
    {"variant": "signed"},
    {"variant": "ce"},
    {"variant": "reg"},
    {"variant": "l1", "form": "released"},
    {"variant": "l1", "form": "released", "normalize": True},
    {"variant": "signed", "form": "released"},
    {"variant": "signed", "form": "released", "normalize": True},
    {"variant": "ce", "form": "released"},
    {"variant": "ce", "form": "released", "absolute": False},
    {"variant": "reg", "form": "released"},
    {"variant": "reg", "form": "released", "absolute": False},
]


def oracle(module: RelativeLocalization, grid: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, float]:
    """Loop over images, pairs and axes: the loss, and the mean absolute error in cells."""
    classes = module.grid_size or (0, 0)
    losses, errors = [], []
    for x, starts, ends in zip(grid, first.tolist(), second.tolist(), strict=True):
        for start, end in zip(starts, ends, strict=True):
            shared = module.layers(torch.cat((x[:, start[0], start[1]], x[:, end[0], end[1]])))
            pair_loss = torch.zeros((), dtype=grid.dtype)
            for axis in (0, 1):
                k, delta = x.shape[1 + axis], start[axis] - end[axis]
                if module.variant in ("l1", "signed"):
                    if module.variant == "l1":
                        shift, moved, largest = 0, abs(delta), k - 1
                    else:
                        shift = 0 if module.form == "paper" else k - 1
                        moved, largest = delta, 2 * (k - 1)
                    scale = k if module.form == "paper" else max(largest, 1) if module.normalize else 1
                    pair_loss = pair_loss + (shared[axis] - (moved + shift) / scale).abs() / 2
                    errors.append(abs(shared[axis].item() * scale - (moved + shift)))
                    continue
                logits, largest = module.unshared[axis](shared), classes[axis]
                offsets = torch.arange(-largest, largest + 1)
                if module.form == "released":
                    offsets = torch.arange(largest) if module.absolute else torch.arange(-largest + 1, largest)
                wanted = abs(delta) if module.absolute else delta
                posterior = logits.softmax(0)
                mean = (posterior * offsets).sum()
                variance = (posterior * (offsets - mean) ** 2).sum() + 1e-8  # as released
                if module.variant == "ce":
                    pair_loss = pair_loss - posterior[offsets.tolist().index(wanted)].log()
                    errors.append(abs(offsets[posterior.argmax()].item() - wanted))
                else:
                    spread = variance.sqrt().log() if module.form == "paper" else variance.log()
                    pair_loss = pair_loss + (wanted - mean) ** 2 / variance + 0.001 * spread
                    errors.append(abs(mean.item() - wanted))
            losses.append(pair_loss)
    return torch.stack(losses).mean(), sum(errors) / len(errors)


def small_module(form: dict[str, Any], height: int, width: int, **options: Any) -> RelativeLocalization:
    return RelativeLocalization(5, hidden=8, grid_size=(height, width), **form, **options).double()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(map(str, form.values())))
@given(
    batch=st.integers(1, 3),
    height=st.integers(1, 5),
    width=st.integers(2, 6),
    pairs=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_equals_the_loops_with_gradients(
    form: dict[str, Any], batch: int, height: int, width: int, pairs: int, seed: int
) -> None:
    torch.manual_seed(seed)
    module = small_module(form, height, width)
    grid = torch.randn(batch, 5, height, width, dtype=torch.float64, requires_grad=True)
    first, second = draw_pairs(batch, (height, width), pairs)
    expected, cells = oracle(module, grid, first, second)
    wanted = torch.autograd.grad(expected, [grid, *module.parameters()])
    loss, error = module.measure_at(grid, first, second)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-8)
    assert error.item() == pytest.approx(cells, rel=1e-6) and not error.requires_grad
    torch.testing.assert_close(module.loss_at(grid, first, second), loss)
    for got, want in zip(torch.autograd.grad(loss, [grid, *module.parameters()]), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("form", FORMS[:4], ids=lambda form: form["variant"])
def test_all_pairs_equal_the_expectation(form: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = small_module(form, 3, 4, pairs="all")
    grid = torch.randn(2, 5, 3, 4, dtype=torch.float64, requires_grad=True)
    cells = torch.cartesian_prod(torch.arange(3), torch.arange(4))
    first = cells.repeat_interleave(12, 0).expand(2, -1, -1)
    second = cells.repeat(12, 1).expand(2, -1, -1)
    loss, error = module.measure(grid)
    expected, wanted_error = module.measure_at(grid, first, second)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(error, wanted_error)
    for got, want in zip(torch.autograd.grad(loss, grid), torch.autograd.grad(expected, grid), strict=True):
        torch.testing.assert_close(got, want)
    many = RelativeLocalization(5, hidden=8, pairs=20000, **form, grid_size=(3, 4)).double()
    many.load_state_dict(module.state_dict())
    assert many(grid, torch.Generator().manual_seed(1)).item() == pytest.approx(loss.item(), rel=0.02)


RELEASED_TAGS: dict[str, dict[str, Any]] = {
    "l1_abs": {"variant": "l1"},
    "l1_abs_norm": {"variant": "l1", "normalize": True},
    "l1_signed": {"variant": "signed"},
    "l1_signed_norm": {"variant": "signed", "normalize": True},
    "ce_abs": {"variant": "ce", "absolute": True},
    "ce_signed": {"variant": "ce", "absolute": False},
    "cbr_abs": {"variant": "reg", "absolute": True},
    "cbr_signed": {"variant": "reg", "absolute": False},
}


def golden_weights(arrays: dict[str, np.ndarray], kind: str, classes: int) -> dict[str, Tensor]:
    state = {}
    for key, value in arrays.items():
        name = key.removeprefix(f"w.{kind}.")
        if name == key or (name.startswith("unshared") and not name.endswith(f".{classes}")):
            continue
        state[name.removesuffix(f".{classes}") if name.startswith("unshared") else name] = torch.from_numpy(
            value.astype(np.float32)
        )
    return state


@pytest.mark.parametrize("tag", RELEASED_TAGS)
def test_numbers_of_the_released_code(golden: Any, tag: str) -> None:
    arrays = golden("a_drloc")
    module = RelativeLocalization(32, form="released", **RELEASED_TAGS[tag])
    kind = "l1" if tag.startswith("l1") else "cls"
    module.load_state_dict(golden_weights(arrays, kind, 7 if tag.endswith("abs") else 13))
    grid = torch.from_numpy(arrays["x"]).requires_grad_()
    loss = module.loss_at(grid, torch.from_numpy(arrays["pos1"]), torch.from_numpy(arrays["pos2"]))
    loss.backward()
    assert loss.item() == pytest.approx(float(arrays[f"{tag}.loss"]), abs=1e-5)
    assert grid.grad is not None
    torch.testing.assert_close(grid.grad, torch.from_numpy(arrays[f"{tag}.grad_x"]), atol=1e-5, rtol=1e-5)
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in module.parameters() if p.grad is not None))
    assert norm == pytest.approx(float(arrays[f"{tag}.grad_mlp_norm"]), rel=1e-5)


@pytest.mark.parametrize(("name", "prefix"), [("f_drloc_cvt", "w.drloc.0."), ("f_drloc_t2t", "w.drloc.")])
def test_numbers_of_released_heads(golden: Any, name: str, prefix: str) -> None:
    arrays = golden(name)
    weights = {key.removeprefix(prefix): torch.tensor(value) for key, value in arrays.items() if key.startswith(prefix)}
    module = RelativeLocalization(arrays["grid"].shape[1], form="released").float()
    module.load_state_dict({key: value.float() for key, value in weights.items()})
    grid, first, second = (torch.tensor(arrays[key]) for key in ("grid", "pos1", "pos2"))
    expected = np.abs(arrays["pred"] - arrays["target"]).mean()
    torch.testing.assert_close(module.loss_at(grid, first, second).item(), float(expected), rtol=1e-5, atol=1e-6)


def test_numbers_of_the_paper(golden: Any) -> None:
    arrays = golden("a_drloc")
    grid, first, second = (torch.from_numpy(arrays[name]) for name in ("x", "pos1", "pos2"))
    losses = {}
    for variant in ("l1", "signed"):
        module = RelativeLocalization(32, variant=variant)
        module.load_state_dict(golden_weights(arrays, "l1", 0))
        losses[variant] = module.loss_at(grid, first, second).item()
    assert losses["l1"] == pytest.approx(float(arrays["paper_l1.pseudocode_mean"]), abs=1e-5)
    assert 2 * len(grid) * losses["l1"] == pytest.approx(float(arrays["paper_l1.eq2_sum_over_batch"]), abs=1e-5)
    assert losses["signed"] == pytest.approx(float(arrays["paper_l1_signed.mean"]), abs=1e-5)


def test_weights_of_the_paper() -> None:
    assert LOCALIZATION_WEIGHTS == {"swin": 0.5, "t2t": 0.1, "cvt": 0.1, "vit": 0.01}


def test_pooling() -> None:
    module = RelativeLocalization(5, hidden=8)
    fine = torch.randn(2, 5, 14, 14)
    first, second = draw_pairs(2, (7, 7), 9)
    torch.testing.assert_close(
        module.loss_at(fine, first, second), module.loss_at(F.avg_pool2d(fine, 2), first, second)
    )
    assert module.pooled_size(14, 5) == (7, 5)
    classes = RelativeLocalization(5, "ce", hidden=8, grid_size=np.int64(7))  # type: ignore[arg-type]
    assert classes.unshared[0].out_features == 15 and torch.isfinite(classes(torch.randn(2, 5, 2, 9)))
    assert RelativeLocalization(5, hidden=8, grid_size=None).pooled_size(14, 5) == (14, 5)
    released = RelativeLocalization(5, hidden=8, form="released")
    pooled = F.avg_pool2d(fine, 3, 2, 1, count_include_pad=False)
    torch.testing.assert_close(released.loss_at(fine, first, second), released.loss_at(pooled, first, second))


def test_pairs_are_uniform_and_reproducible() -> None:
    grid = torch.randn(2, 5, 4, 6)
    module = RelativeLocalization(5, hidden=8)
    losses = [module(grid, torch.Generator().manual_seed(3)).item() for _ in range(2)]
    assert losses[0] == losses[1] != module(grid, torch.Generator().manual_seed(4)).item()
    first, second = draw_pairs(50, (4, 6), 480, generator=torch.Generator().manual_seed(0))
    for positions in (first, second):
        counts = torch.bincount((positions[..., 0] * 6 + positions[..., 1]).flatten(), minlength=24)
        assert counts.min() > 900 and counts.max() < 1100  # 1,000 expected, sd about 31
    assert not torch.equal(first, second) and (first == second).all(-1).any()


@pytest.mark.parametrize("pairs", [16, 64, "all"])
@pytest.mark.parametrize("form", FORMS[:4], ids=lambda form: form["variant"])
def test_hidden_layers_follow_the_autocast(form: dict[str, Any], pairs: int | str) -> None:
    """Hidden layers are bf16, outputs and loss fp32; without autocast all is fp32."""
    torch.manual_seed(0)
    module = RelativeLocalization(16, hidden=32, pairs=pairs, precision="autocast", **form)
    dtypes: list[torch.dtype] = []
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda _, inputs, output: dtypes.append(output.dtype))
    losses, gradients = [], []
    for enabled, precision in ((True, "autocast"), (False, "autocast"), (True, "fp32")):
        module.precision = precision
        grid = torch.randn(2, 16, 7, 7, generator=torch.Generator().manual_seed(1)).bfloat16().float().requires_grad_()
        dtypes.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = module(grid, torch.Generator().manual_seed(2))
        hidden, outputs = dtypes[: -1 - module.classifies], dtypes[-1 - module.classifies :]
        rounded = enabled and precision == "autocast"
        assert set(hidden) == {torch.bfloat16 if rounded else torch.float32} and set(outputs) == {torch.float32}
        losses.append(loss)
        gradients.append(torch.autograd.grad(loss, grid)[0])
    assert all(loss.dtype == torch.float32 for loss in losses)
    assert torch.equal(losses[1], losses[2]) and torch.equal(gradients[1], gradients[2])
    assert losses[0] != losses[1]
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0)
    assert torch.nn.functional.cosine_similarity(gradients[0].flatten(), gradients[1].flatten(), dim=0) > 0.97


def test_dense_form_is_the_sum_over_levels() -> None:
    torch.manual_seed(0)
    dense = DenseLocalization([4, 8], hidden=8)
    grids = [torch.randn(2, 4, 10, 12), torch.randn(2, 8, 3, 5)]
    generator = torch.Generator().manual_seed(5)
    parts = [level.measure(grid, generator) for level, grid in zip(dense.levels, grids, strict=True)]
    loss, error = dense.measure(grids, torch.Generator().manual_seed(5))
    torch.testing.assert_close((loss, error), (parts[0][0] + parts[1][0], parts[1][1]))  # the last grid's error
    assert dense.levels[0].layers[0].weight.shape == (8, 8)
    assert dense.levels[0].pooled_size(10, 12) == (10, 12)
    with pytest.raises(UserError, match="one grid per head"):
        dense(grids[:1])
    assert torch.isfinite(DenseLocalization([4, 8], "ce", hidden=8, grid_sizes=[(10, 12), 7])(grids))


@pytest.mark.parametrize("size", [(7, 7), (3, 5), (14, 2)])
@pytest.mark.parametrize("variant", ["l1", "signed", "ce"])
def test_error_of_the_best_constant_prediction(variant: str, size: tuple[int, int]) -> None:
    module = RelativeLocalization(4, variant, hidden=8, grid_size=7)
    expected = []
    for cells in module.pooled_size(*size):
        offsets = [abs(i - j) if variant == "l1" else i - j for i in range(cells) for j in range(cells)]
        expected.append(min(sum(abs(o - guess) for o in offsets) / len(offsets) for guess in range(-cells, cells)))
    assert module.constant_baseline_error(*size) == pytest.approx(sum(expected) / 2)


FEATURES = Features(torch.randn(2, 5, 4, 4), torch.randn(2, 5))
POSITIONS = torch.zeros(2, 3, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RelativeLocalization(5, "l2"), "is not one of l1"),  # type: ignore[arg-type]
        (lambda: RelativeLocalization(5, form="relaesed"), "Did you mean 'released'"),  # type: ignore[arg-type]
        (lambda: RelativeLocalization(5, pairs=0), "at least 1"),
        (lambda: RelativeLocalization(0), "dim=0"),
        (lambda: RelativeLocalization(5, grid_size=(7, 5, 3)), r"grid_size=\(7, 5, 3\)"),  # type: ignore[arg-type]
        (lambda: RelativeLocalization(5)(FEATURES), "features.grid"),  # type: ignore[arg-type]
        (lambda: RelativeLocalization(5)(torch.randn(0, 5, 4, 4)), "at least one image"),
        (lambda: DenseLocalization([5])(FEATURES), r"backbone\.blocks"),
        (lambda: RelativeLocalization(5, "ce", grid_size=None), "grid_size"),
        (lambda: RelativeLocalization(5, "ce", absolute=True), "contradicts"),
        (lambda: RelativeLocalization(5, normalize=True), "form='released'"),
        (lambda: RelativeLocalization(5)(torch.randn(2, 5, 1, 1)), "1x1 grid"),
        (lambda: RelativeLocalization(5)(torch.randn(2, 6, 4, 4)), "shape"),
        (
            lambda: RelativeLocalization(5).loss_at(torch.randn(2, 5, 4, 4), *torch.zeros(2, 3, 9, 2).long()),
            "positions of shapes",
        ),
        (lambda: RelativeLocalization(5).loss_at(torch.randn(1, 5, 4, 4), *torch.full((2, 1, 9, 2), 4)), "outside"),
        (lambda: RelativeLocalization(5).loss_at(torch.randn(2, 5, 4, 4), POSITIONS.float(), POSITIONS), "integers"),
        (lambda: DenseLocalization([4, 8], grid_sizes=[7]), "one of each per grid"),
    ],
)
def test_wrong_arguments_raise_user_error(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_copy_of_a_compiled_head_is_independent() -> None:
    module = RelativeLocalization(5, hidden=8)
    module.compile(backend="eager")
    grid, (first, second) = torch.randn(2, 5, 7, 7), draw_pairs(2, (7, 7), 64)
    expected = module.measure_at(grid, first, second)
    for copied in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module)):
        torch.testing.assert_close(copied.measure_at(grid, first, second), expected)
        copied._first.weight.data.zero_()
        assert not copied.measure_at(grid, first, second)[0].equal(expected[0])
    assert "measure_at" in vars(module)  # the original stays compiled


@pytest.mark.parametrize("variant", ["l1", "ce"])
def test_compiled_step_takes_a_smaller_last_batch(variant: Any) -> None:
    network, localization = torch.nn.Conv2d(3, 16, 8, 8), RelativeLocalization(16, variant=variant)
    step = torch.compile(lambda images: localization(network(images)), backend="aot_eager", fullgraph=True)
    for batch in (4, 3, 2):
        loss = step(torch.randn(batch, 3, 32, 32))
        loss.backward()
        assert loss.isfinite()
