"""Features in files, and figures of neighbours."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.cli.main import main
from frugalvit.config.probe import EmbedConfig
from frugalvit.data import open_data
from frugalvit.data.image_inputs import InputImages
from frugalvit.embedding.embed import embed, write_features
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model
from frugalvit.probing.extractor import FeatureExtractor, FeatureSet
from helpers import suite_layouts

TINY = {"model": "swin_nano", "img_size": 32, "device": "cpu", "workers": 1}


def test_npz_has_paths_labels_and_vectors(squares: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder" / "f.npz"
    result = embed(EmbedConfig(data=str(squares), out=str(out), **TINY))
    with np.load(out, allow_pickle=False) as file:
        arrays = dict(file)
    assert set(arrays) == {"paths", "splits", "vectors", "labels", "classes"}
    assert arrays["vectors"].shape == (48, result.data["shape"][0]) and arrays["vectors"].dtype == np.float32
    for path, label, split in zip(arrays["paths"], arrays["labels"], arrays["splits"], strict=True):
        assert Path(path).is_file() and arrays["classes"][label] in path and f"/{split}/" in path


def test_parquet_of_one_split(squares: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    embed(EmbedConfig(data=str(squares), out=str(tmp_path / "f.parquet"), split="test", **TINY))
    rows = parquet.read_table(tmp_path / "f.parquet").to_pylist()
    assert len(rows) == 12 and set(rows[0]) == {"path", "split", "label", "vector"}
    assert all(row["label"] in row["path"] and row["split"] == "test" for row in rows)


def test_unlabelled_images_beside_class_folders(squares: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(squares, tmp_path / "squares")
    shutil.copy(next((folder / "train" / "class1").iterdir()), folder / "train" / "loose.png")
    result = embed(EmbedConfig(data=str(folder), out=str(tmp_path / "f.npz"), **TINY))
    with np.load(tmp_path / "f.npz") as arrays:
        (row,) = [row for row, path in enumerate(arrays["paths"]) if path.endswith("loose.png")]
        assert arrays["labels"][row] == -1 and (arrays["labels"] >= 0).sum() == 48 and arrays["splits"][row] == "train"
    assert any("1 unlabelled image" in note for note in result.notes)
    embed(EmbedConfig(data=str(folder), out=str(tmp_path / "g.npz"), label_source="ignore", **TINY))
    with np.load(tmp_path / "g.npz") as arrays:
        assert len(arrays["paths"]) == 49 and "labels" not in arrays


def test_parquet_of_unlabelled_images_and_names_outside_utf8(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    names = ["a.png", "caf\udce9.png"]
    features = FeatureSet(torch.ones(2, 2), torch.tensor([1, -1]), None, names, names)
    write_features(tmp_path / "f.parquet", features, ["train", "train"], ("cat", "dog"))
    table = parquet.read_table(tmp_path / "f.parquet")
    assert table["label"].to_pylist() == ["dog", None] and table["path"].to_pylist()[1] == r"caf\udce9.png"


def test_files_in_two_splits_have_two_rows(tmp_path: Path) -> None:
    for number in range(3):
        suite_layouts.write(tmp_path / f"{number}.png", number % 2, number)
    rows = [("0.png", "a", "train"), ("1.png", "b", "train"), ("0.png", "a", "test"), ("2.png", "a", "test")]
    (tmp_path / "t.csv").write_text("path,label,split\n" + "\n".join(map(",".join, rows)))
    embed(EmbedConfig(data=str(tmp_path / "t.csv"), out=str(tmp_path / "f.npz"), **TINY))
    with np.load(tmp_path / "f.npz") as arrays:
        rows_written = [(Path(path).name, split) for path, split in zip(arrays["paths"], arrays["splits"], strict=True)]
    assert rows_written == [(name, split) for name, _, split in rows]


def test_grids_of_unlabelled_images(tmp_path: Path) -> None:
    for number in range(3):
        suite_layouts.write(tmp_path / "images" / f"{number}.png", 0, number)
    out = tmp_path / "f.npz"
    embed(EmbedConfig(data=str(tmp_path / "images"), out=str(out), features="grid", **TINY))
    with np.load(out) as arrays:
        assert arrays["vectors"].ndim == 4 and "labels" not in arrays


def test_neighbours_are_similar_images(squares: Path, tmp_path: Path) -> None:
    query = squares / "test" / "class1" / "0.png"
    picture = tmp_path / "near.png"
    result = embed(EmbedConfig(data=str(squares), neighbours=str(query), count=6, picture=str(picture), **TINY))
    near = result.data["neighbours"]
    assert len(near) == 6 and {entry["class"] for entry in near} == {"class1"}
    assert str(query) not in {entry["image"] for entry in near}
    cosines = [entry["cosine"] for entry in near]
    assert cosines == sorted(cosines, reverse=True)
    with Image.open(picture) as drawn:
        assert drawn.width > drawn.height > 100
    assert "out" not in result.data


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"out": "f.txt"}, r"f\.txt"),
        ({"out": "f.parquet", "features": "grid"}, "--features grid"),
        ({"neighbours": "nowhere.png"}, "nowhere"),
        ({"neighbours": "nowhere.png", "picture": "f.gif"}, r"f\.gif"),
        ({"split": "val", "out": "f.npz", "label_source": "ignore"}, "no val split"),
    ],
)
def test_invalid_options_are_errors(change: dict, word: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    suite_layouts.folders(tmp_path / "data", {"train": 1, "test": 1})
    with pytest.raises(UserError, match=word):
        embed(EmbedConfig(data="data", **(TINY | change)))


@pytest.mark.parametrize("seed", [0, 7])
def test_missing_val_is_made_as_in_training(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = suite_layouts.folders(tmp_path / "data", {"train": 8})
    result = embed(EmbedConfig(data=str(folder), out=str(tmp_path / "f.npz"), split="val", **TINY | {"seed": seed}))
    with np.load(tmp_path / "f.npz") as arrays:
        assert sorted(arrays["paths"]) == sorted(open_data(str(folder)).splits["val"].names)
    assert any("val is made from train: 3 of 24 images" in note for note in result.notes)
    assert "--split train" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--out", "--picture"])
def test_outputs_are_checked_before_the_model_loads(
    option: str, squares: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "f.npz").write_text("mine")
    (tmp_path / "f.png").write_text("mine")
    query = ["--neighbours", str(squares / "test" / "class1" / "0.png")]
    name, more = ("f.npz", []) if option == "--out" else ("f.png", query)
    for path in (tmp_path / "file" / name, tmp_path / name):  # below a file, and an existing file
        assert main(["embed", "no such model", str(squares), option, str(path), *more]) == 2
        error = capsys.readouterr().err
        assert str(tmp_path) in error and len(error.splitlines()) == 1
    assert (tmp_path / name).read_text() == "mine"


def test_neighbours_of_the_only_image_are_an_error(tmp_path: Path) -> None:
    suite_layouts.write(tmp_path / "images" / "0.png", 0, 0)
    query, out = tmp_path / "images" / "0.png", tmp_path / "f.npz"
    outputs = {"picture": str(tmp_path / "near.png"), "out": str(out)}
    with pytest.raises(UserError, match="--neighbours"):
        embed(EmbedConfig(data=str(tmp_path / "images"), neighbours=str(query), **outputs, **TINY))
    assert not out.exists()


@pytest.mark.parametrize("sizes", [[(480, 640)], [(480, 640), (640, 480), (300, 333)]], ids=["one size", "several"])
def test_features_do_not_depend_on_the_dataset(sizes: list[tuple[int, int]], tmp_path: Path, model: Model) -> None:
    """A JPEG gives the same pixels, alone or with others."""
    random = np.random.default_rng(0)
    for number in range(6):
        height, width = sizes[number % len(sizes)]
        waves = np.sin(np.arange(height)[:, None] * random.uniform(0.05, 0.7) + np.arange(width) * 0.3)[..., None]
        pixels = 128 + 60 * waves * random.uniform(-1, 1, 3) + random.normal(0, 20, (height, width, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(tmp_path / f"{number}.jpg", quality=95)
    features = FeatureExtractor(model, cache=False, batch=4)(open_data(str(tmp_path), split="given").splits["train"])
    names = features.names
    with torch.no_grad():
        alone = torch.cat([model.backbone(model.transform.image(name)).pooled for name in names])
    assert torch.cosine_similarity(features.features, alone).min() > 0.99999
    (tmp_path / "copy").mkdir()
    query = shutil.copy(names[1], tmp_path / "copy" / "query.jpg")
    near = embed(EmbedConfig(data=str(tmp_path), neighbours=str(query), picture=str(tmp_path / "near.png"), **TINY))
    assert near.data["neighbours"][0]["image"] == names[1]
    assert near.data["neighbours"][0]["cosine"] == pytest.approx(1, abs=1e-5)
    pixels = next(InputImages([names[1]]).batches(1, ""))[0].pixels  # as 'predict' reads it
    assert torch.equal(model.transform.image(pixels), model.transform.image(names[1]))
