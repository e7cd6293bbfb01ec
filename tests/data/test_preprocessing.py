"""One preprocessing: every way from a file to the network gives the same pixels, for every kind of file."""

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image, features
from timm.data.transforms_factory import create_transform
from torch.nn.modules.module import register_module_forward_pre_hook

import frugalvit as fv
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.tools import ExportConfig
from frugalvit.data.cache.build import build_store
from frugalvit.data.dataset import FileExamples
from frugalvit.data.decode import decode
from frugalvit.data.image_inputs import InputImages
from frugalvit.data.loader import eval_batches
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.export.command import export
from frugalvit.probing.extractor import FeatureExtractor

SIZE = 96


def scene(height: int, width: int) -> np.ndarray:
    """Draw edges and noise (H, W, 4): a shift of half a pixel changes many grey levels."""
    rows, columns = np.mgrid[:height, :width]
    stripes = [128 + 100 * np.sign(np.sin(rows / a + columns / b)) for a, b in ((5, 9), (7, 4), (11, 6), (30, 23))]
    noise = np.random.default_rng(0).normal(0, 12, (height, width, 4))
    return (np.stack(stripes, 2) + noise).clip(0, 255).astype(np.uint8)


PIXELS = scene(430, 610)
COLOUR = Image.fromarray(PIXELS[..., :3].copy())
DEEP = PIXELS[..., 0].astype(np.uint16) * 200 + 9


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


KINDS: dict[str, Callable[[Path], Any]] = {
    "large.jpg": lambda path: Image.fromarray(scene(1300, 1777)[..., :3].copy()).save(path, quality=92),
    "colour.jpg": lambda path: COLOUR.save(path),
    "progressive.jpg": lambda path: COLOUR.save(path, progressive=True, subsampling=2),
    "grey.jpg": lambda path: COLOUR.convert("L").save(path),
    "cmyk.jpg": lambda path: COLOUR.convert("CMYK").save(path),
    "on_its_side.jpg": lambda path: COLOUR.save(path, exif=turned(6)),
    "mirrored.jpg": lambda path: COLOUR.save(path, exif=turned(7)),
    "colour.png": lambda path: COLOUR.save(path),
    "turned.png": lambda path: COLOUR.save(path, exif=turned(3)),
    "transparent.png": lambda path: Image.fromarray(PIXELS).save(path),
    "grey_alpha.png": lambda path: Image.fromarray(PIXELS).convert("LA").save(path),
    "palette.png": lambda path: COLOUR.quantize(64).save(path),
    "palette_hole.png": lambda path: COLOUR.quantize(64).save(path, transparency=3),
    "one_bit.png": lambda path: COLOUR.convert("1").save(path),
    "deep.png": lambda path: Image.fromarray(DEEP).save(path),
    "deep.tif": lambda path: Image.fromarray(DEEP).save(path),
    "deeper.tif": lambda path: Image.fromarray(DEEP.astype(np.int32) * 300).save(path),
    "floats.tif": lambda path: Image.fromarray(DEEP.astype(np.float32) / 65535).save(path),
    "turned.tif": lambda path: COLOUR.save(path, exif=turned(8)),
    "animation.gif": lambda path: COLOUR.save(path, save_all=True, append_images=[COLOUR.rotate(90)]),
    "colour.bmp": lambda path: COLOUR.save(path),
    "panorama.png": lambda path: Image.fromarray(scene(40, 3000)[..., :3].copy()).save(path),
    "tiny.png": lambda path: COLOUR.resize((7, 5)).save(path),
}
if features.check("webp"):
    KINDS["transparent.webp"] = lambda path: Image.fromarray(PIXELS).save(path, lossless=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("kinds")
    for name, write in KINDS.items():
        write(folder / name)
    assert len(KINDS) > 20
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keywords: dict[str, Any] = {
        "img_size": SIZE,
        "depth": 1,
        "num_heads": 2,
        "embed_dim": 16,
        "mean": (0, 0, 0),
        "std": (1, 1, 1),
    }
    backbone = fv.create_backbone("vit_tiny_patch16_224", num_classes=2, **keywords)
    saved = save_model_folder(backbone, tmp_path_factory.mktemp("model"), classes=["a", "b"])
    out = saved.parent / "exported"
    export(ExportConfig(model=str(saved), to="hf", out=str(out)))
    return out


def in_training(model: Model, files: list[str], where: str, cache: Path) -> torch.Tensor:
    options: Any = {"where": where, "cache_dir": cache, "workers": 0, "crop": model.transform.crop}
    store = build_store(FileExamples(files, None), SIZE, **options)
    return torch.cat([images for images, _, _ in eval_batches(store, model.transform, 5)])


def in_eval(model: Model, files: list[str]) -> torch.Tensor:
    extractor = FeatureExtractor(model, cache=False, batch=7)
    extractor.images = lambda images: images  # type: ignore[method-assign]
    return extractor(FileExamples(files, None)).features


def in_predict(model: Model, files: list[str]) -> torch.Tensor:
    parts = InputImages(files).batches(4, "")
    return torch.cat([model.transform.image(image.pixels) for part in parts for image in part])


def by_opened_pictures(model: Model, files: list[str]) -> torch.Tensor:
    return torch.cat([model.transform.image(Image.open(path)) for path in files])


def by_the_exported_file(folder: Path, files: list[str]) -> torch.Tensor:
    module, config = load_preprocessing(folder), json.loads((folder / "config.json").read_text())
    return torch.from_numpy(np.concatenate([module.preprocess(path, config) for path in files]))


def by_timm(folder: Path, files: list[str]) -> torch.Tensor:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True)
    transform: Any = create_transform(**timm.data.resolve_model_data_config(model))
    return torch.stack([transform(load_preprocessing(folder).read_rgb(path)) for path in files])


