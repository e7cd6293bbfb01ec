"""Health metrics: both collapses are reported, a healthy run is not, and the effective rank is right."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from frugalvit.engine.health import effective_rank, feature_deviation
from frugalvit.probing.knn import knn_accuracy
from frugalvit.tasks.pretraining import collapse
from frugalvit.tasks.pretraining.collapse import FeatureMonitor, Health

K = 1024


def feed(health: Health, lines: list[dict[str, float]]) -> list[str]:
    return [alarm.name for step, line in enumerate(lines) for alarm in health.check(10 * step, line)]


def healthy(t: float) -> dict[str, float]:
    return {
        "loss": 6.5 - 3 * t,
        "view_loss": 6.5 - 3 * t,
        "teacher_entropy": 6.8 - 4 * t,
        "prototypes_used": 700 - 300 * t,
        "effective_rank": 20 + 60 * t,
        "feature_deviation": 0.4 + 0.4 * t,
    }


SIGNS = {
    "uniform collapse (views)": lambda t: (
        healthy(t) | dict.fromkeys(("loss", "view_loss", "teacher_entropy"), math.log(K)) | {"feature_deviation": 0.1}
    ),
    "one-prototype collapse (views)": lambda t: (
        healthy(t) | {"teacher_entropy": 0.01, "prototypes_used": 1.1, "view_loss": 0.1}
    ),
    "dead features": lambda t: healthy(t) | {"effective_rank": 1.02, "feature_deviation": 0.001},
    "divergence": lambda t: healthy(t) | {"loss": 6.5 + 20 * t},
    "stagnation": lambda t: healthy(0.5) | {"effective_rank": 40.0},
    "worse features": lambda t: healthy(t) | {"knn": 10.0 if t < 0.4 else 5.0},
}


def test_healthy_run_has_no_warning() -> None:
    health = Health(K, steps=500, settled=50)
    assert feed(health, [healthy(t / 50) for t in range(50)]) == []
    assert health.verdict() == "healthy" and not health.collapsed


@pytest.mark.parametrize("name", SIGNS)
def test_each_problem_is_reported_once(name: str) -> None:
    health = Health(K, steps=500, settled=50)
    assert feed(health, [SIGNS[name](t / 50) for t in range(50)]) == [name]
    assert "." in str(health.raised[name]) and health.collapsed == ("collapse" in name or name == "dead features")


@pytest.mark.parametrize(("knn", "rank", "expected"), [(20, 40, ["stagnation"]), (60, 40, []), (20, 80, [])])
def test_improving_features_are_not_stagnation(knn: float, rank: float, expected: list[str]) -> None:
    """k-NN and rank have their own lines, between those of the losses."""
    health, flat = Health(K, steps=500, settled=50), healthy(0.5) | {"effective_rank": 40.0}
    lines = []
    for t in range(50):
        lines.append(
            {name: value for name, value in flat.items() if name not in ("effective_rank", "feature_deviation")}
        )
        if t % 5 == 4:
            share = t / 49
            lines[-1] = {"knn": 20 + (knn - 20) * share, "effective_rank": 40 + (rank - 40) * share}
            lines[-1]["feature_deviation"] = 0.6
    assert feed(health, lines) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ["uniform collapse (views)"]),
        ({"region_loss": math.log(K)}, ["uniform collapse (views)"]),
        ({"region_loss": 0.7 * math.log(K)}, []),
        ({"feature_deviation": 0.8}, []),
        ({"feature_deviation": 0.4}, ["uniform collapse (views)"]),
        ({"feature_deviation": 0.8, "teacher_entropy": math.log(K)}, ["uniform collapse (views)"]),
        ({"region_loss": 0.7 * math.log(K), "teacher_entropy": math.log(K) - 0.02}, []),
    ],
)
def test_no_collapse_while_images_differ(more: dict[str, float], expected: list[str]) -> None:
    """One level near ln K is not a collapse if the other level or the features still separate images."""
    health = Health(K, steps=500, settled=50)
    signs = [SIGNS["uniform collapse (views)"](t / 50) | {"teacher_entropy": 0.99 * math.log(K)} for t in range(50)]
    assert feed(health, [line | more for line in signs]) == expected
    assert all("view loss 6.93" in str(alarm) for alarm in health.raised.values())


FLAT, ALONE = math.log(K), {"teacher_entropy": 0.01, "prototypes_used": 1.1}


@pytest.mark.parametrize("views", [True, False])
@pytest.mark.parametrize(
    ("signs", "loss", "name"),
    [
        ({"teacher_entropy": FLAT, "prototypes_used": 900.0}, FLAT, "uniform collapse (regions)"),
        (ALONE, 0.1, "one-prototype collapse (regions)"),
        (ALONE | {"prototypes_used": 500.0}, 0.1, None),
    ],
)
def test_collapse_of_regions_is_reported(views: bool, signs: dict[str, float], loss: float, name: str | None) -> None:
    """Region metrics have a suffix beside those of the views, and none without views."""
    health = Health(K, steps=500, settled=50, stop=True)
    marked = {f"region_{sign}": value for sign, value in signs.items()}
    learning = {"view_loss": 0.95 * FLAT, "feature_deviation": 0.1} if views else signs | {"feature_deviation": 0.1}
    lines = [healthy(t / 50) | marked | {"region_loss": loss} | learning for t in range(50)]
    if not views:
        lines = [{sign: value for sign, value in line.items() if sign != "view_loss"} for line in lines]
    assert feed(health, lines) == ([name] if name else [])
    assert health.collapsed == bool(name)


@pytest.mark.parametrize(
    ("loss", "knn", "expected"),
    [
        (lambda t: 5.0, 60.0, ["stagnation"]),
        (lambda t: 5.0 + 0.05 * (-1) ** round(50 * t), 60.0, ["stagnation"]),
        (lambda t: 5.0 + abs(t - 0.5), 60.0, []),
        (lambda t: 5.0, 99.5, []),
    ],
    ids=["flat", "noise", "down and up again", "nothing left to gain"],
)
def test_moving_loss_is_not_stagnation(loss: Callable[[float], float], knn: float, expected: list[str]) -> None:
    health = Health(K, steps=500, settled=50)
    still = healthy(0.5) | {"effective_rank": 40.0, "knn": knn}
    assert feed(health, [still | {"loss": loss(t / 50)} for t in range(50)]) == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("lines", [range(20, 21), range(6, 24), range(50)], ids=len)
def test_nonfinite_values_are_ignored(bad: float, lines: range) -> None:
    health = Health(K, steps=500, settled=50, stop=True)
    seen = [healthy(t / 50) for t in range(50)]
    for t in lines:
        seen[t] = dict.fromkeys(seen[t], bad)
    assert feed(health, seen) == [] and not health.collapsed


def test_noisy_or_recovering_knn_is_not_worse() -> None:
    wavering = [healthy(t / 50) | {"knn": 10.0 - 2 * (t % 2)} for t in range(50)]
    low = [healthy(t / 50) | {"knn": 4.0 if t < 10 else 1.5} for t in range(50)]  # a few images more or less
    dipping = [healthy(t / 50) | {"knn": 4.0 if t in (20, 21) else 10.0} for t in range(50)]
    for lines in (wavering, low, dipping):
        assert feed(Health(K, steps=500, settled=50), lines) == []


@pytest.mark.parametrize(("steps", "expected"), [(20, []), (199, []), (400, ["stagnation"])])
def test_short_run_is_not_stagnation(steps: int, expected: list[str]) -> None:
    health = Health(K, steps=steps, settled=4)
    lines = ((step, SIGNS["stagnation"](step / steps)) for step in range(1, steps + 1))
    assert [alarm.name for step, line in lines for alarm in health.check(step, line)] == expected


def test_start_of_a_run_is_not_a_collapse() -> None:
    health = Health(K, steps=500, settled=400)
    assert feed(health, [SIGNS["uniform collapse (views)"](0.0) for _ in range(30)]) == []


def test_effective_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    constant = torch.ones(64, 32)
    assert effective_rank(constant) == pytest.approx(1.0, abs=1e-3)
    assert effective_rank(torch.zeros(64, 32)) == 1.0
    assert effective_rank(torch.eye(32)) == pytest.approx(32, rel=1e-4)
    uneven = math.exp(
        -0.75 * math.log(0.75) - 0.25 * math.log(0.25)
    )  # shares of the singular values, not of their squares
    assert effective_rank(torch.diag(torch.tensor([3.0, 1.0]))) == pytest.approx(uneven, rel=1e-6)
    flat = torch.randn(256, 4, generator=generator) @ torch.randn(4, 32, generator=generator)
    assert 3 < effective_rank(flat) < 4.01
    assert feature_deviation(constant) == pytest.approx(0, abs=1e-6)
    assert feature_deviation(torch.randn(512, 32, generator=generator)) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("used", "raised"), [(80.0, False), (4.0, True)])
def test_small_sample_uses_few_prototypes(used: float, raised: bool) -> None:
    """With 65,536 prototypes a sharp teacher gives every crop its own."""
    health = Health(prototypes=65536, steps=100, settled=0)
    line = {"teacher_entropy": 0.2, "prototypes_used": used, "loss": 5.0, "view_loss": 5.0}
    assert any(name.startswith("one-prototype collapse") for name in feed(health, [line] * 10)) == raised


@pytest.mark.parametrize("queries", [True, False])
def test_knn_uses_twenty_neighbours(queries: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    gallery, others = (
        (torch.randn(900, 64, generator=generator), torch.randint(4, (900,), generator=generator)) for _ in range(2)
    )
    monitor: Any = FeatureMonitor(gallery, others if queries else None, 4, None)  # type: ignore[arg-type]
    monitor._embed = lambda backbone, images: images
    targets = others if queries else (None, None)
    shares = {k: scores["top1"] for k, scores in knn_accuracy(*gallery, *targets, ks=(1, 10, 20, 40)).items()}
    assert monitor.evaluate(None)["knn"] == shares.pop(20) not in shares.values()


@pytest.mark.parametrize(("rank", "deviation", "dead"), [(1.02, 0.001, True), (1.02, 0.5, False), (40.0, 0.001, False)])
def test_dead_features_lack_rank_and_deviation(rank: float, deviation: float, dead: bool) -> None:
    """A low rank alone, or a low deviation alone, is not dead."""
    line = {"effective_rank": rank, "feature_deviation": deviation}
    raised = feed(Health(K, 100, settled=0), [healthy(t / 10) | line for t in range(8)])
    assert ("dead features" in raised) == dead


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_adding_a_loss_is_not_divergence(share: float) -> None:
    """L_R starts late, within the steps of one line; both losses only fall."""
    lines = []
    for number in range(40):
        line = {"loss": 3.4 - number / 20, "view_loss": 6.8 - number / 10}
        if number >= 20:
            part = share if number == 20 else 1.0
            line |= {"region_loss": 6.9 - number / 40, "loss": line["loss"] + part * (3.45 - number / 80)}
        lines.append(line)
    assert feed(Health(K, steps=400, settled=40), lines) == []


def test_health_of_long_runs_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, swing = [], collapse._swing
    monkeypatch.setattr(collapse, "_swing", lambda losses: calls.append(len(losses)) or swing(losses))
    health = Health(K, steps=40_000, settled=100)
    feed(health, [{"loss": 6.9, "view_loss": 6.9, "knn": 20.0}] * 4000)
    assert len(calls) < 400 and health.verdict() == "stagnation"
