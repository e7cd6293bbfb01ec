"""What "auto" means for detection and segmentation: each value with its reason, from facts about data and machine."""

from __future__ import annotations

import math

from frugalvit.config.dense import DetectConfig, SegmentConfig, TransferConfig
from frugalvit.engine.step import steps_per_epoch
from frugalvit.experiment.auto_values import SMALL_NETWORK, AutoValues, Facts, resolve_batch_size
from frugalvit.tasks.dense.pyramid import with_top

_STEPS_ON_CPU = 200


def decide_input(config: TransferConfig, facts: Facts, decisions: AutoValues) -> None:
    """Backbone and input size."""
    on_cpu = facts.device == "cpu"
    reason = "no GPU here: a small model that two cores can train" if on_cpu else "the papers' 28 M parameter Swin"
    decisions.resolve(config, "backbone", "swin_nano" if on_cpu else "swin_tiny_w7", reason)
    if isinstance(config, DetectConfig):
        cap, wanted = (128 if on_cpu else 800), 5 / 3 * facts.side
        words = "the papers enlarge 480 px to 800"
    else:
        cap, wanted = (128 if on_cpu else 512), float(facts.side)
        words = "crops as high as the images"
    size = max(32, min(cap, round(wanted / 32) * 32))
    decisions.resolve(
        config, "img_size", size, f"short sides are about {facts.side} px, {words}; at most {cap} px here"
    )


def decide_length(config: TransferConfig, facts: Facts, decisions: AutoValues) -> None:
    """Batch, length and learning rate."""
    detecting = isinstance(config, DetectConfig)
    most = 4 if facts.device == "cpu" else 16
    batch = max(2, min(most, facts.images // 8))
    reason = "the papers' 16" if batch == 16 else f"{facts.images:,} images, {facts.device}"
    batch = resolve_batch_size(config, facts.images, (batch, reason), decisions)
    if config.steps is None:
        epochs, reason = transfer_epochs(facts, batch, detecting)
        decisions.resolve(config, "epochs", epochs, reason)
    decisions.resolve(config, "lr", *transfer_lr(batch, facts.parameters, detecting=detecting))


def transfer_lr(batch: int, parameters: int, *, detecting: bool) -> tuple[float, str]:
    """The papers fine-tune: 1e-4 (detection) and 6e-5 (segmentation) at batch 16, with the root of the batch.

    A small network wants more. ``swin_nano`` at 96 px, batch 4, one seed, from random weights with one, four, ten and
    more times that rate: box AP 0.02, 0.15, 0.33, 0.46 (20 times) on 160 drawn pictures of coloured squares after 200
    steps; mIoU 0.38, 0.51, 0.63, 0.77 (33 times) on as many of squares, discs and triangles after 600, and 0.16, 0.19,
    0.22, 0.21 (33 times) on CamVid after 400, which has the most at ten times. After EsViT it wants no less, with one
    and ten times: AP 0.04 and 0.35 on 60 such pictures, mIoU 0.17 and 0.22 on CamVid.
    """
    small = 0 < parameters < SMALL_NETWORK
    anchor = (1e-4 if detecting else 6e-5) * (10 if small else 1)
    whose = "ten times the papers', for a small network" if small else "the papers'"
    lr = float(f"{anchor * math.sqrt(batch / 16):.2g}")
    return lr, f"{anchor:g} at batch 16 ({whose}), scaled with the square root to batch {batch}"


def transfer_epochs(facts: Facts, batch: int, detecting: bool) -> tuple[float, str]:
    """The papers' 12 (detection) and 127 (segmentation) epochs, and more where that would be few steps."""
    per_epoch = steps_per_epoch(facts.images, batch)
    if facts.device == "cpu":
        epochs = max(1, round(_STEPS_ON_CPU / per_epoch))
        return epochs, f"about {epochs * per_epoch} steps: what a CPU does in reasonable time"
    published, least = (12, 3_000) if detecting else (127, 4_000)
    epochs = max(published, min(200, math.ceil(least / per_epoch)))
    return epochs, f"{per_epoch} steps an epoch: at least {least:,} steps or 200 epochs, never fewer than {published}"


def decide_detector(
    config: DetectConfig,
    dim: int,
    strides: list[float],
    has_masks: bool,
    decisions: AutoValues,
    about_masks: str = "the data's",
) -> None:
    """The sizes of the heads, from the backbone's width, its pyramid's strides and the input's size."""
    decisions.resolve(config, "masks", has_masks, about_masks)
    channels = min(256, max(32, dim // 3 // 32 * 32))
    decisions.resolve(config, "detector.channels", channels, f"a third of the backbone's {dim}, at most 256")
    assert isinstance(config.detector.channels, int)
    hidden = 4 * config.detector.channels
    decisions.resolve(config, "detector.hidden", hidden, "four times the pyramid's channels (1,024 at 256)")
    _decide_anchors(config, strides, decisions)


def _decide_anchors(config: DetectConfig, strides: list[float], decisions: AutoValues) -> None:
    """Anchors from small objects to large ones, whatever strides the backbone has.

    What is usual, strides of 4 to 64 px with anchors of 8 strides at 800 px, goes from 4 % of the short side to 64 %.
    A finer first stride goes lower, a coarser one no higher: there the anchors are fewer of its strides. Anchors of
    less than two strides pass by most objects, which lie between two of them, and three stages end too early: then
    every level has anchors of several sizes. Coarser levels instead, each with one size, would have no more than a
    handful of places in a small picture.
    """
    if config.detector.anchors != "auto":  # given, or of a run before there were octaves: one size on every level
        decisions.resolve(config, "detector.octaves", 1, "the anchors are given")
        return
    side, (finest, *_, coarsest) = short_side(config), with_top(strides)
    usual = min(8.0, max(2.0, 8 * side / 800))
    anchors = round(usual * min(1.0, 4 / finest), 1)
    words = f"8 strides at 800 px, as much less at {side}; at least 2"
    words += f" of 4 px, and the finest has {finest:g}" if finest > 4 else ""
    decisions.resolve(config, "detector.anchors", anchors, words)
    largest = min(16 * anchors * finest, side)
    more = math.ceil(max(0.0, math.log2(2 / anchors), math.log2(largest / (anchors * coarsest))))
    reach = round(anchors * coarsest * 2**more)
    words = f"strides of {finest:g} to {coarsest:g} px: anchors of {anchors * finest:.0f} to {reach} px"
    decisions.resolve(config, "detector.octaves", 1 + more, words)


def decide_segmenter(config: SegmentConfig, dim: int, decisions: AutoValues) -> None:
    channels = min(512, max(64, 2 * dim // 3 // 32 * 32))
    decisions.resolve(config, "decoder.channels", channels, f"two thirds of the backbone's {dim}, at most 512")


def decide_drop_path(config: TransferConfig, decisions: AutoValues) -> None:
    if isinstance(config, SegmentConfig):
        decisions.resolve(config, "drop_path", 0.2, "the paper's")


def short_side(config: TransferConfig) -> int:
    """--img-size, decided."""
    assert isinstance(config.img_size, int)
    return config.img_size
