"""Unreadable images: weights and scores do not depend on where images are cached."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from frugalvit.data.formats.coco import open_coco
from frugalvit.errors import UserError
from frugalvit.tasks.dense import loader
from frugalvit.tasks.dense.loader import ImageReader
from frugalvit.tasks.segmentation.dataset import open_scenes
from helpers.dense_runs import Kind


def spoil(path: Path) -> None:
    """Damage the pixels of a file, but not its beginning and end, as a failing disk does."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


def test_weights_and_scores_do_not_depend_on_the_cache(kind: Kind, tmp_path: Path) -> None:
    data = kind.make_data(tmp_path / "data", train=5, val=3, side=48)
    for split, number in (("train", 3), ("val", 1)):
        spoil(kind.image(data, split, number))
    results = []
    for where in ("ram", "off"):
        out = tmp_path / where
        summary = kind.train(data, out, cache={"location": where, "max_bad": 0.4}, steps=6)
        saved = torch.load(out / "checkpoints" / "last.pt", weights_only=True)["task"]
        facts = json.loads((out / "data.json").read_text())
        results.append((saved, {key: value for key, value in summary.items() if key.endswith(("ap", "miou"))}, facts))
        assert summary["scored_images"] == 2 and facts["used"] == {"train": 4, "val": 2}
    (one, scores, facts), (other, other_scores, other_facts) = results
    assert scores and scores == other_scores and one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one if isinstance(one[key], torch.Tensor))
    assert facts["left_out"] == other_facts["left_out"] and facts["left_out"]["count"] == 2


def test_a_score_does_not_depend_on_free_memory(
    kind: Kind, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = kind.make_data(tmp_path / "data", train=2, val=4, side=48)
    spoil(kind.image(data, "val", 1))
    results = []
    for memory in (1 << 30, 0):
        monkeypatch.setattr(loader, "memory_share", lambda memory=memory: memory)
        results.append(kind.evaluate(model, data) | {"seconds": 0})
    assert results[0] == results[1] and results[0]["scored_images"] == 3


def pictures_of(folder: Path, where: str, count: int = 6) -> ImageReader:
    for number in range(count):
        Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(folder / f"{number}.png")
    return ImageReader([folder / f"{number}.png" for number in range(count)], [(8, 8)] * count, where=where)


@pytest.mark.parametrize("where", ["ram", "off"])
def test_the_next_readable_image_is_the_substitute(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = pictures_of(tmp_path, where)
    for number in (2, 5):
        (tmp_path / f"{number}.png").write_bytes(b"no image")
    assert pictures.find_bad(2, max_bad=0.5) == [2, 5]
    found = [pictures.read_or_substitute(index) for index in range(6)]
    assert [index for index, _ in found] == [0, 1, 3, 3, 4, 0]
    assert [int(pixels[0, 0, 0]) for _, pixels in found] == [0, 10, 30, 30, 40, 0]
    capsys.readouterr()
    others = pictures
    assert others.drop_bad(list("abcdef"), 2, 0.5) == ["a", "b", "d", "e"]
    assert [path.name for path in others.paths] == ["0.png", "1.png", "3.png", "4.png"] and not others.faults
    assert [int(others.read(index)[0, 0, 0]) for index in range(4)] == [0, 10, 30, 40]
    assert [Path(name).name for name, _ in others.unreadable] == ["2.png", "5.png"]
    shutil.rmtree(tmp_path)  # cached images remain
    if where == "ram":
        assert [others.read_or_substitute(index)[0] for index in range(4)] == [0, 1, 2, 3]


def test_vanishing_images_are_named_until_too_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = pictures_of(tmp_path, "off")
    assert pictures.find_bad(2, max_bad=0.4) == []
    for number in (1, 2):
        (tmp_path / f"{number}.png").unlink()
    for _ in range(2):
        assert [pictures.read_or_substitute(index)[0] for index in range(6)] == [0, 3, 3, 3, 4, 5]
    assert capsys.readouterr().err.count("(left out)") == 2 and len(pictures.unreadable) == 2
    (tmp_path / "4.png").unlink()
    with pytest.raises(UserError, match=r"3 of 6 images .*--cache\.max-bad"):
        pictures.read_or_substitute(4)


def test_unreadable_images_are_left_out_or_too_many(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    open_data: Any = open_coco if kind.verb == "detect" else open_scenes
    data = kind.make_data(tmp_path / "data", side=40)
    path = kind.image(data, "train", 1)
    path.write_bytes(b"<html>no image</html>")
    with pytest.raises(UserError, match=r"1 of 8 images .*--cache.max-bad") as one:
        open_data(str(data))
    assert str(one.value).count(str(path)) == 1 and "\n" not in str(one.value)
    capsys.readouterr()
    items = open_data(str(data), max_bad=0.2).splits["train"]
    assert len(items) == 7 and path not in [item.path for item in items]
    assert capsys.readouterr().err.count(str(path)) == 1
    for number in range(8):
        kind.image(data, "train", number).write_bytes(b"")
    with pytest.raises(UserError, match="8 of 8 images"):
        open_data(str(data), max_bad=1.0)
