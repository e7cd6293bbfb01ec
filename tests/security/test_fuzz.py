"""Random and damaged input gives a result or a one-line error, never a traceback or a hang.

FRUGALVIT_FUZZ=N tries N times as many inputs per target.
"""

import io
import json
import resource
import string
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features
from safetensors.torch import save_file

from frugalvit.backbones.weights.load import read_checkpoint
from frugalvit.cli.parser import parse
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.data import open_data
from frugalvit.data.cache import store
from frugalvit.data.decode import decode
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.errors import UserError
from helpers.fuzzing import MAX_MEMORY, damaged, fuzz, is_answered, values


@pytest.fixture(autouse=True)
def _bounded_memory():
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MAX_MEMORY, "an input has used too much memory"


options = st.sampled_from([*TrainConfig.model_fields, *PretrainConfig.model_fields])


@fuzz(60)
@given(st.dictionaries(options | st.text(max_size=8), values, max_size=6))
def test_yaml_values(tmp_path_factory: pytest.TempPathFactory, content: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "values.yaml"
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    for model in (TrainConfig, PretrainConfig):
        assert is_answered(lambda kind=model: kind.parse(read_yaml(path)))


@fuzz(60)
@given(st.binary(max_size=200) | st.text(alphabet=string.printable, max_size=200).map(str.encode))
def test_yaml_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(content)
    assert is_answered(lambda: TrainConfig.parse(read_yaml(path)))


def test_a_yaml_bomb(tmp_path: Path) -> None:
    """Nine levels of nine references would be 387 million strings if they were copied."""
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError):
        TrainConfig.parse(read_yaml(path))


@fuzz(60)
@given(st.lists(st.text(max_size=12) | st.sampled_from(["--batch", "--lr", "--img-size", "--config", "-1", "1e999"])))
def test_command_lines(words: list[str]) -> None:
    if "-h" in words or "--help" in words:
        return
    assert is_answered(parse, TrainConfig, words, "frugalvit train", "")


@fuzz(200)
@given(
    st.sampled_from([b"", b"path,label\n", b'{"path": "']),
    st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from([".csv", ".jsonl", ".tsv", ".txt"]),
)
def test_tables(tmp_path_factory: pytest.TempPathFactory, prefix: bytes, content: bytes, suffix: str) -> None:
    path = tmp_path_factory.getbasetemp() / f"table{suffix}"
    path.write_bytes(prefix + content)
    assert is_answered(open_data, str(path))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("undamaged")
    tensors = {"weight": torch.randn(8, 8), "bias": torch.zeros(8)}
    torch.save({"model": tensors, "epoch": 3}, folder / "zip.pt")
    torch.save({"model": tensors}, folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file(tensors, folder / "st.safetensors")
    return [path.read_bytes() for path in sorted(folder.iterdir())]


@fuzz(80)
@given(st.data())
def test_checkpoints(tmp_path_factory: pytest.TempPathFactory, checkpoints: list[bytes], data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.pth"
    path.write_bytes(damaged(data.draw(st.sampled_from(checkpoints)), data))
    assert is_answered(read_checkpoint, path)


IMAGES = ["png", "jpeg", "gif", "bmp", "tiff", "ppm", "webp"]
IMAGES += [kind for kind, codec in (("jpeg2000", "jpg_2000"), ("avif", "avif")) if features.check(codec)]


@fuzz(300)
@given(st.data())
def test_images(data: st.DataObject) -> None:
    assert is_answered(decode, damaged(_image(data.draw(st.sampled_from(IMAGES))), data), "fuzzed")


@fuzz(40)
@given(st.data())
def test_streams(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("a.png", "a.cls", "../../b.png", "/c.jpg", "c.json"):
            member = tarfile.TarInfo(name)
            content = _image("png") if name.endswith("png") else b"1"
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    folder = tmp_path_factory.getbasetemp()
    path = folder / "fuzzed.tar"
    path.write_bytes(damaged(buffer.getvalue(), data))
    assert is_answered(lambda: list(ShardStream([str(path)], [2]).epoch()))
    assert is_answered(open_data, str(path))
    assert not (folder.parent.parent / "b.png").exists(), "a member has left its folder"


coco_words = st.sampled_from(
    [
        *("id", "image_id", "category_id", "bbox", "segmentation", "counts", "size", "iscrowd", "area", "name"),
        *("file_name", "height", "width", "a.png"),
    ]
)
coco_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 50) | st.floats() | coco_words | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(coco_words, inner, max_size=5),
    max_leaves=15,
)


@fuzz(60)
@given(st.data())
def test_coco(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    from frugalvit.data.formats.coco import masks_of, open_coco

    folder = tmp_path_factory.getbasetemp() / "coco"
    folder.mkdir(exist_ok=True)
    if not (folder / "a.png").exists():
        (folder / "a.png").write_bytes(_image("png"))
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0}
    content: Any = {
        "images": [{"id": 1, "file_name": "a.png", "height": 12, "width": 12}],
        "annotations": [box | {"segmentation": [[1, 1, 5, 1, 5, 5, 1, 5]]}],
        "categories": [{"id": 1, "name": "thing"}],
    }
    group = data.draw(st.sampled_from(list(content)))
    entry = content[group][0]
    key = data.draw(st.sampled_from(list(entry)))
    change = data.draw(coco_values)
    if data.draw(st.booleans()):
        entry[key] = change
    elif data.draw(st.booleans()):
        content[group] = change
    else:
        content[group].append(change)
    path = folder / "instances_train.json"
    path.write_text(json.dumps(content))

    def use() -> None:
        for images in open_coco(str(path)).splits.values():
            for image in images:
                masks_of([e for e in image.trainable() if "segmentation" in e], image.height, image.width)

    assert is_answered(use)


def test_a_polygon_far_outside_of_the_image(tmp_path: Path) -> None:
    """Found by fuzzing: a corner a billion pixels away made the library use all the memory."""
    from frugalvit.data.formats.coco import open_coco

    (tmp_path / "a.png").write_bytes(_image("png"))
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0}
    shapes = [[[-1e9, 0, 5, 5, 1e9, 0]], [[1, 1, 5, 1, 5, 5]]]
    content = {
        "images": [{"id": 1, "file_name": "a.png", "height": 12, "width": 12}],
        "annotations": [box | {"id": i, "segmentation": shape} for i, shape in enumerate(shapes)],
        "categories": [{"id": 1, "name": "thing"}],
    }
    (tmp_path / "instances_train.json").write_text(json.dumps(content))
    data = open_coco(str(tmp_path / "instances_train.json"), split="given")
    assert ["segmentation" in entry for entry in data.splits["train"][0].objects] == [False, True]


def _image(kind: str) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (12, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@fuzz(60)
@given(st.data())
def test_decoded_images(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A damaged cache of images is decoded again."""
    path = tmp_path_factory.getbasetemp() / "fuzzed.bin"

    def fill(images: torch.Tensor) -> Any:
        images.copy_(torch.arange(images.numel()).view(images.shape) % 256)
        return torch.tensor([[4, 5]] * 3), torch.tensor([0, 1, 3]), [("two.png", "broken")]

    store.write_file(path, "print", (4, 3, 4, 5), fill)
    facts = path.with_suffix(".pt")
    facts.write_bytes(damaged(facts.read_bytes(), data))
    opened = store.open_file(path, "print")
    if opened is not None:
        assert opened.images.shape[1] == 3 and len(opened.sizes) == len(opened.index) and opened.sizes.min() > 0
