"""Temperature, sets of classes and distances against loops and the loss of scikit-learn."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.errors import UserError
from frugalvit.experiment import calibration as module
from frugalvit.experiment.calibration import Calibration, calibrate, conformal_quantile, fit_temperature
from frugalvit.experiment.load_model import load_model


def draw(count: int, classes: int = 8, sureness: float = 3.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw labels from softmax(z), and return the overconfident logits sureness * z."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count, classes, generator=generator)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return sureness * logits, labels


@pytest.mark.parametrize("count", [0, 1, 500])
@pytest.mark.parametrize("bins", [5, 10])
def test_calibration_error_equals_the_loop(count: int, bins: int) -> None:
    generator = torch.Generator().manual_seed(count)
    probabilities = (3 * torch.randn(count, 4, generator=generator)).softmax(1)
    labels = torch.randint(4, (count,), generator=generator)
    found = module.measure_calibration(probabilities, labels, bins)
    (confidence, predicted), error = probabilities.max(1), 0.0
    for number in range(bins):
        rows = [i for i in range(count) if number / bins <= confidence[i] < (number + 1) / bins]
        right = sum(int(predicted[i] == labels[i]) for i in rows)
        error += abs(100 * sum(confidence[i].item() for i in rows) - 100 * right) / max(1, count)
    assert found["error"] == pytest.approx(error, abs=1e-4) and sum(row["images"] for row in found["bins"]) == count


@pytest.mark.parametrize("sureness", [0.3, 1.0, 4.0])
def test_temperature_minimizes_the_loss(sureness: float) -> None:
    logits, labels = draw(400, sureness=sureness)
    best = fit_temperature(logits, labels)

    def loss(temperature: float) -> float:
        return log_loss(labels, (logits.double() / temperature).softmax(1).numpy(), labels=np.arange(8))

    assert loss(best) <= min(loss(best * factor) for factor in (0.5, 0.99, 0.999, 1.001, 1.01, 2))


def test_temperature_without_a_mistake_is_not_sharper() -> None:
    logits = 5 * torch.eye(4).repeat(10, 1)
    assert fit_temperature(logits, logits.argmax(1)) == pytest.approx(1, abs=1e-4)
    logits[:, 1] -= 1e9  # a class without training images
    assert math.isfinite(fit_temperature(logits, torch.zeros(40, dtype=torch.long)))


def test_error_halves_on_an_overconfident_model() -> None:
    fitted, fresh = draw(500, sureness=4), draw(4000, sureness=4, seed=1)
    calibration = calibrate(*fitted, "val")
    assert isinstance(calibration, Calibration)
    scored = module.describe_calibration(*fresh, calibration)
    assert scored["before"]["error"] > 15 and scored["error"] < scored["before"]["error"] / 2
    assert calibration.ece[0] > 2 * calibration.ece[1]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("count", [20, 99, 250])
def test_quantile_equals_the_loop(count: int, share: float) -> None:
    scores = torch.rand(count, generator=torch.Generator().manual_seed(count))
    enough = [s for s in scores.tolist() if sum(o <= s for o in scores.tolist()) / (count + 1) >= share - 1e-9]
    assert conformal_quantile(scores, share) == min(enough, default=math.inf)


@pytest.mark.parametrize("coverage", [0.6, 0.8, 0.9, 0.985])
def test_sets_hold_the_right_class_as_often_as_requested(coverage: float) -> None:
    inside = []
    for seed in range(20):
        logits, labels = draw(400, seed=seed)
        calibration = calibrate(logits[:200], labels[:200], "val")
        assert isinstance(calibration, Calibration)
        probabilities = (logits[200:] / calibration.temperature).softmax(1)
        members = probabilities >= calibration.lowest_probability(coverage)
        inside.append(members[torch.arange(200), labels[200:]].double().mean().item())
    assert np.mean(inside) == pytest.approx(coverage, abs=0.02)
    few = calibrate(logits[:50], labels[:50], "val")
    assert isinstance(few, Calibration) and few.lowest_probability(0.99) == 0 < few.lowest_probability(0.95)


@pytest.mark.parametrize("left_out", [False, True])
def test_distance_equals_the_loop(left_out: bool) -> None:
    gallery = torch.nn.functional.normalize(torch.randn(30, 5), dim=1)
    queries = gallery if left_out else torch.randn(9, 5)
    expected = []
    for row, query in enumerate(queries):
        others = [other for number, other in enumerate(gallery) if not (left_out and number == row)]
        expected.append(sorted(1 - torch.cosine_similarity(query, other, dim=0).item() for other in others)[4])
    found = module.neighbour_distance(queries, gallery, leave_one_out=left_out)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return create_backbone("test_resnet", img_size=32, num_classes=8).eval()


def test_a_model_folder_keeps_its_calibration(backbone: Backbone, tmp_path: Path) -> None:
    gallery, held_out = torch.rand(60, backbone.pooled_dim), torch.rand(40, backbone.pooled_dim)
    calibration = calibrate(*draw(40), "val", gallery, held_out)
    assert isinstance(calibration, Calibration) and calibration.distance is not None
    distances = calibration.distances(held_out)
    assert 0 <= sum(map(calibration.is_unlike, distances)) <= 2  # 5 % of 40
    assert calibration.is_unlike(min(calibration.distances(-held_out)))
    save_model_folder(backbone, tmp_path, meta=module.save_calibration(calibration, tmp_path))
    loaded = load_model(str(tmp_path)).calibration
    assert loaded is not None and loaded.model_dump() == calibration.model_dump()
    assert loaded.distances(held_out) == distances
    assert load_model(str(tmp_path), img_size=64).calibration is None, "measured at another size"


@pytest.mark.parametrize("damage", ["temperature", "set_probability", "shape", "bytes"])
def test_damaged_calibrations_are_errors(damage: str, backbone: Backbone, tmp_path: Path) -> None:
    calibration = calibrate(*draw(40), "val", torch.rand(60, 7 if damage == "shape" else backbone.pooled_dim))
    values = {"temperature": float("nan"), "set_probability": [0.5]}
    stored = module.save_calibration(calibration, tmp_path)["calibration"]
    stored |= {damage: values[damage]} if damage in values else {}
    save_model_folder(backbone, tmp_path, meta={"calibration": stored})
    if damage == "bytes":
        (tmp_path / module.FEATURES_FILE).write_bytes(b"x" * 40)
    with pytest.raises(UserError, match=damage if damage in values else module.FEATURES_FILE):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("images", "text"), [(19, "at least 20 held-out images, not 19"), (30, "non-finite")])
def test_reasons_not_to_calibrate(images: int, text: str) -> None:
    logits, labels = draw(images)
    assert text in str(calibrate(logits / (images - 30), labels, "val"))
