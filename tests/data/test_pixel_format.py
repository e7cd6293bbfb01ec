"""Images of 16 bits, floating point and other channels: read exactly, kept in every store, normalized, augmented."""

import sys
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from frugalvit.config.data import AugmentConfig, CropsConfig, PackConfig
from frugalvit.data import open_data
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import EvalTransform, TrainAugment
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.cache.build import build_store
from frugalvit.data.cache.on_demand import Decoder
from frugalvit.data.decode import PHOTO, PixelFormat, as_pixels, decode, read_header, read_pixels, to_picture
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.data.webdataset import pack
from frugalvit.errors import UserError
from helpers.wide_images import RANGES, write_dicom, write_set

random = np.random.default_rng(0)
WIDE = random.integers(0, 256, (12, 20, 5)).astype(np.uint16)
GREY, BYTES, PAGES = WIDE[:, :, :1] * 257, WIDE.astype(np.uint8), np.moveaxis(WIDE, 2, 0)
REAL = random.normal(0, 100, (12, 20, 2)).astype(np.float32)
RGB = random.integers(0, 256, (12, 20, 3), dtype=np.uint8)


def encode(write: Any, *arguments: Any, **options: Any) -> bytes:
    buffer = BytesIO()
    write(buffer, *arguments, **options)
    return buffer.getvalue()


def pillow(values: np.ndarray, kind: str = "PNG") -> bytes:
    return encode(Image.fromarray(values).save, kind)


tiff, npy = partial(encode, tifffile.imwrite), partial(encode, np.save)
FILES = {
    "png": (pillow(GREY[:, :, 0]), GREY),
    "tiff, Pillow": (pillow(GREY[:, :, 0], "TIFF"), GREY),
    "tiff, float": (pillow(REAL[:, :, 0], "TIFF"), REAL[:, :, :1]),
    "tiff, pages": (tiff(PAGES), WIDE),
    "tiff, planes": (tiff(PAGES, planarconfig="separate", photometric="minisblack"), WIDE),
    "tiff, samples": (tiff(WIDE, planarconfig="contig", photometric="minisblack"), WIDE),
    "tiff, 16-bit colour": (tiff(WIDE[:, :, :3], photometric="rgb"), WIDE[:, :, :3]),
    "tiff, four 8-bit bands": (tiff(BYTES[:, :, :4], photometric="rgb", extrasamples=["unspecified"]), WIDE[..., :4]),
    "tiff, 8-bit ImageJ": (tiff(np.moveaxis(BYTES, 2, 0), imagej=True), WIDE),
    "npy": (npy(WIDE), WIDE),
    "npy, channels first": (npy(PAGES), WIDE),
    "npy, grey": (npy(GREY[:, :, 0]), GREY),
    "npy, float64": (npy(np.asfortranarray(REAL, np.float64)), REAL),
    "npy, signed": (npy(WIDE.astype(np.int16) - 5), WIDE.astype(np.float32) - 5),
    "npy, with gaps": (npy(np.where(REAL > 0, REAL, np.nan)), np.where(REAL > 0, REAL, 0)),
}


@pytest.mark.parametrize("kind", FILES)
def test_files_keep_their_values(kind: str) -> None:
    content, expected = FILES[kind]
    pixels, header = PixelFormat("float32", expected.shape[2]), read_header(content, values=True)
    assert header.pixels == pixels and (header.height, header.width) == (12, 20)
    values = read_pixels(content, pixels)
    assert values.dtype == np.float32 and values.flags.c_contiguous and values.flags.writeable
    np.testing.assert_array_equal(values, expected)
    with pytest.raises(UnreadableImage, match="it holds"):
        read_pixels(content, PixelFormat("float32", 7))


@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_dicom_is_in_hounsfield_units(kind: str, tmp_path: Path) -> None:
    stored = 4095 - WIDE[:, :, 0] if kind == "MONOCHROME1" else WIDE[:, :, 0]  # 0 is white
    write_dicom(tmp_path / "a", stored, RescaleSlope=2, RescaleIntercept=-1024, PhotometricInterpretation=kind)
    values = read_pixels(tmp_path / "a", PixelFormat("float32", 1))
    np.testing.assert_array_equal(values[:, :, 0], WIDE[:, :, 0] * np.float32(2) - 1024)


