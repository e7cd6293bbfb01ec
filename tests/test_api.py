"""Commands from Python."""

import contextlib
import inspect
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import frugalvit as fv
from frugalvit import api
from frugalvit.cli import main as cli
from frugalvit.cli.commands import COMMANDS, Command
from frugalvit.config.base import Config, option
from frugalvit.config.train import TrainConfig
from frugalvit.engine.hardware import configure_cuda
from frugalvit.tasks.classification.train import train
from frugalvit.utils.tables import CommandResult

SMALL: dict[str, Any] = {"backbone": "swin_nano", "img_size": 32, "batch": 8, "steps": 2, "report": False}


class Words(Config):
    first: str = option(positional=True)
    more: list[str] = option(default_factory=list, positional=True)
    group: dict[str, int] = option(default_factory=dict)


class TestCommand(Command):
    """A command of this file."""

    __test__ = False

    def load_config(self) -> type[Config]:
        return Words

    def load_function(self) -> Callable[[Any], CommandResult]:
        return FUNCTIONS[self.function]


FUNCTIONS: dict[str, Callable[[Any], CommandResult]] = {}


def add_command(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[[Any], CommandResult]) -> None:
    monkeypatch.setitem(FUNCTIONS, name, function)
    monkeypatch.setattr(cli, "COMMANDS", [TestCommand(name, "", name, "")])


@pytest.fixture
def digits(tmp_path: Path) -> str:
    images = np.random.default_rng(0).integers(0, 255, (24, 8, 8), dtype=np.uint8)
    return fv.save_data(tmp_path / "digits", (images, np.arange(24) % 2))


