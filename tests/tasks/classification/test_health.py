"""Supervised health: chance, alarms on made and on measured curves, and runs that collapse and recover."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from frugalvit.config.data import MixingConfig
from frugalvit.data.augmentation.mixup import Blend, Mixing
from frugalvit.tasks.classification.health import SupervisedHealth, chance_loss
from frugalvit.tasks.classification.metrics import ClassificationScores
from frugalvit.tasks.classification.task import ClassificationTask
from helpers.tiny_runs import read_metrics, run_tiny, write_images

CHANCE = math.log(100)
RESULTS = Path(__file__).parents[3] / "docs" / "results"
CLASSES = {"demo": 10, "quickdraw": 345, "cifar": 100}


def make_health(steps: int = 2000, **more: Any) -> SupervisedHealth:
    values: dict[str, Any] = {
        "chance": CHANCE,
        "noise": 0.0,
        "classes": 100,
        "eval_images": 5000,
        "warmup": 100,
        "lr": 0.001,
    }
    values |= {"steps": steps, "log_every": 10} | more
    return SupervisedHealth(**values)


def first_alarm(health: SupervisedHealth, lines: list[tuple[int, dict[str, float]]]) -> tuple[int, str] | None:
    for step, line in lines:
        if alarms := health.check(step, line):
            return step, alarms[0].name
    return None


def curve(gap: Any, steps: int = 2000, norm: float = 2.0) -> list[tuple[int, dict[str, float]]]:
    """Return lines of a run whose gap to chance at a share of the run is ``gap(share)``, with the noise of mixing."""
    random = np.random.default_rng(0)
    gaps = [(step, gap(step / steps)) for step in range(10, steps + 1, 10)]
    noisy = [(step, value + 0.01 * min(1.0, 20 * abs(value)) * random.normal()) for step, value in gaps]
    return [(step, {"cross_entropy": CHANCE * (1 - value), "gradient_norm": norm}) for step, value in noisy]


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_chance_is_the_loss_of_the_best_constant_answer(smoothing: float, balance: bool) -> None:
    """Also of mixed images; found by gradient descent on the logits of a constant answer."""
    counts = np.array([50, 30, 15, 5, 0])
    drawn = np.array([1, 1, 1, 1, 0]) if balance else counts
    generator = torch.Generator().manual_seed(0)
    labels = torch.multinomial(torch.tensor(drawn).float(), 4000, replacement=True, generator=generator)
    mixing = Mixing(MixingConfig(smoothing=smoothing, mixup=0.8, prob=1.0), 5)
    batches = [mixing(torch.zeros(8, 1, 4, 4), part, generator)[1] for part in labels.split(8)]
    targets, logits = torch.cat(batches), torch.zeros(5, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=100)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(logits.expand(len(targets), 5), targets)
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    expected, deviation = chance_loss(counts, smoothing, balance=balance)
    assert loss().item() == pytest.approx(expected, abs=0.03)
    assert (deviation == pytest.approx(0)) == balance
    plain = mixing.apply(torch.zeros(4000, 1), labels, Blend(1.0))[1]
    each = F.cross_entropy(logits.detach().expand(4000, 5), plain, reduction="none")
    assert float(each.std()) == pytest.approx(deviation, abs=0.05)


HEALTHY = {
    "learns": lambda t: 0.5 * t,
    "warms up at chance": lambda t: max(0.0, 0.3 * (t - 0.2)),
    "learns slowly": lambda t: 0.025 * t,  # 345 classes: 0.6 % after a quarter of the run
    "falls by half": lambda t: 0.1 if t < 0.5 else 0.05,
    "overfits nothing": lambda t: min(0.03, t),
}


@pytest.mark.parametrize("steps", [50, 300, 2000, 20000])
@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs_have_no_alarm(kind: str, steps: int) -> None:
    assert first_alarm(make_health(steps, warmup=steps // 5), curve(HEALTHY[kind], steps)) is None


@pytest.mark.parametrize("steps", [2000, 20000])
@pytest.mark.parametrize("before", [0.025, 0.06, 0.5])
def test_falling_back_to_chance_is_seen_within_two_percent(before: float, steps: int) -> None:
    health = make_health(steps)
    alarm = first_alarm(health, curve(lambda t: min(before, 2 * t) if t < 0.4 else -0.001, steps))
    assert alarm is not None and alarm[1] == "back at chance" and alarm[0] <= 0.4 * steps + max(0.02 * steps, 30)
    assert health.collapsed and not health.is_good and "--lr" in str(health.all_alarms()[0])


def test_a_run_at_chance_from_the_start() -> None:
    alarm = first_alarm(make_health(), curve(lambda t: -0.002))
    assert alarm == (400, "nothing learned")  # a fifth of the run
    assert first_alarm(make_health(warmup=400), curve(lambda t: -0.002)) == (600, "nothing learned")
    assert first_alarm(make_health(150), curve(lambda t: -0.002, 150)) is None  # too short to tell


def test_luck_is_not_learning() -> None:
    """With rare classes a few lines of a constant answer look better than chance."""
    lucky = curve(lambda t: 0.03 if 0.1 < t < 0.12 else 0.0)
    assert first_alarm(make_health(), lucky) == (260, "back at chance")
    assert first_alarm(make_health(noise=0.1), lucky) == (420, "nothing learned")


def test_vanished_gradients_and_dead_features() -> None:
    for line, name in (({"gradient_norm": 1e-5}, "vanished gradients"), ({}, "dead features")):
        health = make_health()
        for step, values in curve(lambda t: -0.001)[:10]:
            assert not health.check(step, values)
        scores = {"mean_per_class": 1.0, "top1": 1.0, "effective_rank": 1.2 if not line else 8.0}
        rest = [(100, scores), *((step, values | line) for step, values in curve(lambda t: -0.001)[10:])]
        alarm = first_alarm(health, rest)
        assert alarm is not None and alarm[1] == name and alarm[0] <= 150
    fitted = make_health()  # gradients of a run that fits its images vanish too, and few classes have few dimensions
    lines = curve(lambda t: 0.99 * min(1.0, 3 * t))
    lines = [(step, values | {"gradient_norm": 2.0 if step < 900 else 1e-6}) for step, values in lines]
    fitted.check(5, {"mean_per_class": 90.0, "effective_rank": 1.1})
    assert first_alarm(fitted, lines) is None


@pytest.mark.parametrize(("gap", "norm", "expected"), [(0.03, 300.0, True), (0.03, 20.0, False), (0.3, 300.0, False)])
def test_exploded_gradients(gap: float, norm: float, expected: bool) -> None:
    lines = [(step, values | {"gradient_norm": 1.0 if step < 400 else norm}) for step, values in curve(lambda t: gap)]
    alarm = first_alarm(make_health(), lines)
    assert (alarm is not None and alarm[1] == "exploded gradients" and 400 < alarm[0] <= 450) == expected


def test_a_score_back_at_chance_counts_only_with_the_loss() -> None:
    for gap, expected in ((0.01, "back at chance"), (0.5, None)):
        health = make_health()
        lines = curve(lambda t, gap=gap: gap)[:60]
        for step, score in ((200, 9.0), (300, 1.0), (400, 1.1)):
            lines.insert(step // 10, (step, {"mean_per_class": score}))
        alarm = first_alarm(health, lines)
        assert (alarm and alarm[1]) == expected


@pytest.mark.parametrize(("score", "expected"), [(54.0, None), (1.0, "back at chance")])
def test_a_confident_classifier_on_mixed_images_is_not_at_chance(score: float, expected: str | None) -> None:
    """Its loss may be above that of a constant answer for some lines; the loss of a constant answer hardly varies."""
    losses = [0.5, 0.6, 0.5, 1.3, 0.97, 1.2] * 5
    lines = [(10 * (i + 1), {"cross_entropy": CHANCE * v, "gradient_norm": 2.0}) for i, v in enumerate(losses)]
    health = make_health(600)
    health.check(0, {"mean_per_class": 50.0})
    lines.insert(3, (35, {"mean_per_class": score}))
    alarm = first_alarm(health, lines)
    assert (alarm and alarm[1]) == expected


@pytest.mark.parametrize(
    ("gaps", "score", "expected"),
    [
        ([-9, -20, -30], 1.0, (30, "diverged")),
        ([-9, -5, -2, -0.5, 0.1, 0.2], 1.0, None),  # a bad start
        ([-9, -20, -30], 50.0, None),  # a confident classifier on mixed images
    ],
)
def test_divergence_is_seen_at_once(gaps: list[float], score: float, expected: Any) -> None:
    health = make_health(200)
    health.check(0, {"mean_per_class": score})
    lines = [(10 * i, {"cross_entropy": CHANCE * (1 - gap)}) for i, gap in enumerate(gaps, 1)]
    assert first_alarm(health, lines) == expected


def test_a_new_network_has_not_diverged() -> None:
    """Two classes, one of them rare: a constant answer has a loss of 0.1, a new network ln 2, also in the warm-up."""
    health = make_health(200, chance=0.1, classes=2)
    lines = [(10 * i, {"cross_entropy": 0.69 + 0.001 * i, "gradient_norm": 1.0}) for i in range(1, 7)]
    assert first_alarm(health, lines) is None


@pytest.mark.parametrize(
    ("gap", "score", "nothing"), [(0.0, 4.0, True), (-50.0, 1.0, True), (0.0, 60.0, False), (0.1, 1.0, False)]
)
def test_random_features_have_learned_nothing(gap: float, score: float, nothing: bool) -> None:
    health = make_health(20)
    assert not health.learned_nothing(score)  # no line yet
    health.check(10, {"cross_entropy": CHANCE * (1 - gap)})
    assert health.learned_nothing(score) == nothing


def test_rescued_health_starts_anew() -> None:
    health = make_health()
    assert first_alarm(health, curve(lambda t: 0.06 if t < 0.4 else 0.0)) is not None
    health.check(850, {"from_step": 0, "lr_scale": 0.3})
    assert not health.collapsed and len(health.all_alarms()) == 1
    later = [(step + 850, values) for step, values in curve(lambda t: -0.001)]
    assert first_alarm(health, later) == (1250, "nothing learned")
    assert "--lr (it is 0.0003)" in str(health.raised["nothing learned"])


def test_measured_curves() -> None:
    """Of all runs in docs/results, exactly those that collapsed raise an alarm."""
    found, count = [], 0
    for path in sorted(RESULTS.rglob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if not any("cross_entropy" in line for line in lines):
            continue
        count += 1
        steps = lines[-1]["step"]
        classes = next((number for name, number in CLASSES.items() if name in str(path)), 102)
        health = make_health(
            steps, chance=math.log(classes), classes=classes, log_every=100, warmup=steps // 5, eval_images=6149
        )
        names = ("cross_entropy", "gradient_norm", "mean_per_class")
        values = [{name: line[name] for name in names if line.get(name) is not None} for line in lines]
        if first_alarm(health, list(zip((line["step"] for line in lines), values, strict=True))):
            found.append(path.relative_to(RESULTS).as_posix())
    assert count > 150 and found == ["lr-flowers/swin_tiny_w7/lr=0.0014/seed_0.jsonl"]


@pytest.mark.parametrize(
    ("confusion", "at_chance"),
    [
        ([[0, 90], [0, 10]], True),  # one class for everything
        ([[45, 45], [5, 5]], True),  # independent of the label
        ([[70, 20], [2, 8]], False),  # below the share of the larger class, but it sees the smaller one
        ([[1, 0], [0, 1]], False),
        ([[30, 30], [28, 32]], True),
        ([[5, 0, 0], [0, 0, 5], [0, 0, 0]], False),  # a class without images
    ],
)
def test_at_chance(confusion: list[list[int]], at_chance: bool) -> None:
    scores = ClassificationScores(len(confusion), torch.device("cpu"))
    scores.confusion = torch.tensor(confusion)
    assert scores.is_at_chance() == at_chance


@pytest.mark.runs
@pytest.mark.parametrize("rescue", [True, False])
def test_a_run_that_collapses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rescue: bool) -> None:
    """Zero weights answer the same for every image and have no gradients."""
    after_step = ClassificationTask.after_step

    def collapse(self: ClassificationTask, step: int, skipped: Any = None) -> None:
        after_step(self, step, skipped)
        if step == 60:
            with torch.no_grad():
                for parameter in self.backbone.parameters():
                    parameter.zero_()

    monkeypatch.setattr(ClassificationTask, "after_step", collapse)
    data, out = write_images(tmp_path / "images"), tmp_path / "run"
    more: dict[str, Any] = {"localization": {"weight": 0}, "mixing": {"prob": 0}, "ema": 0, "split": "train+val"}
    more |= {"save_every": 20, "report": True, "rescue": rescue}
    shutil.copytree(data / "val", data / "test")
    result = run_tiny("train", data=data, out=out, steps=120, lr=3e-3, evaluate_every=60, **more)
    summary, page = json.loads((out / "summary.json").read_text()), (out / "report.html").read_text()
    names = [line["reason"] for line in read_metrics(out) if line["split"] == "rescue"]
    assert result.data["at_chance"] == summary["at_chance"] == (not rescue)
    assert summary["health"] == ("healthy" if rescue else "back at chance, dead features")
    assert names == ["back at chance"] * rescue and len(summary["rescues"]) == rescue
    assert summary["top1"] == (100 if rescue else 50)
    assert any("back at chance" in alarm and "--lr" in alarm for alarm in summary["alarms"])
    assert [entry["step"] for entry in summary["rescues"]] == [68] * rescue
    assert ("rescue at step 68" in page.lower()) == rescue and ("ended at chance" in page) == (not rescue)
    assert ("ended at chance" in result.notes[-1]) == (not rescue)
    assert any("at step 68" in note for note in result.notes) == rescue
