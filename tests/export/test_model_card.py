"""The model card of an export: filled from the run, with escaped names."""

import json
from pathlib import Path

import pytest
import yaml

import frugalvit as fv
from frugalvit.config.tools import ExportConfig
from frugalvit.export.command import export
from frugalvit.export.model_card import _architecture, known_scores
from frugalvit.utils.intervals import wilson_interval
from helpers.exported_models import made


def test_card_is_filled_from_the_run(tmp_path: Path) -> None:
    folder, _ = made(tmp_path / "run", "swin")
    settings = {"data": "photos/", "epochs": 100, "lr": 1e-3, "localization": {"weight": 0.5, "variant": "l1"}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    summary = {"top1": 91.23, "top5": 99.0, "scored_on": "test", "scored_images": 1200}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    options = {"model": str(folder.parent), "to": "hf", "out": str(tmp_path / "out"), "license": "mit"}
    exported = export(ExportConfig.parse(options)).data
    assert exported["checked_on"] == "5 images of noise", "photos/ does not exist"
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    header = yaml.safe_load(front)
    assert (header["license"], header["pipeline_tag"]) == ("mit", "image-classification")
    metrics = header["model-index"][0]["results"][0]["metrics"]
    assert [metric["value"] for metric in metrics] == [91.23], "top-5 of three classes is always 100"
    parts = (
        "flowers \\| 3",
        "| epochs | 100 |",
        "localization.weight | 0.5",
        "1,200 images of test",
        "91.2 %",
        "daisy",
    )
    assert all(part in body for part in parts)
    assert "| top-1 | 91.2 % | {:.1f} to {:.1f} % |".format(*wilson_interval(1095, 1200)) in body
    assert "<script>" not in text
    assert "import frugalvit" in body
    cards = pytest.importorskip("huggingface_hub")
    assert cards.ModelCard(text).data.license == "mit"


def test_scores_of_another_size_are_left_out(tmp_path: Path) -> None:
    made(tmp_path / "run", "swin")
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"top1": 91.23, "scored_on": "test"}))
    for size in (64, 96):
        out = tmp_path / str(size)
        options = {"model": str(tmp_path / "run"), "to": "hf", "out": str(out), "img_size": size}
        notes = " ".join(export(ExportConfig.parse(options)).notes)
        card, meta = (out / "README.md").read_text(), json.loads((out / "config.json").read_text())["frugalvit"]["meta"]
        assert ("91.23" in card) == ("top1" in meta) == (size == 64) and "data" in meta
        assert ("scores" in notes) == ("Not scored" in card) == (size == 96)


@pytest.mark.parametrize(
    ("target", "words"), [("class", "a classifier of 3"), ("labels", "of 3 labels"), ("number", "answers a number")]
)
def test_the_card_says_what_the_network_answers(target: str, words: str, tmp_path: Path) -> None:
    folder, _ = made(tmp_path / "run", "swin")
    model = fv.load(folder)
    model.meta["target"] = target
    assert words in _architecture(model)


@pytest.mark.parametrize(("classes", "labels"), [(5, ["top-1 accuracy"]), (6, ["top-1 accuracy", "top-5 accuracy"])])
def test_top5_needs_more_than_five_classes(classes: int, labels: list[str]) -> None:
    assert list(known_scores({"top1": 80.0, "top5": 99.0, "mean_per_class": None}, classes)) == labels
