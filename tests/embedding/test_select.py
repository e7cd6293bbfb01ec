"""Selection of images to label and near duplicates: against double loops, and through the command."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from frugalvit.cli.main import main
from frugalvit.config.probe import EmbedConfig
from frugalvit.data import open_data
from frugalvit.embedding.contact_sheet import COLUMNS, Thumbnail, arrange_groups, sheet_figure
from frugalvit.embedding.duplicates import group_duplicates
from frugalvit.embedding.embed import embed
from frugalvit.embedding.image_table import path_from_table
from frugalvit.embedding.select import representatives
from frugalvit.errors import UserError
from helpers import suite_layouts

TINY = {"model": "swin_nano", "img_size": 32, "device": "cpu", "workers": 1}
ARGUMENTS = ["--img-size", "32", "--device", "cpu", "--workers", "1", "--quiet"]


# Oracles: the definitions as loops over pairs


def slow_cover(images: list[np.ndarray], chosen: list[np.ndarray]) -> float:
    return sum(max((float(image @ other) for other in chosen), default=-1.0) for image in images)


def slow_representatives(features: np.ndarray, count: int, known: np.ndarray | None = None) -> list[int]:
    unit = [row / np.linalg.norm(row) for row in features]
    before = [] if known is None else [row / np.linalg.norm(row) for row in known]
    chosen: list[int] = []
    while len(chosen) < count:
        best, most = None, -np.inf
        for i in range(len(unit)):
            cover = slow_cover(unit, [*before, *(unit[j] for j in chosen), unit[i]])
            if i not in chosen and cover > most + 1e-6:  # the first of equals
                best, most = i, cover
        assert best is not None
        chosen.append(best)
    return chosen


def slow_groups(features: np.ndarray, threshold: float) -> list[int]:
    unit = [row / np.linalg.norm(row) for row in features]
    first = list(range(len(unit)))
    for i in range(len(unit)):
        for j in range(i):
            if unit[i] @ unit[j] >= threshold - 1e-9 and first[i] != first[j]:
                low, high = sorted((first[i], first[j]))
                first = [low if row == high else row for row in first]
    return first


def random_features(images: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 1, (images, width))


def tied_features(images: int, width: int, seed: int = 0) -> np.ndarray:
    """Plus and minus the axes, many times over: every cosine is exactly -1, 0 or 1."""
    random = np.random.default_rng(seed)
    return random.choice([-1.0, 1.0], images)[:, None] * np.eye(width)[random.integers(0, width, images)]


def grouped_features(groups: int, width: int, seed: int = 0) -> np.ndarray:
    """Groups of 1, 2, 3, … images that are much alike."""
    random = np.random.default_rng(seed)
    centres = random.normal(0, 1, (groups, width)).repeat(np.arange(1, groups + 1), axis=0)
    return centres + random.normal(0, 0.2, centres.shape)


# Representatives


@pytest.mark.parametrize(("images", "width", "count"), [(1, 3, 1), (2, 3, 2), (30, 4, 1), (70, 5, 8), (32, 16, 32)])
def test_representatives_equal_the_double_loop(images: int, width: int, count: int) -> None:
    features = random_features(images, width)
    result = representatives(torch.from_numpy(features), count)
    assert result == slow_representatives(features, count) and len(set(result)) == count


@pytest.mark.parametrize(("images", "width"), [(24, 4), (70, 3)])
@pytest.mark.parametrize("seed", range(2))
def test_first_of_equal_rows_is_chosen(seed: int, images: int, width: int) -> None:
    features = tied_features(images, width, seed)
    result = representatives(torch.from_numpy(features), images)
    assert result[:12] == slow_representatives(features, 12) and sorted(result) == list(range(images))


@pytest.mark.parametrize("make", [random_features, tied_features])
def test_known_images_count_as_chosen(make) -> None:
    features, known = make(30, 6, 1), make(5, 6, 2)
    result = representatives(torch.from_numpy(features), 9, torch.from_numpy(known))
    assert result == slow_representatives(features, 9, known)
    assert result != representatives(torch.from_numpy(features), 9)


@pytest.mark.parametrize("sample", [10, 464])
def test_sampled_selection_covers_nearly_as_well(sample: int) -> None:
    """465 images in 30 groups of unequal size."""
    features = torch.from_numpy(grouped_features(30, 16))
    cells = sample * len(features)
    result = representatives(features, 30, cells=cells)
    assert len(set(result)) == 30 and result == representatives(features, 30, cells=cells)
    assert result != representatives(features, 30, cells=cells, seed=1)
    unit = list((features / features.norm(dim=1, keepdim=True)).numpy())
    any_rows = torch.randperm(len(unit), generator=torch.Generator().manual_seed(0))[:30].tolist()
    best, sampled, random = (
        slow_cover(unit, [unit[row] for row in rows]) for rows in (representatives(features, 30), result, any_rows)
    )
    assert sampled > 0.95 * best > random


@pytest.mark.parametrize("cells", [1, 40, 200, 399])
def test_sampled_selection_has_no_repeats(cells: int) -> None:
    features = torch.from_numpy(random_features(20, 4))
    assert sorted(representatives(features, 20, cells=cells)) == list(range(20))
    known = representatives(features[1:], 19, features[:1], cells=cells)
    assert sorted(known) == list(range(19))


# Groups


@pytest.mark.parametrize("chunk", [1, 5, 32, None])
@pytest.mark.parametrize("threshold", [0.2, 0.6, 0.9, 1.0])
@pytest.mark.parametrize(("images", "width"), [(1, 2), (50, 4)])
def test_groups_equal_the_double_loop(images: int, width: int, threshold: float, chunk: int | None) -> None:
    for features in (random_features(images, width), tied_features(images, width)):
        result = group_duplicates(torch.from_numpy(features), threshold, chunk=chunk)
        assert result.tolist() == slow_groups(features, threshold)


@pytest.mark.parametrize("chunk", [3, 100])
def test_chains_are_one_group_in_any_order(chunk: int) -> None:
    angles = torch.arange(40) * 0.07  # neighbours alike, the ends opposite
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    chain = torch.stack([angles.cos(), angles.sin()], 1)[order]
    first = group_duplicates(chain, float(np.cos(0.075)), chunk=chunk)
    assert set(first.tolist()) == {0}


def test_threshold_1_finds_copies() -> None:
    """The cosine of a vector with itself may be rounded below 1."""
    features = torch.from_numpy(random_features(200, 128)).float()
    result = group_duplicates(torch.cat([features, 3 * features]), 1.0)
    assert result.tolist() == [*range(200), *range(200)]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: representatives(x, 6),
        lambda x: representatives(x * torch.inf, 1),
        lambda x: group_duplicates(x * torch.nan, 0.5),
    ],
)
def test_invalid_inputs_are_errors(call) -> None:
    with pytest.raises(UserError):
        call(torch.ones(5, 3))


# The contact sheet


def test_groups_are_not_split() -> None:
    positions = arrange_groups([4, 4, 4, 10, 1, 9, 2])
    assert positions == [(0, 0), (0, 4), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0)]
    assert arrange_groups([1] * (COLUMNS + 1))[-1] == (1, 0)


def test_sheet_shows_every_image() -> None:
    image = np.zeros((4, 8, 3), np.uint8)
    figure = sheet_figure([[Thumbnail(image, "a"), Thumbnail(image, "b")], [Thumbnail(image, "$c$")]])
    (axis,) = figure.axes
    assert [text.get_text() for text in axis.texts] == ["a", "b", "$c$"] and len(axis.images) == 3
    assert len(axis.lines) == 1  # above the two


# Through the command


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve unlabelled images of three colours in the current folder."""
    monkeypatch.chdir(tmp_path)
    for number in range(12):
        suite_layouts.write(tmp_path / "photos" / f"photo {number}, {'rgb'[number % 3]}.png", number % 3, number)
    return tmp_path / "photos"


