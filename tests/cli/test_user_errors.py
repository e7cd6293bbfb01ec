"""Mistakes of users, command by command: one line each, and no run is started."""

import json
import shutil
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from frugalvit.cli import main as cli
from frugalvit.config.base import set_dotted
from frugalvit.config.run import FREE_ON_RESUME
from frugalvit.config.train import TrainConfig
from frugalvit.errors import UserError
from frugalvit.experiment.resume import load_resumed_config
from helpers import dense_samples

TINY = ["--backbone", "swin_nano", "--backbone-args", "{embed_dim: 8, depths: [1, 1], num_heads: [1, 2]}"]
TINY += ["--img-size", "32", "--batch", "4", "--steps", "1", "--no-report", "--quiet"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, scenes, objects, and a finished run of every kind."""
    folder = tmp_path_factory.mktemp("place")
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
    ("train photos --img-size 5000000", "--img-size = '5000000': it must be at most 8,192 pixels"),
    ("train photos --img-size 33,abc", "it must be a whole number or 'auto'"),
    ("train photos --img-size 32,0", "it must be more than 0"),
    ("train photos --steps 1.5", "steps = '1.5': it must be a whole number."),
    ("train photos --localization.pairs 0", "localization.pairs = '0': it must be at least 1 or 'all'"),
    ("train photos --augment.scale 0.5", "augment.scale = ['0.5']: it must be several values, e.g. 0.08,1"),
    ("train photos --augment.scale 1,0.5", "smaller value must come first"),
    ("train photos --augment.flip 3", "augment.flip = '3': it must be at most 1."),
    ("train photos --drop-path 2", "--drop-path = '2': it must be less than 1 or 'auto'"),
    ("train photos --ema 1", "ema = '1': it must be less than 1"),
    ("train photos --workers -1", "workers = '-1': it must be at least 0"),
    ("train photos --report perhaps", "one argument too many"),
    ("train photos --accumulate 16 --batch 8", "--accumulate 16 is larger than --batch 8"),
    ("pretrain photos --drop-path 3", "less than 1"),
    ("pretrain photos --matching.prototypes 1", "it must be at least 2"),
    ("pretrain photos --matching.momentum 2", "it must be at most 1"),
    ("pretrain photos --matching.teacher-temp 0", "it must be more than 0"),
    ("detect train coco --scales 2,1", "smaller value must come first"),
    ("detect train coco --detector.anchors 0", "it must be more than 0"),
    ("detect train coco --drop-path 3", "less than 1"),
    ("segment train scenes --scales 0,2", "it must be more than 0"),
    ("segment train scenes --root x", "frugalvit: --root is not an option of segment."),
    ("reproduce few-labels --epochs -1", "epochs = '-1': it must be more than 0"),
    (
        "pretrain photos --crops.global-crops 1 --crops.local-crops 0",
        "--crops.global-crops",
    ),
    ("bench swin_nano --img-size 0", "--img-size = '0': it must be at least 1"),
    ("train photos --lr nan", "lr = 'nan': it must be a finite number or 'auto'"),
    ("train photos --localization.weight nan", "localization.weight = 'nan': it must be a finite number or 'auto'"),
    ("probe knn run photos --img-size 100000", "it must be at most 8,192 pixels"),
    # what contradicts itself
    ("probe knn run photos --backbone resnet18", "run holds a swin_nano. Drop --backbone"),
    ("train photos --init run --pretrained", "--init and --pretrained both set"),
    ("pretrain photos --init run --continue pre", "--init and --continue both set"),
    ("train photos --resume run --steps 50", "Cannot change --steps on resume (run started with 1)"),
    ("train --resume run --epochs 3", "Cannot change --epochs on resume (run started without it)"),
    ("train --resume run --init pre", "Cannot change --init on resume"),
    ("train --resume run --localization.weight 3", "Cannot change --localization.weight on resume"),
    ("train --resume run --out other", "Drop --out other"),
    ("train photos --resume auto", "--resume auto needs --out"),
    ("train photos --resume auto --out run --steps 9", "Cannot change --steps on resume"),
    ("train photos --resume auto --out pre", "pre is a run of 'frugalvit pretrain'"),
    ("train --resume auto --out new", "There is no data to train on"),
    ("compare photos --resume auto --out new", "the same --out"),
    ("pretrain --resume pre --continue pre", "Cannot change --continue on resume"),
    ("pretrain --resume pre --steps 1234567", "new run with --continue pre."),
    ("compare photos --with lr=1 --without lr=1", "'with' and 'without' are the same setting"),
    # runs of another kind
    ("train --resume pre", "pre is a run of 'frugalvit pretrain': resume it with 'frugalvit pretrain --resume pre'"),
    ("train --resume det", "det is a run of 'frugalvit detect train'"),
    ("pretrain --resume run", "run is a run of 'frugalvit train'"),
    ("detect train --resume seg", "seg is a run of 'frugalvit segment train'"),
    ("segment train --resume run", "run is a run of 'frugalvit train'"),
    ("pretrain photos --continue run", "--continue takes runs of 'frugalvit pretrain'; --init run starts from its"),
    ("pretrain photos --continue nothere", "nothere holds no run"),
    # names
    ("train photos --init nothere", "--init nothere: there is no such run, exported folder or checkpoint file."),
    ("detect train coco --init nothere", "--init nothere: there is no such run"),
    ("train photos --backbone swin_nano --backbone-args {a:", "it must be a group, {name: value}"),
    ('train photos --backbone-args {"img_size":32}', "'img_size' cannot be set here: use --img-size"),
    ('train photos --backbone-args {"num_classes":4}', "'num_classes' cannot be set here"),
    ('pretrain photos --backbone-args {"name":"resnet18"}', "'name' cannot be set here: use --backbone"),
    ('detect train coco --backbone-args {"img_size":32}', "'img_size' cannot be set here: use --img-size"),
    ('train photos --backbone-args {"in_chans":4}', "in_chans must be 3"),
    ('segment train scenes --backbone-args {"in_chans":2}', "in_chans must be 3"),
    ("probe knn nothere photos", "nothere"),
    ("probe knn swin_tiny photos", "Did you mean 'swin_tiny_w7'"),
    ("probe knn empty photos", "empty holds no model"),
    ("export nothere", "There is no folder, file or network 'nothere'"),
    ("predict run empty", "empty holds no images"),
    ("predict bare.safetensors photos", "bare.safetensors is a bare weight file"),
    ("embed vit_tiny_patch16_224.augreg_in21k photos", "hf download timm/vit_tiny_patch16_224.augreg_in21k"),
    ("report run pre --out photos", "photos is a folder: name a file in it, for instance photos/report.html"),
    ("list models nothing", "No network matches nothing."),
]


@pytest.mark.parametrize(("line", "expected"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_is_one_line_and_leaves_nothing(
    place: Path, line: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = sorted(path.name for path in place.iterdir())
    assert cli.main(line.split()) == 2
    said = [text for text in capsys.readouterr().err.splitlines() if not text.startswith("oneDNN")]
    assert len(said) == 1 and said[0].startswith("frugalvit: ") and expected in said[0], said
    assert sorted(path.name for path in place.iterdir()) == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train photos --steps 1 --backbone swin_nano --init empty", "empty is a folder"),
        ("pretrain photos --steps 5 --matching.prototypes 40 --continue pre", "pre has another shape ("),
    ],
)
def test_what_the_weights_do_not_fit_is_said(
    place: Path, line: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    assert cli.main([*line.split(), "--out", "spoilt", "--no-report"]) == 2
    shutil.rmtree(place / "spoilt", ignore_errors=True)
    error = capsys.readouterr().err
    assert expected in error.splitlines()[-1] and "Traceback" not in error


def test_a_run_resumes_with_the_options_it_was_begun_with(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values may be given again; "auto" is what was decided."""
    monkeypatch.chdir(place)
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
def test_a_job_queued_again_with_the_very_same_words(
    place: Path, line: str, out: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--resume auto`` begins the first time, and finds the run the second time: whole here, killed elsewhere."""
    monkeypatch.chdir(place)
    words = [*line.split(), *TINY, "--out", f"{out}_queued", "--resume", "auto"]
    assert cli.main(words) == 0
    assert "is finished" not in capsys.readouterr().err
    assert cli.main([word for word in words if word != "--quiet"]) == 0
    assert f"{out}_queued is finished" in capsys.readouterr().err
    shutil.rmtree(place / f"{out}_queued")


@pytest.mark.parametrize(
    ("folder", "verb"),
    [
        *(("photos", verb) for verb in ("train", "pretrain", "compare")),
        *(("coco", verb) for verb in ("detect train", "detect compare")),
        ("scenes", "segment train"),
        ("photos/train", "train .."),
    ],
)
def test_the_usual_folder_of_runs_is_not_laid_among_the_images(
    place: Path, folder: str, verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder would be a class the next time; so would one that was made before that was found."""
    monkeypatch.chdir(place / folder)
    before = sorted(path.name for path in (place / folder).iterdir())
    where = [] if verb.endswith("..") else ["."]
    settings = ["--with", "lr=0.1", "--without", "lr=0.2"] if verb.endswith("compare") else []
    assert cli.main([*verb.split(), *where, *TINY, *settings]) == 2
    said = [text for text in capsys.readouterr().err.splitlines() if not text.startswith("oneDNN")]
    assert len(said) == 1 and "runs/, the default output folder, is inside the images of ." in said[0], said
    assert "with --out" in said[0] and sorted(path.name for path in (place / folder).iterdir()) == before


@pytest.mark.parametrize(
    ("name", "given", "kept", "images", "auto_batch", "refused"),
    [
        ("batch", 64, 10, 10, False, False),  # there were no more images
        ("batch", 64, 10, 20, False, True),
        ("batch", 5, 10, 10, False, True),
        ("accumulate", 1, 4, 10, True, False),
        ("accumulate", 1, 4, 10, False, True),
    ],
)
def test_what_a_run_lowered_by_itself_may_be_said_again(
    tmp_path: Path, name: str, given: int, kept: int, images: int, auto_batch: bool, refused: bool
) -> None:
    stored = {"data": "photos", "batch": 16, "auto_batch": auto_batch, name: kept}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored), encoding="utf-8")
    (tmp_path / "data.json").write_text(json.dumps({"images": images}), encoding="utf-8")
    again = TrainConfig.parse({"data": "photos", "resume": str(tmp_path), name: given})
    with pytest.raises(UserError, match="Cannot change") if refused else nullcontext():
        load_resumed_config(again)


