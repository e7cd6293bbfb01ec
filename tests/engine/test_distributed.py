"""Distributed training, with threads as ranks; ``test_two_processes.py`` uses real processes."""

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from frugalvit.comparison import compare
from frugalvit.config.dense import DetectConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.dataset import ArrayExamples
from frugalvit.data.webdataset.streaming_dataset import ShardSurvey, StreamingDataset
from frugalvit.engine import distributed, sharding
from frugalvit.errors import LostRankError, UserError
from frugalvit.experiment import builders
from frugalvit.experiment.resolve import AutoValues
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification import train
from frugalvit.tasks.dense import commands as running
from frugalvit.tasks.dense import loader
from frugalvit.tasks.detection.commands import DetectExperiment
from frugalvit.utils.tables import CommandResult
from helpers.fake_distributed import run_ranks


class StopTest(Exception):
    """Ends a run when the test has its result."""


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The timeouts of collectives; threads have no process group."""
    timeouts: list[float] = []
    monkeypatch.setattr(distributed, "_set_timeout", timeouts.append)
    monkeypatch.setattr(distributed, "FILESYSTEM_TIMEOUT", 0.3)
    return timeouts


# -- the folder of the run


def test_all_ranks_score_rank_zeros_best_weights(tmp_path: Path) -> None:
    """The second rank does not see the file: another node, or a slow network disk."""

    def finish(fabric: Any) -> list[Any]:
        (tmp_path / str(fabric.global_rank)).mkdir()
        run = RunFolder(tmp_path / str(fabric.global_rank))
        if fabric.global_rank == 0:
            run.save_checkpoint({"step": 3, "task": {"weight": torch.ones(2)}}, "best.pt")
        loaded: list[Any] = []
        experiment = train.ClassificationExperiment(TrainConfig())
        experiment.fabric, experiment.run_folder = fabric, run
        experiment.task = SimpleNamespace(load_state_dict=loaded.append)  # type: ignore[assignment]
        assert experiment.load_best({"steps": 9}, "best") and not experiment.load_best({"steps": 3}, "best")
        run.close()
        return [state["weight"].tolist() for state in loaded]

    assert run_ranks(2, finish) == [[[1.0, 1.0]]] * 2


@pytest.mark.parametrize("shared", [True, False])
def test_run_folder_must_be_shared(shared: bool, tmp_path: Path) -> None:
    """A folder of the same name on another node is not enough."""
    (tmp_path / "1").mkdir()

    def check(fabric: Any) -> None:
        folder = tmp_path / str(0 if shared else fabric.global_rank)
        folder.mkdir(exist_ok=True)
        distributed.check_shared_filesystem(fabric, folder)

    errors = run_ranks(2, check)
    assert not list(tmp_path.rglob(".seen*"))
    if shared:
        assert errors == [None, None]
    else:
        assert all(isinstance(error, UserError) and "file system" in str(error) for error in errors)


def test_resume_auto_needs_the_run_on_all_ranks() -> None:
    def check(fabric: Any) -> None:
        distributed.check_same_resume(fabric, fabric.global_rank == 0, "run")

    errors = run_ranks(2, check)
    assert all(isinstance(e, UserError) and "Some processes see a run in run" in str(e) for e in errors)


# -- a command with several processes


def run_command(monkeypatch: pytest.MonkeyPatch, out: Path, open_source: Any, body: Any) -> list[Any]:
    peers = threading.local()
    monkeypatch.setattr(builders, "make_fabric", lambda _: peers.own)

    def command(fabric: Any) -> Any:
        peers.own = fabric
        config = TrainConfig(data="photos", out=str(out))
        experiment = train.ClassificationExperiment(config)
        experiment.open_data = lambda _: open_source(config, fabric)  # type: ignore[method-assign]
        experiment._train = body  # type: ignore[method-assign]
        return experiment.run()

    return run_ranks(2, command)


@pytest.mark.parametrize("lost", [0, 1])
def test_rank_that_cannot_open_the_data(lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_source(_: TrainConfig, fabric: Any) -> Any:
        if fabric.global_rank == lost:
            raise UserError("There is no folder photos.")
        return SimpleNamespace(name="photos")

    results = run_command(monkeypatch, tmp_path / "run", open_source, lambda *_: CommandResult({}))
    assert str(results[lost]) == "There is no folder photos."
    left = results[1 - lost]
    assert isinstance(left, UserError), left
    assert "Another rank of this run ended" in str(left) and "--resume" not in str(left)


def test_an_error_in_the_body_removes_the_empty_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(*_: Any) -> CommandResult:
        raise UserError("There are no weights for this network.")

    errors = run_command(monkeypatch, tmp_path / "run", lambda *_: SimpleNamespace(name="photos"), body)
    assert [type(error) for error in errors] == [UserError, UserError]
    assert len({str(error) for error in errors}) == 1 and not (tmp_path / "run").exists()


def test_every_remaining_rank_reports_a_lost_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost rank may be rank 0: then nobody else reports anything."""

    def body() -> CommandResult:
        with distributed.fail_on_lost_rank(Mock(world_size=2), None, 1.0):
            raise RuntimeError("[gloo] Connection closed by peer")

    errors = run_command(monkeypatch, tmp_path / "run", lambda *_: SimpleNamespace(name="photos"), body)
    assert [type(error) for error in errors] == [LostRankError] * 2


