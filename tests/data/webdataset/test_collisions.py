"""Names with several dots: no image of a shard is lost in silence."""

from pathlib import Path

import pytest

from frugalvit.data import open_data
from frugalvit.data.webdataset.stream import read_samples
from frugalvit.data.webdataset.streaming_dataset import open_stream
from helpers.shards import png, write_tar

ANIMALS = [f"{animal}.{number}" for animal in ("cat", "dog") for number in range(10)]
LABELLED = [(f"{key}.jpg", f"{key}.cls") for key in ANIMALS]
SCENES = [(f"{number}.jpg", f"{number}.seg.png", f"{number}.cls") for number in range(4)]
STEREO = [(f"{number}.left.png", f"{number}.right.png", f"{number}.cls") for number in range(4)]

CASES = {
    "dots in names": ([(f"{key}.jpg",) for key in ANIMALS], ANIMALS, None, "20 images share their name"),
    "more than a sample has": (
        [(f"cat.{number}.jpg",) for number in range(300)],
        [f"cat.{number}" for number in range(300)],
        None,
        "300 images share their name",
    ),
    "dots in names, with labels": (LABELLED, ANIMALS, 20, "20 images share their name"),
    "a folder with dots": ([(f"v1.2/{i}.jpg", f"v1.2/{i}.cls") for i in range(4)], ["v1.2/0"], 4, ""),
    "an image and its mask": (SCENES, ["0", "1", "2", "3"], 4, "4 images not used"),
    "two images and a label": (STEREO, ["0", "1", "2", "3"], 4, "4 images not used"),
    "one image with two dots": ([(f"{i}.input.jpg", f"{i}.cls") for i in range(4)], ["0", "1", "2", "3"], 4, ""),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_no_image_is_lost_in_silence(case: str, streamed: bool, tmp_path: Path) -> None:
    groups, keys, labels, note = CASES[case]
    names = [name for group in groups for name in group]
    contents = {name: f"{i % 2}".encode() if name.endswith(".cls") else png(i) for i, name in enumerate(names)}
    write_tar(tmp_path / "a.tar", contents)
    images = names if labels is None else [group[0] for group in groups]
    samples = list(read_samples(str(tmp_path / "a.tar")))
    assert [sample.content for sample in samples] == [contents[name] for name in images]
    assert [sample.key for sample in samples][: len(keys)] == keys
    assert sum(sample.label is not None for sample in samples) == (labels or 0)
    source = open_stream(str(tmp_path), hold_out=False) if streamed else open_data(tmp_path, split="given")
    assert len(source.splits["train"]) == len(images)
    shown = [text for text in source.notes if "share their name" in text or "not used" in text]
    assert (note in shown[0] and len(shown) == 1) if note else not shown
