"""UCF101 as EsViT uses it (B.3): the middle frame of every clip of the first split.

The official files are the folder ``UCF-101/CLASS/CLIP.avi`` and ``ucfTrainTestlist/{train,test}list01.txt``. From them
this makes ``ucf101/{train,test}/CLASS/CLIP.jpg``, which is what the dataset named ucf101 reads.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from frugalvit.errors import UserError
from frugalvit.utils import console

LISTS = {"train": "trainlist01.txt", "test": "testlist01.txt"}
_MEND = "the file is damaged: unpack UCF101.rar again (the frames taken so far are kept)."


def videos_present(root: Path) -> bool:
    """Whether the clips and the lists of the first split lie under ``root``."""
    lists = (root / "ucfTrainTestlist" / name for name in LISTS.values())
    return (root / "UCF-101").is_dir() and all(path.is_file() for path in lists)


def make_frames(root: Path, read: Callable[[Path], Image.Image] | None = None) -> None:
    """Write the middle frames; into a folder aside first, so that an interrupted call never looks finished."""
    if read is None:
        if importlib.util.find_spec("av") is None:
            raise UserError(
                f'{root} holds UCF101\'s videos; to take their middle frames: pip install "frugalvit[video]"'
            )
        read = middle_frame
    finished, staging = root / "ucf101", root / ".ucf101.part"
    if finished.exists():
        raise UserError(f"{finished} is there but lacks train or test; remove it, and its frames are taken again.")
    for split, name in LISTS.items():
        lines = (root / "ucfTrainTestlist" / name).read_text(encoding="utf-8").splitlines()
        clips = [line.split()[0] for line in lines if line.strip()]  # "Class/clip.avi 1", the number is the class
        if not clips:
            raise UserError(f"{root / 'ucfTrainTestlist' / name} names no clips; unpack UCF101's splits again.")
        for clip in console.progress(clips, label=f"ucf101 {split}: middle frames"):
            target = (staging / split / clip).with_suffix(".jpg")
            if target.exists():
                continue
            source = root / "UCF-101" / clip
            if not source.is_file():
                raise UserError(
                    f"{source} is in {name} but not there; unpack UCF101.rar again (the frames taken so far are kept)."
                )
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            read(source).convert("RGB").save(part, "JPEG", quality=95)
            part.rename(target)
    staging.rename(finished)


def middle_frame(path: Path) -> Image.Image:
    """Frame n // 2 of n as they are shown, counted from 0, decoded with PyAV; n is what the file's header says."""
    import av
    from av.error import FFmpegError

    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise UserError(f"{path} holds no video; {_MEND}")
            count = container.streams.video[0].frames or sum(1 for _ in container.decode(video=0))
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number == count // 2:
                    return frame.to_image()
    except FFmpegError as error:
        raise UserError(f"{path} cannot be decoded ({error.strerror}); {_MEND}") from None
    raise UserError(f"{path} ends before its middle frame; {_MEND}")
