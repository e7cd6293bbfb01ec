"""Every option has an effect: values that differ change what is measured where the option is used."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.backbones import create_backbone
from frugalvit.config.base import merge, set_dotted
from frugalvit.config.dense import DetectConfig, SegmentConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.data.loader import Batch
from frugalvit.tasks.classification import train
from frugalvit.tasks.detection import commands as detect_commands
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.tasks.segmentation import commands as segment_commands
from helpers.tiny_runs import resolve

STEPS, SIDE = 12, 32
SMALL = {
    "data": "x",
    "backbone": "swin_nano",
    "backbone_args": {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]},
    "img_size": SIDE,
    "steps": STEPS,
    "batch": 8,
    "lr": 1.0,
}
HEADS = {"matching": {"prototypes": 16, "hidden": 8, "momentum": 0.9, "teacher_temp": 0.08, "teacher_temp_start": 0.04}}
PLAIN_CROPS = {"crops": {"jitter": [0, 0, 0, 0], "grayscale": 0, "solarize": 0, "blur_first": 0, "blur_global": 0,
                         "blur_local": 0, "blur_sigma": [0.1, 2], "flip": 0, "local_crops": 2}}  # fmt: skip
PLAIN = {"augment": {"crop": "center", "flip": 0, "operations": 0, "erasing": 0}}
IDENTITY = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}


def made(kind: Any, option: str, value: Any, *more: dict[str, Any]) -> Any:
    values: dict[str, Any] = SMALL
    for part in more:
        values = merge(values, part)
    nested: dict[str, Any] = {}
    set_dotted(nested, option, value)
    return kind.parse(merge(values, nested))


# -- schedules


def make_run(kind: Any, option: str, value: Any, *more: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return the configuration, the plan and the task of a run of 12 steps, of which 8 are an epoch."""
    config = resolve(made(kind, option, value, *more))
    module: Any = train if kind is TrainConfig else pretrain
    network = module.make_network(config, 2) if kind is TrainConfig else module.make_network(config)
    plan = module.make_plan(config, images=64, world=1)
    return config, plan, module.make_task(config, network, plan)


def last_lr(kind: Any, option: str, *more: dict[str, Any]) -> Callable[[Any], float]:
    return lambda value: make_run(kind, option, value, HEADS if kind is PretrainConfig else {}, *more)[1].lr.at(STEPS)


CUT_OFF = {"optimizer": {"warmup": 0, "min_lr": 0}, "localization": {"weight": 1.0, "schedule": "ramp"}, "ema": 0.0}


def last_weight_cut_off(value: float) -> float:
    """λ at the end; its ramp rises in the first fifth of the run."""
    more = {"localization": {"variant": "l1", "grid_size": 7}}
    return make_run(TrainConfig, "stretch", value, CUT_OFF, more)[2].weight.at(STEPS)


def last_weight_decay(value: float) -> float:
    return make_run(PretrainConfig, "weight_decay_end", value, HEADS)[1].weight_decay.at(STEPS)


def second_temperature(value: float) -> float:
    """The teacher's temperature at step 1; 0.25 epochs of warm-up are the first 2 steps."""
    return make_run(PretrainConfig, "matching.teacher_temp_warmup", value, HEADS)[2].teacher_temp.at(1)


def steps_with_frozen_prototypes(value: float) -> int:
    """Count them in the first steps of a run of 40 steps, of which 8 are an epoch."""
    longer = {"steps": 40, "matching": {"region_weight": 0.5}}
    config, _, task = make_run(PretrainConfig, "matching.hold_last", value, HEADS, longer)
    task.batches = SimpleNamespace(augment=SimpleNamespace(config=config.crops))
    optimizer = torch.optim.AdamW(task.parameters(), 0.01, weight_decay=0.1)
    prototypes = [level.student.last_layer.weight_v for level in (task.views, task.regions)]
    crops: Any = [torch.randn(2, 3, SIDE, SIDE) for _ in range(config.crops.global_crops)]
    frozen = []
    for step in range(6):
        before = [weight.clone() for weight in prototypes]
        optimizer.zero_grad()
        task(Batch(crops, None, None, torch.arange(2)), step)["loss"].backward()
        task.before_optimizer(step)
        optimizer.step()
        frozen.append([torch.equal(weight, was) for weight, was in zip(prototypes, before, strict=True)])
    count = frozen.count([True, True])
    assert frozen == [[True, True]] * count + [[False, False]] * (6 - count), "both levels, and only at the start"
    return count


