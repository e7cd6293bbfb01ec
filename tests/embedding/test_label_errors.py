"""Wrong labels: against loops, on digits with flipped labels, and through the command."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from frugalvit.cli.main import main
from frugalvit.config.data import DataConfig
from frugalvit.config.probe import ExtractConfig
from frugalvit.embedding import label_errors
from frugalvit.embedding.label_errors import cross_validate, find_label_errors, score_labels
from frugalvit.errors import UserError
from frugalvit.probing.logistic import LogisticRegression
from helpers import suite_layouts

TINY = {"suspicious": "swin_nano", "img_size": 32, "device": "cpu"}
COLOURS = ("red", "green", "blue")


# Oracle: confident learning as loops


def slow_scores(probabilities: np.ndarray, labels: list[int]) -> list[tuple[float, int, bool]]:
    classes = range(probabilities.shape[1])
    own = {c: [float(p[c]) for p, label in zip(probabilities, labels, strict=True) if label == c] for c in classes}
    result = []
    for p, label in zip(probabilities, labels, strict=True):
        confident = [c for c in classes if own[c] and p[c] >= np.float32(sum(own[c]) / len(own[c]))]
        suggested = max(confident or classes, key=lambda c: p[c])
        result.append((float(p[label]), suggested, bool(confident) and suggested != label))
    return result


@pytest.mark.parametrize(("images", "classes", "sharpness"), [(2, 2, 1.0), (40, 3, 0.5), (300, 7, 3.0), (60, 30, 1.0)])
def test_scores_equal_the_loops(images: int, classes: int, sharpness: float) -> None:
    random = np.random.default_rng(images)
    probabilities = torch.from_numpy(random.normal(0, sharpness, (images, classes))).softmax(1).float()
    labels = torch.from_numpy(random.integers(0, classes, images))
    result = score_labels(probabilities, labels)
    for (score, suggested, wrong), *row in zip(
        slow_scores(probabilities.numpy(), labels.tolist()), *result, strict=True
    ):
        assert (suggested, wrong) == (int(row[1]), bool(row[2])) and abs(score - float(row[0])) < 1e-6


def test_images_are_judged_without_their_own_label() -> None:
    """A changed label must not change the image's own prediction: features of random numbers are learned by heart."""
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(40, 60, generator=generator), torch.arange(40) % 2
    learned = LogisticRegression(features, labels).fit(1e-3).scores(features).argmax(1)
    assert (learned == labels).all()
    judged = cross_validate(features, labels)
    assert torch.allclose(judged.sum(1), torch.ones(40)) and 8 <= int((judged.argmax(1) == labels).sum()) <= 32


@pytest.mark.parametrize("seed", range(3))
def test_flipped_digits_are_found(seed: int) -> None:
    """5 % of the labels are flipped; at least 80 % of them are in the first 10 % of the ranking."""
    from sklearn.datasets import load_digits

    pixels, truth = load_digits(return_X_y=True)
    random = np.random.default_rng(seed)
    chosen = random.permutation(len(truth))[:600]
    features, labels = torch.from_numpy(pixels[chosen]).float() / 16, torch.from_numpy(truth[chosen]).long()
    flipped = torch.from_numpy(random.permutation(600)[:30])
    wrong = labels.clone()
    wrong[flipped] = (labels[flipped] + torch.from_numpy(random.integers(1, 10, 30))) % 10
    scores = score_labels(cross_validate(features, wrong, seed), wrong)
    first = scores.score.argsort()[:60]
    assert len(np.intersect1d(first, flipped)) >= 0.8 * 30
    right = scores.suggested[flipped] == labels[flipped]
    assert right.float().mean() > 0.8, "the suggested label is the true one"
    assert 0.5 < scores.likely_wrong.sum() / 30 < 2


# Through the command


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty images of each of three colours, two of them in the wrong folder, one of them in test."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "photos"
    for number in range(120):
        suite_layouts.write(folder / "train" / COLOURS[number % 3] / f"{number}.png", number % 3, number)
    for number, colour in ((4, "blue"), (9, "green")):
        shutil.move(folder / "train" / COLOURS[number % 3] / f"{number}.png", folder / "train" / colour)
    (folder / "test" / "red").mkdir(parents=True)
    shutil.move(folder / "train" / "red" / "0.png", folder / "test" / "red")
    return folder


