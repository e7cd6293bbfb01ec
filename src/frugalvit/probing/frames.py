"""UCF101 as EsViT uses it (B.3): the middle frame of every clip of the first split.

The official files are the folder ``UCF-101/CLASS/CLIP.avi`` and ``ucfTrainTestlist/{train,test}list01.txt``. From them
this makes ``ucf101/{train,test}/CLASS/CLIP.jpg``, which is what the dataset named ucf101 reads.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from frugalvit import console
from frugalvit.errors import UserError

LISTS = {"train": "trainlist01.txt", "test": "testlist01.txt"}


def videos_present(root: Path) -> bool:
    """Whether the clips and the lists of the first split lie under ``root``."""
    lists = (root / "ucfTrainTestlist" / name for name in LISTS.values())
    return (root / "UCF-101").is_dir() and all(path.is_file() for path in lists)


def make_frames(root: Path, read: Callable[[Path], Image.Image] | None = None) -> None:
    """Write the middle frames; into a folder aside first, so that an interrupted call never looks finished."""
    if read is None:
        if importlib.util.find_spec("av") is None:
            raise UserError(f"{root} holds UCF101's videos; to take their middle frames: pip install av")
        read = middle_frame
    staging = root / ".ucf101.part"
    for split, name in LISTS.items():
        lines = (root / "ucfTrainTestlist" / name).read_text(encoding="utf-8").splitlines()
        clips = [line.split()[0] for line in lines if line.strip()]  # "Class/clip.avi 1", the number is the class
        for clip in console.progress(clips, label=f"ucf101 {split}: middle frames"):
            target = (staging / split / clip).with_suffix(".jpg")
            if target.exists():
                continue
            source = root / "UCF-101" / clip
            if not source.is_file():
                raise UserError(f"{source} is in {name} but not there; unpack UCF101.rar again.")
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            read(source).convert("RGB").save(part, "JPEG", quality=95)
            part.rename(target)
    shutil.move(staging, root / "ucf101")


def middle_frame(path: Path) -> Image.Image:
    """Frame n // 2 of n, decoded with PyAV."""
    import av  # type: ignore[import-not-found]

    with av.open(str(path)) as container:
        count = container.streams.video[0].frames or sum(1 for _ in container.decode(video=0))
    with av.open(str(path)) as container:
        for number, frame in enumerate(container.decode(video=0)):
            if number == count // 2:
                return frame.to_image()
    raise UserError(f"{path} ends before its middle frame; the file is damaged.")
