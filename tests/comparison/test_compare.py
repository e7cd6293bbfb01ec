"""Comparisons: outputs, settings, and runs that are finished or resumed."""

import csv
import json
import re
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from frugalvit.cli.main import main
from frugalvit.comparison import compare as module
from frugalvit.comparison.compare import compare, known_metrics
from frugalvit.config.compare import CompareConfig, parse_assignments
from frugalvit.config.train import TrainConfig
from frugalvit.errors import Interrupted, UserError
from frugalvit.probing.metrics import PartCounts
from frugalvit.tasks.detection.metrics import AveragePrecision
from frugalvit.tasks.detection.task import summary_of
from frugalvit.tasks.segmentation.metrics import Confusion
from frugalvit.utils.intervals import wilson_interval
from frugalvit.utils.tables import CommandResult
from helpers.tiny_runs import SWIN, TRAIN


def config(photos: Path, out: Path, **values: object) -> CompareConfig:
    common = TRAIN | {"steps": 4, "seeds": 2, "data": str(photos), "out": str(out)}
    settings = {"with_settings": ["localization.weight=0.5"], "without_settings": ["localization.weight=0"]}
    return CompareConfig.parse(common | settings | values)


@pytest.mark.parametrize(
    ("metric", "counts", "step"),
    [
        ("top1", (50, 50), 2),
        ("top5", (50, 20), 5),
        ("top1", (50, None), None),
        ("top1", (0, 0), None),
        ("val_top1", (50, 50), None),
        ("seconds", (50, 50), None),
    ],
)
def test_resolution_of_metrics(metric: str, counts: tuple[int | None, ...], step: float | None) -> None:
    assert module._resolution(metric, [{"scored_images": count} for count in counts]) == step


def test_four_outputs_and_finished_runs_are_kept(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = module.run_once

    def stops_after_three(run, train):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(str(run.out))
        return real(run, train)

    monkeypatch.setattr(module, "run_once", stops_after_three)
    with pytest.raises(KeyboardInterrupt):
        compare(config(photos, tmp_path / "c"))
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("summary.json")}
    assert len(finished) == 3
    monkeypatch.setattr(module, "run_once", real)
    result = compare(config(photos, tmp_path / "c"))
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items()), "a finished run was repeated"
    for kind in ("md", "csv", "tex", "png", "json"):
        assert (tmp_path / "c" / f"comparison.{kind}").stat().st_size > 50
    assert b"\r" not in (tmp_path / "c" / "comparison.csv").read_bytes()
    rows = list(csv.DictReader((tmp_path / "c" / "comparison.csv").open()))
    assert len(rows) == 4 and {row["seed"] for row in rows} == {"0", "1"}
    assert result.data["differences"]["with"]["count"] == 2 and "\\pm" in (tmp_path / "c/comparison.tex").read_text()
    assert json.loads((tmp_path / "c/comparison.json").read_text())["metric"] == "top1"
    assert result.tables[0].columns[-1] == "floor" and {row[-1] for row in result.tables[0].rows} == {
        "100.0 % (72.2 to 100.0)"
    }
    assert result.data["settings"]["with"]["floor"] == 100 and len(result.notes) == 2
    assert result.notes[0] == result.data["verdict"] and result.notes[0].startswith("with against without: ")
    assert (tmp_path / "c" / "comparison.md").read_text().startswith(result.notes[0])
    assert "overhead" not in result.tables[0].columns and result.tables[0].title.startswith("10 images of val")
    with pytest.raises(UserError, match="steps"):
        compare(config(photos, tmp_path / "c", steps=5))


def test_settings_below_their_floor_are_named(tmp_path: Path) -> None:
    """Settings may differ in their images, and so in their floors. An older run without a floor hides the column."""

    def summary(top1: float, best: float) -> dict[str, Any]:
        numbers = {"seed": 0, "seconds": 1.0, "seconds_per_step": 0.1, "run": str(tmp_path / "run")}
        return numbers | {"top1": top1, "floor": {"best": best}, "scored_images": 1000}

    scores = {"few": [summary(20, 20), summary(22, 24)], "many": [summary(50, 60), summary(57, 62)]}
    result = module.write_comparison(tmp_path, scores, "top1", report=False)
    assert [row[-1] for row in result.tables[0].rows] == ["22.0 % (19.5 to 24.7)", "61.0 % (57.9 to 64.0)"]
    assert result.notes[2].startswith("clearly below the floor: many;")  # few is within the floor's interval
    assert len(result.notes) == 3
    scores["many"][1]["at_chance"] = True
    result = module.write_comparison(tmp_path, scores, "top1", report=False)
    assert result.notes[3].startswith("1 of 4 runs ended at chance: ")
    del scores["few"][0]["floor"], scores["many"][1]["at_chance"]
    result = module.write_comparison(tmp_path, scores, "top1", report=False)
    assert "floor" not in result.tables[0].columns and len(result.notes) == 2


