"""What "auto" resolves to, with reasons."""

from __future__ import annotations

import pytest

from frugalvit.cli.parser import make_parser
from frugalvit.config.dense import DetectConfig, SegmentConfig, TransferConfig
from frugalvit.errors import UserError
from frugalvit.experiment.auto_values import AutoValues, Facts
from frugalvit.tasks.dense.auto_values import (
    decide_detector,
    decide_drop_path,
    decide_input,
    decide_length,
    decide_segmenter,
    transfer_epochs,
)


@pytest.mark.parametrize(
    ("images", "side", "device", "size", "batch", "epochs"),
    [
        (532, 240, "cuda", 384, 16, 91),  # a small subset of COCO
        (118_000, 480, "cuda", 800, 16, 12),  # COCO itself: the papers' 12 epochs at 800 px
        (40, 64, "cuda", 96, 5, 200),
        (532, 240, "cpu", 128, 4, 2),
    ],
)
def test_detection(images: int, side: int, device: str, size: int, batch: int, epochs: int) -> None:
    config, decisions = DetectConfig.parse({"data": "x"}), AutoValues()
    facts = Facts(images, 80, side, device)
    decide_input(config, facts, decisions)
    decide_length(config, facts, decisions)
    assert (config.img_size, config.batch, config.epochs) == (size, batch, epochs)
    assert config.lr == pytest.approx(1e-4 * (batch / 16) ** 0.5, rel=0.05)
    assert all(decision.reason for decision in decisions)


@pytest.mark.parametrize(
    ("dim", "size", "channels", "hidden", "anchors"),
    [(768, 800, 256, 1024, 8.0), (768, 384, 256, 1024, 3.8), (128, 128, 32, 128, 2.0), (2048, 800, 256, 1024, 8.0)],
)
def test_head_sizes_follow_backbone_and_input(dim: int, size: int, channels: int, hidden: int, anchors: float) -> None:
    config = DetectConfig.parse({"data": "x", "img_size": size})
    decide_detector(config, dim, [4, 8, 16, 32], True, AutoValues())
    found = config.detector
    assert (found.channels, found.hidden, found.anchors, config.masks) == (channels, hidden, anchors, True)


@pytest.mark.parametrize(
    ("images", "side", "size", "epochs"), [(367, 240, 256, 182), (20_210, 512, 512, 127), (2_000, 1000, 512, 127)]
)
def test_segmentation(images: int, side: int, size: int, epochs: int) -> None:
    config, decisions = SegmentConfig.parse({"data": "x"}), AutoValues()
    facts = Facts(images, 11, side, "cuda")
    decide_drop_path(config, decisions)
    decide_input(config, facts, decisions)
    decide_length(config, facts, decisions)
    decide_segmenter(config, 768, decisions)
    assert (config.img_size, config.batch, config.epochs, config.lr) == (size, 16, epochs, 6e-5)
    assert (config.drop_path, config.decoder.channels) == (0.2, 512)


@pytest.mark.parametrize(("kind", "published"), [(DetectConfig, 1e-4), (SegmentConfig, 6e-5)])
@pytest.mark.parametrize(("parameters", "factor"), [(900_000, 10), (28_000_000, 1)])
def test_small_networks_have_a_higher_rate(
    kind: type[TransferConfig], published: float, parameters: int, factor: int
) -> None:
    config, decisions = kind.parse({"data": "x", "batch": 16, "steps": 1}), AutoValues()
    decide_length(config, Facts(100, 2, 64, "cuda", parameters=parameters), decisions)
    assert config.lr == pytest.approx(factor * published)
    assert ("for a small network" in decisions[-1].reason) == (factor > 1)


def test_set_values_are_not_resolved() -> None:
    config, decisions = (
        DetectConfig.parse({"data": "x", "img_size": 320, "batch": 8, "lr": 3e-4, "steps": 7}),
        AutoValues(),
    )
    facts = Facts(5, 2, 100, "cuda")
    decide_input(config, facts, decisions)
    decide_length(config, facts, decisions)
    assert (config.img_size, config.lr, config.epochs) == (320, 3e-4, "auto")
    assert config.batch == 5, "there are 5 images"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DetectConfig, "detect takes one number: the short side"),
        (SegmentConfig, "segment takes one number: the side of"),
    ],
)
def test_img_size_is_one_number(kind: type[TransferConfig], message: str) -> None:
    for pair in ((480, 640), "480,640"):
        with pytest.raises(UserError, match=rf"^img_size = .*480.*640.*: {message}"):
            kind.parse({"data": "x", "img_size": pair})
    sizes = ("auto", 480, "480", (480, 480), "480,480")
    assert [kind.parse({"data": "x", "img_size": size}).img_size for size in sizes] == ["auto", 480, 480, 480, 480]
    shown = " ".join(make_parser(kind, "x", "y").format_help().split())
    assert f"--img-size N|auto {message.partition(': the ')[2]}" in shown


def test_a_cpu_gets_a_few_hundred_steps() -> None:
    for images in (10, 100, 1000):
        epochs, reason = transfer_epochs(Facts(images, 2, 64, "cpu"), 4, True)
        assert 100 <= epochs * max(1, images // 4) <= 300 and "CPU" in reason
