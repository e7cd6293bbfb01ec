"""Images are normalized with the mean and deviation of the network."""

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from frugalvit.data.augmentation.transforms import EvalTransform
from frugalvit.data.loader import Batches
from helpers.tiny_runs import TRAIN, run_tiny

NETWORK: dict[str, Any] = {**TRAIN["backbone_args"], "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}  # type: ignore[dict-item]
OPTIONS: dict[str, dict[str, Any]] = {
    "train": {"augment": {"crop": "center", "operations": 0, "erasing": 0.0}, "mixing": {"prob": 0.0}},
    "pretrain": {"crops": {"jitter_prob": 0.0, "grayscale": 0.0, "solarize": 0.0, "local_crops": 1, "local_size": 32}},
}


@pytest.mark.parametrize("verb", OPTIONS)
def test_images_are_normalized_with_the_networks_statistics(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pixels of a grey image become the same number."""
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "grey" / folder).mkdir(parents=True)
        for number in range(8):
            Image.new("RGB", (32, 32), (128, 128, 128)).save(tmp_path / "grey" / folder / f"{number}.png")
    trained, evaluated = [], []
    batch_at, prepare = Batches.batch_at, EvalTransform.__call__

    def record_batch(self: Batches, step: int) -> Any:
        batch = batch_at(self, step)
        trained.extend(batch.images if isinstance(batch.images, list) else [batch.images])
        return batch

    def record_evaluation(self: EvalTransform, *images: Any) -> torch.Tensor:
        evaluated.append(prepare(self, *images))
        return evaluated[-1]

    monkeypatch.setattr(Batches, "batch_at", record_batch)
    monkeypatch.setattr(EvalTransform, "__call__", record_evaluation)
    values = {"data": tmp_path / "grey", "out": tmp_path / "run", "steps": 1, "img_size": 32, "backbone_args": NETWORK}
    run_tiny(verb, **values | OPTIONS[verb])
    assert trained and evaluated
    for images in (*trained, *evaluated):
        torch.testing.assert_close(images, torch.full_like(images, (128 / 255 - 0.5) / 0.5), rtol=0, atol=1e-4)
