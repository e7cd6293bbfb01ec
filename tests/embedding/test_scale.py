"""``embed --engine ray``: parts, resume, and the index on disk against the code in memory."""

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from frugalvit.config.probe import EmbedConfig
from frugalvit.data import open_data
from frugalvit.embedding import parts as parts_module
from frugalvit.embedding import ray_engine, scale
from frugalvit.embedding.embed import embed
from frugalvit.embedding.parts import FeatureParts, PartResult, as_table, embed_part, part_path, plan_parts
from frugalvit.embedding.selection import group_duplicates, representatives
from frugalvit.errors import UserError
from frugalvit.probing.extractor import FeatureExtractor
from frugalvit.probing.knn import nearest
from helpers import shards, suite_layouts

parquet: Any = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow: pip install 'frugalvit[scale]'")
TINY = {"model": "swin_nano", "img_size": 32, "device": "cpu", "workers": 1}
ARGUMENTS = ["--img-size", "32", "--device", "cpu", "--workers", "1", "--engine", "ray", "--actors", "1"]


# The index


def clustered_features(rows: int, width: int) -> torch.Tensor:
    """Rows around centres that overlap, with near copies of other rows at every distance."""
    random = np.random.default_rng(0)
    vectors = random.normal(0, 1, (12, width))[random.integers(0, 12, rows)] + random.normal(0, 0.7, (rows, width))
    copies = random.integers(0, rows, (2, rows // 3))
    noise = random.uniform(0, 0.4, (rows // 3, 1)) * random.normal(0, 1, (rows // 3, width))
    vectors[copies[0]] = vectors[copies[1]] + noise
    return torch.from_numpy(vectors).float()


@pytest.fixture(scope="module")
def features() -> torch.Tensor:
    return clustered_features(900, 8)


@pytest.fixture(scope="module")
def stored(features: torch.Tensor, tmp_path_factory: pytest.TempPathFactory) -> FeatureParts:
    folder = tmp_path_factory.mktemp("stored")
    for number, block in enumerate(features.split(250)):
        table = as_table(
            [f"{number}-{row}.png" for row in range(len(block))], ["train"] * len(block), None, block.numpy()
        )
        parquet.write_table(table, part_path(folder, number))
    return FeatureParts([part_path(folder, number) for number in range(4)])


def open_index(stored: FeatureParts, folder: Path, clusters: int) -> Any:
    pytest.importorskip("faiss", reason="needs faiss: pip install 'frugalvit[scale]'")
    from frugalvit.embedding.cluster_index import ClusterIndex

    index = ClusterIndex.open(stored, folder, clusters=clusters)
    index.block = 40  # several blocks a cluster
    return index


@pytest.mark.parametrize("clusters", [1, 13])
def test_index_equals_memory(clusters: int, features: torch.Tensor, stored: FeatureParts, tmp_path: Path) -> None:
    index = open_index(stored, tmp_path / "index", clusters)
    assert len(index) == 900 and (np.diff(index.starts) > 0).all()
    torch.testing.assert_close(index.vectors(np.arange(900)), F.normalize(features, dim=1))
    for threshold in (0.8, 0.95, 1.0):
        first = index.group_duplicates(threshold)
        assert torch.equal(first, group_duplicates(features, threshold))
    allowed = np.arange(900) % 3 > 0
    first = index.group_duplicates(0.95, allowed).numpy()
    rows = np.flatnonzero(allowed)
    assert (first[allowed] == rows[group_duplicates(features[allowed], 0.95).numpy()]).all()
    assert (first[~allowed] == np.flatnonzero(~allowed)).all()
    for row in range(0, 900, 90):
        _, cosines, expected = next(nearest(features, features[row, None] + 0.1, 7))
        found = index.nearest(features[row] + 0.1, 7)
        assert [number for number, _ in found] == expected[0].tolist()
        assert [cosine for _, cosine in found] == pytest.approx(cosines[0].tolist(), abs=1e-6)
    assert len(index.nearest(features[0], 2000)) == 900
    known = features[:5]
    expected_rows = representatives(features[allowed], 6, known)
    assert index.representatives(6, allowed, known) == rows[expected_rows].tolist()


def test_clusters_choose_nearly_as_well(features: torch.Tensor, stored: FeatureParts, tmp_path: Path) -> None:
    index = open_index(stored, tmp_path / "index", 13)
    chosen = index.representatives(20, np.ones(900, bool), exact=200)
    assert len(set(chosen)) == 20
    unit = F.normalize(features, dim=1)
    best, found = (float((unit @ unit[rows].T).amax(1).sum()) for rows in (representatives(features, 20), chosen))
    assert found > 0.98 * best


def test_weights_repeat_rows() -> None:
    features, weights = torch.randn(30, 4), torch.randint(1, 5, (30,))
    repeated = representatives(features.repeat_interleave(weights, 0), 8)
    rows = torch.arange(30).repeat_interleave(weights)[repeated].tolist()
    assert representatives(features, 8, weights=weights) == rows


def test_index_is_built_again_for_other_parts(stored: FeatureParts, tmp_path: Path) -> None:
    index = open_index(stored, tmp_path / "index", 3)
    times = {path: path.stat().st_mtime_ns for path in index.folder.iterdir()}
    assert {
        path: path.stat().st_mtime_ns for path in open_index(stored, tmp_path / "index", 3).folder.iterdir()
    } == times
    fewer = FeatureParts(stored.paths[:2])
    assert len(open_index(fewer, tmp_path / "index", 3)) == 500


# Parts


def in_process(parts: Any, config: EmbedConfig, folder: Path, images: int | None) -> list[PartResult]:
    """What Ray's workers do, without Ray."""
    worker = ray_engine.Embedder(config, folder.absolute(), Path.cwd())
    return [embed_part(worker.extractor, part, part_path(folder, number)) for number, part in enumerate(parts)]


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("faiss", reason="needs faiss: pip install 'frugalvit[scale]'")
    pytest.importorskip("ray", reason="needs ray: pip install 'frugalvit[scale]'")
    monkeypatch.setattr(scale, "embed_parts", in_process)


def read_csv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.reader(file))


def test_tables_equal_those_in_memory(without_ray: None, squares: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(squares, tmp_path / "squares")
    query = copy / "test" / "class1" / "0.png"
    options: list[dict[str, Any]] = [{"duplicates": 0.997}, {"select": 5}, {"neighbours": str(query), "count": 4}]
    for number, option in enumerate(options):
        out = {} if "neighbours" in option else {"out": str(tmp_path / f"{number}.csv")}
        picture = {"picture": str(tmp_path / f"{number}.png")}
        memory = embed(EmbedConfig(data=str(copy), **out, **picture, **option, **TINY))
        result = embed(EmbedConfig(data=str(copy), engine="ray", out=str(tmp_path / "f"), **option, **TINY))
        assert result.data["computed"] == (3 if number == 0 else 0) and Path(result.data["picture"]).exists()
        if "neighbours" in option:
            expected = [(entry["image"], entry["class"]) for entry in memory.data["neighbours"]]
            assert [(entry["image"], entry["class"]) for entry in result.data["neighbours"]] == expected
            continue
        lines = read_csv(tmp_path / f"{number}.csv")
        written = read_csv(tmp_path / "f" / ("to_label.csv" if "select" in option else "duplicates.csv"))
        if "duplicates" in option:
            assert len(lines) > 5
            lines, written = sorted(row[:2] for row in lines), sorted(row[:2] for row in written)
        assert [row[: row.index(path) + 1] for row in written for path in row if "/" in path] == [
            [*row[: row.index(path)], str(Path(path).absolute()) if Path(path).is_absolute() else str(tmp_path / path)]
            for row in lines
            for path in row
            if "/" in path
        ]


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
        plan = plan_parts(str(tmp_path / kind), "all", lambda: pytest.fail("not listed"))
        assert len(plan.parts) == 1
        assert embed_part(extractor, plan.parts[0], tmp_path / f"{kind}.parquet") == PartResult(24, [], True)
        rows = parquet.read_table(tmp_path / f"{kind}.parquet").to_pylist()
        assert [row["label"] for row in rows] == [path.parent.name for path in files]
        vectors = torch.tensor([row["vector"] for row in rows])
        torch.testing.assert_close(vectors, torch.stack([by_name[str(path)] for path in files]), rtol=1e-4, atol=1e-5)
        with pytest.raises(UserError, match="no test split"):
            plan_parts(str(tmp_path / kind), "test", lambda: pytest.fail("not listed"))


def test_finished_parts_are_not_computed_again(
    squares: Path, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "PART", 10)
    copy = shutil.copytree(squares / "train", tmp_path / "images")
    broken = copy / "class0" / "broken.png"
    broken.write_bytes(b"no image")
    extractor = FeatureExtractor(model, cache=False, workers=1)

    def run() -> list[PartResult]:
        plan = plan_parts(str(copy), "all", lambda: ((source := open_data(str(copy), split="given")), source.splits))
        return [embed_part(extractor, part, part_path(tmp_path, n)) for n, part in enumerate(plan.parts)]

    first = run()
    assert [result.rows for result in first] == [9, 10, 5] and first[0].bad[0][0] == str(broken)
    assert [result._replace(is_new=True) for result in run()] == first and not any(r.is_new for r in run())
    part_path(tmp_path, 2).write_bytes(part_path(tmp_path, 2).read_bytes()[:-9])  # damaged
    Image.new("RGB", (20, 20)).save(copy / "class1" / "5.png")  # in the second part
    assert [result.is_new for result in run()] == [False, True, True]
    other = FeatureExtractor(model, kind="last_blocks", blocks=1, cache=False, workers=1)
    with pytest.raises(UserError, match="--out"):
        embed_part(
            other,
            plan_parts(str(copy), "all", lambda: (s := open_data(str(copy)), s.splits)).parts[0],
            part_path(tmp_path, 0),
        )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"out": "f.npz"}, r"--out f\.npz"),
        ({"out": "squares/f"}, "--out squares/f"),
        ({"out": "f", "duplicates": 0.9}, r"f/duplicates\.csv"),
        ({"features": "grid"}, "--features grid"),
        ({"engine": "memory", "actors": 1}, "--actors"),
    ],
)
def test_mistakes(change: dict, word: str, without_ray: None, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    suite_layouts.folders(tmp_path / "squares", {"train": 1})
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "duplicates.csv").write_text("mine")
    with pytest.raises(UserError, match=word):
        embed(EmbedConfig.parse({"data": "squares", "engine": "ray"} | TINY | change))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    if "engine" not in change and "features" not in change:
        with pytest.raises(UserError, match=r"frugalvit\[scale\]"):
            embed(EmbedConfig.parse({"data": "squares", "engine": "ray"} | TINY | change))


