"""``frugalvit distil`` end to end on a few images: learning, resume, the cache of the teacher."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from frugalvit.backbones import create_backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.cli.main import main
from frugalvit.config.distil import DistilConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.data.cache.store import CachedStore
from frugalvit.errors import UserError
from frugalvit.experiment.builders import make_fabric
from frugalvit.experiment.load_model import load_model
from frugalvit.objectives import distillation_targets
from frugalvit.runs.resume import command_of
from frugalvit.tasks.distillation.task import DistillationTask
from frugalvit.tasks.distillation.teacher import cache_targets, load_teacher
from frugalvit.tasks.distillation.train import distil
from helpers.shards import shard_images
from helpers.tiny_runs import DISTIL, SWIN, differences, interrupted_at, load_state, read_metrics


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A network with another width, size, grid and normalization than the student."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(7)
    keywords: dict[str, Any] = SWIN | {"embed_dim": 12, "mean": (0.5,) * 3, "std": (0.4,) * 3}
    save_model_folder(create_backbone("swin_nano", img_size=24, num_classes=0, **keywords), folder)
    return str(folder)


def run(teacher: str | None, photos: Path, out: Path, **values: Any) -> dict[str, Any]:
    given = DISTIL | {"teacher": teacher, "data": str(photos), "out": str(out)} | values
    return distil(DistilConfig.parse(given)).data


def test_a_run_is_as_usable_as_a_pretraining(teacher: str, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = run(teacher, photos, out, steps=30, lr=5e-3, report=True)
    assert result["task"] == "distil" and result["knn"] is not None and result["health"]
    assert result["loss"] < 0.8 * result["first_loss"]
    assert {"grid_loss", "pooled_loss", "knn", "effective_rank"} <= {key for line in read_metrics(out) for key in line}
    state = load_state(out)["task"]
    student = load_model(str(out)).backbone.state_dict()
    assert all(torch.equal(value, state[f"student.{name}"]) for name, value in student.items())
    assert sum(value.numel() for name, value in state.items() if name.startswith("frozen_teacher")) == 32, "only a hash"
    assert command_of(out) == "distil" and "learned without labels" in (out / "report.html").read_text()
    assert main(["probe", "knn", str(out), str(photos), "--device", "cpu"]) == 0
    init = str(out / "checkpoints/last.pt")
    assert load_model(init).name == "run-last"
    assert TrainConfig.parse({"data": "x", "init": str(out)}).recipe == "finetune"


@pytest.mark.parametrize("values", [{}, {"cache_teacher": True}])
def test_resume_is_exact(
    teacher: str, photos: Path, tmp_path: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))
    run(teacher, photos, tmp_path / "one", **values)
    with interrupted_at(5):
        run(teacher, photos, tmp_path / "two", **values)
    distil(DistilConfig.parse({"resume": str(tmp_path / "two")}))
    assert differences(tmp_path / "one", tmp_path / "two") == []


def test_resume_with_another_teacher(teacher: str, photos: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in Path(teacher).iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    with interrupted_at(5):
        run(str(copy), photos, tmp_path / "run")
    weights = load_file(copy / "model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, copy / "model.safetensors")
    with pytest.raises(UserError, match="other weights"):
        distil(DistilConfig.parse({"resume": str(tmp_path / "run")}))
    distil(DistilConfig.parse({"resume": str(tmp_path / "run"), "teacher": teacher, "data": str(photos)}))


def test_the_teacher_sees_the_pixels_as_it_wants_them(teacher: str) -> None:
    student = create_backbone("swin_nano", img_size=24, **SWIN)  # ImageNet's mean and std
    model = load_model(teacher)
    pixels = torch.rand(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (student.mean, student.std))
    with torch.no_grad():
        expected = model.backbone((pixels - 0.5) / 0.4)
    found = load_teacher(teacher, student)((pixels - mean) / std)
    torch.testing.assert_close(found, distillation_targets(expected, student.grid_size(24)), rtol=1e-3, atol=1e-4)


def test_cached_targets_are_those_of_the_view(teacher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image has its own row; a flipped image has the flipped grid; a second run reads the file."""
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path))
    config = DistilConfig.parse(DISTIL | {"cache_teacher": True, "augment": {"crop": "center", "jitter": (0,) * 4}})
    student = create_backbone("swin_nano", img_size=16, **SWIN)
    source = load_teacher(teacher, student)
    pixels = torch.randint(0, 256, (7, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    store, augment = CachedStore.from_arrays(pixels), TrainAugment(config.augment, 16, student.mean, student.std)
    fabric = make_fabric(config)
    cached = cache_targets(source, store, augment, 3, fabric, "images")
    numbers = torch.rand(7, augment.columns, generator=torch.Generator().manual_seed(2))
    numbers[:, -6:] = 1  # neither grey nor blurred
    flips, order = augment.flips(numbers), torch.tensor([4, 0, 6, 2, 1, 3, 5])
    assert 0 < flips.sum() < 7
    found = cached.at(order, flips, torch.device("cpu"))
    plain = source(augment.apply(pixels[order], store.sizes[order], torch.ones_like(numbers)))
    expected = torch.where(flips[:, None, None, None], plain.grid.flip(3), plain.grid)
    torch.testing.assert_close(found.grid.float(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(found.pooled.float(), plain.pooled, rtol=2e-3, atol=2e-3)
    monkeypatch.setattr(source, "forward", None)
    assert (cache_targets(source, store, augment, 3, fabric, "images").grid == cached.grid).all()


def test_cache_runs_the_teacher_once(
    teacher: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRUGALVIT_CACHE", str(tmp_path / "cache"))
    seen: list[bool] = []
    inputs = DistillationTask.step_inputs

    def record(task: DistillationTask, batch: Any, step: int) -> Any:
        monkeypatch.setattr(task.frozen_teacher, "forward", None)
        found = inputs(task, batch, step)
        batches: Any = task.batches
        seen.extend((batch.index == batches.local_order(batch.number)).tolist())
        return found

    monkeypatch.setattr(DistillationTask, "step_inputs", record)
    result = run(teacher, photos, tmp_path / "run", cache_teacher=True, lr=5e-3, steps=30)
    assert all(seen) and len(seen) == 240 and result["loss"] < 0.8 * result["first_loss"]


def test_streamed_shards(teacher: str, photos: Path, tmp_path: Path) -> None:
    shards = shard_images(tmp_path / "shards", photos)
    assert run(teacher, shards, tmp_path / "run", stream=True, workers=1)["steps"] == 10
    with pytest.raises(UserError, match="--cache-teacher needs"):
        run(teacher, shards, tmp_path / "cached", stream=True, workers=1, cache_teacher=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"teacher": None}, "Pass a teacher"),
        ({"teacher": "swin_nano"}, "only a name"),
        ({"teacher": "nowhere"}, "'nowhere'"),
        ({"backbone_args": SWIN | {"in_chans": 1}}, "in_chans"),
        ({"cache_teacher": True, "augment": {"crop": "resized"}}, r"--augment.crop resized"),
        ({"cache_teacher": True, "augment": {"operations": 2}}, r"--augment.operations 2"),
        ({"distillation": {"grid_weight": 0, "pooled_weight": 0}}, "both 0"),
        ({"optimizer": {"layer_decay": 0.7}}, "layer_decay"),
    ],
)
def test_wrong_options(teacher: str, photos: Path, tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(**{"teacher": teacher, "photos": photos, "out": tmp_path / "run"} | values)
    assert not (tmp_path / "run").exists()


def test_compiles_the_student_and_the_teacher(
    teacher: str, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda module_call, **_: compiled.append(module_call.__name__) or module_call)
    run(teacher, photos, tmp_path / "run", compile=True, steps=1)
    assert compiled == ["_call_impl"] * 8  # two embeddings and two blocks of each network