def test_labelled_selection_is_a_dataset(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["embed", "swin_nano", "photos", "--select", "3", "-o", "tables/to_label.csv", *ARGUMENTS, "--json"]) == 0
    )
    data = json.loads(capsys.readouterr().out)
    table = Path("tables/to_label.csv")
    rows = rows_of(table)
    assert list(rows[0]) == ["path", "label"] and {row["label"] for row in rows} == {""}
    assert [Path(row["path"]).name for row in rows] == [Path(name).name for name in data["chosen"]]
    assert {name[-5] for name in data["chosen"]} == set("rgb"), "one of each colour"
    with Image.open("tables/to_label.png") as drawn:
        assert drawn.width > drawn.height > 100
    assert open_data(table, split="given").classes is None
    filled = [f'"{row["path"]}",{row["path"][-5]}' for row in rows]
    table.write_text("\n".join(["path,label", *filled]), encoding="utf-8")
    source = open_data(table, split="given")
    examples = source.splits["train"]
    assert source.classes == ("b", "g", "r") and examples.labels is not None
    assert [source.classes[label] for label in examples.labels] == [name[-5] for name in data["chosen"]]
    assert all(np.array_equal(examples.read(i), np.asarray(Image.open(data["chosen"][i]))) for i in range(3))


def test_known_images_are_not_selected(photos: Path) -> None:
    start = embed(EmbedConfig(data="photos", select=5, out="the first.csv", **TINY))
    assert "frugalvit train 'the first.csv' --backbone" in start.notes[-1]
    first = start.data["chosen"]
    result = embed(EmbedConfig(data="photos", select=7, known="the first.csv", out="some more.csv", **TINY))
    more = result.data
    assert "some more.csv" in result.notes[-1] and "into the first.csv" in result.notes[-1]
    assert sorted(first + more["chosen"]) == sorted(f"photos/{path.name}" for path in photos.iterdir())
    assert more["known"] == 5
    with pytest.raises(UserError, match=r"--select 8.*first\.csv"):
        embed(EmbedConfig(data=str(photos), select=8, known="the first.csv", out="none.csv", **TINY))
    assert not Path("none.csv").exists()


