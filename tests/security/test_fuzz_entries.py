"""Fuzz what a stranger's folder, a server and the environment say: a result or one line, never a traceback or a hang.

FRUGALVIT_FUZZ=34 tries 10,200 inputs instead of 300.
"""

import json
import os
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import frugalvit as fv
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli.main import main
from frugalvit.config.train import TrainConfig
from frugalvit.data.webdataset import remote
from frugalvit.engine.checkpoint import read_state
from frugalvit.errors import UserError
from frugalvit.experiment.resolve import AutoValue
from frugalvit.runs.resume import load_resumed_config
from frugalvit.runs.run_folder import RunFolder, finished_summary, read_data_facts
from frugalvit.utils import launch_env, system
from frugalvit.utils.files import check_stored, read_json
from helpers.fuzzing import MAX_MEMORY, damaged, fuzz, is_answered, is_json, values
from helpers.tiny_runs import TRAIN

ODD = st.sampled_from(
    [10**9, -1, 0, 1e308, "9" * 5000, [10**6] * 3, "\u00b2", None, [], {}, True, "x", [[[1]]], "hf-hub:x/y", 10**30]
)


@pytest.fixture(autouse=True)
def _bounded_memory():
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < MAX_MEMORY, "an input has used too much memory"


def patched(content: Any, data: st.DataObject) -> Any:
    """Replace or remove one value somewhere in nested JSON."""
    content = json.loads(json.dumps(content))
    here = content
    while True:
        key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else range(len(here))))
        if not (isinstance(here[key], dict | list) and here[key] and data.draw(st.integers(0, 3))):
            break
        here = here[key]
    if data.draw(st.integers(0, 4)):
        here[key] = data.draw(ODD | values.filter(is_json))
    else:
        del here[key]
    return content


def write_patched(path: Path, data: st.DataObject) -> None:
    """Patch a value of a JSON or YAML file, or damage its bytes."""
    read = json.loads if path.suffix == ".json" else yaml.safe_load
    if path.suffix == ".jsonl" or not data.draw(st.integers(0, 3)):
        path.write_bytes(damaged(path.read_bytes(), data))
    else:
        changed = patched(read(path.read_text()), data)
        path.write_text(json.dumps(changed, default=str) if path.suffix == ".json" else yaml.safe_dump(changed))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    keywords: dict[str, Any] = {"img_size": 16, "patch_size": 8, "depth": 1, "num_heads": 1, "embed_dim": 8}
    backbone = fv.create_backbone("vit_tiny_patch16_224", num_classes=2, mean=(0.5,) * 3, std=(0.2,) * 3, **keywords)
    Image.new("RGB", (20, 16), (9, 99, 200)).save(folder / "a.png")
    return save_model_folder(backbone, folder / "model", classes=["a", "b"], meta={"data": "x"})


@fuzz(60)
@given(st.data())
def test_config_json(model: Path, data: st.DataObject) -> None:
    path = model / "config.json"
    before = path.read_text()
    try:
        write_patched(path, data)
        assert main(["predict", str(model), str(model.parent / "a.png"), "--quiet", "--device", "cpu"]) in (0, 2)
    finally:
        path.write_text(before)


STRANGE: list[tuple[str, object]] = [
    ("name", "x"), ("pretrained", True), ("stem_stride", "x"), ("stem_stride", [1]), ("stem_stride", 0),
    ("mean", "abc"), ("mean", [1, None, 2]), ("std", [0, 0, 0]), ("in_chans", 5), ("block_fn", "os.system"),
    ("self", 1),
]  # fmt: skip


@pytest.mark.parametrize(("keyword", "value"), STRANGE, ids=[f"{name}={value}" for name, value in STRANGE])
@pytest.mark.parametrize("ours", [True, False])
def test_keywords_that_no_network_has(model: Path, ours: bool, keyword: str, value: object, capsys) -> None:
    """Keywords of create_backbone and values of other types, in our section of config.json and in timm's."""
    path = model / "config.json"
    before = path.read_text()
    config = json.loads(before)
    for name in ("mean", "std"):
        del config["pretrained_cfg"][name]
    arguments = config["frugalvit"]["keywords"] if ours else config["model_args"]
    arguments[keyword] = value
    if not ours:
        del config["frugalvit"]
    elif keyword == "in_chans":
        config["frugalvit"]["in_chans"] = value
    path.write_text(json.dumps(config))
    try:
        assert main(["predict", str(model), str(model.parent / "a.png"), "--quiet", "--device", "cpu"]) == 2
    finally:
        path.write_text(before)
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


FACTS: dict[str, Any] = {
    "images": 10, "classes": ["a", "b"], "network": {"img_size": [16, 16]}, "batch": 8, "content": "x", "processes": 1,
    "threads": 2, "evaluation": {"val": {"files": 2, "content": "y"}}, "used": {"train": 9, "val": 2},
    "left_out": {"count": 1, "files": [{"name": "a.png", "split": "train", "reason": "empty"}]},
    "survey": {"counts": [4, 6], "total": 10, "labels": ["0", "1"], "held": []},
}  # fmt: skip
FILES: dict[str, Any] = {
    "data.json": FACTS,
    "decisions.json": [{"name": "lr", "value": 0.1, "reason": "auto"}],
    "summary.json": {"top1": 90.0, "top5": 99.0, "scored_on": "val", "scored_images": 10, "steps": 10, "seconds": 1.0},
}


