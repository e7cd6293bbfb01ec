"""Mistakes of users, command by command: one line each, and no run is started."""

import json
import re
import shutil
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.cli import parser
from frugalvit.cli.commands import COMMANDS
from frugalvit.cli.help_layout import EXAMPLES, SHOWN_OPTIONS
from frugalvit.config.base import flat_fields, set_dotted
from frugalvit.config.train import FREE_ON_RESUME, TrainConfig
from frugalvit.errors import UserError
from frugalvit.runs.resume import load_resumed_config
from helpers import dense_samples

TINY = ["--backbone", "swin_nano", "--backbone-args", "{embed_dim: 8, depths: [1, 1], num_heads: [1, 2]}"]
TINY += ["--img-size", "32", "--batch", "4", "--steps", "1", "--no-report", "--quiet"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of every kind and a finished run of every kind."""
    folder = tmp_path_factory.mktemp("workspace")
    random = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for label in ("cat", "dog"):
            (folder / "photos" / split / label).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / split / label / f"{number}.png")
    dense_samples.make_coco(folder / "coco", train=4, val=2, side=48)
    dense_samples.make_scenes(folder / "scenes", train=4, val=2, side=40)
    (folder / "empty").mkdir()
    (folder / "text.txt").write_text("hello\n")
    heads = ["--detector.channels", "8", "--detector.hidden", "8", "--detector.proposals", "20"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "photos", "--out", "run", *TINY]) == 0
        Path("bare.safetensors").write_bytes(Path("run/model/model.safetensors").read_bytes())
        small = ["--matching.prototypes", "16", "--matching.hidden", "8", "--matching.bottleneck", "4"]
        assert cli.main(["pretrain", "photos", "--out", "pre", *TINY, *small, "--crops.local-crops", "1"]) == 0
        assert cli.main(["detect", "train", "coco", "--out", "det", *TINY, *heads]) == 0
        assert cli.main(["segment", "train", "scenes", "--out", "seg", *TINY, "--decoder.channels", "8"]) == 0
    return folder


MISTAKES = [
    # numbers
    ("train photos --img-size 5000000", "--img-size = '5000000': it must be at most 8192"),
    ("train photos --img-size 33,abc", "it must be a whole number or 'auto'"),
    ("train photos --steps 1.5", "steps = '1.5': it must be a whole number."),
    ("train photos --localization.pairs 0", "localization.pairs = '0': it must be at least 1 or 'all'"),
    ("train photos --augment.scale 0.5", "augment.scale = ['0.5']: it must be several values, e.g. 0.08,1"),
    ("train photos --augment.scale 1,0.5", "smaller value must come first"),
    ("train photos --ema 1", "ema = '1': it must be less than 1"),
    ("train photos --report perhaps", "one argument too many"),
    ("train photos --accumulate 16 --batch 8", "--accumulate 16 is larger than --batch 8"),
    ("pretrain photos --matching.prototypes 1", "it must be at least 2"),
    ("segment train scenes --root x", "frugalvit: --root is not an option of segment."),
    ("pretrain photos --crops.global-crops 1 --crops.local-crops 0", "--crops.global-crops"),
    ("train photos --lr nan", "lr = 'nan': it must be a finite number or 'auto'"),
    # contradictions
    ("probe knn run photos --backbone resnet18", "run holds a swin_nano. Drop --backbone"),
    ("train photos --init run --pretrained", "--init and --pretrained both set"),
    ("pretrain photos --init run --continue pre", "--init and --continue both set"),
    ("train photos --resume run --steps 50", "Cannot change --steps on resume (run started with 1)"),
    ("train --resume run --epochs 3", "Cannot change --epochs on resume (run started without it)"),
    ("train --resume run --out other", "Drop --out other"),
    ("train photos --resume auto", "--resume auto needs --out"),
    ("train photos --resume auto --out pre", "pre is a run of 'frugalvit pretrain'"),
    ("train --resume auto --out new", "There is no data to train on"),
    ("compare photos --resume auto --out new", "the same --out"),
    ("pretrain --resume pre --steps 1234567", "new run with --continue pre."),
    ("compare photos --with lr=1 --without lr=1", "'with' and 'without' are the same setting"),
    # runs of another kind
    ("train --resume pre", "pre is a run of 'frugalvit pretrain': resume it with 'frugalvit pretrain --resume pre'"),
    ("pretrain --resume run", "run is a run of 'frugalvit train'"),
    ("detect train --resume seg", "seg is a run of 'frugalvit segment train'"),
    ("pretrain photos --continue run", "--continue takes runs of 'frugalvit pretrain'; --init run starts from its"),
    ("pretrain photos --continue nothere", "nothere holds no run"),
    # names
    (
        "train photos --init nothere",
        "--init nothere: there is no such run, exported folder, checkpoint file or published network.",
    ),
    ("train photos --backbone swin_nano --backbone-args {a:", "it must be a group, {name: value}"),
    ('train photos --backbone-args {"img_size":32}', "'img_size' cannot be set here: use --img-size"),
    ('train photos --backbone-args {"in_chans":4}', "in_chans must be 3"),
    ("probe knn swin_tiny photos", "Did you mean 'swin_tiny_w7'"),
    ("probe knn empty photos", "empty holds no model"),
    ("export nothere", "There is no folder, file or network 'nothere'"),
    ("predict run empty", "empty holds no images"),
    ("predict bare.safetensors photos", "bare.safetensors does not store which network"),
    ("report run pre --out photos", "photos is a folder: name a file in it, for instance photos/report.html"),
]


@pytest.mark.parametrize(("line", "expected"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake_is_one_line_and_starts_no_run(
    workspace: Path, line: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    before = sorted(path.name for path in workspace.iterdir())
    assert cli.main(line.split()) == 2
    lines = [text for text in capsys.readouterr().err.splitlines() if not text.startswith("oneDNN")]
    assert len(lines) == 1 and lines[0].startswith("frugalvit: ") and expected in lines[0], lines
    assert sorted(path.name for path in workspace.iterdir()) == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train photos --steps 1 --backbone swin_nano --init empty", "empty cannot be read"),
        ("pretrain photos --steps 5 --matching.prototypes 40 --continue pre", "pre has another shape ("),
    ],
)
def test_weights_that_do_not_fit(
    workspace: Path, line: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    assert cli.main([*line.split(), "--out", "spoilt", "--no-report"]) == 2
    shutil.rmtree(workspace / "spoilt", ignore_errors=True)
    error = capsys.readouterr().err
    assert expected in error.splitlines()[-1] and "Traceback" not in error


def test_resume_with_the_same_options(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options may be repeated; "auto" is the value of the run."""
    monkeypatch.chdir(workspace)
    same = ["--steps", "1", "--batch", "4", "--lr", "auto", "--out", "run", "--img-size", "32"]
    free = ["--workers", "1", "--no-report", "--peer-timeout", "9"]
    assert cli.main(["train", "photos", "--resume", "run", *same, *free]) == 0
    assert "run is finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "out"),
    [
        ("train photos", "run"),
        ("pretrain photos --matching.prototypes 16 --matching.hidden 8 --matching.bottleneck 4", "pre"),
        pytest.param("detect train coco --detector.channels 8 --detector.hidden 8", "det", marks=pytest.mark.slow),
        ("segment train scenes --decoder.channels 8", "seg"),
    ],
)
def test_resume_auto_with_the_same_command(
    workspace: Path, line: str, out: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--resume auto`` starts the run the first time and finds it finished the second time."""
    monkeypatch.chdir(workspace)
    words = [*line.split(), *TINY, "--out", f"{out}_queued", "--resume", "auto"]
    assert cli.main(words) == 0
    assert "is finished" not in capsys.readouterr().err
    assert cli.main([word for word in words if word != "--quiet"]) == 0
    assert f"{out}_queued is finished" in capsys.readouterr().err
    shutil.rmtree(workspace / f"{out}_queued")


@pytest.mark.parametrize(
    ("folder", "verb"),
    [
        *(("photos", verb) for verb in ("train", "pretrain", "compare")),
        *(("coco", verb) for verb in ("detect train", "detect compare")),
        ("scenes", "segment train"),
        ("photos/train", "train .."),
    ],
)
def test_default_run_folder_inside_the_images(
    workspace: Path, folder: str, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder would be a class of the next run."""
    monkeypatch.chdir(workspace / folder)
    before = sorted(path.name for path in (workspace / folder).iterdir())
    where = [] if verb.endswith("..") else ["."]
    settings = ["--with", "lr=0.1", "--without", "lr=0.2"] if verb.endswith("compare") else []
    assert cli.main([*verb.split(), *where, *TINY, *settings]) == 2
    lines = [text for text in capsys.readouterr().err.splitlines() if not text.startswith("oneDNN")]
    assert len(lines) == 1 and "runs/, the default output folder, is inside the images of ." in lines[0], lines
    assert "with --out" in lines[0] and sorted(path.name for path in (workspace / folder).iterdir()) == before


@pytest.mark.parametrize(
    ("name", "requested", "stored_value", "images", "auto_batch", "refused"),
    [
        ("batch", 64, 10, 10, False, False),  # there were no more images
        ("batch", 64, 10, 20, False, True),
        ("batch", 5, 10, 10, False, True),
        ("accumulate", 1, 4, 10, True, False),
        ("accumulate", 1, 4, 10, False, True),
    ],
)
def test_resume_with_options_the_run_lowered(
    tmp_path: Path, name: str, requested: int, stored_value: int, images: int, auto_batch: bool, refused: bool
) -> None:
    stored = {"data": "photos", "batch": 16, "auto_batch": auto_batch, name: stored_value}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored), encoding="utf-8")
    facts = {"images": images, "classes": ["cat", "dog"], "network": {}, "content": "", "processes": 1}
    (tmp_path / "data.json").write_text(json.dumps(facts), encoding="utf-8")
    again = TrainConfig.parse({"data": "photos", "resume": str(tmp_path), name: requested})
    with pytest.raises(UserError, match="Cannot change") if refused else nullcontext():
        load_resumed_config(again)


