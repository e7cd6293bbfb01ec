"""Shards and batches for tests of streaming."""

from __future__ import annotations

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


def write_shards(folder: Path, shards: int = 4, each: int = 6, bad: tuple[int, ...] = ()) -> list[str]:
    """Grey images whose value is their number, so that a batch shows which ones it holds."""
    folder.mkdir(exist_ok=True)
    paths = []
    for shard in range(shards):
        path = folder / f"{shard:03d}.tar"
        with tarfile.open(path, "w") as archive:
            for place in range(each):
                number = shard * each + place
                buffer = io.BytesIO()
                Image.new("RGB", (20, 16), (number, number, number)).save(buffer, "PNG")
                image = b"broken" if number in bad else buffer.getvalue()
                for name, content in (
                    (f"{number:04d}.png", image),
                    (f"{number:04d}.cls", CLASSES[number % 2].encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        paths.append(str(path))
    return paths


def batches(paths: list[str], batch: int = 4, config: AugmentConfig = STILL, **keywords: Any) -> StreamingBatches:
    keywords = {"workers": 0, "classes": CLASSES, "seed": 0, "steps_per_epoch": 6, "stored": (16, 20)} | keywords
    stream = ShardStream(paths, seed=0, buffer=5)
    augment = TrainAugment(config, 16, mean=(0, 0, 0), std=(1, 1, 1))
    return StreamingBatches(stream, batch, augment=augment, **keywords)
