"""The first hour: doctor, advise, completion, the notebook; and the papers that people are to cite."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from frugalvit.cli import doctor, parser
from frugalvit.cli import main as cli
from frugalvit.cli.advise import Proposal, _propose_trial, advise
from frugalvit.cli.completion import INSTALL, completion, describe
from frugalvit.config.tools import AdviseConfig, CompletionConfig, DoctorConfig

ROOT = Path(__file__).parents[2]


def write_images(folder: Path, classes: int, each: int, side: int = 16) -> Path:
    random = np.random.default_rng(0)
    for label in range(classes):
        place = folder / f"class_{label}" if classes > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        for number in range(each):
            pixels = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    return folder


def check_command(command: str) -> None:
    """A command that the real parser takes."""
    words = shlex.split(command)
    assert words[0] == "frugalvit"
    verb = cli.find_command(words[1:])
    assert verb is not None
    rest = words[1 + len(verb.words.split()) :]
    parser.parse(cli._load(verb.config), rest, verb.words, verb.help)


# -- doctor


def test_doctor_sees_packages_and_devices() -> None:
    data = doctor.doctor(DoctorConfig()).data
    assert data["exit"] == 0 and not data["problems"]
    assert {"torch", "timm", "pydantic"} <= {package["name"] for package in data["packages"] if package["ok"]}
    assert data["devices"][0]["device"] == "cpu" and data["devices"][0]["memory_gib"] > 0
    assert {extra["name"] for extra in data["extras"]} == set(doctor.USEFUL)
    json.dumps(data)


def test_doctor_says_which_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processor what is free, of a GPU all there is."""
    import torch

    facts = SimpleNamespace(name="GPU", multi_processor_count=8, total_memory=40 * 2**30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    rows = doctor.doctor(DoctorConfig(cache=False)).tables[1].rows
    assert str(rows[0][3]).endswith(" free now") and rows[1][3] == "40.0 in all"
    assert str(rows[0][2]).endswith(" 1 thread")


def test_doctor_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "nowhere-at-all>=1", 'wandb-of-nobody>=1; extra == "tracking"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: wanted)
    result = doctor.doctor(DoctorConfig(cache=False))
    assert result.data["exit"] == 1 and len(result.data["problems"]) == 2
    assert any("nowhere-at-all is missing" in note for note in result.notes)
    assert 'to add what is missing:  pip install "frugalvit[tracking]"' in result.notes


def test_doctor_adds_up_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.bin").write_bytes(b"x" * 1000)
    assert {"folder": str(tmp_path / "images"), "files": 1, "bytes": 1000} in doctor.doctor(DoctorConfig()).data[
        "caches"
    ]


# -- advise


def test_advice_on_labelled_images(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "my photos", 3, 12)
    data = advise(AdviseConfig(data=str(folder), trial=1, device="cpu")).data
    assert (data["images"], data["classes"], data["device"], data["side"]) == (36, 3, "cpu", 16)
    commands = [proposal["command"] for proposal in data["proposals"]]
    for command in commands:
        check_command(command)
    long = data["proposals"][0]["command"].endswith("--steps " + str(data["proposals"][0]["steps"]))  # a slow machine
    verbs = [command.split()[1] for command in commands]
    assert verbs[1 if long else 0 :] == ["train", "pretrain", "train", "train", "compare"]
    assert all(proposal["seconds"] > 0 and proposal["why"] for proposal in data["proposals"])
    first = data["proposals"][1 if long else 0]
    assert first["seconds"] >= first["steps"] * first["seconds_per_step"]
    assert {"backbone", "batch", "lr"} <= {decision["name"] for decision in first["decisions"]}
    json.dumps(data)


@pytest.mark.parametrize(("seconds", "looks"), [(100.0, 0), (3000.0, 1)])
def test_a_long_run_gets_a_propose_trial(seconds: float, looks: int) -> None:
    found = _propose_trial(Proposal("frugalvit train photos", "why", seconds, 1000, seconds / 1000))
    assert len(found) == looks
    for look in found:
        check_command(look.command)
        assert look.steps == 100 and look.seconds == 300


def test_advice_without_labels_and_without_a_trial(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images", 1, 10)
    result = advise(AdviseConfig(data=str(folder), trial=0, device="cpu"))
    commands = [proposal["command"] for proposal in result.data["proposals"]]
    assert [command.split()[1] for command in commands] == ["pretrain", "embed", "train"]
    for command in commands:
        check_command(command)
    assert all(proposal["seconds"] is None for proposal in result.data["proposals"])


def test_advice_warns_of_imbalance(tmp_path: Path) -> None:
    folder = write_images(tmp_path, 2, 4)
    for number in range(40):
        shutil.copy(folder / "class_0" / "0.png", folder / "class_0" / f"copy_{number}.png")
    notes = advise(AdviseConfig(data=str(folder), trial=0, device="cpu")).notes
    assert any("--balance" in note for note in notes)


# -- completion


def complete(script: str, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = shlex.split(line) + ([""] if line.endswith(" ") else [])
    code = f"{script}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}\n_frugalvit\n"
    done = subprocess.run(
        ["bash", "-c", code + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")
def test_bash_completion() -> None:
    script = completion(CompletionConfig(shell="bash")).data["script"]
    assert complete(script, "frugalvit tra") == ["train"]
    assert set(complete(script, "frugalvit probe ")) == {"knn", "linear", "logistic", "suite"}
    assert "--localization.weight" in complete(script, "frugalvit train photos --localization.w")
    assert complete(script, "frugalvit train photos --device ") == ["auto", "cpu", "cuda", "mps"]
    assert "swin_nano" in complete(script, "frugalvit train photos --backbone swin")
    assert complete(script, "frugalvit data p") == ["pack"]
    assert "--shard-megabytes" in complete(script, "frugalvit data pack --shard")
    assert complete(script, "frugalvit completion z") == ["zsh"]
    assert complete(script, "frugalvit bench step ") == ["train", "pretrain"]
    assert complete(script, "frugalvit bench ") == ["step"]
    assert complete(script, "frugalvit reproduce drloc-fl") == ["drloc-flowers"]
    assert complete(script, "frugalvit reproduce drloc-flowers d") == []
    assert complete(script, "frugalvit train photos --track ") == ["wandb", "mlflow", "trackio"]
    assert complete(script, "frugalvit pretrain photos --recipe esvit-p") == ["esvit-paper"]
    assert complete(script, "frugalvit train photos --recipe esvit-p") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_first_words_are_offered_by_the_other_shells(shell: str) -> None:
    script = completion(CompletionConfig.parse({"shell": shell})).data["script"]
    place = {"zsh": "(( CURRENT == 4 )) && compadd -- train pretrain", "fish": "_from step' -f -a 'train pretrain'"}
    assert place[shell] in script and "best-cifar" in script


def test_what_is_written_into_a_folder_makes_it_first() -> None:
    for shell, line in INSTALL.items():
        assert "mkdir -p" in line or ">>" in line, shell


def test_what_stands_for_a_value_is_not_offered() -> None:
    offered = {word for words in describe() for choices in words.choices.values() for word in choices}
    assert "auto" in offered and not [word for word in offered if word.upper() == word and not word.isdigit()]
    assert not [word for word in offered if " " in word or "," in word]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_verb_and_option_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    for words in describe():
        assert words.verb.split()[-1] in out
        for flag in words.flags:
            assert (flag[2:] if shell == "fish" else flag) in out
    assert "to install it:" in err and len(err.strip().splitlines()) == 1
    if shell == "zsh":  # a colon would end the name it describes
        assert r"--device:where to compute" in out and re.search(r"--localization\.weight:λ[^']*auto\\: ", out)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True, capture_output=True)


# -- housekeeping


def test_citation_names_both_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0" and citation["license"] == "Apache-2.0"
    titles = {entry["title"] for entry in citation["references"]}
    assert titles == {
        "Efficient Training of Visual Transformers with Small Datasets",
        "Efficient Self-supervised Vision Transformers for Representation Learning",
    }
    assert all(entry["authors"] and entry["year"] for entry in citation["references"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", citation["version"])


def test_notebook_runs_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cells' Python, one after the other in one namespace, as a kernel would run it."""
    notebook = json.loads((ROOT / "notebooks" / "first_steps.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "cells are stored without outputs"
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("epochs=30", "epochs=2")  # two show that it runs
            exec(compile(source, "first_steps.ipynb", "exec"), names)
    assert names["predictions"]


def test_startup_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help costs a fraction of what importing torch costs, in CPU seconds of the same machine."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import startup  # type: ignore[import-not-found]

    help_costs = startup.measure(startup.CASES["frugalvit train --help"], 2)["cpu_seconds"]
    assert 0 < help_costs < 0.7 * startup.measure(startup.CASES["import torch"], 1)["cpu_seconds"]
