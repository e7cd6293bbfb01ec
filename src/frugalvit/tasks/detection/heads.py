"""Detector heads by name (``--head``): the interface of the second stage, and how one is built.

A new head is one file with a subclass of :class:`DetectorHead` and one line in ``DETECTOR_HEADS`` of config/dense.py.
"""

import importlib
from abc import ABC, abstractmethod

from torch import Tensor, nn

from frugalvit.config.dense import DETECTOR_HEADS
from frugalvit.errors import UserError, did_you_mean
from frugalvit.tasks.dense.pyramid import FeaturePyramid
from frugalvit.tasks.detection.layers import DetectorSpec, Target


class DetectorHead(nn.Module, ABC):
    """Second stage of a detector: proposed regions -> objects. ``Detector`` builds it as ``cls(spec, features)``.

    score_thresh: detections with a lower score are dropped; predictions may lower it
    """

    score_thresh: float

    @abstractmethod
    def forward(
        self,
        features: dict[str, Tensor],
        proposals: list[Tensor],
        sizes: list[tuple[int, int]],
        targets: list[Target] | None = None,
    ) -> tuple[list[Target], dict[str, Tensor]]:
        """Return (detections, losses): losses by name while training, else one dict of detections per image.

        features:   maps of the pyramid by level, (B, C, h, w)
        proposals:  regions (r, 4) of each image in pixels of the input
        sizes:      (height, width) of each image in the padded input
        detections: boxes (n, 4), labels (n,), scores (n,), and masks (n, 1, m, m) if the head predicts masks
        """

    @abstractmethod
    def output_modules(self) -> list[nn.Module]:
        """Return the modules whose outputs are scores and boxes; the task checks these for non-finite values."""


def build_head(spec: DetectorSpec, features: FeaturePyramid) -> DetectorHead:
    """Build the head that ``spec.head`` names."""
    if spec.head not in DETECTOR_HEADS:
        raise UserError(f"There is no detector head '{spec.head}'.{did_you_mean(spec.head, list(DETECTOR_HEADS))}")
    head = DETECTOR_HEADS[spec.head]
    if isinstance(head, str):
        module, _, name = head.partition(":")
        head = getattr(importlib.import_module(module), name)
    return head(spec, features)