def test_rows_without_label_are_candidates(photos: Path) -> None:
    names = sorted(path.name for path in photos.iterdir())
    rows = [f'"photos/{name}",{name[-5] if index < 8 else ""}' for index, name in enumerate(names)]
    Path("t.csv").write_text("\n".join(["path,label", *rows]))
    result = embed(EmbedConfig(data="t.csv", select=4, known="t.csv", **TINY)).data
    assert sorted(Path(name).name for name in result["chosen"]) == names[8:] and result["known"] == 8
    written = embed(EmbedConfig(data="t.csv", select=4, known="t.csv", out="more.csv", **TINY))
    assert "more.csv" in written.notes[-1] and "into t.csv" in written.notes[-1] and "--init" not in written.notes[-1]


def test_val_and_test_are_not_selected(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    splits = ("train", "val", "test")
    names = sorted(path.name for path in photos.iterdir())
    rows = [f'"photos/{name}",{splits[index % 3]}' for index, name in enumerate(names)]
    Path("t.csv").write_text("\n".join(["path,split", *rows]))
    chosen = embed(EmbedConfig(data="t.csv", select=4, **TINY)).data["chosen"]
    assert sorted(Path(name).name for name in chosen) == names[::3]
    assert "--select ignores val and test" in capsys.readouterr().err
    everything = embed(EmbedConfig(data="t.csv", select=12, split="all", out="all.csv", **TINY)).data["chosen"]
    assert sorted(Path(name).name for name in everything) == names
    assert "ignores" not in capsys.readouterr().err


def test_duplicates_are_written_to_a_table(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = photos / "photo 4, g.png"
    pixels = np.asarray(Image.open(original)).copy()
    pixels[0, 0] ^= 1  # other bytes, nearly the same image
    Image.fromarray(pixels).save(photos / "a copy.png")
    command = ["embed", "swin_nano", "photos", "--duplicates", "0.999999", "-o", "same.csv", *ARGUMENTS]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (group,) = data["groups"]
    assert [entry["image"] for entry in group] == ["photos/a copy.png", "photos/photo 4, g.png"]
    rows = rows_of(Path("same.csv"))
    assert [list(row.values())[:2] for row in rows] == [["1", "photos/a copy.png"], ["1", "photos/photo 4, g.png"]]
    assert list(rows[0]) == ["group", "path", "similarity"] and float(rows[0]["similarity"]) == 1
    assert 0.99999 < float(rows[1]["similarity"]) <= 1 and Path("same.png").is_file()
    assert main([*command, "-o", "again.csv"]) == 0
    assert "1 group of 2 images" in capsys.readouterr().out


def test_table_without_duplicates_is_empty(photos: Path) -> None:
    assert main(["embed", "swin_nano", "photos", "--duplicates", "1", *ARGUMENTS]) == 0
    assert Path("duplicates.csv").read_text() == "group,path,similarity\n" and not Path("duplicates.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--select 0", "at least 1"),
        ("--select 13", "--select 13"),
        ("--duplicates 0", "more than 0"),
        ("--duplicates 1.01", "at most 1"),
        ("--select 2 --duplicates 0.9", "--select and --duplicates"),
        ("--select 2 --neighbours a.png", "--neighbours and --select"),
        ("--select 2 --known nowhere.csv", "nowhere.csv"),
        ("--select 2 -o f.npz", "f.npz"),
        ("--select 2 --features grid", "--features grid"),
        ("--select 2 -o photos/to_label.csv", "photos/to_label.png"),
        ("--select 2 -o mine.csv", "mine.csv"),
    ],
)
def test_errors_are_one_line_before_the_work(
    arguments: str, message: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.csv").write_text("mine")
    assert main(["embed", "no such model", "photos", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert Path("mine.csv").read_text() == "mine" and sorted(Path().iterdir()) == [Path("mine.csv"), Path("photos")]


def test_images_in_shards_cannot_be_selected(photos: Path) -> None:
    assert main(["data", "pack", "photos", "packed", "--quiet"]) == 0
    with pytest.raises(UserError, match="--select"):
        embed(EmbedConfig(data="packed", select=2, **TINY))
    result = embed(EmbedConfig(data="packed", duplicates=0.01, **TINY)).data["groups"]
    assert sum(len(group) for group in result) == 12, "each is like those of its colour"


@pytest.mark.parametrize(
    ("table", "name", "written"),
    [
        ("tables/t.csv", "tables/photos/a.png", "photos/a.png"),
        ("tables/t.csv", "photos/a.png", "{here}/photos/a.png"),
        ("t.csv", "{here}/photos/a.png", "photos/a.png"),
        ("{here}/t.csv", "photos/../a.png", "photos/../a.png"),
    ],
)
def test_tables_have_relative_paths(table: str, name: str, written: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    table, name, written = (text.format(here=tmp_path) for text in (table, name, written))
    assert path_from_table(Path(table), name) == written
    assert (Path(table).parent / written).resolve() == Path(name).resolve()
