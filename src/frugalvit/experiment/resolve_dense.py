"""The rules for "auto" in detection and segmentation, each with its reason."""

import math
from typing import TypeVar

from frugalvit.config import defaults
from frugalvit.config.defaults import Facts
from frugalvit.config.dense import DetectConfig, SegmentConfig, TransferConfig
from frugalvit.config.resolved import ResolvedDetectConfig, ResolvedSegmentConfig
from frugalvit.engine.step import steps_per_epoch, total_steps
from frugalvit.errors import UserError
from frugalvit.experiment.resolve import AutoValues, describe_interval, resolve_batch_size

D = TypeVar("D", bound=TransferConfig)

_FEWEST_FOR_BATCH_NORM = 8


def resolve_dense_input(config: D, facts: Facts, auto: AutoValues) -> D:
    """Resolve backbone and input size: the short side (detection), or the side of a crop (segmentation)."""
    rule = defaults.published_backbone if config.pretrained else defaults.papers_backbone
    auto.choose("backbone", config.backbone, *rule(facts.device))
    on_cpu = facts.device == "cpu"
    if isinstance(config, DetectConfig):
        limit, wanted, rule = (128 if on_cpu else 800), 5 / 3 * facts.side, "the papers enlarge 480 px to 800"
    else:
        limit, wanted, rule = (128 if on_cpu else 512), float(facts.side), "crops as high as the images"
    size = max(32, min(limit, round(wanted / 32) * 32))
    reason = f"short sides are about {facts.side} px, {rule}; at most {limit} px here"
    auto.choose("img_size", config.img_size, size, reason)
    return auto.apply(config, type(config))


def resolve_detection(
    config: DetectConfig, facts: Facts, strides: list[float], masks: tuple[int, int], auto: AutoValues
) -> ResolvedDetectConfig:
    """Resolve what a detector needs: length, learning rate, heads, anchors, evaluation.

    strides: of all levels of the pyramid, the top level included
    masks:   the number of training objects with a mask, and of all
    """
    batch, length = _resolve_length(config, facts, auto, detecting=True)
    masked, count = masks
    auto.choose("masks", config.masks, masked == count, f"{masked:,} of {count:,} training objects have one; all must")
    options, reason = config.detector, f"a third of the backbone's {facts.dim}, at most 256"
    channels = auto.choose("detector.channels", options.channels, min(256, max(32, facts.dim // 3 // 32 * 32)), reason)
    auto.choose("detector.hidden", options.hidden, 4 * channels, "four times the pyramid's channels (1,024 at 256)")
    _resolve_anchors(config, int(config.img_size), strides, auto)
    _resolve_interval(config, facts, batch, length, auto)
    return auto.apply(config, ResolvedDetectConfig)


def resolve_segmentation(config: SegmentConfig, facts: Facts, auto: AutoValues) -> ResolvedSegmentConfig:
    """Resolve what a segmenter needs: length, learning rate, decoder, evaluation."""
    batch, length = _resolve_length(config, facts, auto, detecting=False)
    channels = min(512, max(64, 2 * facts.dim // 3 // 32 * 32))
    reason = f"two thirds of the backbone's {facts.dim}, at most 512"
    auto.choose("decoder.channels", config.decoder.channels, channels, reason)
    together = batch // config.accumulate
    if together == 1 and config.decoder.norm == "batch":
        raise UserError("--decoder.norm batch needs two images at once. Raise --batch, or use --decoder.norm group.")
    norm = "batch" if together >= _FEWEST_FOR_BATCH_NORM else "group"
    auto.choose("decoder.norm", config.decoder.norm, norm, f"{together} images at once; batch from 8, as published")
    _resolve_interval(config, facts, batch, length, auto)
    return auto.apply(config, ResolvedSegmentConfig)


def _resolve_length(config: TransferConfig, facts: Facts, auto: AutoValues, *, detecting: bool) -> tuple[int, float]:
    """Resolve batch size, epochs and learning rate; return batch size and epochs."""
    most = 4 if facts.device == "cpu" else 16
    batch = max(2, min(most, facts.images // 8))
    reason = "the papers' 16" if batch == 16 else f"{facts.images:,} images, {facts.device}"
    batch, epochs = resolve_batch_size(config, facts.images, (batch, reason), auto), 0.0
    if config.steps is None:
        epochs = auto.choose("epochs", config.epochs, *defaults.dense_epochs(facts, batch, detecting))
    auto.choose("lr", config.lr, *defaults.dense_lr(batch, facts.parameters, detecting=detecting))
    return batch, epochs


def _resolve_interval(config: TransferConfig, facts: Facts, batch: int, epochs: float, auto: AutoValues) -> None:
    """Resolve the steps between evaluations: an epoch, at most ten evaluations."""
    steps, per_epoch = total_steps(config.steps, epochs, facts.images, batch), steps_per_epoch(facts.images, batch)
    every = max(per_epoch, -(-steps // 10))
    auto.choose("evaluate_every", config.evaluate_every, every, describe_interval(every, steps, per_epoch))
    auto.choose("weights", config.weights, *defaults.exported_weights(facts))


def _resolve_anchors(config: DetectConfig, side: int, strides: list[float], auto: AutoValues) -> None:
    """Resolve anchors that reach from small objects to large ones, for any strides.

    The standard is strides of 4 to 64 px with anchors of 8 strides at 800 px: 4 % to 64 % of the short side. A coarser
    first stride gets fewer strides per anchor, so that small objects stay in reach. In two cases every level has
    several sizes: anchors below two strides miss most objects, which lie between two anchors; and three stages end too
    early. Coarser levels with one size each would have only a few cells in a small image.
    """
    options = config.detector
    if options.anchors != "auto":
        auto.choose("detector.octaves", options.octaves, 1, "--detector.anchors is set")
        return
    finest, *_, coarsest = strides
    anchors = round(min(8.0, max(2.0, 8 * side / 800)) * min(1.0, 4 / finest), 1)
    reason = f"8 strides at 800 px, proportionally less at {side}; at least 2"
    reason += f" of 4 px, and the finest has {finest:g}" if finest > 4 else ""
    auto.choose("detector.anchors", options.anchors, anchors, reason)
    largest = min(16 * anchors * finest, side)
    extra = math.ceil(max(0.0, math.log2(2 / anchors), math.log2(largest / (anchors * coarsest))))
    reach = round(anchors * coarsest * 2**extra)
    reason = f"strides of {finest:g} to {coarsest:g} px: anchors of {anchors * finest:.0f} to {reach} px"
    auto.choose("detector.octaves", options.octaves, 1 + extra, reason)
