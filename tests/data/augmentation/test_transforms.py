"""Transforms from cached images to network inputs: training, multi-crop and evaluation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from frugalvit.config.data import AugmentConfig, CropsConfig
from frugalvit.data.augmentation.multicrop import MultiCrop, local_crop_size
from frugalvit.data.augmentation.randaugment import ColorJitter, Step
from frugalvit.data.augmentation.transforms import EvalTransform, TrainAugment
from frugalvit.data.decode import decode
from frugalvit.data.rng import generator_for, to_device_packed, uniform
from frugalvit.errors import UserError
from helpers.augment_images import LEVEL, pictures


def sizes_of(images: Tensor) -> Tensor:
    return torch.tensor([images.shape[-2:]]).expand(len(images), 2)


def test_train_augment_shapes_and_repeatability() -> None:
    images = pictures(6, 40, 40)
    augment = TrainAugment(AugmentConfig(grayscale=0.3, blur=0.3, jitter=(0.4, 0.4, 0.2, 0.1)), (48, 36))
    first = augment(images, sizes_of(images), torch.Generator().manual_seed(5))
    again = augment(images, sizes_of(images), torch.Generator().manual_seed(5))
    other = augment(images, sizes_of(images), torch.Generator().manual_seed(6))
    assert first.shape == (6, 3, 48, 36) and torch.equal(first, again) and not torch.equal(first, other)


def test_result_does_not_depend_on_other_images() -> None:
    """So ranks can share a batch."""
    images = pictures(6, 40, 40)
    augment = TrainAugment(AugmentConfig(jitter=(0.4, 0.4, 0.2, 0.1), blur=0.5, grayscale=0.5), 40)
    numbers = uniform(6, augment.columns, torch.Generator().manual_seed(0))
    full = augment.apply(images, sizes_of(images), numbers)
    part = augment.apply(images[3:], sizes_of(images)[3:], numbers[3:])
    torch.testing.assert_close(full[3:], part, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("out_size", [(64, 64), (48, 96), (120, 40)])
def test_crops_are_stretched_only_by_the_ratio(out_size: tuple[int, int]) -> None:
    """The channels hold the position of a pixel, so their slope shows the scale of a crop."""
    down, across = (torch.arange(200) / 200).view(-1, 1).expand(200, 200), (torch.arange(200) / 200).expand(200, 200)
    images = torch.stack([down, across, torch.zeros(200, 200)]).expand(64, 3, 200, 200)
    plain = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    still = {"jitter_prob": 0.0, "grayscale": 0.0, "blur_first": 0.0, "blur_global": 0.0, "blur_local": 0.0}
    crops = CropsConfig(local_size=(24, 72), solarize=0.0, flip=0.0, ratio=(0.8, 1.25), **still)
    views = MultiCrop(crops, out_size, **plain)(images, sizes_of(images), torch.Generator().manual_seed(0))
    train = TrainAugment(quiet(crop="resized", ratio=(0.8, 1.25)), out_size, **plain)
    for view in [train(images, sizes_of(images), torch.Generator().manual_seed(0)), *views]:
        per_row = (view[:, 0, -3, 2] - view[:, 0, 2, 2]) / (view.shape[2] - 5)
        per_column = (view[:, 1, 2, -3] - view[:, 1, 2, 2]) / (view.shape[3] - 5)
        stretch = per_column / per_row
        assert stretch.min() > 0.72 and stretch.max() < 1.4  # boxes are rounded to pixels, and the border is cut
        assert stretch.max() - stretch.min() > 0.2
        assert view[:, :2, 2, 2].std(0).min() > 0.04  # crops have different positions


def quiet(**changes: object) -> AugmentConfig:
    return AugmentConfig(**({"operations": 0, "erasing": 0.0, "flip": 0.0} | changes))


@pytest.mark.parametrize("size", [32, 64, 224])
@pytest.mark.parametrize("shape", [(248, 224), (213, 320)])
def test_single_image_equals_timms_transform(size: int, shape: tuple[int, int]) -> None:
    rows, columns = np.mgrid[: shape[0], : shape[1]]
    waves = [np.sin(rows / 9 + phase) * np.cos(columns / 13 - phase) for phase in (0.0, 1.0, 2.0)]
    pixels = (127.5 + 110 * np.stack(waves, 2)).astype(np.uint8)
    ours = EvalTransform(size)
    theirs = create_transform(
        (3, size, size),
        interpolation=ours.crop.interpolation,
        crop_pct=ours.crop.crop_pct,
        mean=ours.normalize.mean,
        std=ours.normalize.std,
    )
    expected = theirs(Image.fromarray(pixels))
    torch.testing.assert_close(ours.image(pixels)[0], expected, atol=1e-5, rtol=0)


def test_shifts_are_uniform_over_the_border() -> None:
    images = pictures(9, 32, 32)
    augment = TrainAugment(quiet(), 32, mean=(0, 0, 0), std=(1, 1, 1))
    assert augment.crop == "padded"
    numbers = torch.full((9, augment.columns), 0.5, dtype=torch.float64)
    numbers[:, 0] = (torch.arange(9) + 0.5) / 9
    out = augment.apply(images, sizes_of(images), numbers)
    padded = functional.pad(images.float() / 255, [4])
    for shift in range(9):
        torch.testing.assert_close(out[shift], padded[shift, :, shift : shift + 32, 4:36])


@pytest.mark.parametrize("crop", ["padded", "center"])
def test_larger_images_are_resized_and_flipped_once(crop: str) -> None:
    """A padded crop crops twice; two flips would cancel."""
    images = pictures(2, 48, 64)
    plain, flipped = (
        TrainAugment(quiet(crop=crop, padding=0, flip=flip), 32, (0, 0, 0), (1, 1, 1))(
            images, sizes_of(images), torch.Generator()
        )
        for flip in (0.0, 1.0)
    )
    resized = v2.Resize(32, interpolation=InterpolationMode.BICUBIC)(images.float() / 255)
    torch.testing.assert_close(plain, v2.CenterCrop(32)(resized).clamp(0, 1), atol=LEVEL, rtol=0)
    torch.testing.assert_close(flipped, plain.flip(-1))


def test_erased_boxes_have_timms_shapes() -> None:
    images = torch.zeros(200, 3, 80, 80, dtype=torch.uint8)
    augment = TrainAugment(quiet(crop="center", erasing=1.0, erasing_area=(0.1, 0.1)), 80, (0, 0, 0), (1, 1, 1))
    erased = augment(images, sizes_of(images), torch.Generator().manual_seed(0)).any(1)
    shapes = erased.any(2).sum(1) / erased.any(1).sum(1)
    assert 0.29 < shapes.min() < 0.35 and 2.8 < shapes.max() < 3.45
    assert shapes.log().abs().median() == pytest.approx(-np.log(0.3) / 2, abs=0.1)


@pytest.mark.parametrize(("operation", "share"), [("translate_x", 0.45), ("translate_y", 0.45), ("shear_x", 0.15)])
def test_affine_operations_fill_with_the_mean(operation: str, share: float) -> None:
    """Normalization turns the mean into zero."""
    images = torch.full((1, 3, 80, 80), 255, dtype=torch.uint8)
    once = {"operations": 1, "operation_prob": 1.0, "magnitude": 10.0, "magnitude_std": 0.0}
    augment = TrainAugment(quiet(crop="center", **once), 80, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    numbers = torch.full((1, augment.columns), 0.5, dtype=torch.float64)
    drawn = augment.widths["box"] + augment.widths["flip"] + 1  # which operation
    numbers[0, drawn] = (augment.rand.names.index(operation) + 0.5) / len(augment.rand.names)
    out = augment.apply(images, sizes_of(images), numbers)
    assert (out.abs() < 1e-6).float().mean() == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("kind", ["train", "crops"])
def test_blur_kernel_holds_three_sigmas(kind: str) -> None:
    images = pictures(4, 60, 60)
    plain = ((0, 0, 0), (1, 1, 1))
    if kind == "train":
        augment = TrainAugment(quiet(crop="center", blur=1.0, blur_sigma=(5.0, 5.0)), 60, *plain)
        out = augment(images, sizes_of(images), torch.Generator())
    else:
        still = {"jitter_prob": 0.0, "grayscale": 0.0, "solarize": 0.0, "flip": 0.0, "local_crops": 0}
        full = {"global_scale": (1.0, 1.0), "ratio": (1.0, 1.0), "blur_first": 1.0, "blur_sigma": (5.0, 5.0)}
        out = MultiCrop(CropsConfig(**still, **full), 60, *plain)(images, sizes_of(images), torch.Generator())[0]
    expected = functional.gaussian_blur(images.float() / 255, [31, 31], [5.0, 5.0])
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)


def test_autocast_changes_nothing() -> None:
    images = pictures(4, 40, 40)
    for transform in (TrainAugment(AugmentConfig(blur=1.0), 36), MultiCrop(CropsConfig(local_crops=1), 24)):
        plain = transform(images, sizes_of(images), torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            within = transform(images, sizes_of(images), torch.Generator().manual_seed(0))
        for a, b in zip(plain, within, strict=True):
            assert torch.equal(a, b)


def test_multi_crop_gives_global_crops_first() -> None:
    images = pictures(4, 50, 60)
    crops = MultiCrop(CropsConfig(local_crops=3), (32, 48))(images, sizes_of(images), torch.Generator().manual_seed(0))
    assert [tuple(crop.shape) for crop in crops] == [(4, 3, 32, 48)] * 2 + [(4, 3, 16, 24)] * 3
    only = MultiCrop(CropsConfig(local_crops=0, global_crops=3), 32)(images, sizes_of(images), torch.Generator())
    assert [tuple(crop.shape) for crop in only] == [(4, 3, 32, 32)] * 3


@pytest.mark.parametrize(("size", "expected"), [(224, 96), (64, 24), (32, 16), (448, 192), (8, 8)])
def test_local_size_follows_the_paper(size: int, expected: int) -> None:
    assert local_crop_size(CropsConfig(), (size, size)) == (expected, expected)
    assert local_crop_size(CropsConfig(local_size=(20, 30)), (size, size)) == (20, 30)


def test_multi_crop_probabilities_per_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blur 1.0 / 0.1 / 0.5, solarise 0.2 on the second global crop only, grey 0.2, jitter 0.8."""
    seen: list[list[Step]] = []
    import frugalvit.data.augmentation.multicrop as module

    def record(images: Tensor, steps: list[Step], **_: object) -> Tensor:
        seen.append(steps)
        return images

    monkeypatch.setattr(module, "run_steps", record)
    batch = 500
    images = torch.zeros(batch, 3, 8, 8, dtype=torch.uint8)
    MultiCrop(CropsConfig(), 8)(images, sizes_of(images), torch.Generator().manual_seed(0))
    for steps, views in zip(seen, (2, 8), strict=True):
        rows = {step.operation: step.rows for step in steps if step.operation in ("blur", "solarize", "grayscale")}
        share = {name: torch.bincount(r // batch, minlength=views) / batch for name, r in rows.items()}
        expected_blur = [1.0, 0.1] if views == 2 else [0.5] * 8
        expected_solar = [0.0, 0.2] if views == 2 else [0.0] * 8
        torch.testing.assert_close(share["blur"], torch.tensor(expected_blur), atol=0.08, rtol=0)
        torch.testing.assert_close(share["solarize"], torch.tensor(expected_solar), atol=0.08, rtol=0)
        torch.testing.assert_close(share["grayscale"], torch.full((views,), 0.2), atol=0.08, rtol=0)
        jittered = sum(len(s.rows) for s in steps if s.operation in ColorJitter.names) / 4 / batch / views
        assert jittered == pytest.approx(0.8, abs=0.05)


def test_solarize_threshold() -> None:
    """As PIL's 128 of 255, on the second global crop only."""
    grey = torch.tensor([0, 64, 127, 128, 200, 255], dtype=torch.uint8)
    images = grey.view(6, 1, 1, 1).expand(6, 3, 8, 8)
    still = {"jitter_prob": 0.0, "grayscale": 0.0, "blur_first": 0.0, "blur_global": 0.0, "local_crops": 0}
    cut = MultiCrop(CropsConfig(solarize=1.0, **still), 8, (0, 0, 0), (1, 1, 1))
    first, second = (crop[:, 0, 0, 0] * 255 for crop in cut(images, sizes_of(images), torch.Generator()))
    torch.testing.assert_close(first, grey.float(), atol=1e-3, rtol=0)
    torch.testing.assert_close(second, torch.tensor([0.0, 64, 127, 127, 55, 0]), atol=1e-3, rtol=0)


def test_evaluation_equals_torchvision_and_takes_single_images() -> None:
    image = pictures(6, 300, 260)[5]
    transform = EvalTransform(96)
    photo = Image.fromarray(image.permute(1, 2, 0).numpy())
    ours = transform.image(photo)
    resize = v2.Resize(int(256 / 224 * 96), interpolation=InterpolationMode.BICUBIC)
    theirs = functional.to_image(v2.CenterCrop(96)(resize(photo))).float() / 255
    theirs = functional.normalize(theirs, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[None]
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(transform.image(np.array(photo)), ours)
    assert transform.image(np.array(photo)[..., 0]).shape == (1, 3, 96, 96)
    again = EvalTransform(**transform.spec() | {"out_size": tuple(transform.spec()["out_size"])})
    torch.testing.assert_close(again.image(photo), ours)


@pytest.mark.parametrize("kind", ["colour", "grey", "flat", "floats"])
def test_tensors_and_arrays_give_the_same_input(kind: str) -> None:
    """Tensors have channels first, as in torchvision."""
    colour = pictures(1, 40, 30)[0]
    tensor = {"colour": colour, "grey": colour[:1], "flat": colour[0], "floats": colour / 255}[kind]
    array = (colour if kind in ("colour", "floats") else colour[:1]).permute(1, 2, 0).numpy()
    transform = EvalTransform(16)
    assert torch.equal(transform.image(tensor), transform.image(array))


GREY = np.full((20, 30), 99, dtype=np.uint8)


@pytest.mark.parametrize(
    "picture",
    [
        *(torch.zeros(2, 3, 8, 8), torch.zeros(8, 8, 3), torch.zeros(3, 8, 8) - 1, torch.zeros(3, 0, 8)),
        *(GREY / 255, np.stack([GREY] * 4, 2), GREY[None, ..., None], GREY[0], GREY[:0], GREY.astype(int), None),
    ],
)
def test_wrong_images_are_errors(picture: object) -> None:
    with pytest.raises(UserError, match=r"PIL image|from 0 to 1"):
        EvalTransform(16).image(picture)


@pytest.mark.parametrize("kind", ["RGBA", "16-bit", "turned", "palette", "transparent palette"])
def test_image_in_memory_equals_its_file(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 30, 4), dtype=np.uint8)
    colour, options, name = Image.fromarray(noise[..., :3].copy()), {}, "x.png"
    if kind == "RGBA":
        picture = Image.fromarray(noise)
    elif kind == "16-bit":
        picture = Image.fromarray(noise[..., 0].astype(np.uint16) * 201)
    elif kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        picture, options, name = colour, {"exif": exif}, "x.jpg"
    else:
        picture = colour.quantize(16)
        options = {"transparency": 3} if kind == "transparent palette" else {}
    picture.save(tmp_path / name, **options)
    transform = EvalTransform(16)
    with Image.open(tmp_path / name) as opened:
        assert torch.equal(transform.image(opened), transform.image(decode(tmp_path / name)))


def test_small_images_are_not_cropped() -> None:
    assert EvalTransform(64).crop.crop_pct == 1.0 and EvalTransform(65).crop.crop_pct == 0.875
    image = pictures(1, 64, 64)
    out = EvalTransform(64, (0, 0, 0), (1, 1, 1)).image(image[0])
    torch.testing.assert_close(out, image.float() / 255)


def test_grey_input_of_one_channel_networks() -> None:
    image = pictures(1, 64, 64)
    out = EvalTransform(64, mean=(0.5,), std=(0.25,))(image)
    assert out.shape == (1, 1, 64, 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out_size": 0}, "0 x 0"),
        ({"out_size": 64, "crop_pct": 1.5}, "crop_pct"),
        ({"out_size": 64, "interpolation": "best"}, "best"),
        ({"out_size": 64, "mean": (0.5,), "std": (0.0,)}, "std"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvalTransform(**arguments)


def test_generators_differ_by_seed_purpose_and_number() -> None:
    def first(*key: object) -> float:
        return torch.rand((), generator=generator_for(*key)).item()

    keys = [(0, "order", 0), (1, "order", 0), (0, "augment", 0), (0, "order", 1)]
    values = [first(*key) for key in keys]
    assert len(set(values)) == 4 and values == [first(*key) for key in keys]


@pytest.mark.gpu
def test_to_device_packed() -> None:
    tensors = [torch.arange(5), torch.rand(3, 2), torch.tensor([True, False, True]), torch.rand(2, dtype=torch.float64)]
    for tensor, arrived in zip(tensors, to_device_packed(tensors, torch.device("cuda")), strict=True):
        assert arrived.is_cuda and torch.equal(arrived.cpu(), tensor)


@pytest.mark.gpu
def test_device_and_cpu_agree_and_never_wait() -> None:
    images = pictures(8, 64, 64)
    sizes = sizes_of(images)
    for make in (lambda: TrainAugment(AugmentConfig(), 64), lambda: MultiCrop(CropsConfig(), 64)):
        transform = make()
        numbers = uniform(8, transform.columns, torch.Generator().manual_seed(0))
        there = images.cuda()
        transform.apply(there, sizes, numbers)
        torch.cuda.set_sync_debug_mode("error")
        try:
            on_device = transform.apply(there, sizes, numbers)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        on_cpu = transform.apply(images, sizes, numbers)
        views = (result if isinstance(result, list) else [result] for result in (on_device, on_cpu))
        for a, b in zip(*views, strict=True):
            difference = (a.cpu() - b).abs()
            # Thresholds (posterise, equalize, solarise) may fall to the other side for a pixel or two.
            assert (difference > 3 * LEVEL / 0.22).float().mean() < 0.01
