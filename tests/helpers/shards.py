"""Shards, and the batches streamed from them."""

import io
import tarfile
from pathlib import Path
from typing import Any

from PIL import Image

from frugalvit.config.data import AugmentConfig
from frugalvit.data.augment.transforms import TrainAugment
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.streaming_loader import StreamingBatches

CLASSES = ("cat", "dog")
STILL = AugmentConfig(crop="center", flip=0.0, operations=0, erasing=0.0)


def png(shade: int, size: tuple[int, int] = (6, 5)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade % 256, shade // 256, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path: Path, files: dict[str, bytes], format_number: int = tarfile.GNU_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format_number) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_shards(folder: Path, shards: int = 3, each: int = 4) -> str:
    """Images whose shade is their number, labelled 0 and 1; returns the pattern of the shards."""
    for shard in range(shards):
        files = {}
        for number in range(shard * each, (shard + 1) * each):
            files |= {f"{number:04d}.png": png(number), f"{number:04d}.cls": str(number % 2).encode()}
        write_tar(folder / f"{shard:03d}.tar", files)
    return f"{folder}/{{000..{shards - 1:03d}}}.tar"


def write_numbered(folder: Path, shards: int = 4, each: int = 6, bad: tuple[int, ...] = ()) -> list[str]:
    """Images whose red value is their number, labelled cat and dog; returns the paths of the shards."""
    paths = []
    for shard in range(shards):
        files = {}
        for number in range(shard * each, (shard + 1) * each):
            image = b"broken" if number in bad else png(number, (20, 16))
            files |= {f"{number:04d}.png": image, f"{number:04d}.cls": CLASSES[number % 2].encode()}
        paths.append(str(write_tar(folder / f"{shard:03d}.tar", files)))
    return paths


def shard_images(folder: Path, images: Path, count: int = 4) -> Path:
    """Write the training images of a folder as ``000.tar`` …, each with the name of its class."""
    paths = sorted((images / "train").rglob("*.png"))
    for shard in range(count):
        files = {}
        for number, path in enumerate(paths[shard::count]):
            files |= {f"{shard}_{number}.png": path.read_bytes(), f"{shard}_{number}.cls": path.parent.name.encode()}
        write_tar(folder / f"{shard:03d}.tar", files)
    return folder


def photos(root: Path, count: int = 6) -> Path:
    for label in CLASSES:
        for split in ("train", "test"):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                content = png(hash((label, split)) % 250 + i)
                (root / split / label / f"Photo {i} (é).png").write_bytes(content)
    return root


def streaming_batches(
    paths: list[str], batch: int = 4, config: AugmentConfig = STILL, counts: list[int] | None = None, **keywords: Any
) -> StreamingBatches:
    keywords = {"workers": 0, "classes": CLASSES, "seed": 0, "steps_per_epoch": 6, "cached_size": (16, 20)} | keywords
    stream = ShardStream(paths, counts or [6] * len(paths), seed=0, buffer=5)
    augment = TrainAugment(config, 16, mean=(0, 0, 0), std=(1, 1, 1))
    return StreamingBatches(stream, batch, augment=augment, **keywords)
