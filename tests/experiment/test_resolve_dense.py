"""The values that "auto" resolves to in detection and segmentation."""

from typing import Any

import pytest

from frugalvit.config.defaults import Facts, dense_epochs
from frugalvit.config.dense import DetectConfig, SegmentConfig
from frugalvit.experiment.resolve import AutoValues
from frugalvit.experiment.resolve_dense import resolve_dense_input, resolve_detection, resolve_segmentation

LEVELS: list[float] = [4, 8, 16, 32, 64]
MASKS = 9, 9


def detector(config: DetectConfig, facts: Facts, auto: AutoValues) -> Any:
    return resolve_detection(resolve_dense_input(config, facts, auto), facts, LEVELS, MASKS, auto)


def segmenter(config: SegmentConfig, facts: Facts, auto: AutoValues) -> Any:
    return resolve_segmentation(resolve_dense_input(config, facts, auto), facts, auto)


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
    auto = AutoValues()
    config = detector(DetectConfig.parse({"data": "x"}), Facts(images, 80, side, device), auto)
    assert (config.img_size, config.batch, config.epochs) == (size, batch, epochs)
    assert config.lr == pytest.approx(1e-4 * (batch / 16) ** 0.5, rel=0.05)
    assert all(value.reason for value in auto)


@pytest.mark.parametrize(
    ("dim", "size", "channels", "hidden", "anchors"),
    [(768, 800, 256, 1024, 8.0), (768, 384, 256, 1024, 3.8), (128, 128, 32, 128, 2.0), (2048, 800, 256, 1024, 8.0)],
)
def test_heads_follow_backbone_and_input(dim: int, size: int, channels: int, hidden: int, anchors: float) -> None:
    facts = Facts(100, 80, size, "cuda", dim=dim)
    config = detector(DetectConfig.parse({"data": "x", "img_size": size}), facts, AutoValues())
    sizes = config.detector
    assert (sizes.channels, sizes.hidden, sizes.anchors, config.masks) == (channels, hidden, anchors, True)


@pytest.mark.parametrize(
    ("images", "side", "size", "epochs"), [(367, 240, 256, 182), (20_210, 512, 512, 127), (2_000, 1000, 512, 127)]
)
def test_segmentation(images: int, side: int, size: int, epochs: int) -> None:
    config = segmenter(SegmentConfig.parse({"data": "x"}), Facts(images, 11, side, "cuda"), AutoValues())
    assert (config.img_size, config.batch, config.epochs, config.lr) == (size, 16, epochs, 6e-5)
    assert config.decoder.channels == 512


@pytest.mark.parametrize(
    ("kind", "rules", "published"), [(DetectConfig, detector, 1e-4), (SegmentConfig, segmenter, 6e-5)]
)
@pytest.mark.parametrize(("parameters", "factor"), [(900_000, 10), (28_000_000, 1)])
def test_small_networks_learn_faster(kind: Any, rules: Any, published: float, parameters: int, factor: int) -> None:
    auto = AutoValues()
    facts = Facts(100, 2, 64, "cuda", parameters=parameters)
    config = rules(kind.parse({"data": "x", "batch": 16, "steps": 1}), facts, auto)
    assert config.lr == pytest.approx(factor * published)
    reason = next(value.reason for value in auto if value.name == "lr")
    assert ("for a small network" in reason) == (factor > 1)


def test_user_values_stay() -> None:
    auto = AutoValues()
    values = {"data": "x", "img_size": 320, "batch": 8, "lr": 3e-4, "steps": 7}
    config = detector(DetectConfig.parse(values), Facts(5, 2, 100, "cuda"), auto)
    assert (config.img_size, config.lr, config.epochs, config.batch) == (320, 3e-4, "auto", 5)
    assert ("batch", "limited by the number of training images") in [(value.name, value.reason) for value in auto]


def test_epochs_on_a_cpu() -> None:
    for images in (10, 100, 1000):
        epochs, reason = dense_epochs(Facts(images, 2, 64, "cpu"), 4, True)
        assert 100 <= epochs * max(1, images // 4) <= 300 and "CPU" in reason


@pytest.mark.parametrize(
    ("device", "backbone"), [("cpu", "vit_tiny_patch16_224"), ("cuda", "swin_tiny_patch4_window7_224")]
)
def test_published_weights_have_a_network(device: str, backbone: str) -> None:
    config = DetectConfig.parse({"data": "x", "pretrained": True})
    assert resolve_dense_input(config, Facts(40, 3, 64, device), AutoValues()).backbone == backbone
