"""Temperature, sets of classes and distances against loops, SciPy and the loss of scikit-learn."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from sklearn.metrics import log_loss

from frugalvit.backbones import create_backbone
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
    confidence, right = torch.rand(count, generator=generator), torch.rand(count, generator=generator) > 0.5
    found = module.measure_calibration(confidence, right, bins)
    error = 0.0
    for number in range(bins):
        rows = [i for i in range(count) if number / bins <= confidence[i] < (number + 1) / bins]
        error += abs(100 * sum(confidence[i].item() for i in rows) - 100 * sum(right[rows].tolist())) / max(1, count)
    assert found["error"] == pytest.approx(error, abs=1e-4) and sum(row["images"] for row in found["bins"]) == count


@pytest.mark.parametrize("sureness", [0.3, 1.0, 4.0])
def test_temperature_minimizes_the_loss(sureness: float) -> None:
    logits, labels = draw(400, sureness=sureness)

    def loss(log_temperature: float) -> float:
        probabilities = (logits.double() / math.exp(log_temperature)).softmax(1).numpy()
        return log_loss(labels, probabilities, labels=np.arange(8))

    best = minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8})
    assert fit_temperature(logits, labels) == pytest.approx(math.exp(best.x), rel=1e-4)


def test_temperature_without_a_mistake_is_not_sharper() -> None:
    logits = 5 * torch.eye(4).repeat(10, 1)
    assert fit_temperature(logits, logits.argmax(1)) == pytest.approx(1)
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
    assert conformal_quantile(scores, share) == (min(enough) if enough else None)


@pytest.mark.parametrize("coverage", [0.6, 0.8, 0.9, 0.99])
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


def test_few_images_make_sets_of_all_classes() -> None:
    calibration = calibrate(*draw(50), "val")
    assert isinstance(calibration, Calibration)
    assert calibration.lowest_probability(0.99) == 0 < calibration.lowest_probability(0.95)


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


def test_a_model_folder_keeps_its_calibration(tmp_path: Path) -> None:
    backbone = create_backbone("test_resnet", img_size=32, num_classes=8).eval()
    gallery, held_out = torch.rand(60, backbone.pooled_dim), torch.rand(40, backbone.pooled_dim)
    calibration = calibrate(*draw(40), "val", gallery, held_out)
    assert isinstance(calibration, Calibration) and calibration.distance is not None
    distances = calibration.distances(held_out)
    assert distances is not None and 0 <= sum(map(calibration.is_unlike, distances.tolist())) <= 2  # 5 % of 40
    assert calibration.is_unlike(calibration.distances(-held_out).min().item())  # type: ignore[union-attr]
    save_model_folder(backbone, tmp_path, meta={"calibration": calibration.model_dump()})
    module.save_gallery(calibration, tmp_path)
    loaded = load_model(str(tmp_path)).calibration
    assert loaded is not None and loaded.model_dump() == calibration.model_dump()
    assert torch.equal(loaded.distances(held_out), distances)  # type: ignore[arg-type]
    assert load_model(str(tmp_path), img_size=64).calibration is None, "measured at another size"


@pytest.mark.parametrize("damage", ["temperature", "set_probability", "shape", "bytes"])
def test_damaged_calibrations_are_errors(damage: str, tmp_path: Path) -> None:
    backbone = create_backbone("test_resnet", img_size=32, num_classes=8).eval()
    calibration = calibrate(*draw(40), "val", torch.rand(60, 7 if damage == "shape" else backbone.pooled_dim))
    assert isinstance(calibration, Calibration)
    values = {"temperature": float("nan"), "set_probability": [0.5]}
    stored = calibration.model_dump() | ({damage: values[damage]} if damage in values else {})
    save_model_folder(backbone, tmp_path, meta={"calibration": stored})
    module.save_gallery(calibration, tmp_path)
    if damage == "bytes":
        (tmp_path / module.FEATURES_FILE).write_bytes(b"x" * 40)
    with pytest.raises(UserError, match=damage if damage in values else module.FEATURES_FILE):
        load_model(str(tmp_path))


@pytest.mark.parametrize(("images", "text"), [(19, "19 held-out images are too few"), (30, "non-finite")])
def test_reasons_not_to_calibrate(images: int, text: str) -> None:
    logits, labels = draw(images)
    assert text in str(calibrate(logits / (images - 30), labels, "val"))


def test_config_json_holds_plain_numbers() -> None:
    calibration = calibrate(*draw(40), "val", torch.rand(60, 6))
    assert isinstance(calibration, Calibration)
    stored = json.loads(json.dumps(calibration.model_dump()))
    assert "gallery" not in stored and len(stored["set_probability"]) == 99
