"""Pipes, devices and endless files in the user's data are one clear error: no hang, no full memory."""

import ast
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from frugalvit.backbones.weights.load import read_checkpoint
from frugalvit.backbones.weights.model_folder import load_model_folder
from frugalvit.config.yaml import read_yaml
from frugalvit.data import open_data
from frugalvit.data.cache.store import open_file
from frugalvit.data.dataset import FileExamples
from frugalvit.data.formats.annotated_images import read_image_size
from frugalvit.data.formats.coco import read_coco_file
from frugalvit.data.open import read_class_names
from frugalvit.data.webdataset.index import read_index
from frugalvit.data.webdataset.tar import list_members
from frugalvit.engine.checkpoint import read_state
from frugalvit.errors import UserError
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.segmentation.dataset import _class_names
from frugalvit.utils.files import read_bytes, read_text

SOURCE = Path(__file__).parents[2] / "src" / "frugalvit"
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")


def open_tiny_imagenet(path: Path) -> None:
    root = path.parent
    for name in ("train/a/0.png", "train/b/0.png", "val/images/0.png"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    path.rename(root / "val" / path.name)
    open_data(root)


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "COCO": ("instances.json", read_coco_file),
    "index": ("index.json", lambda path: read_index(path.parent)),
    "Tiny ImageNet": ("val_annotations.txt", open_tiny_imagenet),
    "classes": ("classes.txt", read_class_names),
    "classes of masks": ("classes.txt", lambda path: _class_names(path.parent, "voc")),
    "options": ("options.yaml", read_yaml),
    "weights": ("model.pth", read_checkpoint),
    "model": ("config.json", lambda path: (path.with_name("model.pth").touch(), load_model_folder(path.parent))),
    "shard": ("a.tar", lambda path: list(list_members(path))),
    "image": ("a.png", lambda path: FileExamples([str(path)], None).raw(0)),
    "metrics": ("metrics.jsonl", lambda path: RunFolder(path.parent, writer=False).metrics()),
}


@pytest.fixture
def deadline() -> Iterator[None]:
    """Turn a hang into a failure."""

    def fail(*_: object) -> None:
        raise AssertionError("reading hangs")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_special(path: Path, kind: str) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)  # a sparse file: a terabyte of zeros that takes no space


@pytest.mark.parametrize("kind", ["pipe", "device", "endless"])
@pytest.mark.parametrize("reader", READERS)
def test_special_files_are_one_line(reader: str, kind: str, tmp_path: Path, deadline: None) -> None:
    if kind == "endless" and reader in ("weights", "shard"):
        pytest.skip("read in parts, up to the first wrong byte")
    name, read = READERS[reader]
    make_special(tmp_path / name, kind)
    with pytest.raises((UserError, OSError), match=r"not a regular file|larger than") as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_special_files_beside_images(kind: str, tmp_path: Path, deadline: None, capsys) -> None:
    """An image of a detector counts as unreadable, and decoded images are decoded again."""
    for name in ("file", "file.pt"):
        make_special(tmp_path / name, kind)
    with pytest.raises(UserError, match="not a regular file"):
        read_image_size(tmp_path / "file")
    assert "not a regular file" in read_state(tmp_path / "file")[1]  # a checkpoint
    assert open_file(tmp_path / "file", "fingerprint") is None
    assert "not a regular file" in capsys.readouterr().err


def test_read_text_reads_as_pathlib(tmp_path: Path) -> None:
    for content in (b"", b"a\r\nb\rc\n\nd", "\ufeffä\r\n".encode(), json.dumps(["ü"]).encode()):
        (tmp_path / "file").write_bytes(content)
        assert read_bytes(tmp_path / "file", 100) == content
        for encoding in ("utf-8", "utf-8-sig"):
            assert read_text(tmp_path / "file", encoding) == (tmp_path / "file").read_text(encoding)
    with pytest.raises(OSError, match="larger than"):
        read_bytes(tmp_path / "file", 3)
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)


def test_users_files_are_opened_by_one_function() -> None:
    """No module that reads the user's data opens a path itself."""
    folders = [SOURCE / name for name in ("data", "tasks", "config", "backbones")]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            assert name not in ("read_text", "read_bytes"), f"{path}:{node.lineno} reads a path itself"
