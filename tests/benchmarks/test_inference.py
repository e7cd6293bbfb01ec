"""``frugalvit bench`` against the papers' numbers and against hand-counted operations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import frugalvit as fv
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.probe import BenchConfig
from frugalvit.errors import UserError
from inference import accuracy_of, bench, count_parameters, multiply_adds
from tradeoff_figure import Contender, tradeoff_figure


@pytest.mark.parametrize(("name", "parameters", "gflops"), [("swin_tiny_w7", 28, 4.5), ("resnet50", 23, 4.1)])
def test_parameters_and_gflops_equal_the_papers(name: str, parameters: int, gflops: float) -> None:
    backbone = fv.create_backbone(name, num_classes=7).eval()
    assert round(count_parameters(backbone) / 1e6 - 0.01) == pytest.approx(parameters, abs=1)
    counted = multiply_adds(backbone, torch.zeros(1, 3, *backbone.img_size)) / 1e9
    assert counted == pytest.approx(gflops, rel=0.04)


def test_attention_is_counted() -> None:
    backbone = fv.create_backbone("vit_tiny_patch16_224", img_size=32, patch_size=16, depth=1).eval()
    tokens, dim = 5, 192  # four patches and the class token
    embedding = 4 * dim * 3 * 16 * 16
    attention = tokens * dim * 3 * dim + 2 * tokens * tokens * dim + tokens * dim * dim
    mlp = 2 * tokens * dim * 4 * dim
    assert multiply_adds(backbone, torch.zeros(1, 3, 32, 32)) == embedding + attention + mlp


def test_rows_are_relative_to_the_reference() -> None:
    config = BenchConfig(
        models=["swin_nano", "resnet18"], img_size=32, batch=2, steps=2, device="cpu", reference="resnet18"
    )
    result = bench(config)
    first, second = result.data["models"]
    assert second["relative"] == 1
    assert first["relative"] == pytest.approx(first["images_per_second"] / second["images_per_second"])
    assert first["img_size"] == 32 and first["parameters_m"] < second["parameters_m"]
    assert json.dumps(result.data, allow_nan=False)


@pytest.mark.parametrize(
    ("reference", "scaled"),
    [pytest.param("vit_base", True, marks=pytest.mark.slow), ("vit_base_patch16_224", True), ("resnet18", False)],
)
def test_table_7_needs_vit_b_as_reference(reference: str, scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.measure", lambda *_, **__: {"images_per_second": 2.0})
    result = bench(BenchConfig(models=["swin_nano"], img_size=32, device="cpu", reference=reference))
    (row,) = result.data["models"]
    assert row.get("table7") == (312 if scaled else None) and row["relative"] == 1
    assert ("table7" in result.tables[0].columns) is scaled and "relative" in result.tables[0].columns


@pytest.mark.parametrize("values", [{"reference": "nosuch"}, {"models": ["swin_nano", "swin_nan"]}, {"models": ["."]}])
def test_unknown_models_are_errors_before_measuring(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("inference.measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(UserError, match=r"nosuch|swin_nan|\."):
        bench(BenchConfig.parse({"models": ["swin_nano"], "img_size": 32, "device": "cpu"} | values))


def test_plot_of_runs(tmp_path: Path, model) -> None:
    for name, accuracy in (("one", 61.0), ("two", 75.5)):
        save_model_folder(model.backbone, tmp_path / name / "model")
        (tmp_path / name / "summary.json").write_text(json.dumps({"top1": accuracy}))
    runs, plot = [str(tmp_path / "one"), str(tmp_path / "two")], tmp_path / "figure.png"
    config = BenchConfig(models=runs, batch=1, steps=1, device="cpu", reference=None, plot=str(plot))
    result = bench(config)
    assert [row["accuracy"] for row in result.data["models"]] == [61.0, 75.5]
    assert "relative" not in result.tables[0].columns and result.data["reference"] is None
    with Image.open(plot) as drawn:
        assert drawn.width > 300
    left, right = tradeoff_figure([Contender("ours", 900.0, 61.0, 28_000_000)], "top1", "CPU").axes
    assert left.get_xlabel() == "images / s (CPU)" and right.get_xlabel() == "parameters (millions)"
    points = {tuple(point) for line in right.lines for point in line.get_xydata().tolist()}
    assert {(28.0, 78.1), (87.0, 80.4), (21.0, 77.0)} < points, "EsViT and DINO in EsViT's Table 1"
    with pytest.raises(UserError, match="figure"):
        bench(config)


def test_accuracy_of_a_run_prefers_its_linear_probe(tmp_path: Path) -> None:
    assert accuracy_of(str(tmp_path)) is None
    (tmp_path / "summary.json").write_text(json.dumps({"knn": 40.0}))
    assert accuracy_of(str(tmp_path)) == ("knn", 40.0)
    probes = {"knn flowers": {"top1": 50.0, "data": "flowers"}, "linear flowers": {"top1": 60.0, "data": "flowers"}}
    (tmp_path / "probes.json").write_text(json.dumps(probes))
    assert accuracy_of(str(tmp_path)) == ("linear top1 on flowers", 60.0)


def test_plot_needs_an_accuracy_and_a_known_suffix(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--plot"):
        bench(BenchConfig(models=["swin_nano"], device="cpu", plot=str(tmp_path / "f.png")))
    with pytest.raises(UserError, match=r"f\.gif"):
        bench(BenchConfig(models=["swin_nano"], device="cpu", plot=str(tmp_path / "f.gif")))