@pytest.mark.slow
def test_killed_and_continued_with_ray(squares: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill leaves finished parts; the same command continues, and a damaged shard is an error that names it."""
    pytest.importorskip("ray", reason="needs ray: pip install 'frugalvit[scale]'")
    files, content = sorted((squares / "train").rglob("*.png")), io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (900, 900, 3), dtype=np.uint8)).save(content, "PNG")
    for number in range(12):
        images = {f"{row}.png": content.getvalue() if row % 2 else files[row].read_bytes() for row in range(24)}
        shards.write_tar(tmp_path / "tars" / f"{number:03d}.tar", images)
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")  # other processes may fill the memory of this machine
    command = [sys.executable, "-m", "frugalvit.cli", "embed", "swin_nano", "tars", *ARGUMENTS, "--out", "f"]
    child = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 300
    while not (done := list((tmp_path / "f").glob("part-*.parquet"))):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert len(done) < 12
    times = {path: path.stat().st_mtime_ns for path in done}
    finished = subprocess.run([*command, "--json"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert finished.returncode == 0, finished.stderr
    assert {path: path.stat().st_mtime_ns for path in done} == times
    assert len(FeatureParts(sorted((tmp_path / "f").glob("part-*.parquet")))) == 12 * 24
    (tmp_path / "tars" / "003.tar").write_bytes(b"damaged")
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert failed.returncode == 2 and "003" in failed.stderr and "1 of 12 parts failed" in failed.stderr
