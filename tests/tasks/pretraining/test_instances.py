"""``pretrain --method instances`` on a few images: learning, resume, and what follows it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.cli.main import main
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data import open_data
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import load_model
from frugalvit.tasks.pretraining.instances import number_images
from frugalvit.tasks.pretraining.train import pretrain
from helpers.shards import shard_images
from helpers.tiny_runs import DISTIL, differences, interrupted_at, load_state, run_tiny


def run(photos: Path, out: Path, **values: Any) -> dict[str, Any]:
    tiny = DISTIL | {"method": "instances", "data": str(photos), "out": str(out), "device": "cpu"}
    return pretrain(PretrainConfig.parse(tiny | values)).data


def test_a_run_learns_and_is_usable(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(photos, out, steps=40, lr=5e-3, mixing={"prob": 0.0}, augment={"operations": 0}, report=True)
    assert result["loss"] < 0.95 * result["first_loss"] and result["knn"] is not None and result["health"]
    state = load_state(out)["task"]
    images = sum(1 for _ in (photos / "train").rglob("*.png"))
    assert state["instances.classifier.weight"].shape[0] == images
    exported = load_model(str(out)).backbone.state_dict()
    assert all(torch.equal(value, state[f"average.{name}"]) for name, value in exported.items())
    assert "learned without labels" in (out / "report.html").read_text()
    assert TrainConfig.parse({"data": "x", "init": str(out)}).recipe == "scratch"
    assert main(["probe", "knn", str(out), str(photos), "--device", "cpu"]) == 0
    assert run_tiny("train", data=photos, init=out, out=tmp_path / "tuned", steps=2).data["steps"] == 2


def test_resume_is_exact(photos: Path, tmp_path: Path) -> None:
    run(photos, tmp_path / "one")
    with interrupted_at(5):
        run(photos, tmp_path / "two")
    pretrain(PretrainConfig.parse({"resume": str(tmp_path / "two")}))
    assert differences(tmp_path / "one", tmp_path / "two") == []


def test_labels_are_not_used(photos: Path) -> None:
    images = open_data(str(photos)).splits["train"]
    numbered = number_images(images)
    assert numbered.labels is not None and numbered.labels.tolist() == list(range(len(images)))
    assert images.labels is not None and images.labels.max() < len(images) - 1, "the dataset itself is unchanged"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"matching": {"prototypes": 16}}, "--matching has no effect"),
        ({"crops": {"local_crops": 2}}, "--crops has no effect"),
        ({"method": "esvit", "mixing": {"prob": 1.0}}, "--mixing has no effect"),
        ({"continue_from": "runs/x"}, "--continue"),
    ],
)
def test_wrong_options(photos: Path, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(photos, tmp_path / "run", **values)


def test_a_stream_has_no_numbers(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--stream false"):
        run(shard_images(tmp_path / "shards", photos), tmp_path / "run", stream=True, workers=1)
