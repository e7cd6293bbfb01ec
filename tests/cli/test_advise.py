"""frugalvit advise: every proposed command is valid, and the timed step is the step of a run."""

import json
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from lightning_fabric import Fabric
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.cli import parser as parser
from frugalvit.cli.advise import Proposal, _estimate, advise
from frugalvit.config.tools import AdviseConfig
from frugalvit.engine.step import TrainStep
from helpers.toy_task import ToyTask, toy_plan


def write_images(folder: Path, classes: int, each: int, side: int = 16) -> Path:
    random = np.random.default_rng(0)
    for label in range(classes):
        path = folder / f"class_{label}" if classes > 1 else folder
        path.mkdir(parents=True, exist_ok=True)
        for number in range(each):
            Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path / f"{number}.png")
    return folder


def check_command(text: str) -> None:
    """The real parser accepts the command."""
    words = shlex.split(text)
    command = cli.find_command(words[1:])
    assert words[0] == "frugalvit" and command is not None
    options = words[1 + len(command.name.split()) :]
    parser.parse(command.load_config(), options, command.name, command.help)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Tests choose whether the hub answers; no weights are on this machine."""
    state = {"online": False}
    monkeypatch.setattr("frugalvit.cli.advise.is_online", lambda: state["online"])
    monkeypatch.setattr("frugalvit.cli.advise.locate_published", lambda name: None)
    return state


def test_published_weights_come_first_where_they_can_be_had(tmp_path: Path, online: dict[str, bool]) -> None:
    folder, found = write_images(tmp_path / "photos", 2, 4), {}
    for online["online"] in (True, False):
        proposals = advise(AdviseConfig(data=str(folder), trial=0, device="cpu")).data["proposals"]
        found[online["online"]] = [proposal["command"].split()[1:3] for proposal in proposals]
    assert found[True][:2] == [["probe", "logistic"], ["train", str(folder)]] and len(found[True]) == 5
    assert found[False][0][0] == "train" and found[False][3:5] == found[True][:2]


@pytest.mark.parametrize(("unlabelled", "proposed"), [(2, False), (12, True), (18, True)])
def test_rows_without_a_label_count(unlabelled: int, proposed: bool, tmp_path: Path) -> None:
    folder = write_images(tmp_path / "photos", 2, 5 + unlabelled // 2)
    files = sorted(folder.rglob("*.png"), key=lambda file: int(file.stem))
    rows = [f"{file},{file.parent.name if int(file.stem) < 5 else ''}" for file in files]
    (tmp_path / "t.csv").write_text("\n".join(["path,label", *rows]))
    data = advise(AdviseConfig(data=str(tmp_path / "t.csv"), trial=0, device="cpu")).data
    assert data["splits"]["train without a label"] == unlabelled and data["images"] == 10 + unlabelled
    commands = [proposal["command"] for proposal in data["proposals"]]
    assert any(command.endswith("--unlabelled rest --init RUN") for command in commands) == proposed
    assert any("probe logistic" in command and "--unlabelled rest" in command for command in commands)
    assert any("--select 16" in command for command in commands) == (unlabelled > 16)
    for command in commands:
        check_command(command)
    assert not any("left out" in note for note in data["notes"])


@pytest.mark.parametrize("side", [16, 40])
def test_labelled_images(tmp_path: Path, side: int) -> None:
    folder = write_images(tmp_path / "my photos", 3, 12, side)
    data = advise(AdviseConfig(data=str(folder), trial=1, device="cpu")).data
    assert (data["images"], data["classes"], data["device"], data["side"]) == (36, 3, "cpu", side)
    proposals = data["proposals"]
    for proposal in proposals:
        check_command(proposal["command"])
        assert proposal["seconds"] > 0 and proposal["why"]
    assert [p["command"].split()[1] for p in proposals] == ["train", "pretrain", "train", "probe", "train"]
    assert proposals[1]["command"].endswith("--method instances") == (side > 32)
    assert proposals[0]["seconds"] >= proposals[0]["steps"] * proposals[0]["seconds_per_step"]
    floor = data["floor"]
    assert floor["train_images"] == data["splits"]["train"] and 0 < floor["majority"] <= floor["best"] <= 100
    assert any("The floor on val (" in note for note in data["notes"])
    assert any("What to expect" in note for note in data["notes"])
    assert {"backbone", "batch", "lr"} <= {decision["name"] for decision in proposals[0]["decisions"]}
    json.dumps(data)


def test_unlabelled_images_without_a_trial(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 1, 10)
    proposals = advise(AdviseConfig(data=str(folder), trial=0, device="cpu")).data["proposals"]
    assert [proposal["command"].split()[1] for proposal in proposals] == ["pretrain", "embed", "train"]
    for proposal in proposals:
        check_command(proposal["command"])
        assert proposal["seconds"] is None


def test_unbalanced_classes(tmp_path: Path) -> None:
    folder = write_images(tmp_path, 2, 4)
    for number in range(100):
        shutil.copy(folder / "class_0" / "0.png", folder / "class_0" / f"copy_{number}.png")
    advice = advise(AdviseConfig(data=str(folder), trial=0, device="cpu"))
    assert any("--balance" in note for note in advice.notes)
    chosen = {value["name"]: value["value"] for value in advice.data["proposals"][0]["decisions"]}
    assert chosen["logit_adjustment"] == 1, "as train does"


def test_the_timed_step_is_the_step_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping and the hook before the optimizer, where the centers move, take time too."""
    done: list[str] = []
    task, clip = ToyTask(), TrainStep._clip
    monkeypatch.setattr(task, "before_optimizer", lambda step: done.append(f"before {step}"))
    monkeypatch.setattr(TrainStep, "_clip", lambda self: done.append("clip") or clip(self))
    monkeypatch.setattr(task, "after_step", lambda step, skipped: done.append(f"after {step}"))
    before = task.linear.weight.detach().clone()
    proposal = Proposal("frugalvit train", "a toy")
    _estimate(proposal, task, toy_plan(clip=1.0), Fabric(accelerator="cpu", devices=1), 2, 0.0, 0.0)
    assert proposal.seconds and proposal.seconds > 0
    assert done == [word for step in range(3) for word in (f"before {step}", "clip", f"after {step}")]
    assert not before.equal(task.linear.weight)
