"""Load trained detectors and segmenters in Python: images -> objects, or a class for every pixel."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faster_coco_eval.core import mask as run_length
from torch import Tensor

from frugalvit.data.decode import as_pixels
from frugalvit.data.image_inputs import as_list
from frugalvit.engine import hardware
from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands


@dataclass(frozen=True)
class Detection:
    """An object: box (left, top, width, height in pixels), and mask (H, W) if the model predicts masks."""

    name: str
    score: float
    box: tuple[float, float, float, float]
    mask: np.ndarray | None = None


class _Ready:
    """A trained model for predictions; ``classes`` are the names of its classes."""

    def __init__(self, load: Any, run: str | Path, device: str | torch.device) -> None:
        with hardware.preserve_onednn(), torch.random.fork_rng(devices=[]):
            self._task, facts = load(str(run), str(device))
        self.classes: tuple[str, ...] = tuple(facts["classes"])


class ReadyDetector(_Ready):
    """A trained detector; ``classes`` are the names of its classes."""

    def predict(self, pictures: Any, threshold: float = 0.5) -> list[list[Detection]]:
        """Return the objects of each image with a score of at least ``threshold``, the highest first.

        pictures: a path, a PIL image, a uint8 array (H, W) or (H, W, C), or a list of them
        """
        self._task.net.set_score_threshold(threshold)
        with hardware.cpu_settings(self._task.device):
            results = [self._task.detect([pixels], threshold)[0] for pixels in _tensors(pictures)]
        return [[self._object(entry) for entry in sorted(objects, key=lambda e: -e["score"])] for objects in results]

    def _object(self, entry: dict[str, Any]) -> Detection:
        mask = run_length.decode(entry["segmentation"]).astype(bool) if "segmentation" in entry else None
        return Detection(self.classes[entry["label"] - 1], entry["score"], tuple(entry["bbox"]), mask)


class ReadySegmenter(_Ready):
    """A trained segmenter; ``classes`` are the names of the numbers it predicts."""

    def predict(self, pictures: Any) -> list[np.ndarray]:
        """Return for each image (H, W) the index in ``classes`` of every pixel. Inputs are as for a detector."""
        with hardware.cpu_settings(self._task.device):
            return [self._task.predict([p], self._task.test)[0].cpu().numpy() for p in _tensors(pictures)]


def load_detector(run: str | Path, device: str | torch.device = "auto") -> ReadyDetector:
    """Load the detector of a finished run of ``frugalvit detect train``."""
    return ReadyDetector(commands.load_task, run, device)


def load_segmenter(run: str | Path, device: str | torch.device = "auto") -> ReadySegmenter:
    """Load the segmenter of a finished run of ``frugalvit segment train``."""
    return ReadySegmenter(segment_commands.load_task, run, device)


def _tensors(pictures: Any) -> Iterator[Tensor]:
    """Yield the images as uint8 (3, H, W)."""
    for picture in as_list(pictures):
        pixels = torch.from_numpy(as_pixels(picture)).permute(2, 0, 1)
        yield pixels.expand(3, -1, -1)
