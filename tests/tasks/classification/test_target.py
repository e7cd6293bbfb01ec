"""Several labels per image, a number per image, and rare classes: losses and scores against loops and scikit-learn."""

import csv
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, mean_absolute_error, r2_score
from torch import Tensor

import frugalvit as fv
from frugalvit.config.base import set_dotted
from frugalvit.config.compare import CompareConfig
from frugalvit.config.data import MixingConfig
from frugalvit.config.defaults import IMBALANCED, Facts, logit_adjustment
from frugalvit.config.probe import EvalConfig, LogisticConfig
from frugalvit.config.train import PredictConfig
from frugalvit.data.augmentation.mixup import Blend, Mixing
from frugalvit.errors import UserError
from frugalvit.probing.logistic import logistic
from frugalvit.probing.metrics import FEW_POSITIVES, average_precisions, best_thresholds, chance_precision
from frugalvit.tasks.classification.evaluate import align_labels, evaluate
from frugalvit.tasks.classification.predict import predict
from frugalvit.tasks.classification.target import ClassTarget, LabelTarget, NumberTarget, make_target
from helpers.dense_samples import make_coco
from helpers.tiny_runs import TRAIN, differences, interrupted_at, run_tiny

CPU = torch.device("cpu")
NAMES = ["a", "b", "c"]


