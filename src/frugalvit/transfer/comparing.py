"""``frugalvit detect compare`` and ``segment compare``: the same runner, tables and tests as ``frugalvit compare``."""

from __future__ import annotations

from frugalvit.config.transfer import DetectCompareConfig, DetectConfig, SegmentCompareConfig, SegmentConfig
from frugalvit.results import Result
from frugalvit.training.compare import compare_runs
from frugalvit.transfer import detect_commands, segment_commands


def detect(config: DetectCompareConfig) -> Result:
    return compare_runs(config, DetectConfig, detect_commands.train, "detect compare")


def segment(config: SegmentCompareConfig) -> Result:
    return compare_runs(config, SegmentConfig, segment_commands.train, "segment compare")
