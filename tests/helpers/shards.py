"""Shards written for tests."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from PIL import Image


def png(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 5), (shade % 256, shade // 256, 0)).save(buffer, "PNG")
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
    for shard in range(shards):
        files = {}
        for i in range(each):
            number = shard * each + i
            files |= {f"{number:04d}.png": png(number), f"{number:04d}.cls": str(number % 2).encode()}
        write_tar(folder / f"{shard:03d}.tar", files)
    return f"{folder}/{{000..{shards - 1:03d}}}.tar"


def photos(root: Path, count: int = 6) -> Path:
    for label in ("cat", "dog"):
        for split in ("train", "test"):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                content = png(hash((label, split)) % 250 + i)
                (root / split / label / f"Photo {i} (é).png").write_bytes(content)
    return root