def transfer_rate(kind: Any, option: str, step: int) -> Callable[[Any], float]:
    """The learning rate of detection or segmentation at a step of a run without a warm-up, whose highest is 1."""

    def observe(value: Any) -> float:
        module: Any = detect_commands if kind is DetectConfig else segment_commands
        config = resolve(made(kind, option, value, {"optimizer": {"warmup": 0}}))
        return module.make_schedule(config, STEPS).at(step)

    return observe


def last_ema_rate(value: float) -> float:
    """How much of itself the average keeps late in a run, after all weights grow by 1."""
    _, _, task = make_run(TrainConfig, "ema", value, {"localization": {"weight": 0.0}})
    weight, average = (next(network.parameters()) for network in (task.backbone, task.average))
    with torch.no_grad():
        weight += 1
    task.after_step(10**6)
    return (weight - average).mean().item()


# -- what the network stores


def numbers_stored_for_backward(value: bool) -> int:
    stored = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal stored
        stored += tensor.numel()
        return tensor

    network = train.make_network(made(TrainConfig, "checkpoint_activations", value), 2).train()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        network(torch.zeros(4, 3, SIDE, SIDE))
    return stored


# -- pictures


def slope(images: int) -> torch.Tensor:
    """Images that get brighter from left to right: the range of brightness shows the width of a crop."""
    line = torch.linspace(0, 255, 64).round().byte()
    return line.expand(images, 3, 64, 64).contiguous()


