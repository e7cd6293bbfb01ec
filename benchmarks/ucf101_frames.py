"""UCF101 as in EsViT (B.3): the middle frame of every clip of the first split.

    pip install "frugalvit[video]"
    python benchmarks/ucf101_frames.py FOLDER        # the folder of named datasets: ~/.cache/frugalvit/datasets

Reads the official ``UCF-101/CLASS/CLIP.avi`` and ``ucfTrainTestlist/{train,test}list01.txt``, and writes
``ucf101/{train,test}/CLASS/CLIP.jpg``, which the named dataset ucf101 reads.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from frugalvit.errors import UserError
from frugalvit.utils import console
from frugalvit.utils.files import read_text

LISTS = {"train": "trainlist01.txt", "test": "testlist01.txt"}
_ADVICE = "Unpack UCF101.rar again; finished frames stay."


def make_frames(root: Path, read: Callable[[Path], Image.Image] | None = None) -> None:
    """Write the middle frames, first to a temporary folder: an interrupted call never counts as finished."""
    read = read or middle_frame
    finished, staging = root / "ucf101", root / ".ucf101.part"
    if finished.exists():
        raise UserError(f"{finished} lacks train or test. Remove it to extract the frames again.")
    for split, name in LISTS.items():
        lines = read_text(root / "ucfTrainTestlist" / name).splitlines()
        clips = [line.split()[0] for line in lines if line.strip()]  # "Class/clip.avi 1", the number is the class
        if not clips:
            raise UserError(f"{root / 'ucfTrainTestlist' / name} lists no clips. {_ADVICE}")
        for clip in console.progress(clips, label=f"ucf101 {split}: middle frames"):
            target = (staging / split / clip).with_suffix(".jpg")
            if target.exists():
                continue
            source = root / "UCF-101" / clip
            if not source.is_file():
                raise UserError(f"{source} is missing, but {name} lists it. {_ADVICE}")
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            read(source).convert("RGB").save(part, "JPEG", quality=95)
            part.rename(target)
    staging.rename(finished)


def middle_frame(path: Path) -> Image.Image:
    """Decode frame n // 2 with PyAV, in display order from 0; the header of an AVI holds n."""
    import av
    from av.error import FFmpegError

    try:
        with av.open(str(path)) as container:
            count = container.streams.video[0].frames
        with av.open(str(path)) as container:
            for number, frame in enumerate(container.decode(video=0)):
                if number == count // 2:
                    return frame.to_image()
    except (FFmpegError, IndexError) as error:  # IndexError: no video in the file
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"Cannot decode {path} ({reason}). {_ADVICE}") from None
    raise UserError(f"{path} ends before its middle frame. {_ADVICE}")


if __name__ == "__main__":
    try:
        make_frames(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))