def summaries(tmp_path: Path, right: np.ndarray, split: str = "test") -> list[dict[str, Any]]:
    """Runs that were right on these images: (S, n) of bool."""
    facts = {"seconds": 1.0, "seconds_per_step": 0.1, "run": str(tmp_path), "scored_on": split, "chosen_on": "val"}
    runs = []
    for seed, row in enumerate(right):
        ranked = torch.tensor(1 - row.astype(int))[:, None]  # all images are of class 0
        counts = PartCounts(2)
        counts.add(ranked, ranked[:, 0] * 0, torch.arange(len(row)))
        scores = {"top1": 100 * row.mean(), "scored_images": len(row), **counts.facts()}
        runs.append(facts | scores | {"seed": seed})
    return runs


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        (0.9, 0.5, r"a helps by \d+\.\d points \(\d+\.\d to \d+\.\d\) against b"),
        (0.5, 0.9, r"a hurts by \d+\.\d points \(\d+\.\d to \d+\.\d\) against b"),
        (
            0.7,
            0.71,
            r"a against b: no clear difference .one below \d+\.\d points .*: (use more seeds|the 400 images .*)",
        ),
    ],
)
def test_verdict_is_one_sentence(better: float, worse: float, verdict: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    scores = {name: summaries(tmp_path, random.random((5, 400)) < p) for name, p in (("a", better), ("b", worse))}
    result = module.write_comparison(tmp_path, scores, "top1", report=False)
    assert re.fullmatch(verdict, result.notes[0]) and json.loads((tmp_path / "comparison.json").read_text())["verdict"]
    assert result.tables[0].title == "400 images of test; chance 100.0 %"


def test_images_limit_what_more_seeds_can_show(tmp_path: Path) -> None:
    """All seeds are right on the same images, so the images alone decide how sure the difference is."""
    random = np.random.default_rng(1)
    scores = {name: summaries(tmp_path, np.repeat(random.random((1, 60)) < 0.7, 4, 0)) for name in "ab"}
    result = module.write_comparison(tmp_path, scores, "top1", report=False)
    assert "the 60 images are the limit, not the seeds: score on more images" in result.notes[0]


def test_a_negative_r2_is_inside_its_interval(tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    facts = {"seconds": 1.0, "seconds_per_step": 0.1, "run": str(tmp_path), "scored_on": "val", "scored_images": 40}
    parts = random.normal(-40, 20, (2, 3, 20))
    scores: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}
    for name, runs in zip(scores, parts, strict=True):
        for i, run in enumerate(runs):
            scores[name].append(facts | {"seed": i, "r2": run.mean(), "pseudo_values": {"r2": run.tolist()}})
    row = module.write_comparison(tmp_path, scores, "r2", report=False).tables[0].rows[0]
    low, high = map(float, str(row[2]).removesuffix(" %").split(" to "))
    assert low < parts[0].mean() < high


@pytest.mark.parametrize("seeds", [2, 3, 10])
@pytest.mark.parametrize("images", [6, 100])
def test_seeds_do_not_replace_images(seeds: int, images: int, tmp_path: Path) -> None:
    """Interval and limit are not narrower than one run's, or one image's, though all seeds agree on every image."""
    right = np.repeat(np.arange(images)[None] % 3 > 0, seeds, 0)
    scores = {name: summaries(tmp_path, right) for name in "ab"}
    result = module.write_comparison(tmp_path, scores, "top1", report=False)
    low, high = map(float, str(result.tables[0].rows[0][2]).removesuffix(" %").split(" to "))
    least, most = wilson_interval(int(right[0].sum()), images)
    assert low <= round(least, 1) and high >= round(most, 1)
    difference = result.data["differences"]["a"]
    assert difference["high"] - difference["low"] > 2 * 1.95 * 100 / images
    assert f"the {images} images are the limit, not the seeds" in result.notes[0]


def test_shares_are_compared_in_points(tmp_path: Path) -> None:
    facts = {"seconds": 1.0, "seconds_per_step": 0.1, "run": str(tmp_path)}
    scores = {
        name: [facts | {"miou": mean + shift, "seed": 0} for shift in (0.0, 0.001, 0.002)]
        for name, mean in (("a", 0.5), ("b", 0.4))
    }
    result = module.write_comparison(tmp_path, scores, "miou", report=False)
    assert result.data["settings"]["a"]["mean"] == pytest.approx(50.1)
    result = module.write_comparison(tmp_path, scores, "seconds", report=False)
    assert "helps" not in result.notes[0]


def test_auto_lines_are_printed_once(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare(config(photos, tmp_path / "c", report=False))
    log = capsys.readouterr().err
    lines, tables = log.splitlines(), re.findall(r"auto chose.*\n(?:  .*\n)+", log)
    assert tables and len(set(tables)) == len(tables)
    assert any("run 1 of 4 is done: about" in line for line in lines)


def test_out_with_another_comparison_is_refused(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "comparison.json").write_text('{"settings": {"b": {}}}')
    with pytest.raises(UserError, match=r"holds a comparison with b.* --out"):
        compare(config(photos, tmp_path / "c"))
    assert compare(config(photos, tmp_path / "c", redraw=True, seeds=1)).data["settings"].keys() == {"with", "without"}


def test_default_folder_avoids_other_comparisons(tmp_path: Path) -> None:
    default, numbered = tmp_path / "compare_photos", tmp_path / "compare_photos_2"

    def find(*settings: str, lr: float = 0.1) -> Path:
        def plan(folder: Path) -> Any:
            values = {"data": "photos", "lr": lr}
            return {name: [TrainConfig.parse(values | {"out": str(folder / name / "seed_0")})] for name in settings}

        return module._find_folder(default, plan)[0]

    assert find("a", "b") == default
    (default / "a" / "seed_0").mkdir(parents=True)
    request = module._request(TrainConfig.parse({"data": "photos", "lr": 0.1}))
    (default / "a" / "seed_0" / "asked.json").write_text(json.dumps(request))
    assert find("a", "b") == default, "a started comparison is continued"
    assert find("c", "d") == find("a", "b", lr=0.2) == numbered


def test_free_options_may_change_on_resume(photos: Path, tmp_path: Path) -> None:
    values = TRAIN | {"data": str(photos), "out": str(tmp_path / "run")}
    other = {
        "log_every": 5,
        "save_every": 7,
        "devices": 2,
        "workers": 3,
        "cache": {"location": "off", "folder": "cached"},
    }
    with pytest.raises(KeyboardInterrupt):
        module.run_once(TrainConfig.parse(values), interrupt)
    (tmp_path / "run" / "config.yaml").write_text("")  # it has started
    runs: list[TrainConfig] = []
    module.run_once(TrainConfig.parse(values | other), lambda run: runs.append(run) or CommandResult({}))
    assert runs[0].resume == str(tmp_path / "run") and runs[0].is_set("cache.location")
    options = runs[0].model_dump()
    assert [options[name] for name in ("log_every", "save_every", "devices", "workers")] == [5, 7, 2, 3]
    assert (runs[0].cache.location, runs[0].cache.folder) == ("off", "cached")
    with pytest.raises(UserError, match="was run with cache"):
        module.run_once(TrainConfig.parse(values | {"cache": {"size": 99}}), interrupt)


@pytest.mark.parametrize("name", ["data", "init"])
def test_one_path_may_be_written_in_several_ways(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = TRAIN | {"data": "photos", "recipe": "scratch", "out": "run"}
    with pytest.raises(KeyboardInterrupt):
        module.run_once(TrainConfig.parse(values | {name: "here/"}), interrupt)
    for same in ("here", "./here", "other/../here", str(tmp_path / "here")):
        assert module.find_difference(Path("run"), TrainConfig.parse(values | {name: same})) == "", same
    for other in ("there", "here/deeper", "hf:here", None):
        difference = module.find_difference(Path("run"), TrainConfig.parse(values | {name: other}))
        assert difference == f"run was run with {name} = here/, not {other}"


def interrupt(_: object) -> NoReturn:
    raise KeyboardInterrupt


def test_default_folder_is_named_after_the_data(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []
    monkeypatch.setattr(module, "run_once", lambda config, _: folders.append(Path(config.out)) or halt())
    assert main(["compare", f"{photos}/train/..", "--seeds", "1"]) == 3
    assert [path.parents[1] for path in folders] == [Path("runs") / f"compare_{photos.name}"]


def test_settings_hold_several_values(photos: Path, tmp_path: Path) -> None:
    """A group of keywords is merged with the common ones."""
    settings = [
        "a: optimizer.betas=0.9,0.95 img_size=32,48 backbone_args={window_size: 4, depths: [2, 2]} lr=0.1",
        "b: img_size=32 backbone_args.window_size=2 augment.scale=0.1,0.5",
    ]
    made = config(photos, tmp_path, settings=settings, with_settings=[], without_settings=[])
    a, b = (TrainConfig.parse(made.run_values(one, 0, "out")) for one in made.named_settings().values())
    assert (a.optimizer.betas, a.img_size, a.lr) == ((0.9, 0.95), (32, 48), 0.1)
    assert a.backbone_args == SWIN | {"depths": [2, 2], "window_size": 4}
    assert (b.img_size, b.optimizer.betas, b.augment.scale) == (32, (0.9, 0.999), (0.1, 0.5))
    assert b.backbone_args["window_size"] == 2
    assert TrainConfig.parse({"img_size": "auto"}).img_size == "auto"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("img_size=32,48,64", "img_size = .*several values"),
        ("img_size=32,x", "img_size = .*a whole number"),
        ("optimizer.betas=0.9", "optimizer.betas = .*several values, e.g. 0.9,0.999"),
        ("backbone_args={window_size: 4", "backbone_args = .*a group"),
    ],
)
def test_wrong_values_in_settings_are_one_line(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainConfig.parse(parse_assignments([setting]))


def test_unknown_metric_fails_before_the_first_run(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--metric val_top2 .* Did you mean 'val_top1'\?"):
        compare(config(photos, tmp_path / "c", metric="val_top2"))
    assert not (tmp_path / "c").exists()


def test_missing_metric_fails_after_the_first_run(photos: Path, tmp_path: Path) -> None:
    settings = {"with_settings": ["lr=0.001"], "without_settings": ["lr=0.002"], "localization": {"weight": 0}}
    with pytest.raises(UserError, match="no number 'localization_error' to compare"):
        compare(config(photos, tmp_path / "c", metric="localization_error", **settings))
    (summary,) = (tmp_path / "c").rglob("summary.json")
    values = json.loads(summary.read_text()).items()
    numbers = {name for name, value in values if isinstance(value, int | float) and not isinstance(value, bool)}
    assert numbers - {"seed"} <= set(known_metrics("train"))


def test_every_score_of_detectors_and_segmenters_is_known() -> None:
    found = AveragePrecision(*[0.0] * 6, curves={}, classes=[])
    assert set(summary_of({"bbox": found, "segm": found})) <= set(known_metrics("detect"))
    assert set(Confusion(2).summary()) <= set(known_metrics("segment"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"without_settings": []}, "two settings"),
        ({"with_settings": [], "without_settings": [], "localization": {"weight": 0}}, "leaves nothing to compare"),
        ({"settings": ["nameless"]}, "name: option=value"),
        ({"settings": ["a: lr=1", "a: lr=2"]}, "'a' twice"),
        ({"settings": ["with: lr=1"]}, "'with' twice"),
        *(
            ({"settings": [f"{name}: lr=1", "b: lr=2"]}, "choose a plain word")
            for name in ("", "..", "../../escape", "/escape", "a\\b", "a\x1b[31m", "caf\udce9", "Report.html")
        ),
        ({"with_settings": ["recipe=finetune"]}, "cannot change the recipe"),
        ({"with_settings": ["localization.weight"]}, "option=value"),
        ({"with_settings": ["localization.wieght=1"]}, "localization.weight"),
    ],
)
def test_mistakes(photos: Path, tmp_path: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare(config(photos, tmp_path / "c", **values))
    assert not list(tmp_path.rglob("config.yaml"))


def test_default_settings_compare_drloc() -> None:
    config = CompareConfig.parse({"data": "x", "localization": {"pairs": 32}})
    first, second = (
        TrainConfig.parse(config.run_values(values, 0, "out")) for values in config.named_settings().values()
    )
    assert (first.localization.weight, second.localization.weight) == ("paper", 0)
    assert first.localization.pairs == 32 and list(config.named_settings()) == ["with", "without"]


def test_a_stopped_comparison_can_be_queued_again(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = TrainConfig.parse(TRAIN | {"data": str(photos), "out": str(tmp_path / "run")})
    with pytest.raises(Interrupted):
        module.run_once(run, lambda _: CommandResult({"stopped": "SIGTERM"}))
    monkeypatch.setattr(module, "run_once", halt)
    assert main(["compare", str(photos), "--seeds", "1", "--out", str(tmp_path / "out"), "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"error": "stopped; the same command continues.", "status": 3}


def halt(*_: object) -> NoReturn:
    raise Interrupted
