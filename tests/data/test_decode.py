"""Decoding: every kind of image gives the right pixels, every unreadable file a reason."""

import os
import pickle
import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps, features

from frugalvit.data import decode as decoding
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.decode import decode, read_header

random = np.random.default_rng(0)
COLOUR = random.integers(0, 256, (12, 20, 3), dtype=np.uint8)
GREY = random.integers(0, 256, (12, 20), dtype=np.uint8)


def encode(image: Image.Image, format_name: str = "PNG", **options: object) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format_name, **options)
    return buffer.getvalue()


LOSSLESS = ["PNG", "BMP", "TIFF", "PPM"] + (["WEBP"] if features.check("webp") else [])


@pytest.mark.parametrize("format_name", LOSSLESS)
def test_lossless_formats_keep_every_pixel(format_name: str) -> None:
    options = {"lossless": True} if format_name == "WEBP" else {}
    pixels = decode(encode(Image.fromarray(COLOUR), format_name, **options))
    assert pixels.dtype == np.uint8 and pixels.flags.c_contiguous and pixels.flags.writeable
    np.testing.assert_array_equal(pixels, COLOUR)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_name", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_orientation_is_applied_once(orientation: int, format_name: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format_name == "WEBP" else {}
    content = encode(Image.fromarray(COLOUR), format_name, exif=exif, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(BytesIO(content))).convert("RGB"))
    np.testing.assert_array_equal(decode(content), expected)
    assert expected.shape[:2] == ((20, 12) if orientation >= 5 else (12, 20))


def test_grey_palette_and_one_bit() -> None:
    np.testing.assert_array_equal(decode(encode(Image.fromarray(GREY))), np.stack([GREY] * 3, axis=2))
    palette = Image.fromarray(COLOUR).quantize(16)
    np.testing.assert_array_equal(decode(encode(palette)), np.asarray(palette.convert("RGB")))
    black_and_white = Image.fromarray(GREY).convert("1")
    np.testing.assert_array_equal(decode(encode(black_and_white))[:, :, 0], np.asarray(black_and_white) * 255)


@pytest.mark.parametrize("format_name", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_grey_is_scaled_not_clipped(format_name: str) -> None:
    wide = np.linspace(0, 65535, 240).reshape(12, 20).astype(np.uint16)
    if format_name == "PPM":  # older Pillows read it, but cannot write it
        content = b"P5\n20 12\n65535\n" + wide.astype(">u2").tobytes()
    else:
        content = encode(Image.fromarray(wide), format_name)
    pixels = decode(content)
    np.testing.assert_allclose(pixels[:, :, 0], wide / 257, atol=0.51)
    assert pixels.max() == 255 and len(np.unique(pixels)) > 200


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 255.0), (-3.0, 1000.0)])
def test_floating_point(low: float, high: float) -> None:
    values = np.linspace(low, high, 240, dtype=np.float32).reshape(12, 20)
    values[0, 0] = np.nan if low == 0 else low
    expected = (np.nan_to_num(values) - low) / (high - low) * 255
    np.testing.assert_allclose(decode(encode(Image.fromarray(values), "TIFF"))[:, :, 0], expected, atol=0.51)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_pixels_become_white(mode: str) -> None:
    alpha = random.integers(0, 256, (12, 20), dtype=np.uint8)
    colour = COLOUR if mode == "RGBA" else np.stack([GREY] * 3, axis=2)
    stacked = np.dstack([COLOUR, alpha]) if mode == "RGBA" else np.dstack([GREY, alpha])
    share = alpha[:, :, None] / 255
    expected = colour * share + 255 * (1 - share)
    np.testing.assert_allclose(decode(encode(Image.fromarray(stacked, mode))), expected, atol=1)


def test_transparent_palette_and_colour_key_become_white() -> None:
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30] * 256)
    assert (decode(encode(palette, "GIF", transparency=0)) == 255).all()
    key = Image.new("RGB", (4, 4), (1, 2, 3))
    assert (decode(encode(key, "PNG", transparency=(1, 2, 3))) == 255).all()


def test_cmyk_becomes_rgb() -> None:
    flat = Image.new("CMYK", (16, 16), (0, 200, 100, 20))
    content = encode(flat, "JPEG", quality=100, subsampling=0)
    np.testing.assert_allclose(decode(content)[8, 8], np.asarray(flat.convert("RGB"))[0, 0], atol=4)