@pytest.mark.parametrize("name", FREE_ON_RESUME)
def test_what_no_score_follows_from_may_be_another_on_a_resume(tmp_path: Path, name: str) -> None:
    values = {"log_every": 3, "save_every": 7, "workers": 2, "devices": 2, "nodes": 2, "peer_timeout": 9.0}
    values |= {"report": False, "track": ["mlflow"], "device": "cuda", "plugin": ["own_objective.py"]}
    values |= {"cache.where": "off", "cache.folder": "kept", "cache.max_bad": 0.5}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": "photos", "cache": {"size": 64}}), encoding="utf-8")
    given: dict[str, object] = {"resume": str(tmp_path)}
    set_dotted(given, name, values[name])
    again = TrainConfig.parse(given)
    found = load_resumed_config(again)
    assert attrgetter(name)(found) == values[name], "what is given now counts"
    assert (found.data, found.cache.size, found.resume) == ("photos", 64, str(tmp_path))


def test_an_image_smaller_than_a_patch_is_saved(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = ["--backbone", "swin_nano", "--img-size", "4", "--steps", "1", "--batch", "2", "--no-report", "--quiet"]
    assert cli.main(["segment", "train", "scenes", "--out", "small", *words]) == 0


def test_help_says_what_a_value_looks_like(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
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
    assert "--no-balance" not in page  # it is off already