@pytest.mark.parametrize("name", FREE_ON_RESUME)
def test_options_that_may_change_on_resume(tmp_path: Path, name: str) -> None:
    values = {"log_every": 3, "save_every": 7, "workers": 2, "devices": 2, "nodes": 2, "peer_timeout": 9.0}
    values |= {
        "strategy": "fsdp",
        "report": False,
        "track": ["mlflow"],
        "device": "cuda",
        "plugin": ["own_objective.py"],
    }
    values |= {"cache.location": "off", "cache.folder": "kept", "cache.max_bad": 0.5}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": "photos", "cache": {"size": 64}}), encoding="utf-8")
    options: dict[str, object] = {"resume": str(tmp_path)}
    set_dotted(options, name, values[name])
    again = TrainConfig.parse(options)
    config = load_resumed_config(again)
    assert attrgetter(name)(config) == values[name], "the new value counts"
    assert (config.data, config.cache.size, config.resume) == ("photos", 64, str(tmp_path))


def test_help_shows_kinds_of_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help", "all"]) == 0
    page = capsys.readouterr().out
    assert page.count("\noptions:") == 1 and page.index("\narguments:") < page.index("\noptions:")
    for words in (
        "--img-size N|auto|N,N",
        "--augment.scale X,X",
        "--compile true|false|auto|graphs",
        "--backbone-args YAML",
        "--track wandb|mlflow|trackio …",
        "--report, --no-report",
    ):
        assert words in page, words
    assert "--no-balance" not in page  # off by default


