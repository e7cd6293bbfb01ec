"""Completion scripts complete every command, option and choice."""

import shlex
import shutil
import subprocess

import pytest

from frugalvit.cli import main as cli
from frugalvit.cli.completion import build_parser, completion
from frugalvit.config.tools import CompletionConfig


def complete(script: str, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    code = (
        f"{script}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}\n_shtab_frugalvit\n"
    )
    done = subprocess.run(
        ["bash", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completion() -> None:
    script = completion(CompletionConfig(shell="bash")).data["script"]
    for line, offered in {
        "frugalvit tra": ["train"],
        "frugalvit probe ": ["knn", "linear", "logistic", "suite"],
        "frugalvit train photos --localization.w": ["--localization.weight"],
        "frugalvit train photos --device ": ["auto", "cpu", "cuda", "mps"],
        "frugalvit train photos --backbone swin_na": ["swin_nano"],
        "frugalvit data p": ["pack"],
        "frugalvit data photos --decode ": ["auto", "all", "sample", "headers"],
        "frugalvit data pack --shard": ["--shard-megabytes"],
        "frugalvit completion z": ["zsh"],
        "frugalvit bench step ": ["train", "pretrain"],
        "frugalvit reproduce drloc-fl": ["drloc-flowers"],
        "frugalvit train photos --track ": ["wandb", "mlflow", "trackio"],
        "frugalvit pretrain photos --recipe esvit-p": ["esvit-paper"],
        "frugalvit train photos --recipe esvit-p": [],
        "frugalvit predict /et": ["/etc"],
    }.items():
        assert complete(script, line) == offered, line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    out, _ = capsys.readouterr()
    for command in cli.COMMANDS:
        assert command.name.split()[-1] in out
    flag = "localization.weight" if shell == "fish" else "--localization.weight"
    assert flag in out and "drloc-flowers" in out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True, capture_output=True)


def test_placeholders_are_not_offered() -> None:
    parsers = [build_parser()]
    offered: set[str] = set()
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action.choices, dict):
                parsers.extend(action.choices.values())
            elif action.choices:
                offered.update(map(str, action.choices))
    assert "auto" in offered and not [word for word in offered if word.isupper() or " " in word or "," in word]
