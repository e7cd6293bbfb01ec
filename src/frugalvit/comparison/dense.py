"""``frugalvit detect compare`` and ``segment compare``."""

from frugalvit.comparison.compare import compare_runs
from frugalvit.config.dense import DetectCompareConfig, DetectConfig, SegmentCompareConfig, SegmentConfig
from frugalvit.tasks.detection import commands
from frugalvit.tasks.segmentation import commands as segment_commands
from frugalvit.utils.tables import CommandResult


def detect(config: DetectCompareConfig) -> CommandResult:
    """Compare settings of ``frugalvit detect train``."""
    return compare_runs(config, DetectConfig, commands.train, "detect compare")


def segment(config: SegmentCompareConfig) -> CommandResult:
    """Compare settings of ``frugalvit segment train``."""
    return compare_runs(config, SegmentConfig, segment_commands.train, "segment compare")