@pytest.mark.parametrize("name", SHOWN_OPTIONS)
def test_short_help_shows_about_twenty_options_and_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = next(command for command in COMMANDS if command.name == name)
    fields = flat_fields(command.load_config())
    assert set(SHOWN_OPTIONS[name]) <= set(fields) and 14 <= len(SHOWN_OPTIONS[name]) <= 24
    pages = []
    for words in (["--help"], ["--help", "all"]):
        assert cli.main([*name.split(), *words]) == 0
        pages.append(capsys.readouterr().out)
    short, everything = ({word for word in page.split() if word.startswith("--")} for page in pages)
    assert short < everything and "--optimizer.clip" in everything - short
    more = int(re.search(r"(\d+) more options", pages[0])[1])  # type: ignore[index]
    assert more > 20 and "more options" not in pages[1]
    for example in EXAMPLES.get(name, ()):
        assert example in pages[0]
        words = re.split(r"\s{3,}", example)[0].split()[1 + len(name.split()) :]
        parser.parse(command.load_config(), words, name, "")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("photos --drloc 1", "'--localization.weight'"),
        ("photos --batch-size 8", "'--batch'"),
        ("photos --amp", "'--precision'"),
        ("photos --epoch 8", "'--epochs'"),
        ("photos --clip 1", "'--optimizer.clip'"),
        ("photos epochs=10", "'--epochs 10'"),
        ("epochs=10", "'--epochs 10'"),
        ("photos --drlok 1", None),
        ("photos --zzz 1", None),
        ("photos more", None),
    ],
)
def test_suggestions_are_close(words: str, hint: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words.split()]) == 2
    message = capsys.readouterr().err
    assert (f"Did you mean {hint}?" in message) if hint else ("Did you mean" not in message)
