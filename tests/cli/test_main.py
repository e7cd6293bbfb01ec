"""The command line: fast, one-line errors with exit status 2, and Ctrl-C without a traceback."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from frugalvit.cli import main as cli
from frugalvit.cli.parser import make_parser, parse
from frugalvit.config.train import TrainConfig
from frugalvit.utils.tables import CommandResult

ROOT = Path(__file__).parents[2]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(list(words))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        (["--help"], {"torch", "timm", "numpy", "pydantic", "rich", "yaml"}),
        (["train", "--help"], {"torch", "timm", "numpy", "matplotlib", "PIL", "sklearn", "rich"}),
    ],
)
def test_help_imports_nothing_heavy(words: list[str], modules: set[str]) -> None:
    code = f"import sys; from frugalvit.cli.main import main; main({words}); assert not {modules} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: frugalvit" in done.stdout


def test_training_does_not_import_slow_modules() -> None:
    """Both take seconds: Fabric would import the first, a mark for CUDA graphs the second."""
    code = (
        "import sys, frugalvit.tasks.dense.commands, frugalvit.engine.step\n"
        "assert not {'torchmetrics', 'torch._inductor.cudagraph_trees'} & set(sys.modules)\n"
        "from importlib.util import find_spec; assert find_spec('torchmetrics'), 'the test needs it installed'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS, ids=lambda command: command.name.replace(" ", "-"))
def test_every_command_has_help_and_a_function(command: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *command.name.split(), "--help")
    assert status == 0 and f"frugalvit {command.name}" in out and "--json" in out
    page = make_parser(command.load_config(), "x", "y").format_help()
    assert " VALUE" not in page and "|VALUE" not in page, "every option says what its values are"
    assert callable(command.load_function())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trian", "Did you mean 'train'"),
        ("list modles", "Did you mean 'models'"),
        ("train x --epoch 3", "Did you mean '--epochs'"),
        ("train x --localization.wieght 3", "--localization.weight"),
        ("train x --batch many", "--batch = 'many'"),
        ("train x --zzz 3", "no option '--zzz'"),
        ("train x --track wandbb", "Did you mean 'wandb'?"),
        ("train x --augment.scale -1,0", "--augment.scale = '-1'"),
        ("train x --localization.weight -1", "--localization.weight = '-1'"),
        ("train x --recipe scrath", "Did you mean 'scratch'"),
        ("train x --config absent.yaml", "absent.yaml"),
        ("train nowhere-at-all", "nowhere-at-all"),
        ("train", "frugalvit train photos/"),
        ("export runs/x --to onxx", "Did you mean 'onnx'?"),
        ("list models zzz", "No network matches zzz."),
        ("list datasets zzz", "No dataset matches zzz."),
        ("list recipes scrtch", "Did you mean 'scratch'?"),
        ("predict nowhere/at/all x.png", "nowhere/at/all"),
    ],
)
def test_mistakes_are_one_line(
    line: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *line.split())
    assert status == 2 and out == ""
    assert expected in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "rescue"),
    [([], True), (["--rescue", "false"], False), (["--rescue", "true"], True), (["--no-rescue"], False)],
)
def test_switches_may_have_a_value(words: list[str], rescue: bool) -> None:
    config, _ = parse(TrainConfig, ["photos", *words, "--seed", "1"], "frugalvit train", "")
    assert config.rescue is rescue  # type: ignore[attr-defined]


def test_flags_override_a_yaml_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 7\nbatch: 16\nlocalization: {pairs: 32}\n")
    words = ["photos", "--config", str(file), "--batch", "8", "--img_size=40,56"]
    config, _ = parse(TrainConfig, words, "p", "")
    assert isinstance(config, TrainConfig)
    assert (config.epochs, config.batch, config.localization.pairs, config.img_size) == (7, 8, 32, (40, 56))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohcs: 7", "{file}: There is no option 'epohcs'. Did you mean 'epochs'?"),
        ("localizaton: {weight: 7}", "{file}: There is no option 'localizaton'. Did you mean 'localization'?"),
        ("localization: {wieght: 7}", "{file}: There is no option 'localization.wieght'."),
        ("epochs: many", "{file}: epochs = 'many'"),
        ("localization: 3", "{file}: localization = 3"),
        ("epochs: 7", "--batch = '0'"),  # the mistake is in the flag
    ],
)
def test_a_mistake_in_a_file_names_the_file(text: str, message: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    batch = ["--batch", "0"] if message.startswith("--") else []
    status, _, err = run(capsys, "train", "photos", "--config", str(file), *batch)
    assert status == 2 and err.startswith(f"frugalvit: {message.format(file=file)}")


def test_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "list", "recipes", "--json")
    names = [recipe["name"] for recipe in json.loads(out)["recipes"]]
    assert status == 0 and {"scratch", "finetune", "small", "esvit-paper"} <= set(names)


@pytest.mark.parametrize("words", [["trian"], ["train", "nowhere"], ["train", "x", "--epochs", "-1"]])
def test_json_reports_a_mistake(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *words, "--json")
    assert status == 2 and err.startswith("frugalvit: ") and len(out.splitlines()) == 1
    assert json.loads(out) == {"error": err.removeprefix("frugalvit: ").strip(), "status": 2}


def test_json_reports_a_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("frugalvit.cli.list_command.recipes", broken)
    status, out, err = run(capsys, "list", "recipes", "--json")
    assert status == 1 and "Traceback" in err and "bug in frugalvit" in err
    assert json.loads(out) == {"error": "ZeroDivisionError: division by zero", "status": 1}


def test_json_reports_how_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"run": "runs/x", "stopped": "SIGTERM", "resume": "frugalvit train --resume runs/x", "exit": 3}
    monkeypatch.setattr("frugalvit.cli.list_command.recipes", lambda _: CommandResult(data))
    status, out, _ = run(capsys, "list", "recipes", "--json")
    assert status == 3 and json.loads(out) == {"error": "SIGTERM: saved, not finished", "status": 3} | data


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import torch  # noqa: F401  the check needs it loaded

    def greedy(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:113] not enough memory: you tried to allocate 3e14 bytes.")

    monkeypatch.setattr("frugalvit.cli.list_command.recipes", greedy)
    status, _, err = run(capsys, "list", "recipes")
    assert status == 2 and "--batch" in err and len(err.splitlines()) == 1


_IMPORT_SWALLOWS_IT = """
import os, signal, sys
from frugalvit.cli import main as cli

def interrupted(words):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:  # as an extension module does while it is imported
        pass
    raise AttributeError("module 'numpy' has no attribute 'matrix'")

cli._run = interrupted
sys.argv = ["frugalvit", "doctor"]
sys.exit(cli.main())
"""

_TWICE = """
import os, signal, sys
from frugalvit.cli import main as cli

cli._run = lambda words: os.kill(os.getpid(), signal.SIGINT)
sys.argv = ["frugalvit", "doctor"]
status = cli.main()
os.kill(os.getpid(), signal.SIGINT)
sys.exit(status)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT of another kind")
@pytest.mark.parametrize("code", [_IMPORT_SWALLOWS_IT, _TWICE], ids=["swallowed by an import", "twice"])
def test_ctrl_c_prints_no_traceback(code: str) -> None:
    # Tests in the background have SIGINT ignored, and a child inherits that.
    reset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    done = subprocess.run([sys.executable, "-c", reset + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "frugalvit: stopped.")


def test_main_restores_the_handler_of_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(words: list[str]) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the signal did not arrive")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(cli, "_run", interrupt)
        assert cli.main(["doctor"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
