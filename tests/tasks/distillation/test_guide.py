"""``frugalvit train --guide``: the grid of a trained network as a term that fades out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli.main import main
from frugalvit.config.train import TrainConfig
from frugalvit.engine.schedules import Linear
from frugalvit.errors import UserError
from frugalvit.features import Features
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.distillation.teacher import Guide, load_teacher
from helpers.tiny_runs import SWIN, TRAIN, differences, interrupted_at, load_state, read_metrics


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small convolutional network: its pooled features are wider than its grid."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(7)
    save_model_folder(create_backbone("mobilenetv3_small_050", img_size=64, num_classes=2), folder)
    return str(folder)


def run(photos: Path, out: Path, **values: Any) -> dict[str, Any]:
    return train(TrainConfig.parse(TRAIN | {"data": str(photos), "out": str(out)} | values)).data


def test_the_term_fades_out(teacher: str) -> None:
    student = create_backbone("swin_nano", img_size=16, **SWIN)
    guide = Guide(load_teacher(teacher, student), student.dim, Linear(2.0, 0.0, 5))
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    features = Features(*(part.detach().requires_grad_() for part in student(images)))
    for step, wanted in enumerate([2.0, 1.5, 1.0, 0.5, 0.0, 0.0]):
        grid, weight = guide.targets(images, step)
        term, logged = guide.loss(features, grid, weight)
        if not wanted:
            assert (grid, weight, logged) == (None, None, {}) and term == 0
            continue
        assert grid is not None and grid.shape[2:] == student.grid_size(16)
        answer = guide.head.grid_map(features.grid.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[misc]
        expected = torch.nn.functional.smooth_l1_loss(answer, grid)
        torch.testing.assert_close(term, wanted * expected)
        torch.testing.assert_close(logged["guide_loss"], expected)
    gradients = torch.autograd.grad(term, list(guide.head.parameters()))
    assert all((gradient == 0).all() for gradient in gradients), "DDP needs a gradient of every parameter"


def test_a_guided_run(teacher: str, photos: Path, tmp_path: Path) -> None:
    """It begins with the weights of an unguided run, learns the grid until its half, and resumes exactly."""
    plain, guided, resumed = tmp_path / "plain", tmp_path / "guided", tmp_path / "resumed"
    run(photos, plain)
    run(photos, guided, guide={"model": teacher})
    lines = [line for line in read_metrics(guided) if line["split"] == "train"]
    assert ["guide_loss" in line for line in lines] == [True] * 4 + [False] * 6
    first = [run_lines[0]["cross_entropy"] for run_lines in (read_metrics(plain), lines)]
    assert first[0] == pytest.approx(first[1], rel=1e-2)
    total = lines[0]["cross_entropy"] + 0.5 * lines[0]["localization"]
    assert lines[0]["loss"] > total + 0.05
    with interrupted_at(5):
        run(photos, resumed, guide={"model": teacher})
    train(TrainConfig.parse({"resume": str(resumed)}))
    assert differences(guided, resumed) == []
    saved = {name for name in load_state(guided)["task"] if name.startswith("guide.")}
    assert saved == {"guide.frozen_teacher._extra_state", "guide.head.grid_map.weight", "guide.head.grid_map.bias"}
    assert main(["eval", str(guided), str(photos), "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"guide": {"weight": 2.0}}, "guide.weight has no effect without --guide"),
        ({"guide": {"model": "swin_nano"}}, "only a name"),
        ({"guide": {"model": "x"}, "unlabelled": "y"}, "--guide"),
    ],
)
def test_wrong_options(photos: Path, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(photos, tmp_path / "run", **values)