def noise(images: int) -> torch.Tensor:
    return torch.randint(0, 256, (images, 3, 64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def crops(option: str, value: Any, pictures: torch.Tensor, *more: dict[str, Any]) -> list[torch.Tensor]:
    cut = MultiCrop(made(PretrainConfig, option, value, PLAIN_CROPS, *more).crops, SIDE, **IDENTITY)
    return cut(pictures, torch.full((len(pictures), 2), 64), torch.Generator().manual_seed(0))


def augmented(option: str, value: Any, pictures: torch.Tensor, *more: dict[str, Any]) -> torch.Tensor:
    vary = TrainAugment(made(TrainConfig, option, value, PLAIN, *more).augment, SIDE, **IDENTITY)
    return vary(pictures, torch.full((len(pictures), 2), 64), torch.Generator().manual_seed(0))


def shown_by(option: str, view: int) -> Callable[[Any], float]:
    """The mean share of the picture's width that a view shows."""

    def observe(value: Any) -> float:
        seen = crops(option, value, slope(16))[view]
        return (seen.amax((1, 2, 3)) - seen.amin((1, 2, 3))).mean().item()

    return observe


def jittered_crops(value: float) -> float:
    strong = {"crops": {"jitter": [0.8, 0.8, 0.8, 0.2]}}
    pairs = zip(
        crops("crops.jitter_prob", value, noise(16), strong), crops("crops.jitter_prob", 0, noise(16)), strict=True
    )
    return torch.cat([(one != other).flatten(1).any(1) for one, other in pairs]).float().mean().item()


def jittered_images(value: float) -> float:
    strong = {"augment": {"jitter": [0.8, 0.8, 0.8, 0.2]}}
    one, other = (augmented("augment.jitter_prob", share, noise(16), strong) for share in (value, 0))
    return (one != other).flatten(1).any(1).float().mean().item()


def spread_of_magnitudes(value: float) -> float:
    config = made(TrainConfig, "augment.magnitude_std", value).augment
    drawn = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    return TrainAugment(config, SIDE).rand.magnitudes(drawn).std().item()


def erased_share(value: tuple[float, float]) -> float:
    black = torch.zeros(64, 3, 64, 64, dtype=torch.uint8)
    seen = augmented("augment.erasing_area", value, black, {"augment": {"erasing": 1}})
    return (seen != 0).any(1).float().mean().item()


# -- detection and segmentation


def longest_side(value: float) -> int:
    from frugalvit.data.formats.coco import CocoData
    from frugalvit.tasks.detection.commands import make_task

    sizes = {"masks": False, "detector": {"channels": 8, "hidden": 8, "anchors": 8, "octaves": 1}}
    config = resolve(made(DetectConfig, "longest", value, sizes))
    backbone = create_backbone("swin_nano", img_size=SIDE)
    task = make_task(config, CocoData("", ("a",), (1,), {}), backbone)
    return max(task.view.fit(100, 1000, SIDE))


def classes_of_scenes(value: int, folder: Path) -> int:
    for kind in ("images", "masks"):
        for number in range(4):
            path = folder / kind / "train" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.eye(8, dtype=np.uint8)).save(path)
    return len(
        segment_commands.open_annotations(made(SegmentConfig, "label_count", value, {"data": str(folder)})).classes
    )


CASES: dict[str, tuple[Callable[..., float], list[tuple[Any, Any]]]] = {
    "optimizer.min_lr, train": (last_lr(TrainConfig, "optimizer.min_lr"), [(0.0, 0.0), (0.25, 0.25)]),
    "optimizer.min_lr, pretrain": (last_lr(PretrainConfig, "optimizer.min_lr"), [(0.0, 0.0), (0.25, 0.25)]),
    "stretch, the rate": (
        last_lr(TrainConfig, "stretch", CUT_OFF),
        [(1.0, 0.0), (3.0, 0.75)],
    ),  # as in Drloc's released code
    "stretch, λ": (last_weight_cut_off, [(1.0, 0.0), (3.0, 1 - 10 / 34)]),
    "weight_decay_end": (last_weight_decay, [(0.1, 0.1), (0.4, 0.4)]),
    "matching.teacher_temp_warmup": (second_temperature, [(0.0, 0.08), (0.25, 0.08), (0.5, 0.04 + 0.04 / 3)]),
    "matching.hold_last": (steps_with_frozen_prototypes, [(0.0, 0), (0.25, 2), (9.0, 4)]),  # a tenth of the run at most
    "ema": (last_ema_rate, [(0.9, 0.9), (0.5, 0.5)]),
    "optimizer.milestones, detect": (
        transfer_rate(DetectConfig, "optimizer.milestones", STEPS // 2),
        [((0.75,), 1.0), ((0.5,), 0.1), ((0.25, 0.5), 0.01)],
    ),
    "optimizer.factor, detect": (transfer_rate(DetectConfig, "optimizer.factor", STEPS), [(0.5, 0.25), (1.0, 1.0)]),
    "optimizer.power, segment": (
        transfer_rate(SegmentConfig, "optimizer.power", STEPS // 2),
        [(1.0, 0.5), (2.0, 0.25)],
    ),
    "optimizer.min_lr, segment": (transfer_rate(SegmentConfig, "optimizer.min_lr", STEPS), [(0.0, 0.0), (0.25, 0.25)]),
    "crops.global_scale": (shown_by("crops.global_scale", 0), [((0.04, 0.04), 0.2), ((1, 1), 1.0)]),
    "crops.local_scale": (shown_by("crops.local_scale", 2), [((0.04, 0.04), 0.2), ((1, 1), 1.0)]),
    "crops.jitter_prob": (jittered_crops, [(0.0, 0.0), (1.0, 1.0)]),
    "augment.jitter_prob": (jittered_images, [(0.0, 0.0), (1.0, 1.0)]),
    "augment.magnitude_std": (spread_of_magnitudes, [(0.0, 0.0), (0.25, 0.25), ("inf", 9 / 12**0.5)]),
    "augment.erasing_area": (erased_share, [((0.1, 0.1), 0.1), ((0.3, 0.3), 0.3)]),
    "longest": (longest_side, [(1.0, SIDE), (2.0, 2 * SIDE)]),
    "label_count": (classes_of_scenes, [(2, 2), (5, 5), (256, 255)]),  # label 255 is ignored
}


@pytest.mark.parametrize(
    ("observe", "value", "seen"),
    [
        pytest.param(observe, *pair, id=f"{name}={pair[0]}")
        for name, (observe, pairs) in CASES.items()
        for pair in pairs
    ],
)
def test_option_has_its_effect(observe: Callable[..., float], value: Any, seen: float, tmp_path: Path) -> None:
    measured = observe(value, tmp_path) if observe is classes_of_scenes else observe(value)
    assert measured == (seen if isinstance(seen, int) else pytest.approx(seen, rel=0.1, abs=0.01))


def test_checkpoint_activations_stores_less() -> None:
    assert numbers_stored_for_backward(True) < 0.8 * numbers_stored_for_backward(False)


@pytest.mark.parametrize(
    ("option", "views"), [("blur_first", [0]), ("blur_global", [1]), ("blur_local", [2, 3])], ids=str
)
def test_blur_affects_its_own_views(option: str, views: list[int]) -> None:
    blurred, sharp = (crops(f"crops.{option}", share, noise(4)) for share in (1.0, 0.0))
    assert [view for view in range(4) if not torch.equal(blurred[view], sharp[view])] == views