def load_preprocessing(folder: Path) -> Any:
    spec = importlib.util.spec_from_file_location("exported_preprocessing", folder / "preprocessing.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_way_gives_the_same_pixels(files: list[str], folder: Path, tmp_path: Path) -> None:
    """Over more than 20 kinds of files: training's evaluation, eval, predict, the exported transform and timm."""
    model = load_model(str(folder))
    expected = by_timm(folder, files)
    ways = {where: in_training(model, files, where, tmp_path) for where in ("ram", "disk", "off")}
    ways |= {"eval": in_eval(model, files), "predict": in_predict(model, files)}
    ways |= {"pictures": by_opened_pictures(model, files), "exported": by_the_exported_file(folder, files)}
    for way, images in ways.items():
        assert images.shape == expected.shape == (len(files), 3, SIZE, SIZE)
        apart = (images - expected).abs().amax((1, 2, 3)) * 255
        wrong = {Path(file).name: round(value, 2) for file, value in zip(files, apart.tolist(), strict=True)}
        assert max(wrong.values()) < 1.01, (way, {name: value for name, value in wrong.items() if value >= 1.01})
        torch.testing.assert_close(images, ways["predict"], atol=1e-6, rtol=0, msg=way)


OPAQUE = PIXELS[..., 3:] / 255
PLAIN = {
    "turned.png": PIXELS[::-1, ::-1, :3],
    "transparent.png": np.rint(PIXELS[..., :3] * OPAQUE + 255 * (1 - OPAQUE)),
    "deep.png": np.rint(DEEP / 257)[:, :, None].repeat(3, 2),
}
"""What a reader must see in these files, written without the code of the package."""


@pytest.mark.parametrize("kind", PLAIN)
def test_the_model_card_recipe(kind: str, files: list[str], folder: Path) -> None:
    """The card's first block, run as it stands, sees EXIF, transparency and 16 bits, and answers as 'predict' does."""
    file = next(file for file in files if Path(file).name == kind)
    block = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {}
    inputs: list[Any] = []
    hook = register_module_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    try:
        exec(block.replace("FOLDER", str(folder)).replace("photo.jpg", file), names)
    finally:
        hook.remove()
    ours, plain = fv.load(str(folder)), Image.fromarray(PLAIN[kind].astype(np.uint8))
    seen = next(value for value in inputs if getattr(value, "ndim", 0) == 4)  # transforms are modules too
    torch.testing.assert_close(seen, ours.transform(plain), atol=1.01 / 255, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(names["output"], ours(ours.transform(file)), atol=2e-3, rtol=0)


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("size", [(32, 32), (224, 224), (64, 96), (100, 70)])
def test_crop_equals_timms(size: tuple[int, int], mode: str) -> None:
    random = np.random.default_rng(1)
    for _ in range(12):
        height, width = random.integers(150, 700, 2).tolist()
        crop_pct, kind = float(random.choice([0.8, 0.875, 0.9, 0.95, 1.0])), str(random.choice(["bicubic", "bilinear"]))
        pixels = scene(height, width)[..., :3].copy()
        theirs: Any = create_transform(
            size, crop_pct=crop_pct, interpolation=kind, crop_mode=mode, mean=(0, 0, 0), std=(1, 1, 1)
        )
        expected = theirs(Image.fromarray(pixels)).permute(1, 2, 0).numpy() * 255
        ours = CenterCrop(size, crop_pct, kind, mode == "squash")(pixels)
        np.testing.assert_allclose(ours, expected, atol=1e-4, err_msg=f"{height} {width} {crop_pct} {kind}")


def test_training_may_decode_at_a_reduced_size(files: list[str]) -> None:
    large = FileExamples([file for file in files if file.endswith("large.jpg")], None)
    crop = CenterCrop((SIZE, SIZE))
    _, reduced = large.read_sized(0, (110, 150))
    assert reduced < (1300, 1777)
    np.testing.assert_array_equal(large.read_sized(0, crop.size, crop)[0], crop(decode(large.names[0])))
