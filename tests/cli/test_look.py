"""frugalvit look and report, end to end."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli import main as cli
from helpers.report_samples import write_picture, write_run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small Swin, exported."""
    folder = tmp_path_factory.mktemp("exported") / "small"
    sizes = {"embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4), "window_size": 4, "patch_size": 4}
    save_model_folder(create_backbone("swin_tiny_w7", img_size=64, **sizes).eval(), folder)
    return str(folder)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments):
    """A command's JSON result."""
    status = cli.main([*map(str, arguments), "--json", "--quiet"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out)


def get_error(capsys, *arguments):
    assert cli.main([*map(str, arguments), "--quiet"]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    return error


def test_correspond_draws_the_best_pairs(here, capsys, model):
    write_picture(here / "photo.jpg", 1)
    result = run(capsys, "look", "correspond", model, "photo.jpg", "--format", "svg", "--against", "swin_nano")
    assert result["figure"] == "correspond_photo.svg"
    assert b"<?xml" in (here / result["figure"]).read_bytes()[:100]
    first, second = result["matches"]
    assert first["grids"] == [[8, 8], [8, 8]] and len(first["pairs"]) == 10 and len(second["pairs"]) == 10
    assert [pair["rank"] for pair in first["pairs"]] == list(range(1, 11))
    similarities = [pair["similarity"] for pair in first["pairs"]]
    assert similarities == sorted(similarities, reverse=True)
    again = run(capsys, "look", "correspond", model, "photo.jpg", "--format", "svg")
    assert again["figure"] == "correspond_photo_2.svg"


def test_correspond_between_two_pictures(here, capsys, model):
    write_picture(here / "wide.png", 1, 100, 300)
    write_picture(here / "tall.png", 2, 300, 100)
    result = run(capsys, "look", "correspond", model, "wide.png", "tall.png", "-o", "out/pair.png")
    assert (here / "out" / "pair.png").is_file()
    assert result["matches"][0]["grids"] == [[8, 8], [8, 8]]


def test_correspond_scores_models_over_a_dataset(here, capsys, model):
    for kind in ("a", "b"):
        (here / "photos" / kind).mkdir(parents=True)
        for seed in range(4):
            write_picture(here / "photos" / kind / f"{seed}.png", seed, 70 + seed, 90)
    result = run(capsys, "look", "correspond", model, "--data", "photos", "--against", "swin_nano", "--batch", 3)
    assert set(result["scores"]) == {"small", "swin_nano"}
    for score in result["scores"].values():
        assert score["images"] == 8 and score["top"] == 10 and 0 <= score["accuracy"] <= 1
    assert result["scores"]["small"]["chance_accuracy"] == pytest.approx(1 / 64)
    assert (here / "correspond_scores.png").is_file()
    assert "no split 'test'" in get_error(capsys, "look", "correspond", model, "--data", "photos", "--split", "test")


def test_attend_ranks_the_heads(here, capsys, model):
    write_picture(here / "photo.png", 1, 300, 500)
    result = run(capsys, "look", "attend", model, "photo.png", "--query", "250,150")
    assert result["query"] == [4, 4] and result["grid"] == [8, 8]
    entropies = [head["entropy"] for head in result["heads"]]
    assert entropies == sorted(entropies) and len(entropies) == 4
    assert (here / "attend_photo.png").is_file()
    assert "centre crop" in get_error(capsys, "look", "attend", model, "photo.png", "--query", "2,2")
    assert "no class token" in get_error(capsys, "look", "attend", model, "photo.png", "--query", "class")


def test_attention_of_a_block_against_another_model(here, capsys, model):
    write_picture(here / "photo.png", 1, 64, 64)
    result = run(
        capsys, "look", "attend", model, "photo.png", "--block", 1, "--against", "vit_tiny_patch16_224", "-o", "x.png"
    )
    other = result["against"][0]
    assert result["reach"] == 16 and result["grid"] == [16, 16], "windows of 4 x 4 regions"
    assert other["reach"] == other["grid"][0] ** 2, "a plain ViT attends to everything"
    assert (here / "x.png").is_file() and (here / "x_2.png").is_file()
    assert "blocks 1 to 2" in get_error(capsys, "look", "attend", model, "photo.png", "--block", "3")


@pytest.mark.parametrize(("network", "token"), [("swin_nano", False), ("vit_tiny_patch16_224", True)])
def test_attention_to_the_class_token(here, capsys, network, token):
    write_picture(here / "photo.png", 1, 64, 64)
    heads = run(capsys, "look", "attend", network, "photo.png", "--img-size", 32)["heads"]
    assert all(("on_class_token" in head) is token for head in heads)


def test_explore_writes_one_page(here, capsys, model):
    write_picture(here / "a.png", 1)
    write_picture(here / "b.png", 2)
    result = run(
        capsys, "look", "explore", model, "a.png", "b.png", "--against", "swin_nano", "--img-size", 64, "-o", "p.html"
    )
    assert result["images"] == 2 and result["models"] == ["small", "swin_nano"]
    assert result["bytes"] == (here / "p.html").stat().st_size
    assert run(capsys, "look", "explore", model, "a.png")["images"] == 2  # with its second view
    assert "p.html exists" in get_error(capsys, "look", "explore", model, "a.png", "-o", "p.html")


def test_odd_pictures(here, capsys, model):
    Image.new("L", (8000, 40), 77).save(here / "long.png")
    Image.fromarray(np.zeros((1, 1, 3), dtype=np.uint8)).save(here / "dot.png")
    result = run(capsys, "look", "explore", model, "long.png", "dot.png")
    assert result["images"] == 2 and result["bytes"] < 1_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explore", "{model}", "text.jpg"], "text.jpg"),
        (["attend", "{model}", "nothing.jpg"], "nothing.jpg"),
        (["attend", "runs/none", "a.png"], "runs/none"),
        (["correspond", "{model}"], "--data"),
        (["correspond", "{model}", "a.png", "a.png", "a.png"], "two images, not 3"),
        (["correspond", "{model}", "a.png", "-o", "a.pdf", "--format", "svg"], "a.pdf does not end with .svg"),
        (["explore", "{model}", "a.png", "-o", "p.png"], "p.png does not end with .html"),
        (["explore", "{model}", "a.png", "-o", "x" * 300 + ".html"], "too long"),
    ],
)
def test_mistakes_are_one_line(here, capsys, model, arguments, message):
    (here / "text.jpg").write_text("no picture at all")
    write_picture(here / "a.png", 1)
    assert message in get_error(capsys, "look", *(argument.format(model=model) for argument in arguments))