def make_tables(folder: Path, images: int = 40) -> Path:
    """Write images whose brightness is a number, and whose colours are labels; with tables of both."""
    folder.mkdir()
    random = np.random.default_rng(0)
    numbers, labels = [], []
    for i in range(images):
        value, present = random.uniform(0, 100), random.random(2) < 0.5
        pixels = np.full((16, 16, 3), 50 + value) + random.normal(0, 3, (16, 16, 3))
        pixels[:8, :, 0] += 80 * present[0]
        pixels[8:, :, 1] += 80 * present[1]
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
        split = ("train", "train", "val", "test")[i % 4]
        numbers.append((f"{i}.png", f"{1000 + value:.3f}", split))
        tags = [name for name, there in zip(("red", "green"), present, strict=True) if there]
        labels.append({"path": f"{i}.png", "label": tags, "split": split})
    with (folder / "ages.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "age", "split"), *numbers])
    (folder / "tags.jsonl").write_text("\n".join(map(json.dumps, labels)))
    return folder


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tables(tmp_path_factory.mktemp("tables") / "data")


def data_of(tables: Path, kind: str) -> dict[str, Any]:
    if kind == "labels":
        return {"data": str(tables / "tags.jsonl")}
    return {"data": f"{tables / 'ages.csv'}:label=age", "target": "number"}


# -- losses, against loops


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("classes", "tau"), [(2, 1.0), (5, 0.5), (7, 2.0)])
def test_logit_adjusted_loss(classes: int, tau: float, soft: bool) -> None:
    generator = torch.Generator().manual_seed(classes)
    counts = np.arange(1, classes + 1) ** 2
    logits = torch.randn(6, classes, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(classes, (6,), generator=generator)
    targets = torch.rand(6, classes, generator=generator, dtype=torch.float64).softmax(1) if soft else labels
    total = torch.zeros((), dtype=torch.float64)
    for i in range(6):
        scaled = [torch.exp(logits[i, k]) * (counts[k] / counts.sum()) ** tau for k in range(classes)]
        for k in range(classes):
            share = targets[i, k] if soft else float(labels[i] == k)
            total = total - share * torch.log(scaled[k] / torch.stack(scaled).sum()) / 6
    (expected,) = torch.autograd.grad(total, logits)
    loss = ClassTarget([str(k) for k in range(classes)], counts, tau).loss(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(loss, total, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


def test_plain_loss_is_cross_entropy_to_the_bit() -> None:
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    assert torch.equal(ClassTarget(NAMES).loss(logits, labels), torch.nn.functional.cross_entropy(logits, labels))
    assert not ClassTarget(NAMES, np.array([1, 2, 3]), 0.0).state_dict()
    adjusted = ClassTarget(NAMES, np.array([1, 1, 2]), 1.0)
    assert adjusted.adjust_fitted(torch.zeros(3)).softmax(0).tolist() == pytest.approx([0.4, 0.4, 0.2])


@pytest.mark.parametrize("mixed", [False, True])
def test_loss_of_several_labels(mixed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(-1, 2, (6, 4), generator=generator).to(torch.int8)
    logits = torch.randn(6, 4, generator=generator, requires_grad=True)
    targets, share = labels, 0.3
    if mixed:
        mixing = Mixing(MixingConfig(), 4)
        _, targets = mixing.apply(torch.zeros(6, 3, 2, 2), labels, Blend(share))
    terms = []
    for i, k in itertools.product(range(6), range(4)):
        own, other = float(labels[i, k]), float(labels[i ^ 1, k])
        if own < 0 or (mixed and other < 0):
            continue  # unknown, or mixed with an unknown one
        y = share * own + (1 - share) * other if mixed else own
        p = 1 / (1 + torch.exp(-logits[i, k]))
        terms.append(-y * torch.log(p) - (1 - y) * torch.log(1 - p))
    expected = torch.stack(terms).mean()
    loss = LabelTarget(list("abcd")).loss(logits, targets)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, logits), torch.autograd.grad(expected, logits))


def test_loss_and_unit_of_numbers() -> None:
    values = np.array([[1990.0], [2000.0], [2025.0]], np.float32)
    target = NumberTarget(["year"], float(values.mean()), float(values.std()))
    logits = torch.tensor([[0.0], [1.0], [-1.0]])
    expected = (((target.answers(logits).numpy() - values) / values.std()) ** 2).mean()
    assert float(target.loss(logits, torch.from_numpy(values))) == pytest.approx(expected, rel=1e-5)
    assert float(target.loss(torch.zeros(3, 1), torch.from_numpy(values))) == pytest.approx(1.0, rel=1e-5)
    backbone = fv.create_backbone("swin_nano", img_size=32, num_classes=1)
    features = torch.randn(5, backbone.pooled_dim)
    with torch.no_grad():
        before = backbone.classify(features)
        target.finish(backbone)  # the exported weights answer in years
        torch.testing.assert_close(backbone.classify(features), target.answers(before))
        target.start_classifier(backbone, loaded=True)  # --init with them
        torch.testing.assert_close(backbone.classify(features), before, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["class", "labels", "number"])
def test_a_checkpoint_restores_the_loss(kind: str) -> None:
    """A dumped step has the checkpoint and the configuration, but not the data."""
    config: Any = SimpleNamespace(target=kind, logit_adjustment=1.0)
    truth = {"class": [0, 1, 1], "labels": [[1, 0, -1], [0, 1, 1]], "number": [[3.0], [7.0]]}[kind]
    array = np.array(truth, np.int64 if kind == "class" else None)
    names = NAMES[: 1 if kind == "number" else 3]
    made, again = make_target(config, names, SimpleNamespace(truth=array)), make_target(config, names)  # type: ignore[arg-type]
    again.load_state_dict(made.state_dict())
    logits, targets = torch.randn(len(truth), len(names)), torch.from_numpy(array)
    assert torch.equal(again.loss(logits, targets), made.loss(logits, targets))


# -- scores, against scikit-learn


def make_answers(images: int = 60, labels: int = 5) -> tuple[Tensor, Tensor]:
    """Make answers with ties, and truth with unknown entries and one label that no image has."""
    random = np.random.default_rng(0)
    truth = random.choice([-1, 0, 1], (images, labels), p=[0.1, 0.6, 0.3])
    truth[:, -1] = truth[:, -1].clip(-1, 0)
    return torch.from_numpy(random.integers(1, 20, (images, labels)) / 20).float(), torch.from_numpy(truth).float()


def sklearn_map(answers: Tensor, truth: Tensor) -> float:
    columns = [(answers[:, k][truth[:, k] >= 0], truth[:, k][truth[:, k] >= 0]) for k in range(truth.shape[1])]
    return 100 * float(np.mean([average_precision_score(y, scores) for scores, y in columns if (y == 1).any()]))


def test_scores_of_several_labels() -> None:
    answers, truth = make_answers()
    target = LabelTarget(list("abcde"), thresholds=[0.3, 0.4, 0.5, 0.6, 0.7])
    scores, order = target.make_scores(len(answers) + 3, CPU), torch.randperm(len(answers))
    for rows in order.split(16):  # three images of the dataset are unreadable
        scores.add(answers[rows].logit(), truth[rows].to(torch.int8), rows)
    found, facts = scores.summary(), scores.facts("val")
    stored = scores.scored()[0]  # after rounding
    assert found["map"] == pytest.approx(sklearn_map(stored, truth))
    known, chosen = truth >= 0, stored >= target.thresholds
    assert found["f1"] == pytest.approx(100 * f1_score(truth[known], chosen[known]))
    assert facts["scored_images"] == 60 and facts["map_interval"][0] < found["map"] < facts["map_interval"][1]
    values = facts["pseudo_values"]["map"]
    without_part = sklearn_map(stored[(index := torch.arange(60)) % 20 != 3], truth[index % 20 != 3])
    assert values[3] == pytest.approx(20 * found["map"] - 19 * without_part)
    perfect = target.make_scores(60, CPU)
    perfect.put(truth.clamp(min=0), truth, torch.arange(60))
    assert scores.is_at_chance() and not perfect.is_at_chance() and perfect.summary()["map"] == 100


@pytest.mark.parametrize("whole", [False, True])
def test_scores_of_numbers(whole: bool) -> None:
    random = np.random.default_rng(1)
    truth = random.integers(0, 5, 50).astype(np.float32) if whole else random.normal(1000, 5, 50).astype(np.float32)
    answers = (truth + random.normal(0, 0.7, 50)).astype(np.float32)
    scores = NumberTarget(["x"], 0.0, 1.0).make_scores(50, CPU)
    scores.add(torch.from_numpy(answers)[:, None], torch.from_numpy(truth)[:, None], torch.arange(50))
    found = scores.summary()
    assert found["r2"] == pytest.approx(100 * r2_score(truth, answers), rel=1e-6)
    assert found["mae"] == pytest.approx(mean_absolute_error(truth, answers), rel=1e-6)
    assert found.get("rounded") == (pytest.approx(100 * float((answers.round() == truth).mean())) if whole else None)
    constant = 100 * r2_score(truth, np.full(50, truth.mean()))
    assert scores.facts("val")["chance"]["r2"] == pytest.approx(constant, abs=1e-6) and not scores.is_at_chance()


def test_chance_and_thresholds() -> None:
    truth = torch.tensor([[1], [1], [0], [0], [0]])
    orders = [torch.tensor(order)[:, None].float() for order in itertools.permutations(range(5))]
    expected = 100 * float(np.mean([float(average_precisions(order, truth)) for order in orders]))
    assert chance_precision(truth) == pytest.approx(expected)
    answers, truth = make_answers(images=120)
    truth[FEW_POSITIVES - 1 :, 0] = 0
    thresholds = best_thresholds(answers, truth)

    def f1(columns: slice, threshold: float) -> float:
        known = truth[:, columns] >= 0
        return float(f1_score(truth[:, columns][known], (answers[:, columns] >= threshold)[known], zero_division=0.0))

    for k in range(4):  # label 0 has few images and takes the threshold that is best for all
        columns = slice(0, 5) if k == 0 else slice(k, k + 1)
        best = max(f1(columns, threshold) for threshold in np.arange(0.5, 20) / 20)
        assert f1(columns, float(thresholds[k])) == pytest.approx(best)


def test_labels_of_other_data_are_unknown() -> None:
    targets = torch.tensor([[1, 0], [0, 1]], dtype=torch.int8)
    assert align_labels(targets, torch.tensor([2, -1]), 3).tolist() == [[-1, -1, 1], [-1, -1, 0]]


# -- the choice of "auto"


def test_auto_adjusts_only_imbalanced_classes() -> None:
    facts = {"images": 100, "classes": 3, "side": 32, "device": "cpu"}
    assert logit_adjustment(Facts(**facts, imbalance=IMBALANCED), balance=False)[0] == 1
    assert logit_adjustment(Facts(**facts, imbalance=IMBALANCED - 1), balance=False)[0] == 0
    for other in ({"balance": True}, {"balance": False, "unlabelled": 9}, {"balance": False, "target": "labels"}):
        balance = bool(other.pop("balance"))
        assert logit_adjustment(Facts(**facts, imbalance=100, **other), balance=balance)[0] == 0  # type: ignore[arg-type]


# -- whole runs


@pytest.mark.runs
@pytest.mark.parametrize("kind", ["labels", "number"])
def test_train_predict_eval_report(tables: Path, tmp_path: Path, kind: str) -> None:
    options = data_of(tables, kind) | {"steps": 40, "evaluate_every": 20, "mixing": {"prob": 0.5}, "report": True}
    result = run_tiny("train", out=tmp_path / "run", **options, lr=3e-3).data
    metric = {"labels": "map", "number": "r2"}[kind]
    assert result[metric] > result["chance"][metric] and result["scored_on"] == "test" and not result["at_chance"]
    assert "per_class" in (tmp_path / "run/summary.json").read_text()
    page = (tmp_path / "run/report.html").read_text()
    assert "Answers" in page and ("average precision" in page or "mean of the answers" in page)
    data = options["data"]
    scored = evaluate(EvalConfig(model=str(tmp_path / "run"), data=data, device="cpu", out=str(tmp_path / "out.csv")))
    for name in (metric, f"{metric}_interval"):
        assert scored.data[name] == pytest.approx(result[name], abs=1e-3)
    rows = list(csv.DictReader((tmp_path / "out.csv").open()))
    images = [str(tables / f"{i}.png") for i in (3, 7)]
    answers = predict(PredictConfig(model=str(tmp_path / "run"), images=images, device="cpu"))
    ready = fv.load(tmp_path / "run").predict(images)
    for row, first, answer in zip(rows, ready, answers.data["predictions"], strict=False):
        if kind == "number":
            assert float(row["predicted"]) == pytest.approx(answer["value"], rel=1e-3)
            assert first[0] == ("age", pytest.approx(answer["value"], rel=1e-3))
            assert 950 < answer["value"] < 1150
        else:
            assert [name for name in row["predicted"].split("|") if name] == answer["labels"]
            line = json.loads((tables / "tags.jsonl").read_text().split("\n")[int(Path(row["image"]).stem)])
            assert set(filter(None, row["labels"].split("|"))) == set(line["label"])
            assert dict(first) == pytest.approx({g["class"]: g["probability"] for g in answer["predictions"]}, rel=1e-3)
    table = predict(PredictConfig(model=str(tmp_path / "run"), images=images, device="cpu", format="csv")).notes[0]
    assert table.splitlines()[0] == ("image,age" if kind == "number" else "image,rank,class,probability,present")
    checkpoint = f"{tmp_path / 'run/checkpoints/last.pt'}"  # its weights answer in deviations from the mean
    again = predict(PredictConfig(model=checkpoint, images=images, device="cpu")).data["predictions"]
    assert again == [answer | {} for answer in again] and (kind == "labels" or 900 < again[0]["value"] < 1200)


@pytest.mark.runs
def test_resumed_run_is_the_same(tables: Path, tmp_path: Path) -> None:
    run_tiny("train", out=tmp_path / "whole", **data_of(tables, "number"))
    with interrupted_at(7):
        run_tiny("train", out=tmp_path / "parts", **data_of(tables, "number"))
    run_tiny("train", resume=tmp_path / "parts")
    assert differences(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.runs
def test_probe_of_several_labels_is_saved(tables: Path, tmp_path: Path) -> None:
    options = {
        "model": "swin_nano",
        "data": str(tables / "tags.jsonl"),
        "img_size": 32,
        "device": "cpu",
        "cache": False,
    }
    result = logistic(LogisticConfig.parse(options | {"save": str(tmp_path / "probe")})).data
    assert result["map"] > result["chance"]["map"] and "map11" in result
    answer = predict(PredictConfig(model=str(tmp_path / "probe"), images=[str(tables / "0.png")], device="cpu"))
    assert set(answer.data["predictions"][0]["labels"]) <= {"red", "green"}
    scored = evaluate(EvalConfig(model=str(tmp_path / "probe"), data=options["data"], device="cpu")).data
    assert scored["map"] == pytest.approx(result["map"], abs=1e-3) and (tmp_path / "probe/report.html").exists()


@pytest.mark.runs
def test_compare_takes_the_main_score(tables: Path, tmp_path: Path) -> None:
    from frugalvit.comparison.compare import compare

    values = TRAIN | data_of(tables, "number") | {"device": "cpu", "out": str(tmp_path / "c"), "seeds": 1, "steps": 2}
    config = CompareConfig.parse(values | {"with_settings": ["lr=0.01"], "without_settings": ["lr=0.001"]})
    assert compare(config).data["metric"] == "r2"


def test_boxes_are_labels(tmp_path: Path) -> None:
    folder = make_coco(tmp_path / "coco")
    source = fv.open_data(folder, split="given", target="labels")
    content = json.loads((folder / "instances_train.json").read_text())
    names = {entry["id"]: entry["name"] for entry in content["categories"]}
    files = {entry["id"]: entry["file_name"] for entry in content["images"]}
    expected = {(files[entry["image_id"]], names[entry["category_id"]]) for entry in content["annotations"]}
    train = source.splits["train"]
    assert train.targets is not None and source.classes is not None
    found = {(Path(train.names[row]).name, source.classes[k]) for row, k in np.argwhere(train.targets == 1)}
    assert found == expected and set(source.splits) == {"train", "val"}
    with pytest.raises(UserError, match="--target labels"):
        run_tiny("train", data=folder, out=tmp_path / "run")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no boxes"):
        fv.open_data(tmp_path / "empty", target="labels")


@pytest.mark.parametrize(
    ("kind", "options", "flag"),
    [
        ("labels", {"balance": True}, "--balance"),
        ("labels", {"labels": 5}, "--labels 5"),
        ("labels", {"target": "class"}, "one label"),
        ("number", {"classifier": "logistic"}, "--classifier logistic"),
    ],
)
def test_options_without_a_meaning_are_refused(
    tables: Path, tmp_path: Path, kind: str, options: dict[str, Any], flag: str
) -> None:
    values = data_of(tables, kind)
    for name, value in options.items():
        set_dotted(values, name, value)
    with pytest.raises(UserError, match=flag) as error:
        run_tiny("train", out=tmp_path / "run", **values)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()