def test_lost_rank_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The empty run is removed, so the message must not advise to resume it."""

    def body() -> CommandResult:
        raise RuntimeError("[gloo] Connection closed by peer")

    errors = run_command(monkeypatch, tmp_path / "run", lambda *_: SimpleNamespace(name="photos"), body)
    assert [type(error) for error in errors] == [LostRankError] * 2 and not (tmp_path / "run").exists()
    assert all("--resume" not in str(error) for error in errors)


@pytest.mark.parametrize(("rank", "error"), [("0", KeyboardInterrupt), ("1", SystemExit)])
def test_stopped_comparison(
    rank: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status other than 0 of another rank would make the launcher kill rank 0."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    wanted = TrainConfig(data="photos", out=str(tmp_path / "run"), devices=2)
    with pytest.raises(error) as left:
        compare.run_once(wanted, lambda _: CommandResult({"stopped": "SIGTERM"}))
    assert (tmp_path / "run" / "asked.json").exists() == (rank == "0")
    if rank == "1":
        assert left.value.code == 0  # type: ignore[attr-defined]


# -- decisions of all ranks


def test_ranks_of_a_node_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frugalvit.data.cache.build.available_memory", lambda: 10_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert loader.ImageReader([], [(10, 20)]).is_cached
    fabric: Any = SimpleNamespace(launch=lambda: None, world_size=1, global_rank=0, strategy=None)
    distributed.launch(fabric, 8)
    assert not loader.ImageReader([], [(10, 20)]).is_cached
    distributed.launch(fabric, 1)
    assert loader.ImageReader([], [(10, 20)]).is_cached, "the next run of this process is alone"


def test_same_number_of_readers_on_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes with 16 and 8 cores; torchrun started two processes on each."""
    cores = threading.local()
    monkeypatch.setattr("joblib.cpu_count", lambda: cores.here)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    sample = ArrayExamples(np.zeros((1, 8, 8, 3), np.uint8), None, "one")

    def decide(fabric: Any) -> Any:
        cores.here = 16 if fabric.global_rank < 2 else 8
        config = TrainConfig()
        survey = ShardSurvey([1] * 100, 100, None, [])
        shards = StreamingDataset([f"{i}.tar" for i in range(100)], survey, None, sample)
        return builders.resolve_readers(config, shards, fabric, AutoValues()).workers

    assert run_ranks(4, decide) == [4, 4, 4, 4]


@pytest.mark.parametrize(("lengths", "error"), [((5, 5), ""), ((5, 4), "this one")])
def test_all_ranks_cache_the_same_images(lengths: tuple[int, int], error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has more RAM, or cannot read an image."""
    locations: list[str] = []

    def build(*_: Any, agree: Any, **__: Any) -> Any:
        rank = ranks.own
        locations.append(agree(("ram", "off")[rank]))
        return SimpleNamespace(readable=lengths[rank])

    ranks = threading.local()
    monkeypatch.setattr(builders, "build_store", build)
    examples = ArrayExamples(torch.zeros(5, 8, 8, 3, dtype=torch.uint8).numpy(), None, "five")

    def keep(fabric: Any) -> int:
        ranks.own = fabric.global_rank
        return builders.get_image_store(examples, (8, 8), TrainConfig(), fabric.device, fabric).readable

    results = run_ranks(2, keep)
    assert locations == ["off", "off"]
    if error:
        assert all(isinstance(one, UserError) and error in str(one) for one in results)
    else:
        assert results == [5, 5]


def test_detection_ranks_use_the_same_images(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = threading.local()
    pictures = SimpleNamespace(find_bad=lambda *_: range(ranks.own), drop_bad=lambda items, *_: items[ranks.own :])
    monkeypatch.setattr(running, "open_pictures", lambda *_: pictures)

    def open_set(fabric: Any, training: bool) -> None:
        ranks.own = fabric.global_rank
        experiment: Any = DetectExperiment(DetectConfig())
        experiment.config, experiment.fabric, experiment.items = experiment.options, fabric, [1, 2, 3]
        if training:
            experiment._open_training_set()
        else:
            experiment._open_eval_set([1, 2, 3])

    for training in (True, False):
        errors = run_ranks(2, partial(open_set, training=training))
        texts = [str(error).partition("(")[2].partition(")")[0] for error in errors]
        assert texts == ["this one 3 of 3", "this one 2 of 3"]


def test_timeout_counts_only_in_steps(waits: list[float]) -> None:
    """Preparation may take longer than a step."""
    arrived: list[int] = []

    def work(fabric: Any) -> None:
        if fabric.global_rank == 1:
            threading.Event().wait(0.2)
        arrived.append(fabric.global_rank)
        with distributed.collective_timeout(fabric, 5.0):
            assert len(arrived) == 2
            fabric.barrier()

    assert run_ranks(2, work) == [None, None]
    assert waits == [5.0, 5.0, distributed.SETUP_TIMEOUT, distributed.SETUP_TIMEOUT]
    fabric: Any = SimpleNamespace(launch=lambda: None, barrier=lambda: None, world_size=2, global_rank=0, strategy=None)
    distributed.launch(fabric)
    assert waits[-1] == distributed.SETUP_TIMEOUT


# -- fsdp


@pytest.mark.parametrize(
    ("kind", "option", "word"),
    [
        (TrainConfig, {"auto_batch": True}, "--auto-batch"),
        (TrainConfig, {"compile": True}, "--compile"),
        (TrainConfig, {"precision": "fp16"}, "fp16"),
        (PretrainConfig, {}, "pretrain"),
        (DetectConfig, {}, "detect"),
    ],
)
def test_fsdp_refuses_what_it_cannot_do(kind: Any, option: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=f"--strategy fsdp does not work with .*{word}"):
        kind.parse({"strategy": "fsdp"} | option)


def test_fsdp_needs_processes_and_no_batch_norms() -> None:
    with pytest.raises(UserError, match=r"--strategy fsdp .* --devices 2"):
        distributed.strategy("fsdp", 1, 9.0)
    with pytest.raises(UserError, match="batch norms"):
        sharding.setup(torch.nn.BatchNorm1d(3), Mock())