@fuzz(60)
@given(st.data())
def test_run_folders(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    run = tmp_path_factory.getbasetemp() / "run"
    run.mkdir(exist_ok=True)
    for name, content in FILES.items():
        (run / name).write_text(json.dumps(content))
    (run / "config.yaml").write_text(TrainConfig.parse({"data": "photos"} | TRAIN).to_yaml())
    lines = [{"step": step, "epoch": step / 2, "split": "train", "loss": 1 / (step + 1)} for step in range(4)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_patched(run / data.draw(st.sampled_from([*FILES, "config.yaml", "metrics.jsonl"])), data)
    assert is_answered(lambda: load_resumed_config(TrainConfig.parse({"resume": str(run)})))
    assert is_answered(lambda: (finished_summary(run), read_data_facts(run)))
    assert is_answered(lambda: RunFolder(run, writer=False).metrics())
    assert is_answered(lambda: check_stored(list[AutoValue], read_json(run / "decisions.json", list), run))
    assert main(["report", str(run), "--quiet"]) in (0, 2)


WRONG: list[tuple[str, object]] = [
    ("threads", 0), ("threads", 10**6), ("threads", "x"), ("classes", None), ("network", [1]), ("processes", -1),
    ("network", {"pretrained": True}), ("network", {"name": "x"}), ("content", 1), ("evaluation", {"val": 3}),
    ("left_out", {"files": [{"name": 1}]}), ("survey", {"counts": "x"}), ("survey", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value}" for name, value in WRONG])
def test_facts_of_a_resumed_run(tmp_path: Path, name: str, value: object) -> None:
    """data.json of a stranger's run: a million threads ended with a segmentation fault, a network could download."""
    (tmp_path / "data.json").write_text(json.dumps(FACTS))
    assert read_data_facts(tmp_path) == FACTS
    (tmp_path / "data.json").write_text(json.dumps(FACTS | {name: value}))
    with pytest.raises(UserError, match=name):
        read_data_facts(tmp_path)


def test_stored_decisions(tmp_path: Path) -> None:
    for wrong in ([1], [None], [{"name": 1}], [{"name": "lr", "value": 1}]):
        with pytest.raises(UserError, match="damaged"):
            check_stored(list[AutoValue], wrong, tmp_path)
    assert check_stored(list[AutoValue], [{"name": "a", "value": [1], "reason": "b"}], tmp_path)[0].value == [1]


def test_a_compressed_checkpoint_is_refused(tmp_path: Path) -> None:
    """It could unpack to any size."""
    torch.save({"step": 1, "task": {}}, tmp_path / "last.pt")
    assert read_state(tmp_path / "last.pt")[0] is not None
    with (
        zipfile.ZipFile(tmp_path / "last.pt") as stored,
        zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for member in stored.namelist():
            packed.writestr(member, stored.read(member))
    state, fault = read_state(tmp_path / "packed.pt")
    assert state is None and "compressed" in fault


class Answer:
    """An HTTP answer with any headers."""

    status = 206

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers, self.parts = headers, [b"x" * 700, b""]

    def read1(self, _: int) -> bytes:
        return self.parts.pop(0) if self.parts else b""

    def close(self) -> None: ...


texts = st.text(max_size=12) | st.sampled_from(["\u00b2", "9" * 5000, "-1", "700", "0", "1e9", "0x10", "\u0667"])


@fuzz(90)
@given(st.dictionaries(st.sampled_from(["Content-Length", "ETag", "Last-Modified", "Content-Range"]), texts))
def test_http_headers(headers: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote, "_WAIT", 0.0)
        patch.setattr(remote.urllib.request, "urlopen", lambda *_, **__: Answer(headers))
        content = remote.read_small("http://example.invalid/a.tar")
        assert content is None or content.startswith(b"x" * 700)


VARIABLES = ["SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "LOCAL_RANK"]
VARIABLES += ["TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "SLURM_CPUS_ON_NODE"]
plain = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@fuzz(90)
@given(st.dictionaries(st.sampled_from(VARIABLES), plain | texts.map(lambda text: text.replace("\0", ""))))
def test_environment(variables: dict[str, str]) -> None:
    before = dict(os.environ)
    try:
        os.environ.update(variables)
        for function in (launch_env.rank, system.cores, system.processes_here):
            assert is_answered(function)
        assert is_answered(launch_env.devices_and_nodes, 1, 1)
    finally:
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)


def test_the_fuzz_can_fail() -> None:
    with pytest.raises(ZeroDivisionError):
        is_answered(lambda: 1 // 0)
    assert is_answered(lambda: (_ for _ in ()).throw(UserError("one line")).__next__())
