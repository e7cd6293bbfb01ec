"""Schedules against the numbers of the released code, and at any length."""

import numpy as np
import pytest

from frugalvit.engine.schedules import Constant, Cosine, Linear, Polynomial, Steps, warmup_steps


def test_released_esvit_schedules(golden) -> None:
    wanted = golden("e_schedules")
    ours = {"lr": Cosine(1e-3, 1e-6, 70, warmup=21), "wd": Cosine(0.04, 0.4, 70), "momentum": Cosine(0.996, 1.0, 70)}
    for name, schedule in ours.items():
        np.testing.assert_allclose([schedule.at(step) for step in range(70)], wanted[name], rtol=0, atol=1e-12)
    temperature = Linear(0.04, 0.07, 3)
    np.testing.assert_allclose([temperature.at(epoch) for epoch in range(10)], wanted["teacher_temp"], atol=1e-12)


def test_released_drloc_ramp(golden) -> None:
    wanted = golden("a_drloc_lambda")
    for name, ramp in {
        "lam05_w20_t300": Polynomial(0.5, 300, warmup=20),
        "lam05_w20_t100": Polynomial(0.5, 100, warmup=20),
        "lam01_w10_t100": Polynomial(0.1, 100, warmup=10),
    }.items():
        np.testing.assert_allclose([ramp.at(epoch) for epoch in range(len(wanted[name]))], wanted[name], atol=1e-12)


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 1000])
def test_any_length_works(steps: int) -> None:
    warmup = warmup_steps(20, 5, steps)
    assert warmup <= 0.2 * steps + 1
    for schedule in (Cosine(1.0, 0.0, steps, warmup), Polynomial(1.0, steps, warmup=warmup)):
        values = [schedule.at(step) for step in range(steps + 1)]
        assert all(0 <= value <= 1 for value in values)
        assert Constant(2.0).at(steps) == 2.0


def test_polynomial_schedule() -> None:
    """It falls from the rate after the warm-up to the final rate."""
    schedule = Polynomial(1.0, 12, power=2.0, end=0.2, warmup=2, warmup_from=0.1)
    expected = {0: 0.1, 1: 0.55, 2: 1.0, 7: 0.2 + 0.8 / 4, 12: 0.2, 15: 0.2}
    assert {step: schedule.at(step) for step in expected} == pytest.approx(expected)


def test_milestones() -> None:
    schedule = Steps(1.0, (8, 11), warmup=2)
    assert [round(schedule.at(step), 4) for step in (0, 1, 2, 7, 8, 11)] == [0.0, 0.5, 1.0, 1.0, 0.1, 0.01]
