"""Images of 16 bits, floating point and other channels: read exactly, kept in every store, normalized, augmented."""

import json
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from frugalvit.config.data import AugmentConfig, CropsConfig
from frugalvit.data import open_data
from frugalvit.data.augmentation.randaugment import RandAugment
from frugalvit.data.augmentation.transforms import EvalTransform, MultiCrop, TrainAugment
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.cache.build import build_store
from frugalvit.data.cache.on_demand import Decoder
from frugalvit.data.decode import PHOTO, PixelFormat, as_pixels, decode, read_pixels, stored_header, to_picture
from frugalvit.data.pixel_format import measure_statistics
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.data.webdataset.pack import PackConfig, command
from frugalvit.errors import UserError
from helpers.wide_images import RANGES, write_dicom, write_set

random = np.random.default_rng(0)
WIDE = random.integers(0, 4096, (12, 20, 5)).astype(np.uint16)
GREY = WIDE[:, :, :1]
REAL = random.normal(0, 100, (12, 20, 2)).astype(np.float32)
RGB = random.integers(0, 256, (12, 20, 3), dtype=np.uint8)


def png(values: np.ndarray, **options: Any) -> bytes:
    buffer = BytesIO()
    Image.fromarray(values).save(buffer, **{"format": "PNG", **options})
    return buffer.getvalue()


def tiff(values: np.ndarray, **options: Any) -> bytes:
    buffer = BytesIO()
    tifffile.imwrite(buffer, values, **options)
    return buffer.getvalue()


def npy(values: np.ndarray) -> bytes:
    buffer = BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return png(np.ascontiguousarray(np.rot90(GREY[:, :, 0])), exif=exif)