def test_eight_bit_pictures_stay_pictures() -> None:
    opaque, pages = np.dstack([RGB, np.full((12, 20), 255, np.uint8)]), np.stack([RGB, RGB + 1])
    for content in (pillow(RGB), pillow(opaque, "TIFF"), tiff(pages, photometric="rgb")):
        assert read_header(content, values=True).pixels == PHOTO
        np.testing.assert_array_equal(decode(content), RGB)


HOSTILE = {
    "npy, short": npy(WIDE)[:200],
    "npy, objects": npy(np.array([{"a": 1}], dtype=object)),
    "npy, huge": npy(np.zeros((2, 2, 2))).replace(b"(2, 2, 2), }", b"(99999, 99999, 9), }"),
    "npy, a volume": npy(np.zeros((2, 3, 4, 5), np.uint16)),
    "npy, empty": npy(np.zeros((0, 4), np.uint16)),
    "dicom, empty": bytes(128) + b"DICM",
    "tiff, damaged": tiff(PAGES)[:60],
    "png, damaged": pillow(GREY[:, :, 0])[:80],
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("channels", [0, 1, 5])
def test_hostile_files_are_unreadable(kind: str, channels: int) -> None:
    with pytest.raises(UnreadableImage):
        read_pixels(HOSTILE[kind], PixelFormat("float32", channels) if channels else PHOTO)


@pytest.mark.parametrize("kind", RANGES)
def test_statistics_and_stores_keep_the_values(kind: str, tmp_path: Path) -> None:
    source = open_data(write_set(tmp_path / "set", kind, 3), split="given")
    examples, wanted = source.splits["train"], [4, 1, 5]
    assert examples.pixels == PixelFormat("float32", RANGES[kind][0])
    assert any("stay as they are" in note for note in source.notes)
    images = np.stack([examples.read(i) for i in range(6)])
    mean, std, count = examples.measure_statistics()
    np.testing.assert_allclose(mean, images.astype(float).mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(std, images.astype(float).std((0, 1, 2)), rtol=1e-5)
    batches = [Decoder(examples, (24, 24), 0)(wanted).images]  # of a worker
    for where in ("ram", "disk", "disk"):  # the last time from the file
        store = build_store(examples, 24, where=where, stored=24, workers=1, cache_dir=tmp_path / "cache")
        batches.append(store.fetcher(lambda step: torch.tensor(wanted)).at(0).images.clone())
        store.close()
    for batch in batches:
        assert batch.dtype == torch.float32 and count == 6
        np.testing.assert_array_equal(batch.permute(0, 2, 3, 1).numpy(), images[wanted])


MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
PLAIN: dict[str, Any] = {"jitter": (0.0,) * 4, "grayscale": 0.0, "interpolation": "bilinear"}
TRANSFORMS = {
    "resized": lambda *s: TrainAugment(AugmentConfig(crop="resized", operations=0, blur=0.5, **PLAIN), 16, *s),
    "center": lambda *s: TrainAugment(AugmentConfig(crop="center", operations=0, **PLAIN), 16, *s),
    "multi-crop": lambda *s: MultiCrop(CropsConfig(local_crops=2, solarize=0.0, **PLAIN), 16, *s),
}


@pytest.mark.parametrize("kind", TRANSFORMS)
def test_geometry_is_that_of_photos(kind: str) -> None:
    """The same pixels as uint8 and as float32, with statistics in their units, give the same input."""
    photos = torch.from_numpy(random.integers(0, 256, (6, 3, 24, 20), dtype=np.uint8))
    sizes, scaled = torch.tensor([[24, 20]]).repeat(6, 1), [tuple(255 * x for x in values) for values in (MEAN, STD)]
    ours, theirs = (
        TRANSFORMS[kind](*statistics)(images, sizes, torch.Generator().manual_seed(1))
        for images, statistics in ((photos, (MEAN, STD)), (photos.float(), scaled))
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("crop", "affine"), [("resized", "bilinear"), ("padded", "bicubic")])
def test_colours_stay_and_borders_are_the_mean(crop: Any, affine: Any) -> None:
    """Five constant channels, 3 deviations above their means, stay equal; outside the image there is the mean, 0."""
    config = AugmentConfig(crop=crop, operations=2, affine=affine, erasing=0.0, jitter=(1, 1, 1, 0.5), grayscale=1.0)
    mean = torch.tensor([1000.0, 2000, 3000, 4000, 60000])
    images = (mean + 300).view(1, 5, 1, 1).repeat(32, 1, 16, 16)
    augment = TrainAugment(config, 16, mean.tolist(), (100.0,) * 5)
    batch = augment(images, torch.full((32, 2), 16), torch.Generator().manual_seed(0))
    torch.testing.assert_close(batch, batch[:, :1].expand_as(batch), rtol=0, atol=1e-3)
    assert batch.max() == pytest.approx(3, abs=1) and batch.min() < 1e-3 < batch.mean()


def test_evaluation_crops_and_normalizes_the_values(tmp_path: Path) -> None:
    crop = CenterCrop((7, 9), 0.875)
    np.testing.assert_allclose(crop(RGB.astype(np.float32)).clip(0, 255), crop(RGB), atol=1)
    (tmp_path / "a.npy").write_bytes(npy(WIDE))
    mean, std = WIDE.mean((0, 1)), WIDE.std((0, 1))
    transform = EvalTransform((12, 20), mean.tolist(), std.tolist(), crop_pct=1.0, pixel_type="float32")
    expected = torch.from_numpy(((WIDE - mean) / std).transpose(2, 0, 1)).float()
    for picture in (tmp_path / "a.npy", npy(WIDE), WIDE, torch.from_numpy(PAGES.astype(np.int32))):
        torch.testing.assert_close(transform.image(picture)[0], expected)
    assert EvalTransform(**transform.spec()).pixels == transform.pixels
    with pytest.raises(UserError, match="5 channels of raw values"):
        as_pixels(RGB, transform.pixels)


def test_pictures_are_stretched_between_percentiles() -> None:
    shown = to_picture(np.append(np.linspace(1000, 3000, 239), 60000).reshape(12, 20, 1))  # with one hot pixel
    assert shown.shape == (12, 20, 3) and shown.min() == 0 and shown[-1, -2, 0] >= 250
    assert to_picture(WIDE).shape == (12, 20, 3) and (to_picture(RGB) == RGB).all()


def test_mixed_sets(tmp_path: Path) -> None:
    """16-bit among 8-bit pictures is read as before, arrays beside pictures are ignored, other mixtures refused."""
    folder = write_set(tmp_path / "set", "png", 2)
    np.save(folder / "class0" / "features.npy", REAL)
    (folder / "class0" / "8bit.png").write_bytes(pillow(RGB))
    source = open_data(folder, split="given")
    assert len(source) == 5 and source.splits["train"].pixels == PHOTO and "because they differ" in source.notes[-1]
    (folder / "class1" / "five.tif").write_bytes(FILES["tiff, pages"][0])
    with pytest.raises(UserError, match="different kinds"):
        open_data(folder)


@pytest.mark.parametrize(("kind", "package"), [("tiff", "tifffile"), ("dicom", "pydicom")])
def test_a_missing_package_is_named(kind: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_set(tmp_path / "set", kind, 1)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"needs {package}: pip install .frugalvit\[science\]"):
        open_data(folder)


def test_readers_of_photos_refuse_channels(tmp_path: Path) -> None:
    five, grey = (open_data(write_set(tmp_path / k, k, 1), split="given").splits["train"] for k in ("tiff", "png"))
    with pytest.raises(UserError, match="5 channels"):
        five.with_pixels(PHOTO)
    assert grey.with_pixels(PHOTO).read(0).shape == (24, 24, 3)
    with pytest.raises(UserError, match="8-bit RGB only"):
        pack.command(PackConfig(data=str(tmp_path / "png"), out=str(tmp_path / "out")))
