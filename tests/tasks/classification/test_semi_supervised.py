"""``train --unlabelled``: layouts, resume, ranks, streams, losses, report and errors."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from frugalvit.cli import main as cli
from frugalvit.config.semi_supervised import SemiConfig
from frugalvit.config.train import LocalizationConfig, TrainConfig
from frugalvit.data import open_data
from frugalvit.data.augmentation.mixup import Blend, mix_images
from frugalvit.data.loader import Batch
from frugalvit.engine.schedules import Constant
from frugalvit.errors import UserError
from frugalvit.objectives import RelativeLocalization, SoftMatch
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification import semi_supervised
from frugalvit.tasks.classification.semi_supervised import SemiBatch, SemiSupervisedTask
from helpers.fork_server import ForkServer
from helpers.processes import finish, start, torchrun_variables
from helpers.shards import shard_images
from helpers.tiny_runs import (
    TRAIN,
    differences,
    interrupted_at,
    load_state,
    read_metrics,
    resolve,
    run_tiny,
    write_config,
    write_images,
)

METHODS = ["fixmatch", "flexmatch", "softmatch"]
SEMI: dict[str, Any] = {"unlabelled": "rest", "labels": 4, "batch": 4, "mixing": {"prob": 0.7}}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("semi") / "images", train=13)


def semi_options(method: str) -> dict[str, Any]:
    """With region matching, except for fixmatch, whose strong views are mixed."""
    if method == "fixmatch":
        return {"ratio": 2, "method": method, "threshold": 0.5}
    return {"ratio": 2, "method": method, "region_weight": 0.5, "prototypes": 8}


def data_facts(run: Path) -> dict[str, Any]:
    return json.loads((run / "data.json").read_text(encoding="utf-8"))


def opened(**values: Any) -> tuple[Any, Any]:
    """The source and its unlabelled images, as a run opens them."""
    config = TrainConfig.parse({"split": "given"} | values)
    source = open_data(str(config.data), split="given", loose=config.unlabelled == "rest")
    scored = [part for name, part in source.splits.items() if name != "train"]
    return source, semi_supervised.open_unlabelled(config, source, None, scored)


# -- layouts


def move_out(images: Path, target: Path, name: str) -> Path:
    """A copy of the images in which all but four of each class are in a folder of this name."""
    shutil.copytree(images, target)
    (target / name).mkdir(parents=True)
    for path in sorted(target.glob("train/*/*.png")):
        if int(path.stem) >= 4 and path.parent.name in ("cat", "dog"):
            path.rename(target / name / f"{path.parent.name}_{path.name}")
    return target


@pytest.mark.parametrize("name", ["train/unlabelled", "unlabeled", "train/Unlabelled"])
def test_a_folder_named_unlabelled(images: Path, tmp_path: Path, name: str) -> None:
    source, unlabelled = opened(data=str(move_out(images, tmp_path / "photos", name)), unlabelled="rest")
    assert source.classes == ("cat", "dog") and len(source.splits["train"]) == 8
    assert len(unlabelled) == 18 and set(unlabelled.labels) == {-1}, "nobody knows their classes"
    without = open_data(str(tmp_path / "photos"), split="given")
    assert any("18 unlabelled images" in note and "--unlabelled rest" in note for note in without.notes)


def test_a_table_with_empty_labels(images: Path, tmp_path: Path) -> None:
    lines = ["path,label,split"]
    for path in sorted(images.rglob("*.png")):
        split, label = path.parts[-3:-1]
        lines.append(f"{path},{label if split == 'val' or int(path.stem) < 4 else ''},{split}")
    table = tmp_path / "photos.csv"
    table.write_text("\n".join(lines), encoding="utf-8")
    source, unlabelled = opened(data=str(table), unlabelled="rest")
    assert (len(source.splits["train"]), len(source.splits["val"]), len(unlabelled)) == (8, 10, 18)
    assert not open_data(str(table)).loose and not set(unlabelled.names) & set(source.splits["train"].names)


def test_the_rest_of_labels(images: Path) -> None:
    """The hidden labels stay, to measure the pseudo-labels; labelled and unlabelled images do not overlap."""
    source, unlabelled = opened(data=str(images), **SEMI)
    train = source.splits["train"]
    chosen = semi_supervised.subsample_labels(train.labels, 4, 0)
    assert len(unlabelled) == 18 and not {train.names[i] for i in chosen} & set(unlabelled.names)
    truth = {Path(name).parent.name for name, label in zip(unlabelled.names, unlabelled.labels, strict=True) if label}
    assert truth == {"dog"}


def test_images_that_score_the_run_are_left_out(images: Path, tmp_path: Path) -> None:
    """A list names all images, by other paths."""
    (tmp_path / "link").symlink_to(images)
    (tmp_path / "all.txt").write_text("\n".join(f"link/{path.relative_to(images)}" for path in images.rglob("*.png")))
    source, unlabelled = opened(data=str(images), unlabelled=str(tmp_path / "all.txt"))
    assert len(unlabelled) == 26 and not any("/val/" in name for name in unlabelled.names)
    assert any("holds 10 images of val and test: left out" in note for note in source.notes)
    (tmp_path / "val.txt").write_text("\n".join(map(str, images.glob("val/*/*.png"))))
    with pytest.raises(UserError, match="all of its images choose settings or score"):
        opened(data=str(images), unlabelled=str(tmp_path / "val.txt"))


# -- a step


class Linear(torch.nn.Module):
    """The smallest network: its grid is the image, its logits a linear map."""

    num_classes, dim, mean, std = 3, 3, (0.0,) * 3, (1.0,) * 3

    def __init__(self) -> None:
        super().__init__()
        self.head, self.model = torch.nn.Linear(3, 3), torch.nn.Identity()

    def forward(self, images: torch.Tensor) -> Any:
        return semi_supervised.Features(images, images.mean((2, 3)))

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.head(pooled)

    def grid_size(self, size: tuple[int, int]) -> tuple[int, int]:
        return size


def make_batch(labelled: int = 2, ratio: int = 3, blend: Blend = Blend(1.0)) -> SemiBatch:  # noqa: B008
    draw = torch.Generator().manual_seed(0)
    images, weak, strong = (
        torch.randn(*shape, 3, 4, 4, generator=draw) for shape in ((labelled,), (labelled, ratio), (labelled, ratio))
    )
    truth = torch.tensor([0, 1, 2, -1, 0, 1])[: labelled * ratio].view(labelled, ratio)
    targets, rows = torch.tensor([0, 2])[:labelled], torch.arange(labelled * ratio).view(labelled, ratio)
    plain = Batch(images, targets, targets, torch.arange(labelled))
    mixed = mix_images(strong.flatten(0, 1), blend).view_as(strong)
    return SemiBatch(**vars(plain), weak=weak, strong=mixed, truth=truth, rows=rows, blend=blend)


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_losses_and_gradients_equal_the_sum_of_the_parts(share: float) -> None:
    torch.manual_seed(0)
    network: Any = Linear()
    localization = RelativeLocalization(3, pairs=5, hidden=4, grid_size=None)
    semi = SemiConfig(weight=0.7)
    task = SemiSupervisedTask(
        network, localization, LocalizationConfig(), Constant(0.3), ema=0.9,
        semi=semi, start=0, ramp=Constant(0.5), labels=SoftMatch(3, 0.9), regions=None,
    ).train()  # fmt: skip
    with torch.no_grad():
        network.head.weight.mul_(3)  # the EMA weights differ from the current ones
    batch, oracle = make_batch(blend=Blend(share)), SoftMatch(3, 0.9)
    losses = task(batch, 0)
    assert not task.result.training and task.training

    weak, strong = batch.weak.flatten(0, 1), batch.strong.flatten(0, 1)
    probs = task.result.classify(weak.mean((2, 3))).softmax(1).detach()
    weights = oracle(probs, batch.rows.flatten())
    logits = network.classify(strong.mean((2, 3)))
    assert batch.targets is not None
    expected = torch.nn.functional.cross_entropy(network.classify(batch.images.mean((2, 3))), batch.targets)
    for n, partner in ((0, 1), (1, 0), (2, 3), (3, 2), (4, 5), (5, 4)):
        for other, part in ((n, share), (partner, 1 - share)):
            loss = -weights[other] * logits[n].log_softmax(0)[probs[other].argmax()]
            expected = expected + part * 0.5 * 0.7 * loss / 6
    grid, pairs = torch.cat((batch.images, strong)), task._pairs(batch)
    expected = expected + 0.3 * semi_supervised.loss_at_pairs(localization, grid, pairs)[0]
    torch.testing.assert_close(losses["loss"], expected)
    parameters = [*network.head.parameters(), *localization.parameters()]
    for got, want in zip(
        torch.autograd.grad(losses["loss"], parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(got, want)

    label, truth = probs.argmax(1), batch.truth.flatten()
    for c in range(3):
        mine = label == c
        counts = [
            mine.sum(),
            weights[mine].sum(),
            weights[mine & (truth >= 0)].sum(),
            weights[mine & (truth == c)].sum(),
        ]
        assert task.window_counts[:, c].tolist() == pytest.approx([float(count) for count in counts])


@pytest.mark.parametrize("method", METHODS)
def test_learns_from_the_rest(images: Path, tmp_path: Path, method: str) -> None:
    """Metrics, summary, per-class table and report name the pseudo-labels."""
    run = tmp_path / "run"
    semi = semi_options(method)
    result = run_tiny("train", data=images, out=run, steps=6, report=True, **SEMI | {"semi": semi})
    *_, train, last = read_metrics(run)
    assert {"cross_entropy", "pseudo_label_loss", "localization", "pseudo_labels_used"} <= train.keys()
    assert ("region_loss" in train) == (method != "fixmatch")
    assert 0 <= last["pseudo_labels_used"] <= 100 and 0 <= last["pseudo_labels_right"] <= 100
    assert result.data["pseudo_labels_used"] == last["pseudo_labels_used"]
    rows = json.loads((run / "summary.json").read_text())["pseudo_labels"]["rows"]
    assert [row[0] for row in rows] == ["cat", "dog"] and sum(row[1] for row in rows) == pytest.approx(100, abs=0.02)
    assert data_facts(run)["used"] == {"train": 8, "unlabelled": 18, "val": 10}
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "Pseudo-labels" in page and "right %" in page
    assert load_state(run)["task"]["last_counts"].sum() > 0


def test_the_best_weights_do_not_hide_the_pseudo_labels(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_earlier(run: RunFolder) -> dict[str, Any]:
        """The best weights are of a step before the first pseudo-label."""
        best = load_state(run.folder)
        best["task"]["last_counts"].zero_()
        return best | {"step": 0}

    monkeypatch.setattr(RunFolder, "load_best", load_earlier)
    run_tiny("train", data=images, out=tmp_path / "run", **SEMI | {"weights": "best", "steps": 6})
    summary = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))
    assert summary["pseudo_labels_used"] > 0


def test_unlabelled_images_change_the_weights(images: Path, tmp_path: Path) -> None:
    """With weight 0 and no Drloc, the labelled images alone decide; then the weights are those without --unlabelled."""
    plain = {"labels": 4, "batch": 4, "steps": 4, "localization": {"weight": 0}, "drop_path": 0.0}
    plain |= {"mixing": {"prob": 0.0, "smoothing": 0.0}}
    run_tiny("train", data=images, out=tmp_path / "supervised", **plain)
    states = [load_state(tmp_path / "supervised")["task"]]
    for weight in (0.0, 1.0):
        out = tmp_path / f"weight_{weight}"
        run_tiny("train", data=images, out=out, **plain, unlabelled="rest", semi={"ratio": 2, "weight": weight})
        states.append({name: value for name, value in load_state(out)["task"].items() if name in states[0]})
    torch.testing.assert_close(states[0], states[1], rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(states[0], states[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("init", [True, False])
def test_the_first_classifier_after_pretraining_spreads_the_labels(
    images: Path, tmp_path: Path, init: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = SEMI | {"data": images, "steps": 4, "semi": {"ratio": 2}}
    if init:
        run_tiny("pretrain", data=images, out=tmp_path / "features", steps=2)
        options["init"] = str(tmp_path / "features")
    run_tiny("train", out=tmp_path / "run", **options)
    assert ("frozen features of 18 unlabelled and 8 labelled images" in capsys.readouterr().err) == init


# -- resume, ranks, streams


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_resumes_to_the_bit(images: Path, tmp_path: Path, method: str) -> None:
    semi = semi_options(method)
    options = SEMI | {"data": images, "semi": semi, "steps": 6, "accumulate": 2 if method == "softmatch" else 1}
    run_tiny("train", out=tmp_path / "complete", **options)
    with interrupted_at(5):
        run_tiny("train", out=tmp_path / "resumed", **options)
    run_tiny("train", resume=tmp_path / "resumed")
    assert differences(tmp_path / "complete", tmp_path / "resumed") == []


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, images: Path) -> ForkServer:
    folder = tmp_path_factory.mktemp("server")
    shutil.copytree(images, folder / "images")
    shard_images(folder / "shards", folder / "images")
    for method in METHODS:
        semi = semi_options(method)
        write_config(folder / f"{method}.yaml", TRAIN, **SEMI | {"semi": semi, "drop_path": 0.0, "steps": 6})
    return ForkServer(folder)


def test_a_stream_of_unlabelled_shards_killed_and_resumed(server: ForkServer) -> None:
    """Unlabelled shards are streamed beside a folder of labelled images; the position in both is resumed."""
    words = ["train", "images", "--config", "softmatch.yaml", "--unlabelled", "shards/{000..003}.tar", "--stream"]
    words += ["true", "--workers", "0", "--labels", "1.0"]
    complete, resumed = server.folder / "complete", server.folder / "killed"
    status, output = server.run(*words, "--out", str(complete))
    assert status == 0 and "26 unlabelled images of shards" in output, output
    status, output = server.run(*words, "--out", str(resumed), kill_at=30, inside=resumed)
    assert status == -signal.SIGKILL, output
    status, output = server.run("train", "--resume", str(resumed))
    assert status == 0 and "resuming" in output, output
    assert differences(complete, resumed) == []
    assert "pseudo_labels_right" not in read_metrics(complete)[-1], "a stream has no truth"


@pytest.mark.parametrize("method", METHODS)
def test_two_ranks_equal_one(server: ForkServer, method: str) -> None:
    words = ["train", "images", "--config", f"{method}.yaml"]
    one, two = server.folder / f"{method}_1", server.folder / f"{method}_2"
    status, output = server.run(*words, "--out", str(one))
    assert status == 0, output
    finish(start(server, torchrun_variables(2), *words, "--out", str(two)))
    first, second = (load_state(run)["task"] for run in (one, two))
    torch.testing.assert_close(first, second, rtol=2e-3, atol=5e-5)
    for a, b in zip(read_metrics(one), read_metrics(two), strict=True):
        assert {n: v for n, v in a.items() if n != "split"} == pytest.approx(
            {n: v for n, v in b.items() if n != "split"}, rel=2e-4, abs=2e-5
        )


# -- options and errors


@pytest.mark.parametrize(
    ("data", "unlabelled", "stream", "expected"),
    [
        ("images", "shards", True, (False, True)),
        ("shards", "images", True, (True, False)),
        ("shards", "shards", "auto", (False, False)),
        ("shards", "http://host/{0..3}.tar", "auto", (True, True)),
        ("images", "http://host/{0..3}.tar", False, (False, False)),
    ],
)
def test_stream_holds_for_both_kinds_of_images(
    server: ForkServer, data: str, unlabelled: str, stream: bool | str, expected: tuple[bool, bool]
) -> None:
    """A resumed run has --stream true, and must read the data as its start did."""
    paths = [name if "/" in name else str(server.folder / name) for name in (data, unlabelled)]
    for choice in (stream, *([True] if any(expected) else [])):
        config = TrainConfig.parse({"data": paths[0], "unlabelled": paths[1], "stream": choice})
        first, second = semi_supervised.separate_streams(config)
        assert second is not None and (first.stream, second.stream) == expected


def test_auto_values() -> None:
    def resolved(images: int = 40, unlabelled: int = 1400, **values: Any) -> Any:
        return resolve(TrainConfig.parse({"unlabelled": "rest"} | values), images, unlabelled=unlabelled)

    config = resolved()
    assert (config.semi.ratio, config.mixing.smoothing) == (7, 0.0)
    assert config.batch == 8, "an epoch draws every unlabelled image: 200 batches of 7"
    assert config.epochs * 25 == pytest.approx(2500, rel=0.1)
    assert resolved(unlabelled=30).semi.ratio == 3, "fewer unlabelled images than seven per labelled one"
    assert resolved(steps=20_000).semi.momentum == 0.999 and resolved(steps=1000).semi.momentum == 0.98
    assert resolve(TrainConfig.parse({})).mixing.smoothing == "auto"
    with pytest.raises(UserError, match=r"--semi.ratio 7 times --batch 8"):
        resolved(unlabelled=30, semi={"ratio": 7})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("images --unlabelled empty", "empty holds no images"),
        ("images --unlabelled missing", "No folder, file or known dataset"),
        ("images --unlabelled rest", "every training image of images has a label"),
        ("images/train/cat --unlabelled images", "has no labels"),
        ("images --semi.ratio 3", "--semi.ratio has no effect without --unlabelled"),
        (
            "images --unlabelled rest --semi.threshold 0.9",
            "--semi.threshold has no effect without --semi.method fixmatch or --semi.method flexmatch.\n",
        ),
        ("images --unlabelled rest --ema 0", "--ema 0"),
        ("images --unlabelled rest --localization.variant dense", "--localization.variant dense"),
        ("images --unlabelled shards --stream true --semi.method flexmatch", "--semi.method flexmatch"),
        ("shards --unlabelled rest --stream true", "--unlabelled rest"),
        ("images --unlabelled images --semi.ratio 9 --batch 8", "--semi.ratio 9"),
    ],
)
def test_mistakes_end_with_one_line(
    words: str,
    expected: str,
    server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(server.folder)
    (server.folder / "empty").mkdir(exist_ok=True)
    argv = ["train", *words.split(), "--device", "cpu", "--img-size", "16", "--out", str(tmp_path / "run")]
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    assert expected in error and "Traceback" not in error and not (tmp_path / "run").exists(), error