FILES = {
    "png": (png(GREY[:, :, 0]), GREY),
    "png, turned": (turned(), GREY),
    "tiff, Pillow": (png(GREY[:, :, 0], format="TIFF"), GREY),
    "tiff, float": (png(REAL[:, :, 0], format="TIFF"), REAL[:, :, :1]),
    "tiff, pages": (tiff(np.moveaxis(WIDE, 2, 0)), WIDE),
    "tiff, planes": (tiff(np.moveaxis(WIDE, 2, 0), planarconfig="separate", photometric="minisblack"), WIDE),
    "tiff, samples": (tiff(WIDE, planarconfig="contig", photometric="minisblack"), WIDE),
    "tiff, 16-bit colour": (tiff(WIDE[:, :, :3], photometric="rgb"), WIDE[:, :, :3]),
    "tiff, four 8-bit bands": (tiff((WIDE[..., :4] % 256).astype(np.uint8), photometric="rgb", extrasamples=["unspecified"]), WIDE[..., :4] % 256),
    "tiff, 8-bit ImageJ": (tiff((np.moveaxis(WIDE, 2, 0) % 256).astype(np.uint8), imagej=True), WIDE % 256),
    "npy": (npy(WIDE), WIDE),
    "npy, channels first": (npy(np.moveaxis(WIDE, 2, 0)), WIDE),
    "npy, grey": (npy(WIDE[:, :, 0]), GREY),
    "npy, float64": (npy(REAL.astype(np.float64)), REAL),
    "npy, Fortran": (npy(np.asfortranarray(REAL)), REAL),
    "npy, signed": (npy(WIDE.astype(np.int16) - 5), WIDE.astype(np.float32) - 5),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_files_keep_their_values(kind: str) -> None:
    content, expected = FILES[kind]
    pixels = PixelFormat("uint16" if expected.dtype == np.uint16 else "float32", expected.shape[2])
    header = stored_header(content)
    assert header is not None and header[1] == pixels and (header[0].height, header[0].width) == (12, 20)
    values = read_pixels(content, pixels=pixels)
    assert values.dtype == pixels.type and values.flags.c_contiguous and values.flags.writeable
    np.testing.assert_array_equal(values, expected)
    with pytest.raises(UnreadableImage, match="it holds"):
        read_pixels(content, pixels=PixelFormat(pixels.type, 7))


@pytest.mark.parametrize("inverted", [False, True])
def test_dicom_is_in_hounsfield_units(inverted: bool, tmp_path: Path) -> None:
    stored = 4095 - GREY[:, :, 0] if inverted else GREY[:, :, 0]
    facts = {"PhotometricInterpretation": "MONOCHROME1"} if inverted else {}
    write_dicom(tmp_path / "a.dcm", stored, RescaleSlope=2, RescaleIntercept=-1024, **facts)
    values = read_pixels(tmp_path / "a.dcm", pixels=PixelFormat("float32", 1))
    np.testing.assert_array_equal(values, GREY * np.float32(2) - 1024)


PICTURES = {
    "png": png(RGB),
    "tiff": tiff(RGB, photometric="rgb"),
    "tiff, alpha": png(np.dstack([RGB, np.full((12, 20, 1), 255, np.uint8)]), format="TIFF"),
    "tiff, document": tiff(np.stack([RGB, RGB + 1]), photometric="rgb"),
    "npy": npy(RGB),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_eight_bit_pictures_stay_pictures(kind: str) -> None:
    assert stored_header(PICTURES[kind]) is None
    np.testing.assert_array_equal(decode(PICTURES[kind]), RGB)


HOSTILE = {
    "npy, short": npy(WIDE)[:200],
    "npy, objects": npy(np.array([{"a": 1}], dtype=object)),
    "npy, huge": npy(np.zeros((2, 2, 2))).replace(b"(2, 2, 2), }", b"(99999, 99999, 9), }"),
    "npy, a volume": npy(np.zeros((2, 3, 4, 5), np.uint16)),
    "npy, empty": npy(np.zeros((0, 4), np.uint16)),
    "dicom, empty": bytes(128) + b"DICM",
    "tiff, damaged": tiff(np.moveaxis(WIDE, 2, 0))[:60],
    "png, damaged": png(GREY[:, :, 0])[:80],
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("pixels", [PHOTO, PixelFormat("uint16", 5), PixelFormat("uint16", 1)])
def test_hostile_files_are_unreadable(kind: str, pixels: PixelFormat) -> None:
    with pytest.raises(UnreadableImage):
        read_pixels(HOSTILE[kind], "name", pixels)


@pytest.mark.parametrize("kind", RANGES)
def test_statistics_are_those_of_all_pixels(kind: str, tmp_path: Path) -> None:
    source = open_data(write_set(tmp_path / "set", kind), split="given")
    examples = source.splits["train"]
    assert examples.pixels == PixelFormat("float32" if kind == "dicom" else "uint16", RANGES[kind][0])
    assert any("are kept" in note for note in source.notes)
    pixels = np.concatenate([examples.read(i).reshape(-1, RANGES[kind][0]) for i in range(16)]).astype(float)
    mean, std, images = measure_statistics(examples)
    np.testing.assert_allclose(mean, pixels.mean(0), rtol=1e-5)
    np.testing.assert_allclose(std, pixels.std(0), rtol=1e-5)
    assert images == 16


@pytest.mark.parametrize("kind", RANGES)
def test_every_store_keeps_type_and_values(kind: str, tmp_path: Path) -> None:
    examples = open_data(write_set(tmp_path / "set", kind, 3), split="given").splits["train"]
    wanted = [4, 1, 5]
    batches = [Decoder(examples, (24, 24), 0)(wanted).images]  # of a worker
    for where in ("ram", "disk", "disk"):  # the last time from the file
        store = build_store(examples, 24, where=where, stored=24, workers=1, cache_dir=tmp_path / "cache")
        batches.append(store.fetcher(lambda step: torch.tensor(wanted)).at(0).images.clone())
        store.close()
    expected = np.stack([examples.read(i) for i in wanted]).transpose(0, 3, 1, 2)
    for images in batches:
        assert str(images.dtype) == f"torch.{examples.pixels.type}"
        np.testing.assert_array_equal(images.numpy(), expected)


def test_values_are_resized_as_pictures_are() -> None:
    crop = CenterCrop((7, 9), 0.875)
    wide = crop(np.ascontiguousarray(RGB, np.uint16))
    assert wide.dtype == np.uint16
    np.testing.assert_allclose(wide, crop(RGB), atol=1)
    np.testing.assert_allclose(crop(np.ascontiguousarray(RGB, np.float32)), wide, atol=0.51)


MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
PLAIN: dict[str, Any] = {"jitter": (0.0,) * 4, "grayscale": 0.0, "interpolation": "bilinear"}
TRANSFORMS = {
    "resized": lambda *s: TrainAugment(AugmentConfig(crop="resized", operations=0, blur=0.5, **PLAIN), 16, *s),
    "center": lambda *s: TrainAugment(AugmentConfig(crop="center", operations=0, **PLAIN), 16, *s),
    "multi-crop": lambda *s: MultiCrop(CropsConfig(local_crops=2, solarize=0.0, **PLAIN), 16, *s),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_geometry_is_that_of_photos(kind: str) -> None:
    """The same pixels as uint8 and as uint16, with statistics in their units, give the same input."""
    photos = torch.from_numpy(random.integers(0, 256, (6, 3, 24, 20), dtype=np.uint8))
    sizes = torch.tensor([[24, 20]]).repeat(6, 1)
    scaled = [tuple(255 * value for value in values) for values in (MEAN, STD)]
    outputs = [
        TRANSFORMS[kind](*statistics)(images, sizes, torch.Generator().manual_seed(1))
        for images, statistics in ((photos, (MEAN, STD)), (photos.to(torch.uint16), scaled))
    ]
    for ours, theirs in zip(*(out if isinstance(out, list) else [out] for out in outputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("crop", ["resized", "padded"])
@pytest.mark.parametrize("affine", ["bilinear", "bicubic"])
def test_colours_stay_and_borders_are_the_mean(crop: Any, affine: Any) -> None:
    """A constant image of five channels stays constant: only geometry and the mean outside the image change it."""
    steps = RandAugment(3, 1.0).plan(torch.rand(64, 12), (16, 16), colours=False)
    assert {step.operation for step in steps} == {"affine"} and sum(len(step.rows) for step in steps) == 3 * 64
    config = AugmentConfig(crop=crop, operations=2, affine=affine, erasing=0.0, jitter=(1, 1, 1, 0.5), grayscale=1.0)
    mean, std = (1000.0, 2000.0, 3000.0, 4000.0, 60000.0), (100.0,) * 5
    values = torch.tensor([1300, 2300, 3300, 4300, 60300], dtype=torch.float32).to(torch.uint16)
    images, sizes = values.view(1, 5, 1, 1).repeat(32, 1, 16, 16), torch.full((32, 2), 16)
    batch = TrainAugment(config, 16, mean, std)(images, sizes, torch.Generator().manual_seed(0))
    torch.testing.assert_close(batch, batch[:, :1].expand_as(batch), rtol=0, atol=1e-3)  # (value - mean) / std = 3
    assert batch.max() == pytest.approx(3, abs=1) and batch.min() < 1e-3 < batch.mean()


def test_evaluation_normalizes_the_values(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy(WIDE))
    mean, std = WIDE.mean((0, 1)).tolist(), WIDE.std((0, 1)).tolist()
    transform = EvalTransform((12, 20), mean, std, crop_pct=1.0, pixel_type="uint16")
    expected = torch.from_numpy(((WIDE - np.array(mean)) / std).transpose(2, 0, 1)).float()
    tensor = torch.from_numpy(WIDE.astype(np.int32)).permute(2, 0, 1)
    for picture in (tmp_path / "a.npy", npy(WIDE), WIDE, tensor):
        torch.testing.assert_close(transform.image(picture)[0], expected)
    assert EvalTransform(**json.loads(json.dumps(transform.spec()))).pixels == transform.pixels
    with pytest.raises(UserError, match="uint16 values in 5 channels"):
        as_pixels(RGB, transform.pixels)


def test_pictures_are_stretched_between_percentiles() -> None:
    values = np.linspace(1000, 3000, 240, dtype=np.float32).reshape(12, 20, 1)
    values[0, 0] = 60000  # one hot pixel
    shown = to_picture(values)
    assert shown.shape == (12, 20, 3) and shown.min() == 0 and shown[-1, -1, 0] >= 250
    assert to_picture(WIDE).shape == (12, 20, 3) and to_picture(RGB) is RGB


def test_mixed_sets(tmp_path: Path) -> None:
    """16-bit among 8-bit pictures is read as before; other mixtures are an error."""
    folder = write_set(tmp_path / "set", "png", 2)
    (folder / "class0" / "8bit.png").write_bytes(png(RGB))
    source = open_data(folder, split="given")
    assert source.splits["train"].pixels == PHOTO and "not all hold 16-bit" in source.notes[-1]
    (folder / "class1" / "five.tif").write_bytes(FILES["tiff, pages"][0])
    with pytest.raises(UserError, match="different kinds"):
        open_data(folder)


def test_arrays_beside_pictures_are_no_images(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "set", "png", 2)
    for name in ("class0", "class1"):
        np.save(folder / name / "features.npy", REAL)
    assert len(open_data(folder, split="given")) == 4


@pytest.mark.parametrize(("kind", "package"), [("tiff", "tifffile"), ("dicom", "pydicom")])
def test_a_missing_package_is_named(kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_set(tmp_path / "set", kind, 1)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs {package}: pip install .frugalvit\[science\]"):
        open_data(folder)
    (folder / "picture.png").write_bytes(png(RGB))
    examples = open_data(folder, split="given", labels="ignore").splits["train"]  # among pictures it is only unreadable
    assert examples.pixels == PHOTO
    if kind == "dicom":
        with pytest.raises(UnreadableImage, match="frugalvit"):
            examples.read([name.endswith(".dcm") for name in examples.names].index(True))


def test_networks_for_photos_refuse_channels(tmp_path: Path) -> None:
    examples = open_data(write_set(tmp_path / "set", "tiff", 1), split="given").splits["train"]
    with pytest.raises(UserError, match="--pretrained adapts"):
        examples.with_pixels(PHOTO)
    grey = open_data(write_set(tmp_path / "grey", "png", 1), split="given").splits["train"]
    assert grey.with_pixels(PHOTO).read(0).shape == (24, 24, 3)


def test_shards_hold_pictures_only(tmp_path: Path) -> None:
    config = PackConfig(data=str(write_set(tmp_path / "set", "png", 2)), out=str(tmp_path / "out"))
    with pytest.raises(UserError, match="8-bit RGB only"):
        command(config)