@pytest.mark.parametrize("format_name", ["GIF", "PNG", "WEBP", "TIFF"])
def test_animations_give_their_first_frame(format_name: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if format_name == "WEBP" else {}
    content = encode(frames[0], format_name, save_all=True, append_images=frames[1:], **options)
    assert (decode(content) == (255, 0, 0)).all()


def test_large_jpegs_are_decoded_at_a_smaller_size() -> None:
    big = Image.fromarray(random.integers(0, 256, (40, 60, 3), dtype=np.uint8)).resize((1200, 800))
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(encode(big, "JPEG"), at_least=(100, 150)).shape == (100, 150, 3)
    assert decode(encode(big, "JPEG"), at_least=(101, 150)).shape == (200, 300, 3)
    assert decode(encode(big, "JPEG", exif=exif), at_least=(150, 100)).shape == (150, 100, 3)
    assert decode(encode(big, "PNG"), at_least=(100, 150)).shape == (800, 1200, 3)


# ---- bad files ------------------------------------------------------------------------------------------------------


def png_header(width: int, height: int) -> bytes:
    content = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + content
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))


PNG = encode(Image.fromarray(COLOUR))
JPEG = encode(Image.fromarray(np.repeat(np.repeat(COLOUR, 20, 0), 20, 1)), "JPEG")
BAD = {
    "empty": (b"", "empty"),
    "page": (b"<!DOCTYPE html><html><body>404</body></html>", "not an image"),
    "pdf": (b"%PDF-1.7 ...", "not an image"),
    "heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
    "noise": (bytes(random.integers(128, 256, 500, dtype=np.uint8)), "not an image"),
    "short png": (PNG[: len(PNG) // 2], "truncated"),
    "short jpeg": (JPEG[: len(JPEG) // 2], "truncated"),
    "png header only": (PNG[:20], "or damaged"),
    "damaged png": (PNG[:60] + bytes(20) + PNG[80:], "damaged"),
    "bomb": (png_header(100_000, 100_000) + PNG[33:], "decompression bomb"),
    "no pixels": (png_header(0, 10) + PNG[33:], "damaged|no pixels"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "not an image"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("as_file", [False, True])
def test_unreadable_files_have_a_name_and_a_reason(kind: str, as_file: bool, tmp_path: Path) -> None:
    content, reason = BAD[kind]
    path = tmp_path / "schöne Blume.jpg"
    path.write_bytes(content)
    with pytest.raises(UnreadableImage, match=reason) as caught:
        decode(path) if as_file else decode(content, str(path))
    assert caught.value.name == str(path) and "\n" not in str(caught.value)


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match="missing"):
        decode(tmp_path / "no.jpg")
    with pytest.raises(UnreadableImage, match="cannot read"):
        decode(tmp_path)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.jpg")
        with pytest.raises(UnreadableImage, match="not a regular file"):
            decode(tmp_path / "pipe.jpg")
    with pytest.raises(UnreadableImage, match="cannot read"):
        decode("a\0b.jpg")


@pytest.mark.parametrize("format_name", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_read_header(format_name: str) -> None:
    header = read_header(encode(Image.fromarray(COLOUR), format_name), complete=True)
    assert (header.format, header.width, header.height) == (format_name, 20, 12)


def test_the_error_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(UnreadableImage("a.jpg", "truncated")))
    assert (error.name, error.reason) == ("a.jpg", "truncated")


def test_pillow_never_warns_the_user() -> None:
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30] * 256)
    content = encode(palette, "PNG", transparency=bytes([0] * 256))  # Pillow warns about this when it becomes RGB
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode(content)
        with pytest.raises(UnreadableImage):
            decode(encode(Image.fromarray(COLOUR), "TIFF")[:-30])
    assert not caught


def test_8_bit_values_in_32_bits() -> None:
    wide = encode(Image.fromarray(GREY.astype(np.int32)), "TIFF")
    np.testing.assert_array_equal(decode(wide)[:, :, 1], GREY)
    deep = encode(Image.fromarray(GREY.astype(np.int32) * 257), "TIFF")
    np.testing.assert_array_equal(decode(deep)[:, :, 1], GREY)


def test_too_little_memory_is_not_called_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Image.Image) -> None:
        raise MemoryError

    buffer = BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "BMP")
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(UnreadableImage, match="too little memory"):
        decode(buffer.getvalue(), "a.bmp")


@pytest.mark.parametrize("options", [{}, {"subsampling": 0}, {"progressive": True, "quality": 40}])
def test_jpegs_equal_those_of_pillow(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode(Image.fromarray(COLOUR), "JPEG", **options)
    monkeypatch.setattr(decoding, "upright_rgb", lambda image: pytest.fail("Pillow decoded it"))
    np.testing.assert_array_equal(decode(content), np.asarray(Image.open(BytesIO(content))))