def test_out_may_be_a_folder(here, capsys, model):
    (here / "figures").mkdir()
    (here / "photos").mkdir()
    name = "é" * 120  # file systems count bytes
    write_picture(here / f"{name}.png", 1)
    write_picture(here / "photos" / "b.png", 2)
    result = run(capsys, "look", "correspond", model, f"{name}.png", "--data", "photos", "-o", "figures")
    assert result["chart"] == "figures/correspond_scores.png" and result["figure"].startswith("figures/correspond_éé")
    assert len(list((here / "figures").iterdir())) == 2


def test_the_crop_of_the_model_is_used(here, capsys, model):
    """This model's config.json crops half of the picture."""
    own = shutil.copytree(model, here / "own")
    config = json.loads((own / "config.json").read_text())
    config["pretrained_cfg"]["crop_pct"] = 0.5
    (own / "config.json").write_text(json.dumps(config))
    write_picture(here / "photo.png", 1, 200, 200)
    assert "centre crop" in get_error(capsys, "look", "attend", own, "photo.png", "--query", "45,100")
    assert cli.main(["look", "explore", str(own), "photo.png", "--against", model, "-o", "page.html"]) == 0
    assert "another crop" in capsys.readouterr().err
    assert '"width":100,"height":100' in (here / "page.html").read_text()


def test_report_of_run_folders(here, capsys):
    write_run(here / "runs" / "one")
    write_run(here / "runs" / "two", seed=1)
    result = run(capsys, "report", "runs/one")
    assert result["page"] == "runs/one/report.html"
    assert run(capsys, "report", "runs/one")["page"] == "runs/one/report.html"  # our own page is made anew
    assert len(run(capsys, "report", "runs", "-o", "all.html")["runs"]) == 2
    before = (here / "runs" / "one" / "report.html").read_bytes()
    assert "--out" in get_error(capsys, "report", "runs/one", "runs/two")
    assert (here / "runs" / "one" / "report.html").read_bytes() == before
    assert run(capsys, "report", "runs")["page"] == "runs/report.html"
    (here / "mine.html").write_text("<p>my own notes</p>")
    assert "not a report of frugalvit" in get_error(capsys, "report", "runs/one", "-o", "mine.html")
    assert (here / "mine.html").read_text() == "<p>my own notes</p>"
    assert "There is no run" in get_error(capsys, "report", "runs/three")


def test_a_page_does_not_replace_that_of_another_run(here, capsys):
    one, two = (write_run(here / "runs" / name, seed=seed, extras=False) for seed, name in enumerate(("one", "two")))
    for runs in ((two,), (one, two)):
        assert "another --out" in get_error(capsys, "report", *runs, "-o", "runs/one/report.html")


def test_report_of_a_real_run_in_a_browser(here, capsys, browser):
    for index, kind in enumerate(("cat", "<script>alert(1)<", "dog")):
        (here / "photos" / kind).mkdir(parents=True)
        for seed in range(6):
            write_picture(here / "photos" / kind / f"{seed}.png", 10 * index + seed, 40, 48)
    sizes = ["--backbone", "swin_nano", "--img-size", 32, "--epochs", 2, "--batch", 4, "--device", "cpu"]
    run(capsys, "train", "photos", *sizes, "--out", "trained")
    result = run(capsys, "report", "trained", "--images", "photos/cat/0.png", "photos/dog/1.png")
    browser.open(here / result["page"])
    browser.wait_for("document.querySelector('.explorer').dataset.ready === 'yes'")
    assert browser.complaints() == [] and browser.requests() == []
    assert browser.value("document.querySelectorAll('figure.chart').length") > 5
    assert browser.value("[...document.querySelectorAll('.confusion tbody th')].map(h => h.textContent)") == [
        "<script>alert(1)<",
        "cat",
        "dog",
    ]
