"""UCF101's videos in their real layout: the middle frame, resuming, and error messages."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import ucf101_frames
from frugalvit.data import open_data
from frugalvit.errors import UserError

CLIPS = {
    "train": ["Archery/v_Archery_g08_c01.avi", "Biking/v_Biking_g08_c01.avi"],
    "test": ["Archery/v_Archery_g01_c01.avi", "Biking/v_Biking_g01_c01.avi"],
}


@pytest.fixture
def av():
    return pytest.importorskip("av", reason="av is not installed; it comes with the video extra")


def colour(number: int) -> tuple[int, int, int]:
    """Give neighbouring frames very different colours."""
    return 40 + 70 * (number % 3), 200 - 12 * (number % 15), 20 + 100 * (number % 2)


def make_video(av, path: Path, count: int, *, between: int = 0) -> None:
    """Write ``count`` frames of one colour each, as UCF101 does: MPEG-4 with the tag XVID in an AVI, 320 x 240."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25, options={"bf": str(between)})
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        stream.codec_context.codec_tag = "XVID"
        for number in range(count):
            frame = av.VideoFrame.from_ndarray(np.full((240, 320, 3), colour(number), np.uint8), format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def make_lists(root: Path, clips: dict[str, list[str]] = CLIPS) -> None:
    """Write the official lists; the test list has no class numbers."""
    lists = root / "ucfTrainTestlist"
    lists.mkdir(parents=True)
    (lists / "trainlist01.txt").write_text("".join(f"{clip} {n}\r\n" for n, clip in enumerate(clips["train"], 1)))
    (lists / "testlist01.txt").write_text("".join(f"{clip}\r\n" for clip in clips["test"]))
    (lists / "classInd.txt").write_text("1 Archery\r\n2 Biking\r\n")


def touch_clips(root: Path) -> None:
    for clip in (clip for clips in CLIPS.values() for clip in clips):
        path = root / "UCF-101" / clip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


def is_frame(image: Image.Image, number: int) -> bool:
    return bool(np.abs(np.asarray(image.convert("RGB")).mean((0, 1)) - colour(number)).max() < 6)


@pytest.mark.parametrize("between", [0, 2])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 9, 30])
def test_middle_frame(av, tmp_path: Path, count: int, between: int) -> None:
    """``between``: with B-frames, whose stored order is not the display order."""
    make_video(av, tmp_path / "clip.avi", count, between=between)
    frame = ucf101_frames.middle_frame(tmp_path / "clip.avi")
    assert frame.size == (320, 240)
    assert [number for number in range(count) if is_frame(frame, number)] == [count // 2]


def test_frames_are_a_named_dataset(av, tmp_path: Path) -> None:
    make_lists(tmp_path)
    for count, clip in enumerate((clip for clips in CLIPS.values() for clip in clips), start=5):
        make_video(av, tmp_path / "UCF-101" / clip, count)
    ucf101_frames.make_frames(tmp_path)
    assert not (tmp_path / ".ucf101.part").exists()
    source = open_data("ucf101", split="given", root=str(tmp_path))
    assert source.classes == ("Archery", "Biking")
    parts = [source.splits[split] for split in ("train", "test")]
    assert [examples.labels.tolist() for examples in parts] == [[0, 1], [0, 1]]
    middles = [Image.fromarray(examples.read(index)) for examples in parts for index in range(2)]
    assert all(is_frame(image, count // 2) for count, image in enumerate(middles, start=5))


def test_damaged_video_is_named_and_frames_are_kept(av, tmp_path: Path) -> None:
    make_lists(tmp_path)
    for clip in (clip for clips in CLIPS.values() for clip in clips):
        make_video(av, tmp_path / "UCF-101" / clip, 4)
    broken = tmp_path / "UCF-101" / CLIPS["test"][0]
    complete = broken.read_bytes()
    for content in (b"", b"<html>404", complete[:6000]):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=r"v_Archery_g01_c01\.avi .*Unpack UCF101\.rar again") as caught:
            ucf101_frames.make_frames(tmp_path)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "ucf101").exists()
    broken.write_bytes(complete)
    modified = (tmp_path / ".ucf101.part" / "train" / CLIPS["train"][0]).with_suffix(".jpg").stat().st_mtime_ns
    ucf101_frames.make_frames(tmp_path)
    assert (tmp_path / "ucf101" / "train" / CLIPS["train"][0]).with_suffix(".jpg").stat().st_mtime_ns == modified


# -- tests without PyAV


def test_frames_are_class_folders(tmp_path: Path) -> None:
    make_lists(tmp_path)
    touch_clips(tmp_path)
    ucf101_frames.make_frames(tmp_path, read=lambda path: Image.new("RGB", (8, 8), "red"))
    made = sorted(str(path.relative_to(tmp_path / "ucf101")) for path in (tmp_path / "ucf101").rglob("*.*"))
    expected = [f"{split}/{clip}".replace(".avi", ".jpg") for split, clips in CLIPS.items() for clip in clips]
    assert made == sorted(expected)
    with pytest.raises(UserError, match="lacks train or test"):
        ucf101_frames.make_frames(tmp_path, read=lambda path: Image.new("RGB", (8, 8), "red"))


def test_missing_clips_are_named(tmp_path: Path) -> None:
    make_lists(tmp_path)
    touch_clips(tmp_path)
    (tmp_path / "UCF-101" / CLIPS["train"][1]).unlink()
    with pytest.raises(UserError, match=r"v_Biking_g08_c01\.avi .*trainlist01\.txt"):
        ucf101_frames.make_frames(tmp_path, read=lambda path: Image.new("RGB", (8, 8), "red"))


def test_empty_lists_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "ucfTrainTestlist").mkdir()
    for name in ("trainlist01.txt", "testlist01.txt"):
        (tmp_path / "ucfTrainTestlist" / name).write_text("\n")
    with pytest.raises(UserError, match="lists no clips"):
        ucf101_frames.make_frames(tmp_path, read=lambda path: Image.new("RGB", (8, 8), "red"))
