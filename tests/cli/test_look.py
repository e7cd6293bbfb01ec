"""frugalvit look and report, end to end."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli import look
from frugalvit.cli import main as cli
from frugalvit.experiment.load_model import load_model
from frugalvit.report import page
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


def run(capsys, *words):
    """A command's JSON result."""
    status = cli.main([*map(str, words), "--json", "--quiet"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out)


def get_error(capsys, *words):
    assert cli.main([*map(str, words), "--quiet"]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_correspond_draws_the_best_pairs(here, capsys, model, kind):
    write_picture(here / "photo.jpg", 1)
    result = run(capsys, "look", "correspond", model, "photo.jpg", "--format", kind, "--against", "swin_nano")
    assert result["figure"] == f"correspond_photo.{kind}"
    start = (here / result["figure"]).read_bytes()[:100]
    assert start.startswith(b"\x89PNG") if kind == "png" else b"<?xml" in start
    first, second = result["matches"]
    assert first["grids"] == [[8, 8], [8, 8]] and len(first["pairs"]) == 10 and len(second["pairs"]) == 10
    assert [pair["rank"] for pair in first["pairs"]] == list(range(1, 11))
    similarities = [pair["similarity"] for pair in first["pairs"]]
    assert similarities == sorted(similarities, reverse=True)
    again = run(capsys, "look", "correspond", model, "photo.jpg", "--format", kind)
    assert again["figure"] == f"correspond_photo_2.{kind}"


def test_correspond_between_two_full_pictures(here, capsys, model):
    write_picture(here / "wide.png", 1, 100, 300)
    write_picture(here / "tall.png", 2, 300, 100)
    result = run(capsys, "look", "correspond", model, "wide.png", "tall.png", "--fit", "whole", "-o", "out/pair.png")
    assert (here / "out" / "pair.png").is_file()
    (rows, columns), (more_rows, fewer_columns) = result["matches"][0]["grids"]
    assert columns > rows and more_rows > fewer_columns


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
    assert "cropped away" in get_error(capsys, "look", "attend", model, "photo.png", "--query", "2,2")
    for query in ("-1,0", "0,300"):
        told = get_error(capsys, "look", "attend", model, "photo.png", "--query", query)
        assert f"--query {query} is outside" in told
    assert "no class token" in get_error(capsys, "look", "attend", model, "photo.png", "--query", "class")
    assert run(capsys, "look", "attend", model, "photo.png", "--query", "2,2", "--fit", "whole")["query"] == [0, 0]


@pytest.mark.parametrize(("network", "token"), [("swin_nano", False), ("vit_tiny_patch16_224", True)])
def test_attention_to_the_class_token(here, capsys, network, token):
    write_picture(here / "photo.png", 1, 64, 64)
    words = ["look", "attend", network, "photo.png", "--img-size", 32]
    assert all(("on_class_token" in head) is token for head in run(capsys, *words)["heads"])
    assert cli.main([*map(str, words), "--quiet"]) == 0
    out = capsys.readouterr().out
    assert ("on class token" in out) is token and "uniform attention has" in out


def test_tables_count_regions_from_one(here, capsys, model):
    write_picture(here / "photo.png", 1)
    first = run(capsys, "look", "correspond", model, "photo.png")["matches"][0]["pairs"][0]
    assert cli.main(["look", "correspond", model, "photo.png", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert f" {first['first'][0] + 1},{first['first'][1] + 1} " in out
    assert "count from 1 here, from 0 in --json" in out


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
    grey = np.tile(np.linspace(0, 255, 90, dtype=np.uint8), (70, 1))
    Image.fromarray(grey).save(here / "grey.png")
    Image.fromarray(np.zeros((1, 1, 3), dtype=np.uint8)).save(here / "dot.png")
    Image.new("RGB", (8000, 40), "teal").save(here / "long.png")
    Image.new("RGBA", (50, 60), (255, 0, 0, 128)).save(here / "clear.png")
    for name in ("grey", "dot", "long", "clear"):
        result = run(capsys, "look", "correspond", model, f"{name}.png")
        assert len(result["matches"][0]["pairs"]) == 10
    result = run(capsys, "look", "explore", model, "grey.png", "dot.png", "long.png", "clear.png")
    assert result["images"] == 4


def test_huge_picture(here, capsys, model):
    Image.new("L", (8000, 8000), 77).save(here / "huge.jpg", quality=30)
    assert run(capsys, "look", "explore", model, "huge.jpg")["bytes"] < 1_000_000


def test_mistakes_are_one_line(here, capsys, model):
    (here / "text.jpg").write_text("no picture at all")
    write_picture(here / "a.png", 1)
    assert "not an image" in get_error(capsys, "look", "explore", model, "text.jpg")
    assert "missing" in get_error(capsys, "look", "attend", model, "nothing.jpg")
    assert "--data" in get_error(capsys, "look", "correspond", model)
    assert "two images, not 3" in get_error(capsys, "look", "correspond", model, "a.png", "a.png", "a.png")
    assert "does not end with .svg" in get_error(
        capsys, "look", "correspond", model, "a.png", "-o", "a.pdf", "--format", "svg"
    )
    assert "There is no model" in get_error(capsys, "look", "attend", "runs/none", "a.png")


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["correspond", "a.png"], {"figure": "correspond_a.png"}),
        (["correspond", "a.png", "--data", "photos"], {"figure": "correspond_a.png", "chart": "correspond_scores.png"}),
        (["correspond", "--data", "photos"], {"chart": "correspond_scores.png"}),
        (["attend", "a.png"], {"figure": "attend_a.png"}),
        (["explore", "a.png"], {"page": "explore_a.html"}),
    ],
    ids=lambda part: part[0] if isinstance(part, list) else "",
)
def test_a_folder_gets_a_new_file(here, capsys, model, words, written):
    (here / "figures").mkdir()
    (here / "photos").mkdir()
    write_picture(here / "a.png", 1)
    write_picture(here / "photos" / "b.png", 2)
    lens, *rest = words
    result = run(capsys, "look", lens, model, *rest, "-o", "figures")
    assert {key: result[key] for key in written} == {key: f"figures/{name}" for key, name in written.items()}
    assert sorted(path.name for path in (here / "figures").iterdir()) == sorted(written.values())
    assert not list(here.glob("figures*.*"))


def test_explore_writes_html_only(here, capsys, model):
    write_picture(here / "a.png", 1)
    assert "p.png does not end with .html; choose another name." in get_error(
        capsys, "look", "explore", model, "a.png", "-o", "p.png"
    )


@pytest.mark.parametrize("letter", ["x", "é"])
def test_long_names_are_truncated(here, capsys, model, letter):
    """File systems count bytes, and a letter may have several."""
    name = letter * (250 // len(letter.encode()))
    write_picture(here / f"{name}.png", 1)
    written = here / run(capsys, "look", "explore", model, f"{name}.png")["page"]
    assert written.is_file() and written.name.startswith(f"explore_{letter * 20}")
    assert "too long" in get_error(capsys, "look", "explore", model, f"{name}.png", "-o", f"{name}.html")


def test_the_crop_of_the_model_is_used(here, capsys, model):
    """This model's config.json crops half of the picture."""
    own = shutil.copytree(model, here / "own")
    config = json.loads((own / "config.json").read_text())
    config["pretrained_cfg"]["crop_pct"] = 0.5
    (own / "config.json").write_text(json.dumps(config))
    write_picture(here / "photo.png", 1, 200, 200)
    assert "cropped away" in get_error(capsys, "look", "attend", own, "photo.png", "--query", "45,100")
    assert cli.main(["look", "explore", str(own), "photo.png", "--against", model, "-o", "page.html"]) == 0
    assert "small is evaluated on another crop" in capsys.readouterr().err
    assert '"width":100,"height":100' in (here / "page.html").read_text()
    whole, half = (look._crop_share(load_model(str(place))) for place in (model, own))
    assert (whole, half) == (1.0, 0.5)


def test_fewer_pairs_than_requested(here, capsys, model):
    (here / "photos").mkdir()
    write_picture(here / "photos" / "a.png", 1)
    assert cli.main(["look", "correspond", model, "--data", "photos", "--top", "100"]) == 0
    assert "The 64 most similar pairs" in capsys.readouterr().out


def test_single_region_is_an_error(here, capsys, tmp_path):
    write_picture(here / "a.png", 1)
    sizes = {"embed_dim": 24, "depths": (1,), "num_heads": (2,), "window_size": 4, "patch_size": 16}
    save_model_folder(create_backbone("swin_tiny_w7", img_size=16, **sizes), tmp_path / "single")
    for words in (["correspond"], ["explore"]):
        assert "1x1 grid" in get_error(capsys, "look", *words, tmp_path / "single", "a.png")


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


def test_a_page_replaces_a_page_of_the_same_runs_only(here, capsys):
    one, two = (write_run(here / "runs" / name, seed=seed, extras=False) for seed, name in enumerate(("one", "two")))
    run(capsys, "report", one, two, "-o", "both.html")
    run(capsys, "report", two, one, "-o", "both.html")  # in another order they are the same
    run(capsys, "report", "runs/one")
    (here / "explored.html").write_text(page.explorer({"images": [], "models": []}, "explored"))
    before = {path: path.read_bytes() for path in here.rglob("*.html")}
    for words in ((one, "-o", "both.html"), (one, two, "-o", "explored.html"), (two, "-o", "explored.html")):
        assert "is not a report of these runs" in get_error(capsys, "report", *words)
    for words in ((two, "-o", "runs/one/report.html"), (one, two, "-o", "runs/two/report.html")):
        assert "is the page of the run in that folder" in get_error(capsys, "report", *words)
    assert {path: path.read_bytes() for path in here.rglob("*.html")} == before
    (here / "runs").rename(here / "moved")  # a page goes with its run
    run(capsys, "report", "moved/one")


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