def make_layout(layout: str) -> str:
    """Return the photos as a folder, a table or shards."""
    if layout == "table":
        rows = [f"{path},{path.parent.name},{path.parts[1]}" for path in sorted(Path("photos").glob("*/*/*.png"))]
        Path("photos.csv").write_text("\n".join(["path,label,split", *rows]))
        return "photos.csv"
    if layout == "shards":
        assert main(["data", "pack", "photos", "shards", "--quiet"]) == 0
        return "shards"
    return "photos"


@pytest.mark.parametrize("layout", ["folder", "table", "shards"])
def test_images_in_the_wrong_folder_are_first(layout: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make_layout(layout)
    capsys.readouterr()
    command = ["data", data, "--suspicious", "swin_nano", "--img-size", "32", "--device", "cpu", "--quiet"]
    assert main([*command, "-o", "tables/suspicious.csv", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    with Path("tables/suspicious.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["rank", "path", "label", "suggested", "score", "likely_wrong"]
    assert len(rows) == 120 == result["judged"] == result["images"]
    assert {(row["label"], row["suggested"]) for row in rows[:2]} == {("blue", "green"), ("green", "red")}
    assert [row["likely_wrong"] for row in rows[:2]] == ["yes", "yes"] and rows[-1]["likely_wrong"] == "no"
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores) and 0 <= scores[0] < 0.5 < scores[-1] <= 1
    assert {entry["suggested"] for entry in result["likely_wrong"][:2]} == {"green", "red"}
    if layout != "shards":
        paths = [Path("tables") / row["path"] for row in rows]
        assert all(path.is_file() for path in paths) and {path.stem for path in paths[:2]} == {"4", "9"}
    page = Path("tables/suspicious.html").read_text(encoding="utf-8")
    wrong, _ = page.split("Less likely wrong</h2>")
    assert wrong.count("<figure>") == len(result["likely_wrong"]) and page.count("<figure>") == 120
    assert "<b>blue</b> looks like <b>green</b>" in wrong and "<b>green</b> looks like <b>red</b>" in wrong


def test_one_image_beside_small_classes() -> None:
    """The first fifth may hold nothing to choose the penalty on."""
    features, labels = torch.randn(5, 4), torch.tensor([0, 1, 1, 2, 2])
    for seed in range(8):
        assert cross_validate(features, labels, seed).shape[1] == 3


def test_single_images_of_a_class_are_not_judged(photos: Path) -> None:
    suite_layouts.write(photos / "train" / "grey" / "only.png", 1, 0)
    result = find_label_errors(DataConfig(data="photos", **TINY))
    assert result.data["judged"] == 120 and any("1 image alone" in note for note in result.notes)
    assert "only.png" not in Path("suspicious.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("photos --suspicious swin_nano -o table.txt", "table.txt"),
        ("photos --suspicious swin_nano -o mine.csv", "mine.csv"),
        ("photos --suspicious nowhere/run", "nowhere/run"),
        ("photos --suspicious swin_nano --label-source ignore", "--suspicious"),
        ("photos/train/red --suspicious swin_nano", "--suspicious"),
        ("photos --suspicious swin_nano --decode all", "--decode"),
        ("photos -o table.csv", "--out"),
    ],
)
def test_errors_are_one_line(arguments: str, message: str, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.csv").write_text("mine")
    assert main(["data", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1 and Path("mine.csv").read_text() == "mine"


def test_one_class_is_an_error(photos: Path) -> None:
    for colour in COLOURS[1:]:
        shutil.rmtree(photos / "train" / colour)
    with pytest.raises(UserError, match="--suspicious"):
        find_label_errors(DataConfig(data="photos", **TINY))


def test_the_name_of_a_network_means_its_published_weights(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights would call half of the labels wrong."""

    def stop(name: str, options: ExtractConfig) -> None:
        raise UserError(f"{name} {options.pretrained}")

    monkeypatch.setattr(label_errors, "open_model", stop)
    for name, pretrained in (("vit_tiny_patch16_224", True), ("swin_nano", False)):
        with pytest.raises(UserError, match=f"{name} {pretrained}"):
            find_label_errors(DataConfig(data="photos", suspicious=name))
