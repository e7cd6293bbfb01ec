"""The model card of an export: filled from the run, with escaped names."""

import json
from pathlib import Path

import pytest
import yaml

import frugalvit as fv
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.tools import ExportConfig
from frugalvit.export.command import export
from frugalvit.export.model_card import known_scores

CLASSES = ("daisy", "<script>alert(1)</script>", "pipe | _dream_")


def test_card_is_filled_from_the_run(tmp_path: Path) -> None:
    backbone = fv.create_backbone(
        "swin_tiny_w7", num_classes=3, img_size=64, embed_dim=24, depths=(1, 2), num_heads=(2, 4)
    ).eval()
    meta = {"data": "flowers | 3", "recipe": "small", "top1": 87.5}
    folder = save_model_folder(backbone, tmp_path / "run" / "model", classes=CLASSES, meta=meta)
    settings = {
        "data": "photos/",
        "epochs": 100,
        "lr": 1e-3,
        "seed": 7,
        "localization": {"weight": 0.5, "variant": "l1"},
    }
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    summary = {"top1": 91.23, "top5": 99.0, "scored_on": "test", "scored_images": 1200}
    (tmp_path / "run" / "summary.json").write_text(json.dumps(summary))
    options = {"model": str(folder.parent), "to": "hf", "out": str(tmp_path / "out"), "license": "mit"}
    exported = export(ExportConfig.parse(options)).data
    assert exported["checked_on"] == "5 images of noise", "photos/ does not exist"
    text = (tmp_path / "out" / "README.md").read_text()
    _, front, body = text.split("---\n", 2)
    header = yaml.safe_load(front)
    assert (header["license"], header["library_name"], header["pipeline_tag"]) == (
        "mit",
        "timm",
        "image-classification",
    )
    metrics = header["model-index"][0]["results"][0]["metrics"]
    assert [metric["value"] for metric in metrics] == [91.23], "top-5 of three classes is always 100"
    for text_part in (
        "flowers \\| 3",
        "| epochs | 100 |",
        "localization.weight | 0.5",
        "test, 1,200 images",
        "91.23 %",
        "daisy",
    ):
        assert text_part in body
    assert "<script>" not in text
    assert "import frugalvit" in body
    cards = pytest.importorskip("huggingface_hub")
    assert cards.ModelCard(text).data.license == "mit"


def test_scores_of_another_size_are_marked(tmp_path: Path) -> None:
    backbone = fv.create_backbone(
        "swin_tiny_w7", num_classes=3, img_size=64, embed_dim=24, depths=(1, 2), num_heads=(2, 4)
    ).eval()
    run = tmp_path / "run"
    save_model_folder(backbone, run / "model", meta={"data": "flowers", "top1": 87.5, "knn": {"20": 60.0}})
    (run / "summary.json").write_text(json.dumps({"top1": 91.23, "scored_on": "test", "scored_images": 1200}))
    texts, metas, notes = {}, {}, {}
    for size in (64, 96):
        out = tmp_path / str(size)
        options = {"model": str(run), "to": "hf", "out": str(out), "img_size": size}
        notes[size] = " ".join(export(ExportConfig.parse(options)).notes)
        texts[size] = (out / "README.md").read_text()
        metas[size] = json.loads((out / "config.json").read_text())["frugalvit"]["meta"]
    assert (metas[64]["top1"], metas[64]["knn"]) == (87.5, {"20": 60.0}) and "scores" not in notes[64]
    assert "model-index" in texts[64].split("---\n")[1] and "pixels |" not in texts[64]
    assert not {"top1", "knn"} & metas[96].keys() and metas[96]["data"] == "flowers"
    assert "64 × 64 pixels" in notes[96]
    _, front, body = texts[96].split("---\n", 2)
    assert "model-index" not in front and "91.23" not in front
    assert "score on test, 1,200 images, at 64 × 64 pixels" in body and "91.23 %" in body
    assert "not scored at 96 × 96 pixels" in body
    options = {"model": str(run), "to": "pt2", "out": str(tmp_path / "program"), "img_size": 96}
    export(ExportConfig.parse(options))
    assert "top1" not in json.loads((tmp_path / "program" / "config.json").read_text())["frugalvit"]["meta"]


@pytest.mark.parametrize(("classes", "labels"), [(5, ["top-1 accuracy"]), (6, ["top-1 accuracy", "top-5 accuracy"])])
def test_top5_needs_more_than_five_classes(classes: int, labels: list[str]) -> None:
    assert list(known_scores({"top1": 80.0, "top5": 99.0, "mean_per_class": None}, classes)) == labels
