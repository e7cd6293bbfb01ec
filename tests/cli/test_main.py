"""The command line: quick, and its mistakes are one line with exit status 2."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from frugalvit.cli import main as cli
from frugalvit.cli.parser import make_parser
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = cli.main(list(words))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from frugalvit.cli import main as cli; cli.main(['--help']); cli.main(['train', '--help']);"
        "heavy = {'torch', 'timm', 'numpy', 'matplotlib', 'PIL', 'sklearn'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "usage: frugalvit" in done.stdout and "--localization.weight" in done.stdout


def test_training_starts_without_what_it_does_not_use() -> None:
    """Both take seconds to import; Fabric would import the one, a mark for CUDA graphs the other."""
    code = (
        "import sys, frugalvit.tasks.dense.experiment, frugalvit.engine.step\n"
        "assert not {'torchmetrics', 'torch._inductor.cudagraph_trees'} & set(sys.modules)\n"
        "from importlib.util import find_spec; assert find_spec('torchmetrics'), 'or there was nothing to leave out'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("verb", cli.COMMANDS, ids=lambda verb: verb.words.replace(" ", "-"))
def test_every_verb_has_help_and_a_function(verb: cli.Command, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *verb.words.split(), "--help")
    assert status == 0 and f"frugalvit {verb.words}" in out and "--json" in out
    make_parser(cli._load(verb.config), "x", "y")
    assert callable(cli._load(verb.function))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "Did you mean 'train'"),
        (["list", "modles"], "Did you mean 'models'"),
        (["train", "x", "--epoch", "3"], "Did you mean '--epochs'"),
        (["train", "x", "--localization.wieght", "3"], "--localization.weight"),
        (["train", "x", "--batch", "many"], "--batch = 'many'"),
        (["look", "attend", "x", "a.png", "--mass", "2"], "--mass = '2': it must be less than 1"),
        (["train", "x", "--augment.scale", "-1,0"], "--augment.scale = '-1': it must be"),
        (["completion", "tcsh"], "frugalvit: shell = 'tcsh'"),
        (["list", "models", "zzz"], "No network is called zzz."),
        (["list", "datasets", "zzz"], "No dataset is called zzz."),
        (["list", "recipes", "scrtch"], "No recipe is called scrtch. Did you mean 'scratch'?"),
        (["train", "x", "--localization.weight", "-1"], "cannot be negative"),
        (["train", "x", "--recipe", "scrath"], "Did you mean 'scratch'"),
        (["train", "x", "--config", "absent.yaml"], "There is no configuration file absent.yaml"),
        (["train", "nowhere-at-all"], "nowhere-at-all"),
        (["train"], "frugalvit train photos/"),
        (["predict", "nowhere/at/all", "x.png"], "There is no model"),
    ],
)
def test_mistakes_are_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *words)
    assert status == 2 and out == ""
    assert expected in err and len(err.strip().splitlines()) == 1 and "Traceback" not in err


def test_yaml_and_flags_meet(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    from frugalvit.cli import parser
    from frugalvit.config.train import TrainConfig

    file = tmp_path / "run.yaml"
    file.write_text("epochs: 7\nbatch: 16\nlocalization: {pairs: 32}\n")
    config, _ = parser.parse(
        TrainConfig, ["photos", "--config", str(file), "--batch", "8", "--img_size=40,56"], "p", ""
    )
    assert isinstance(config, TrainConfig)
    assert (config.epochs, config.batch, config.localization.pairs, config.img_size) == (7, 8, 32, (40, 56))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epohcs: 7", "{file}: There is no option 'epohcs'. Did you mean 'epochs'?"),
        ("localizaton: {weight: 7}", "{file}: There is no option 'localizaton'. Did you mean 'localization'?"),
        ("localization: {wieght: 7}", "{file}: There is no option 'localization.wieght'."),
        ("epochs: many", "{file}: epochs = 'many': it must be"),
        ("localization: 3", "{file}: localization = 3: it must be"),
        ("epochs: 7", "--batch = '0': it must be"),  # the flag's own mistake
    ],
)
def test_a_mistake_in_a_file_names_it(text: str, message: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    batch = ["--batch", "0"] if message.startswith("--") else []
    status, _, err = run(capsys, "train", "photos", "--config", str(file), *batch)
    assert status == 2 and err.startswith(f"frugalvit: {message.format(file=file)}")


def test_the_command_that_fetches_a_dataset_knows_where_they_lie(tmp_path: Path, capsys) -> None:
    for root, told in (("here too", " --root 'here too'"), ("", "")):
        words = ["--root", root] if root else []
        _, out, _ = run(capsys, "list", "datasets", "cifar100", "--json", *words)
        (found,) = json.loads(out)["datasets"]
        assert f"'frugalvit data cifar100{told}'" in found["instruction"] or found["status"] == "present"


def test_list_recipes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "list", "recipes", "--json")
    names = [recipe["name"] for recipe in json.loads(out)["recipes"]]
    assert status == 0 and {"scratch", "finetune", "small", "esvit-paper"} <= set(names)


def test_our_fault_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(config: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("frugalvit.cli.list_command.recipes", broken)
    status, _, err = run(capsys, "list", "recipes")
    assert status == 1 and "fault of frugalvit" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train photos --learning-rate 1", "Did you mean '--lr'?"),
        ("train photos --lerning-rate 1", "Did you mean '--lr'?"),
        ("train photos --batch-size 1", "Did you mean '--batch'?"),
        ("train photos --model swin_nano", "Did you mean '--backbone'?"),
        ("train photos --epoch 3", "Did you mean '--epochs'"),
        ("train photos --zzz 3", "There is no option '--zzz'. See"),
        ("train photos --epochs -3", "epochs = '-3': it must be more than 0"),
        ("train photos --batch 0", "batch = '0': it must be more than 0"),
        ("train photos --lr 0", "lr = '0': it must be more than 0"),
        ("train photos --track wandbb", "Did you mean 'wandb'?"),
        ("export runs/x --to onxx", "Did you mean 'onnx'?"),
        ("predict runs/x photo.jpg", "Give a run's folder, a checkpoint or an exported folder."),
    ],
)
def test_typical_mistakes_are_one_line_with_the_way_out(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and message in err


def test_a_run_is_not_laid_among_its_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    photos = tmp_path / "photos"
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (photos / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(photos / name / "1.png")
    for out in (photos, photos / "runs" / "first"):
        assert cli.main(["train", str(photos), "--out", str(out), "--steps", "1"]) == 2
        assert "lies among the images" in capsys.readouterr().err
    assert sorted(path.name for path in photos.iterdir()) == ["train", "val"]


@pytest.mark.slow
def test_a_terminal_is_never_silent_for_long(tmp_path: Path) -> None:
    """In a real terminal: a command that says nothing for three seconds shows that it is at work, then clears it."""
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    code = (
        "import sys, time; from frugalvit.cli import doctor, main as cli; from frugalvit.utils import console; from frugalvit.utils.tables import Result\n"
        "def slow(config):\n"
        "    time.sleep(3.2); console.say('half way')\n"
        "    list(console.progress(map(time.sleep, [1.5, 1.5, 1.5]), 3, 'on'))\n"
        "    return Result({'done': 1}, [], ['all done'])\n"
        "doctor.doctor = slow; sys.exit(cli.main(['doctor']))"
    )
    shown = b""
    master, slave = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave, cwd=tmp_path)
    os.close(slave)
    with contextlib.suppress(OSError):  # Linux ends a terminal nobody writes to any more with an error
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    assert child.wait() == 0
    text = shown.decode()
    assert "\x1b[2Kfrugalvit doctor … 2 s" in text or "\x1b[2Kfrugalvit doctor … 3 s" in text
    assert re.search(r"…[^\n]*\x1b\[2Khalf way", text), "what it said while waiting is gone"
    assert "on ━" in text and text.rstrip().endswith("all done")
    assert "…" not in text.partition("on ━")[2].partition("3/3")[0], "a bar is progress enough"


@pytest.mark.parametrize("words", [["trian"], ["train", "nowhere"], ["train", "x", "--epochs", "-1"]])
def test_json_says_what_went_wrong(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, *words, "--json")
    assert status == 2 and err.startswith("frugalvit: ") and len(out.splitlines()) == 1
    assert json.loads(out) == {"error": err.removeprefix("frugalvit: ").strip(), "status": 2}


def test_json_says_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("frugalvit.cli.list_command.recipes", broken)
    status, out, err = run(capsys, "list", "recipes", "--json")
    assert status == 1 and "Traceback" in err
    assert json.loads(out) == {"error": "ZeroDivisionError: division by zero", "status": 1}


def test_json_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"run": "runs/x", "stopped": "SIGTERM", "resume": "frugalvit train --resume runs/x", "exit": 3}
    monkeypatch.setattr("frugalvit.cli.list_command.recipes", lambda _: CommandResult(data))
    status, out, _ = run(capsys, "list", "recipes", "--json")
    assert status == 3 and json.loads(out) == {"error": "SIGTERM: saved, not finished", "status": 3} | data


def test_letters_that_a_terminal_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """LC_ALL=C: ours have a plain spelling, those of names are escaped."""
    heard = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", heard)
    console.info(
        "top1 43.75 \N{MIDDLE DOT} top5 100 \N{HORIZONTAL ELLIPSIS} K\N{LATIN SMALL LETTER A WITH DIAERESIS}fer"
    )
    console.warning("the paper's \N{GREEK SMALL LETTER LAMDA}")
    console.error("8\N{MULTIPLICATION SIGN}8")
    heard.seek(0)
    assert heard.read().splitlines() == [
        "top1 43.75 | top5 100 ... K\\xe4fer",
        "warning: the paper's lambda",
        "frugalvit: 8x8",
    ]


def test_a_terminal_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    console.warning("stopping after this step")
    console.info("epoch 1")
    assert [word for word in ("stopping", "epoch") if word in "".join(tried)] == ["stopping", "epoch"]


_SWALLOWED = """
import os, signal, sys
from frugalvit.cli import main as cli

def broken_off(words):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:  # as an extension module does while it is imported
        pass
    raise AttributeError("module 'numpy' has no attribute 'matrix'")

cli._run = broken_off
sys.argv = ["frugalvit", "doctor"]
sys.exit(cli.main())
"""

_TWICE = """
import os, signal, sys
from frugalvit.cli import main as cli

def pressed(words):
    os.kill(os.getpid(), signal.SIGINT)

cli._run = pressed
sys.argv = ["frugalvit", "doctor"]
status = cli.main()
os.kill(os.getpid(), signal.SIGINT)
sys.exit(status)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT of another kind")
@pytest.mark.parametrize("code", [_SWALLOWED, _TWICE], ids=["swallowed by an import", "twice"])
def test_ctrl_c_has_no_traceback_wherever_it_lands(code: str) -> None:
    # Whoever runs the tests in the background has SIGINT ignored, which a child would inherit.
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    done = subprocess.run([sys.executable, "-c", listens + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (130, "frugalvit: stopped.")


def test_a_command_inside_a_program_leaves_ctrl_c_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:

        def pressed(words: list[str]) -> int:
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("it was not heard")

        monkeypatch.setattr(cli, "_run", pressed)
        assert cli.main(["doctor"]) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
