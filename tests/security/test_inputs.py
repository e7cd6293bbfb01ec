"""Odd data, settings and surroundings: each is noticed, in one line and with status 2, or does no harm."""

import os
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from frugalvit.backbones import create_backbone
from frugalvit.cli.main import main
from frugalvit.config.recipes import recipe_values
from frugalvit.config.train import TrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.data import dataset, image_inputs, open_data
from frugalvit.data import decode as decoding
from frugalvit.data.cache.build import build_store
from frugalvit.data.dataset import FileExamples
from frugalvit.data.formats.masks import _find_folders
from frugalvit.data.worker_pool import WorkerPool
from frugalvit.errors import UserError
from frugalvit.experiment.builders import check_out_outside_data
from frugalvit.utils import system

PIXELS = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)


def write_classes(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(2):
            Image.fromarray(PIXELS).save(folder / name / f"{number}.png")
    return folder


@pytest.mark.parametrize(
    "other",
    [
        "cafe\u0301",
        "caf\u00e9\u200b",
        "caf\u00e9 ",
        "\u00a0caf\u00e9",
        "caf\u00e9\x01",
        "caf\u00e9\ufe0f",
        "caf\u3164\u00e9",
    ],
    ids=["NFD", "zero width", "space", "nbsp", "control", "variant", "filler"],
)
def test_classes_that_look_the_same_are_refused(tmp_path: Path, other: str) -> None:
    folder = write_classes(tmp_path / "data", "caf\u00e9", other, "tea")
    with pytest.raises(UserError, match="look the same") as caught:
        open_data(str(folder))
    assert ascii(other) in str(caught.value)
    assert len(open_data(str(folder), classes=["caf\u00e9", other]).classes or ()) == 2, "both are named on purpose"


def test_classes_that_differ_in_case_are_noted(tmp_path: Path) -> None:
    notes = open_data(str(write_classes(tmp_path / "data", "A", "a", "b"))).notes
    assert any("'A' and 'a'" in note for note in notes)


def test_a_replaced_file_changes_the_fingerprint(tmp_path: Path) -> None:
    """Same name, size and time of modification, and not among the files whose bytes are sampled."""
    paths = [tmp_path / f"{number:03d}.bmp" for number in range(200)]
    for path in paths:
        Image.fromarray(PIXELS).save(path)
    examples = FileExamples([str(path) for path in paths], None)
    before, status = examples.fingerprint(), paths[5].stat()
    Image.fromarray(255 - PIXELS).save(tmp_path / "new.bmp")
    (tmp_path / "new.bmp").replace(paths[5])
    os.utime(paths[5], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert paths[5].stat().st_size == status.st_size and examples.fingerprint() != before


def test_large_images_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight small files of many pixels took 6.6 GB; threads and worker processes now take turns."""
    monkeypatch.setattr(decoding, "LARGE_MEGAPIXELS", 0.01)
    together, most = 0, []

    def count(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def counted(*arguments: Any) -> np.ndarray:
            nonlocal together
            together += 1
            most.append(together)
            pixels = function(*arguments)
            threading.Event().wait(0.01)
            together -= 1
            return pixels

        return counted

    monkeypatch.setattr(decoding, "upright_rgb", count(decoding.upright_rgb))
    monkeypatch.setattr(dataset, "resize_to", count(dataset.resize_to))
    (tmp_path / "large.png").write_bytes(_png(200, 200))
    examples = FileExamples([str(tmp_path / "large.png")], None)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: examples.read_sized(0, (8, 8)), range(8)))
    assert max(most) == 1 and len(most) == 16


def test_large_images_are_predicted_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 64 huge images, decoded in full, would fill the memory."""
    monkeypatch.setattr(image_inputs, "_MAX_BYTES", 100_000)
    for number, side in enumerate((8, 8, 200, 8, 200, 8)):
        (tmp_path / f"{number}.png").write_bytes(_png(side, side))
    parts = list(image_inputs.InputImages([str(tmp_path)]).batches(64, ""))
    assert [[image.index for image in part] for part in parts] == [[0, 1, 2], [3, 4], [5]]


def test_worker_processes_share_the_turn_and_name_a_full_memory() -> None:
    pool = WorkerPool(1, _Probe, advice="")
    assert pool.submit(False)() == "SemLock", "a lock between processes, not between threads"
    with pytest.raises(UserError, match=r"/dev/shm.*--workers"):
        pool.submit(True)()
    pool.close()


class _Probe:
    def __call__(self, fail: bool) -> str:
        if fail:
            raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device")
        return type(decoding.large_images._semlock).__name__  # type: ignore[attr-defined]


def _png(height: int, width: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        body = name + content
        return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    rows = zlib.compress(bytes(height * (3 * width + 1)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_workers_are_capped_by_cores_and_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "cores", lambda: 2)
    assert [system.cap_workers(wanted, 100) for wanted in (0, 1, 8, 10**6, "auto")] == [0, 1, 8, 8, 2]
    assert system.cap_workers(10**6, 3) == 3
    folder = write_classes(tmp_path, "a", "b")
    store = build_store(open_data(str(folder), split="given").splits["train"], 8, where="off", workers=10**6)
    assert store.workers == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "match"), [("batch: 8\nbatch: 9\n", "'batch'"), ("img-size: 8\nimg_size: 9\n", "img_size"),
                        ("a.b: 1\na:\n  b: 2\n", "a.b"), ("x: " + "[" * 20_000, "YAML"), ("x: " + "9" * 5000, "YAML"),
                        ("x: [" + "[], " * 2000 + "]", "brackets"), ("x: " + "9 " * 600_000, "characters"),
                        ("x: " + "[" * 450, "YAML")],
    ids=["equal keys", "two spellings", "dotted", "brackets", "digits", "many brackets", "long", "deep"],
)  # fmt: skip
def test_a_configuration_that_contradicts_itself(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=match):
        read_yaml(path)
    assert main(["train", "--config", str(path), "--quiet"]) == 2


def test_yaml_flags_with_brackets() -> None:
    assert main(["train", "nothing", "--backbone-args", "[" * 20_000, "--quiet"]) == 2


@pytest.mark.parametrize("header", ["path,label,label", "path,path,label", "path,label,split,split"])
def test_equal_columns_are_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.csv").write_text(
        f"{header}\nx.png,a,b,train\n".replace(",train", "" if "split" not in header else ",train")
    )
    with pytest.raises(UserError, match="several columns"):
        open_data(str(tmp_path / "a.csv"))


def test_labels_of_many_digits_are_names(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "x.png")
    Image.fromarray(PIXELS).save(tmp_path / "y.png")
    (tmp_path / "a.csv").write_text(f"path,label\nx.png,{'9' * 5000}\ny.png,1\n")
    assert open_data(str(tmp_path / "a.csv"), split="given").classes == ("1", "9" * 5000)


@pytest.mark.parametrize("command", ["train", "pretrain", "detect train"])
def test_backbone_args_cannot_download(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*command.split(), "nothing", "--backbone-args", "{pretrained: true}"]
    assert main(words) == 2 and "--init" in capsys.readouterr().err


def test_out_inside_the_unlabelled_images(tmp_path: Path) -> None:
    more = write_classes(tmp_path / "more", "a")
    values = {"data": str(tmp_path / "data"), "unlabelled": str(more), "out": str(more / "run")}
    with pytest.raises(UserError, match="more"):
        check_out_outside_data(TrainConfig.parse(values))
    check_out_outside_data(TrainConfig.parse(values | {"out": str(tmp_path / "run")}))


def test_both_names_of_drop_path() -> None:
    small: dict[str, Any] = {"img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)}
    with pytest.raises(UserError, match="drop_path_rate"):
        create_backbone("swin_nano", drop_path=0.1, drop_path_rate=0.2, **small)
    assert create_backbone("swin_nano", drop_path=0.1, drop_path_rate=0.1, **small).keywords["drop_path"] == 0.1


def test_two_folders_for_one_split_of_masks(tmp_path: Path) -> None:
    for name in ("images/train", "images/val", "images/validation", "masks/train", "masks/val", "masks/validation"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(UserError, match="'val' and 'validation'"):
        _find_folders(tmp_path)


def test_a_recipe_with_another_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "other", "task": "train", "values": {}}))
    with pytest.raises(UserError, match="'mine'"):
        recipe_values(str(path), "train")


CODE = "import sys; from frugalvit.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.parametrize("case", ["SLURM_PROCID=y", "WORLD_SIZE=two", "no home", "deleted folder"])
def test_odd_surroundings_are_one_line(tmp_path: Path, case: str) -> None:
    words, variables, where, code = ["list", "datasets"], dict(os.environ), tmp_path, CODE
    if case == "SLURM_PROCID=y":
        variables |= {"SLURM_PROCID": "y", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    elif case == "WORLD_SIZE=two":
        variables |= {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "two"}
    elif case == "no home":  # a container with a user that no list names
        variables = {name: value for name, value in variables.items() if name not in ("HOME", "FRUGALVIT_CACHE")}
        words = ["data", "~/photos"]
        code = f"import os; os.path.expanduser = lambda path: path; {CODE}"
    if case == "deleted folder":
        where = tmp_path / "gone"
        where.mkdir()
        code = f"import os; os.rmdir({str(where)!r}); {CODE}"
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=variables, cwd=where, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
