"""The images that k-NN evaluates in pre-training, their name, and whether they choose the best weights."""

import shutil
from pathlib import Path

import pytest

from helpers.tiny_runs import read_metrics, run_tiny, write_images


@pytest.mark.parametrize(
    ("splits", "images", "labels", "split"),
    [
        ({"train": "train", "val": "val"}, "train", "auto", "val"),
        ({"train": "train", "val": "val"}, "train+val", "auto", "sample"),
        ({"train": "train", "val": "test"}, "train", "auto", "test"),
        ({"train": "train", "val": "test"}, "train+val", "auto", "test"),
        ({"train": "train", "val": "test"}, "all", "auto", "sample"),
        ({"train": "train"}, "train", "auto", "sample"),  # leave-one-out
        ({"train": "train"}, "train", "ignore", "sample"),
        ({"train": "test", "val": "val"}, "all", "auto", "sample"),
        ({"train": "test", "val": "val"}, "train+val", "auto", "test"),
        ({"train": "test"}, "all", "auto", "sample"),
    ],
)
def test_only_val_chooses_weights(splits: dict[str, str], images: str, labels: str, split: str, tmp_path: Path) -> None:
    """Images that are trained on are called sample; only val stores best.pt."""
    folder, run = write_images(tmp_path / "all"), tmp_path / "run"
    for source, name in splits.items():
        shutil.copytree(folder / source, tmp_path / "photos" / name)
    data = run_tiny(
        "pretrain", data=tmp_path / "photos", out=run, steps=4, split="given", images=images, label_source=labels
    ).data
    assert {line["split"] for line in read_metrics(run)} == {"train", split}
    assert data["knn_on"] == (None if labels == "ignore" else split) and data["effective_rank"] is not None
    assert (data["best_knn"] is not None) == (split == "val") == (run / "checkpoints" / "best.pt").exists()