def test_train_then_predict_and_probe(digits: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From arrays to a model and its score, without output; the command line can use the same run."""
    result = fv.train(digits, quiet=True, out=tmp_path / "run", localization={"weight": 0.25}, **SMALL)
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1 and "top-1" in output.err, "random labels: an alarm"
    assert fv.load(result["run"]).predict(np.zeros((8, 8), np.uint8))[0][0][0] in "01"
    stored = TrainConfig.from_run(tmp_path / "run" / "config.yaml")
    assert (stored.localization.weight, stored.steps, stored.data) == (0.25, 2, digits)
    score = fv.run("probe knn", result["run"], digits, quiet=True)
    assert score["top1"] >= 0 and cli.main(["report", str(result["run"]), "--quiet"]) == 0


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, "change", change)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.delenv("FRUGALVIT_RANK_ZERO_PID", raising=False)
    emptied: list[bool] = []  # other threads would miss their PATH for a moment
    monkeypatch.setattr(type(os.environ), "clear", lambda self: emptied.append(True))
    fv.run("change", "x")
    assert not emptied
    assert os.environ["SLURM_NTASKS"] == "4" and "FRUGALVIT_RANK_ZERO_PID" not in os.environ


def change(config: Config) -> CommandResult:
    del os.environ["SLURM_NTASKS"]
    os.environ["FRUGALVIT_RANK_ZERO_PID"] = "1"
    return CommandResult({})


def test_the_settings_of_torch_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the command fails; the caller's next random numbers are the same as without it."""
    add_command(monkeypatch, "tune", tune)
    threads, onednn = torch.get_num_threads(), torch.backends.mkldnn.enabled
    try:
        torch.set_num_threads(2)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        with pytest.raises(fv.UserError, match="failed"):
            fv.run("tune", "x")
        assert torch.equal(torch.rand(3), expected)
        assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (2, "highest")
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.mkldnn.enabled == onednn
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")
        torch.backends.mkldnn.enabled = onednn


def tune(config: Config) -> CommandResult:
    configure_cuda()
    torch.backends.mkldnn.enabled = not torch.backends.mkldnn.enabled
    torch.manual_seed(0)
    raise fv.UserError("failed")


@contextlib.contextmanager
def float64_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


MODES = {
    "autocast": lambda: torch.autocast("cpu"),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "float64": float64_default,
    "another device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_modes_of_the_caller_do_not_change_a_command(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, "compute", compute)
    with mode():
        before = torch.ones(2) @ torch.ones(2)
        result = fv.run("compute", "x")
        after = torch.ones(2) @ torch.ones(2)
    assert result == {"sum": 5.0, "kind": "torch.float32"}
    assert (before.dtype, before.device, before.is_inference()) == (after.dtype, after.device, after.is_inference())


def compute(config: Words) -> CommandResult:
    weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    loss = weight @ weight
    loss.backward()
    assert weight.grad is not None and weight.grad.tolist() == [2.0, 4.0]
    return CommandResult({"sum": loss.item(), "kind": str(loss.dtype)})


def test_one_thread_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings and random numbers belong to the process; a command may still call another one."""
    add_command(monkeypatch, "wait", wait)
    with ThreadPoolExecutor(4) as threads:
        seen = list(threads.map(lambda number: fv.run("wait", str(number), quiet=True)["with"], range(4)))
    assert seen == [1, 1, 1, 1]
    assert fv.run("wait", "outer", "inner")["with"] == 2


_at_work: list[str] = []


def wait(config: Words) -> CommandResult:
    _at_work.append(config.first)
    most = fv.run("wait", *config.more)["with"] if config.more else 0
    threading.Event().wait(0.05)  # time for another thread
    most = max(most, len(_at_work))
    _at_work.remove(config.first)
    return CommandResult({"with": most})


def test_the_configuration_of_the_caller_is_not_changed(digits: str, tmp_path: Path) -> None:
    """Values that are resolved for one run do not leak into the next."""
    config = TrainConfig.parse({"data": digits, "out": str(tmp_path / "run"), **SMALL})
    before = config.model_dump()
    train(config)
    assert config.model_dump() == before and config.lr == "auto"


def test_positional_arguments_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    add_command(monkeypatch, "echo it", echo)
    assert fv.run("echo it", Path("a"), "b", "c") == {"first": "a", "more": ["b", "c"], "group": {}}
    assert fv.run("echo it", "a", ["b"], group={"x": 1}) == {"first": "a", "more": ["b"], "group": {"x": 1}}
    assert fv.run("echo it", first="a", **{"group.x": 2})["group"] == {"x": 2}


def echo(config: Words) -> CommandResult:
    return CommandResult(config.model_dump())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fv.run("fly"), "There is no command 'fly'"),
        (lambda: fv.run("probe"), "There is no command 'probe'"),
        (lambda: fv.train("photos", epoch=3), "no option 'epoch'. Did you mean 'epochs'"),
        (lambda: fv.train("photos", model="x"), "no option 'model'. Did you mean 'backbone'"),
        (lambda: fv.run("train", "photos", "others"), "'others' is one argument too many"),
        (lambda: fv.run("train", "photos", data="others"), "'data' is passed twice"),
        (lambda: fv.train(np.zeros((400, 8, 8))), r"data = a ndarray: it must be text\.$"),
        (lambda: fv.run("embed", object(), "photos"), r"model = a object: it must be text\.$"),
        (lambda: fv.train(3), r"data = 3: it must be text\.$"),
        (lambda: fv.train("photos", device=torch.device("cuda:3")), "device = device.*it must be 'auto', 'cpu'"),
        (lambda: fv.train("nowhere"), "'nowhere'"),
    ],
)
def test_mistakes(call: Any, message: str) -> None:
    with pytest.raises(fv.UserError, match=message):
        call()


def test_a_spawned_worker_starts_no_command(digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As multiprocessing marks a spawned process while it imports the main module."""
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(fv.UserError, match='if __name__ == "__main__":\''):
        fv.train(digits, quiet=True, out=tmp_path / "run", **SMALL)
    assert not (tmp_path / "run").exists()


COMMANDS_AS_FUNCTIONS = {
    "eval": "evaluate", "detect eval": "detect_evaluate", "segment eval": "segment_evaluate",
}  # fmt: skip


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_is_a_function_of_its_name(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if command == "list models":
        pytest.skip("fv.list_models returns names")
    name = COMMANDS_AS_FUNCTIONS.get(command, command.replace(" ", "_"))
    function, called = getattr(api, name), []
    assert name in fv.__all__ and callable(getattr(fv, name)) and f"frugalvit {command}`" in function.__doc__
    monkeypatch.setattr(api, "run", lambda *words, **options: called.append((words, options)))
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    getattr(fv, name)(*required, quiet=True, batch=2)
    assert called == [((command, *required), {"quiet": True, "batch": 2})]


def test_functions_score_and_predict(digits: str, tmp_path: Path) -> None:
    run = fv.train(digits, out=tmp_path / "run", quiet=True, **SMALL)["run"]
    assert fv.evaluate(run, digits, quiet=True)["scored_images"] == 2
    assert fv.probe_knn(run, digits, quiet=True)["test_images"] == 24
    image = tmp_path / "image.png"
    Image.new("RGB", (8, 8)).save(image)
    assert len(fv.predict(run, [image, image], quiet=True)["predictions"]) == 2
    assert fv.export(run, out=str(tmp_path / "model"), quiet=True) and fv.export.__name__ == "frugalvit.export"
    assert fv.data(digits, quiet=True)["splits"] and fv.data.__name__ == "frugalvit.data"
