"""What "auto" resolves to in detection and segmentation, and why."""

from __future__ import annotations

import math

from frugalvit.config.dense import DetectConfig, SegmentConfig, TransferConfig
from frugalvit.engine.step import steps_per_epoch
from frugalvit.experiment.auto_values import SMALL_NETWORK, AutoValues, Facts, resolve_batch_size
from frugalvit.tasks.dense.pyramid import with_top

_STEPS_ON_CPU = 200


def decide_input(config: TransferConfig, facts: Facts, decisions: AutoValues) -> None:
    """Resolve backbone and input size."""
    on_cpu = facts.device == "cpu"
    reason = "no GPU here: a small model that two cores can train" if on_cpu else "the papers' 28 M parameter Swin"
    decisions.resolve(config, "backbone", "swin_nano" if on_cpu else "swin_tiny_w7", reason)
    if isinstance(config, DetectConfig):
        cap, wanted = (128 if on_cpu else 800), 5 / 3 * facts.side
        rule = "the papers enlarge 480 px to 800"
    else:
        cap, wanted = (128 if on_cpu else 512), float(facts.side)
        rule = "crops as high as the images"
    size = max(32, min(cap, round(wanted / 32) * 32))
    decisions.resolve(config, "img_size", size, f"short sides are about {facts.side} px, {rule}; at most {cap} px here")


def decide_length(config: TransferConfig, facts: Facts, decisions: AutoValues) -> None:
    """Resolve batch, length and learning rate."""
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
    """Return the papers' learning rate, scaled with the square root of the batch; ten times it if small.

    ``swin_nano`` at 96 px, batch 4, one seed, with multiples of the papers' 1e-4 (detection) and 6e-5 (segmentation):

    | data | steps | score | 1 × | 4 × | 10 × | more |
    | --- | --- | --- | --- | --- | --- | --- |
    | 160 images of squares | 200 | box AP | 0.02 | 0.15 | 0.33 | 0.46 (20 ×) |
    | 160 images of squares, discs, triangles | 600 | mIoU | 0.38 | 0.51 | 0.63 | 0.77 (33 ×) |
    | CamVid | 400 | mIoU | 0.16 | 0.19 | 0.22 | 0.21 (33 ×) |
    | 60 images of squares, after EsViT | | box AP | 0.04 | | 0.35 | |
    | CamVid, after EsViT | | mIoU | 0.17 | | 0.22 | |
    """
    small = 0 < parameters < SMALL_NETWORK
    anchor = (1e-4 if detecting else 6e-5) * (10 if small else 1)
    source = "ten times the papers', for a small network" if small else "the papers'"
    lr = float(f"{anchor * math.sqrt(batch / 16):.2g}")
    return lr, f"{anchor:g} at batch 16 ({source}), scaled with the square root to batch {batch}"


def transfer_epochs(facts: Facts, batch: int, detecting: bool) -> tuple[float, str]:
    """Return the papers' 12 (detection) or 127 (segmentation) epochs, and more if those are few steps."""
    per_epoch = steps_per_epoch(facts.images, batch)
    if facts.device == "cpu":
        epochs = max(1, round(_STEPS_ON_CPU / per_epoch))
        return epochs, f"about {epochs * per_epoch} steps, which a CPU can do in reasonable time"
    published, min_steps = (12, 3_000) if detecting else (127, 4_000)
    epochs = max(published, min(200, math.ceil(min_steps / per_epoch)))
    reason = f"{per_epoch} steps per epoch: at least {min_steps:,} steps or 200 epochs, never fewer than {published}"
    return epochs, reason


def decide_detector(
    config: DetectConfig,
    dim: int,
    strides: list[float],
    has_masks: bool,
    decisions: AutoValues,
    about_masks: str = "the data's",
) -> None:
    """Resolve the sizes of the head from the backbone's width, the pyramid's strides and the input size."""
    decisions.resolve(config, "masks", has_masks, about_masks)
    channels = min(256, max(32, dim // 3 // 32 * 32))
    decisions.resolve(config, "detector.channels", channels, f"a third of the backbone's {dim}, at most 256")
    assert isinstance(config.detector.channels, int)
    hidden = 4 * config.detector.channels
    decisions.resolve(config, "detector.hidden", hidden, "four times the pyramid's channels (1,024 at 256)")
    _decide_anchors(config, strides, decisions)


def _decide_anchors(config: DetectConfig, strides: list[float], decisions: AutoValues) -> None:
    """Resolve anchors that cover small to large objects with any strides.

    The standard, strides of 4 to 64 px and anchors of 8 strides at 800 px, covers 4 % to 64 % of the short side. A
    finer first stride covers smaller objects. With a coarser one anchors are fewer strides, so that they stay as small.
    Anchors below two strides miss most objects, and three stages end too early: then every level gets several anchor
    sizes. Coarser levels instead would have only a handful of cells in a small image.
    """
    if config.detector.anchors != "auto":
        decisions.resolve(config, "detector.octaves", 1, "--detector.anchors is set")
        return
    side, (finest, *_, coarsest) = short_side(config), with_top(strides)
    standard = min(8.0, max(2.0, 8 * side / 800))
    anchors = round(standard * min(1.0, 4 / finest), 1)
    reason = f"8 strides at 800 px, proportionally less at {side}; at least 2"
    reason += f" of 4 px, and the finest has {finest:g}" if finest > 4 else ""
    decisions.resolve(config, "detector.anchors", anchors, reason)
    largest = min(16 * anchors * finest, side)
    more = math.ceil(max(0.0, math.log2(2 / anchors), math.log2(largest / (anchors * coarsest))))
    reach = round(anchors * coarsest * 2**more)
    reason = f"strides of {finest:g} to {coarsest:g} px: anchors of {anchors * finest:.0f} to {reach} px"
    decisions.resolve(config, "detector.octaves", 1 + more, reason)


def decide_segmenter(config: SegmentConfig, dim: int, decisions: AutoValues) -> None:
    """Resolve the channels of the decoder."""
    channels = min(512, max(64, 2 * dim // 3 // 32 * 32))
    decisions.resolve(config, "decoder.channels", channels, f"two thirds of the backbone's {dim}, at most 512")


def decide_drop_path(config: TransferConfig, decisions: AutoValues) -> None:
    """Resolve stochastic depth; detection uses the model's own."""
    if isinstance(config, SegmentConfig):
        decisions.resolve(config, "drop_path", 0.2, "the paper's")


def short_side(config: TransferConfig) -> int:
    """Return the resolved --img-size."""
    assert isinstance(config.img_size, int)
    return config.img_size
