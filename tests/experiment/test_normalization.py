"""Images are normalized with the mean and deviation of the network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.augment.transforms import EvalTransform
from frugalvit.data.loader import Batches
from frugalvit.tasks.classification.train import train
from frugalvit.tasks.pretraining.train import pretrain
from helpers.tiny_runs import PRETRAIN, TRAIN

HALVES = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
PLAIN = {"crop": "center", "operations": 0, "erasing": 0.0}
STILL = {"jitter_prob": 0.0, "grayscale": 0.0, "solarize": 0.0, "local_crops": 1, "local_size": 32}


@pytest.mark.parametrize("verb", ["train", "pretrain"])
def test_images_are_normalized_with_the_networks_statistics(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By halves, where most have ImageNet's: all pixels of a grey image become one number."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "grey" / split / name).mkdir(parents=True)
            for number in range(8):
                Image.new("RGB", (32, 32), (128, 128, 128)).save(tmp_path / "grey" / split / name / f"{number}.png")
    seen: dict[str, list[torch.Tensor]] = {"learned": [], "looked at": []}
    batch_at, prepare = Batches.batch_at, EvalTransform.__call__

    def learned(self: Batches, step: int) -> Any:
        batch = batch_at(self, step)
        seen["learned"] += batch.images if isinstance(batch.images, list) else [batch.images]
        return batch

    def looked_at(self: EvalTransform, *given: Any) -> torch.Tensor:
        seen["looked at"].append(prepare(self, *given))
        return seen["looked at"][-1]

    monkeypatch.setattr(Batches, "batch_at", learned)
    monkeypatch.setattr(EvalTransform, "__call__", looked_at)
    usual: dict[str, Any] = TRAIN if verb == "train" else PRETRAIN
    values = usual | {"data": str(tmp_path / "grey"), "out": str(tmp_path / "run"), "steps": 1, "img_size": 32}
    values["device"] = "cpu"  # a GPU resizes to a quarter of a grey level
    values["backbone_args"] = usual["backbone_args"] | HALVES
    if verb == "train":
        train(TrainConfig.parse(values | {"augment": PLAIN, "mixing": {"prob": 0.0}}))
    else:
        pretrain(PretrainConfig.parse(values | {"crops": STILL}))
    for images in seen.values():
        assert images
        for one in images:
            torch.testing.assert_close(one, torch.full_like(one, (128 / 255 - 0.5) / 0.5), rtol=0, atol=1e-4)
