"""``embed --engine ray`` against the code in memory: parts, tables and resume."""

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import open_data
from frugalvit.embedding import partition, ray_embed
from frugalvit.embedding.embed import embed
from frugalvit.embedding.partition import Part, divide
from frugalvit.embedding.ray_workers import Bad, Embedder, embed_part
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureExtractor
from helpers import shards, suite_layouts

parquet: Any = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'frugalvit[scale]'")
pytest.importorskip("faiss", reason="needs faiss: pip install 'frugalvit[scale]'")
pytest.importorskip("ray", reason="needs ray: pip install 'frugalvit[scale]'")
TINY = {"model": "swin_nano", "img_size": 32, "device": "cpu", "workers": 1}
OPTIONS = ["--img-size", "32", "--device", "cpu", "--workers", "1", "--engine", "ray", "--actors", "1"]


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do in this process what the workers do."""

    def embed_parts(parts: Sequence[tuple[Part, Path]], config: EmbedConfig) -> Bad:
        worker = Embedder(config, Path.cwd())
        return [entry for part, path in parts for entry in embed_part(worker.extractor, part, path)]

    monkeypatch.setattr(ray_embed, "embed_parts", embed_parts)


def read_csv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.reader(file))


def test_tables_equal_those_in_memory(without_ray: None, squares: Path, tmp_path: Path) -> None:
    query = str(squares / "test" / "class1" / "0.png")
    options: list[dict[str, Any]] = [{"duplicates": 0.997}, {"select": 5}, {"neighbours": query, "count": 4}]
    tables = ["duplicates.csv", "to_label.csv", "neighbours.csv"]
    for option, name in zip(options, tables, strict=True):
        out = {} if "neighbours" in option else {"out": str(tmp_path / "memory" / name)}
        picture = str(tmp_path / f"{name}.png")
        memory = embed(EmbedConfig(data=str(squares), picture=picture, **out, **option, **TINY))
        result = embed(EmbedConfig(data=str(squares), engine="ray", out=str(tmp_path / "ray"), **option, **TINY))
        assert (result.data["parts"], result.data["computed"]) == (3, 3 if name == tables[0] else 0)
        written = read_csv(tmp_path / "ray" / name)
        if "neighbours" in option:
            assert [line[1:3] for line in written[1:]] == [[n["image"], n["class"]] for n in memory.data["neighbours"]]
            continue
        expected = read_csv(tmp_path / "memory" / name)
        assert [line[:2] for line in written] == [line[:2] for line in expected] and len(expected) > 5
        if "duplicates" in option:
            cosines = [[float(line[2]) for line in lines[1:]] for lines in (written, expected)]
            assert cosines[0] == pytest.approx(cosines[1], abs=2e-6)


def test_shards_and_parquet_equal_files(squares: Path, model: Any, tmp_path: Path) -> None:
    extractor = FeatureExtractor(model, cache=False, workers=1)
    files = sorted((squares / "train").rglob("*.png"))
    expected = extractor(open_data(str(squares)).splits["train"])
    by_name = dict(zip(expected.names, expected.features, strict=True))
    contents: dict[str, bytes] = {}
    for number, path in enumerate(files):
        contents |= {f"{number:03d}.png": path.read_bytes(), f"{number:03d}.cls": path.parent.name.encode()}
    shards.write_tar(tmp_path / "tars" / "train-000.tar", contents)
    import pyarrow

    images = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
    table = pyarrow.table({"image": images, "label": [path.parent.name for path in files]})
    (tmp_path / "tables").mkdir()
    parquet.write_table(table, tmp_path / "tables" / "train-0.parquet", row_group_size=10)
    for kind in ("tars", "tables"):
        (part,) = divide(str(tmp_path / kind), "all", lambda: pytest.fail("not listed")).parts
        assert embed_part(extractor, part, tmp_path / f"{kind}.parquet") == []
        rows = parquet.read_table(tmp_path / f"{kind}.parquet").to_pylist()
        assert [(row["split"], row["label"]) for row in rows] == [("train", path.parent.name) for path in files]
        vectors = torch.tensor([row["vector"] for row in rows])
        torch.testing.assert_close(vectors, torch.stack([by_name[str(path)] for path in files]), rtol=1e-4, atol=1e-5)
        with pytest.raises(UserError, match="no test split"):
            divide(str(tmp_path / kind), "test", lambda: pytest.fail("not listed"))


def test_a_part_that_exists_is_finished(
    without_ray: None, squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partition, "PART", 10)
    images, out = shutil.copytree(squares / "train", tmp_path / "images"), tmp_path / "features"
    (images / "class0" / "broken.png").write_bytes(b"no image")
    config = EmbedConfig(data=str(images), engine="ray", out=str(out), **TINY)
    first = embed(config).data
    assert (first["images"], first["bad"], first["parts"], first["computed"]) == (24, 1, 3, 3)
    paths = sorted(out.glob("part-*.parquet"))
    paths[1].unlink()
    times = [path.stat().st_mtime_ns for path in paths[::2]]
    assert embed(config).data["computed"] == 1 and sorted(out.glob("part-*.parquet")) == paths
    assert [path.stat().st_mtime_ns for path in paths[::2]] == times
    with pytest.raises(UserError, match="another model or other options: choose another --out"):
        embed(config.model_copy(update={"img_size": 64}))
    Image.new("RGB", (20, 20)).save(images / "class1" / "0.png")
    with pytest.raises(UserError, match="other images"):
        embed(config)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"out": "f.npz"}, r"--out f\.npz"),
        ({"out": "squares/f"}, "--out squares/f"),
        ({"out": "f", "duplicates": 0.9}, r"f/duplicates\.csv"),
        ({"features": "grid"}, "--features grid"),
        ({"duplicates": 0.9, "picture": "a.png"}, "--picture"),
        ({"engine": "memory", "actors": 1}, "--actors"),
        ({}, r"frugalvit\[scale\]"),
    ],
)
def test_mistakes(change: dict, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    suite_layouts.folders(tmp_path / "squares", {"train": 1})
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "duplicates.csv").write_text("mine")
    if not change:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=word):
        embed(EmbedConfig.parse({"data": "squares", "engine": "ray"} | TINY | change))


@pytest.mark.slow
def test_killed_and_continued_with_ray(squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill leaves finished parts, and the same command continues; an error names a damaged shard."""
    files, content = sorted((squares / "train").rglob("*.png")), io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 900, 3), dtype=np.uint8)).save(content, "PNG")
    images = {f"{row}.png": content.getvalue() if row % 2 else files[row].read_bytes() for row in range(24)}
    for number in range(12):
        shards.write_tar(tmp_path / "tars" / f"{number:03d}.tar", images)
    (tmp_path / "tars" / "011.tar").write_bytes(b"damaged")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # other processes may fill the memory of this machine
    command = [sys.executable, "-m", "frugalvit.cli", "embed", "swin_nano", "tars", *OPTIONS, "--out", "f", "--json"]
    child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (done := list((tmp_path / "f").glob("part-*.parquet"))):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert len(done) < 11
    times = {path: path.stat().st_mtime_ns for path in done}
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert failed.returncode == 2 and "011.tar" in failed.stderr and "1 of " in failed.stderr
    assert {path: path.stat().st_mtime_ns for path in done} == times
    shards.write_tar(tmp_path / "tars" / "011.tar", images)
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert finished.returncode == 0, finished.stderr
    assert '"computed": 1' in finished.stdout and '"images": 288' in finished.stdout
