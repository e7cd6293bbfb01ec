"""A weight file is read, or refused with a reason; code in it never runs."""

import argparse
import io
import os
import pickle
import random
import struct
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as safetensors_bytes

from frugalvit.backbones.weights.safe_load import read_checkpoint
from frugalvit.errors import UserError


def torch_bytes(content: object, old_format: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=not old_format)
    return buffer.getvalue()


def zip_bytes(compression: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/"), data)
    return buffer.getvalue()


class Evil:
    """Unpickled by an ordinary unpickler, this writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("old_format", [False, True])
@pytest.mark.parametrize("bare", [False, True])
def test_pickle_with_code_is_refused(bare: bool, old_format: bool, tmp_path: Path):
    proof, path = tmp_path / "proof", tmp_path / "weights.pth"
    content = {"model": {"weight": torch.ones(2)}, "extra": Evil(proof)}
    path.write_bytes(pickle.dumps(content) if bare else torch_bytes(content, old_format))
    with pytest.raises(UserError, match=r"refused: (it is a plain Python pickle|loading it would run code)") as caught:
        read_checkpoint(path)
    assert not proof.exists()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [torch.nn.Linear(2, 2), Path("x"), slice(1, 2), np.arange(3)])
def test_unknown_classes_are_refused_by_name(value: object, tmp_path: Path):
    path = tmp_path / "weights.pth"
    path.write_bytes(torch_bytes({"model": value}))
    with pytest.raises(UserError, match=r"would run code \('[\w.]+'\)"):
        read_checkpoint(path)


@pytest.mark.parametrize("old_format", [False, True])
def test_classes_in_convert_are_read(old_format: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    yacs = types.ModuleType("yacs.config")

    class CfgNode(dict):
        def __init__(self, values: dict) -> None:
            super().__init__(values)
            self.__dict__["__immutable__"] = True

    CfgNode.__module__, CfgNode.__qualname__ = "yacs.config", "CfgNode"
    yacs.CfgNode = CfgNode  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "yacs", types.ModuleType("yacs"))
    monkeypatch.setitem(sys.modules, "yacs.config", yacs)
    numbers = [kind(1) for kind in (np.float16, np.float32, np.float64, np.int8, np.int64, np.uint16, np.bool_)]
    content = {
        "model": {"weight": torch.arange(3.0)},
        "args": argparse.Namespace(lr=0.1),
        "config": CfgNode({"MODEL": CfgNode({"NAME": "swin"})}),
        "numbers": [*numbers, np.float64(0.1), np.array(2.5, dtype=">f8")[()]],
    }
    path = tmp_path / "weights.pth"
    path.write_bytes(torch_bytes(content, old_format))
    monkeypatch.delitem(sys.modules, "yacs.config")
    read = read_checkpoint(path)
    assert read["args"].lr == 0.1
    assert read["config"]["MODEL"]["NAME"] == "swin"
    assert read["numbers"] == [*[1] * 7, 0.1, 2.5]
    assert torch.equal(read["model"]["weight"], torch.arange(3.0))


GOOD = {"model": {"weight": torch.arange(1000.0), "bias": torch.ones(3)}, "epoch": 3}
HTML = b"\n<!DOCTYPE html><html><head><title>Sign in</title></head></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
FILES = {
    "empty": (b"", "is not a checkpoint"),
    "web page": (HTML, "begins with .*DOCTYPE"),
    "lfs pointer": (LFS, "begins with .*version"),
    "text": (b"hello there", "is not a checkpoint"),
    "gzip": (b"\x1f\x8b\x08\x00" + bytes(40), "is not a checkpoint"),
    "truncated zip": (torch_bytes(GOOD)[:-700], "truncated or damaged"),
    "truncated old format": (torch_bytes(GOOD, True)[:-900], "truncated or damaged"),
    "truncated safetensors": (safetensors_bytes({"a": torch.ones(99)})[:-9], "damaged safetensors"),
    "header longer than the file": (struct.pack("<Q", 1 << 31) + b"{" + bytes(20), "damaged safetensors"),
    "cut safetensors header": (safetensors_bytes({"a": torch.ones(99)})[:30], "damaged safetensors"),
    "other zip": (zip_bytes(readme=b"hello"), "an archive or a program"),
    "compressed": (
        zip_bytes(zipfile.ZIP_DEFLATED, archive__data_pkl=b"").replace(b"data_pkl", b"data.pkl"),
        "is compressed",
    ),
    "torchscript": (zip_bytes(m__code__x=b"", **{"m/data.pkl": b""}), "an archive or a program"),
    "exported program": (zip_bytes(**{"m/archive_format": b"pt2"}), "an archive or a program"),
    "a list": (torch_bytes([torch.ones(2)]), "contains a list"),
    "a tensor": (torch_bytes(torch.ones(2)), "contains a Tensor"),
}


@pytest.mark.parametrize("name", FILES)
def test_unreadable_file_raises_one_line(name: str, tmp_path: Path):
    data, message = FILES[name]
    path = tmp_path / "weights.pth"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path):
    with pytest.raises(UserError, match=r"nothing\.pth cannot be read"):
        read_checkpoint(tmp_path / "nothing.pth")
    with pytest.raises(UserError, match="cannot be read"):
        read_checkpoint(tmp_path)


SEEDS = [torch_bytes(GOOD), torch_bytes(GOOD, True), safetensors_bytes({"a": torch.ones(9)})]


@given(
    seed=st.sampled_from(SEEDS),
    cut=st.integers(0, 3000),
    edits=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=8),
)
def test_damaged_bytes_raise_only_user_error(seed: bytes, cut: int, edits, tmp_path_factory):
    data = bytearray(seed[: len(seed) - cut] if cut % 2 else seed)
    for position, value in edits:
        if data:
            data[position % len(data)] = value
    path = tmp_path_factory.mktemp("damaged") / "weights.pth"
    path.write_bytes(data)
    try:
        message = str(type(read_checkpoint(path)))
    except UserError as error:
        message = str(error)
    assert "\n" not in message


@pytest.mark.slow
def test_thousands_of_damaged_files(tmp_path: Path):
    """Bytes are changed, removed and added, mostly in the headers."""
    chance = random.Random(0)
    path = tmp_path / "weights.pth"
    counts = {"read": 0, "refused": 0}
    for _ in range(5000):
        data = bytearray(chance.choice(SEEDS))
        reach = len(data) if chance.random() < 0.5 else min(len(data), 900)
        for _ in range(chance.choice([1, 2, 4, 16])):
            at = chance.randrange(min(reach, len(data)))
            some = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9)))
            data[at : at + chance.choice([0, 1, len(some)])] = some
        path.write_bytes(data[: chance.randrange(len(data))] if chance.random() < 0.15 else data)
        try:
            read_checkpoint(path)
            counts["read"] += 1
        except UserError:
            counts["refused"] += 1
    assert counts["read"] > 100 and counts["refused"] > 2000
