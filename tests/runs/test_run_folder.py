"""The run folder: names, metrics, checkpoints, and files that survive a kill."""

import errno
import json
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frugalvit.config.train import TrainConfig
from frugalvit.engine.checkpoint import find_damage, read_state
from frugalvit.errors import UserError
from frugalvit.experiment.summary import run_result
from frugalvit.runs.layout import find_run
from frugalvit.runs.run_folder import RunFolder, finished_summary, new_run_folder
from frugalvit.utils.files import remove_parts, write_atomically, write_text
from frugalvit.utils.tables import Table


def test_names_of_run_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = new_run_folder(None, "swin tiny", "a/b"), new_run_folder(None, "swin tiny", "a/b")
    assert first.parent == second.parent == Path("runs") and first.name.endswith("_swin-tiny_a-b")
    assert second.name == first.name + "_2" and second.is_dir()


def test_two_processes_never_get_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(new_run_folder(None, "x"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8


@pytest.mark.parametrize("new", ["elsewhere", "with\na line break", "a \\1 long name " * 20 + "ünd"])
def test_update_data_path_changes_only_data(new: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.save_config(TrainConfig.parse({"data": "images", "seed": 3}))
    stored = (tmp_path / "config.yaml").read_bytes()
    run.update_data_path("images")
    assert (tmp_path / "config.yaml").read_bytes() == stored
    run.update_data_path(new)
    run.close()
    assert TrainConfig.from_run(tmp_path / "config.yaml").data == new
    assert (tmp_path / "config.yaml").read_bytes().endswith(stored[stored.index(b"\nrecipe:") :])


def test_metrics_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        run.log(step, split="train", loss=float(step))
    run.close()
    with (tmp_path / "metrics.jsonl").open("a") as handle:
        handle.write('{"step": 4, "lo')  # the writer was killed in the middle of a line
    run = RunFolder(tmp_path)
    assert [line["step"] for line in run.metrics()] == [1, 2, 3]
    run.truncate_metrics(2)
    run.log(3, split="train", loss=9.0)
    assert [line["loss"] for line in run.metrics()] == [1.0, 2.0, 9.0]
    run.close()


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(UserError, match="Another process"):
        RunFolder(tmp_path)
    RunFolder(tmp_path, writer=False)  # reading is free
    run.close()
    RunFolder(tmp_path).close()


def test_last_and_previous(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.load_checkpoint() is None and not run.has_checkpoint()
    for step in (1, 2, 3):
        run.save_checkpoint({"step": step, "task": {}})
    run.save_checkpoint({"step": 2, "task": {}}, "best.pt")
    steps = {path.name: torch.load(path, weights_only=True)["step"] for path in run.checkpoints.iterdir()}
    assert steps == {"last.pt": 3, "previous.pt": 2, "best.pt": 2}
    run.close()


def test_a_damaged_checkpoint_never_replaces_a_good_one(tmp_path: Path) -> None:
    """After falling back, the next save must keep the good state as the previous one, not the damaged file."""
    run = RunFolder(tmp_path)
    for step in (1, 2):
        run.save_checkpoint({"step": step, "task": {}})
    (run.checkpoints / "last.pt").write_bytes(b"damaged")
    state = run.load_checkpoint()
    assert state is not None and state["step"] == 1
    run.save_checkpoint({"step": 3, "task": {}})
    assert find_damage(run.checkpoints / "previous.pt") is None and (run.checkpoints / "last.damaged").exists()
    run.close()


def test_a_damaged_best_checkpoint_is_warned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder(tmp_path)
    assert run.load_best() is None
    (run.checkpoints / "best.pt").write_bytes(b"damaged")
    assert run.load_best() is None and "best.pt is damaged" in capsys.readouterr().err
    run.close()


@given(st.data())
def test_every_damaged_byte_is_noticed_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped bit is detected by a checksum, or it changes nothing that is read."""
    path = tmp_path_factory.getbasetemp() / "flipped.pt"
    state = {"step": 7, "task": {"weight": torch.arange(64.0)}}
    torch.save(state, path)
    content = bytearray(path.read_bytes())
    index = data.draw(st.integers(0, len(content) - 1))
    content[index] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    found, fault = read_state(path)
    assert (found is None and fault) or (
        found["step"] == 7 and torch.equal(found["task"]["weight"], torch.arange(64.0))
    )


@given(st.binary(max_size=300) | st.integers(0, 100))
def test_no_content_of_a_checkpoint_is_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, content: bytes | int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.pt"
    if isinstance(content, int):  # a truncated checkpoint
        torch.save({"step": 1, "task": {"weight": torch.zeros(100)}}, path)
        complete = path.read_bytes()
        content = complete[: len(complete) * content // 101]
    path.write_bytes(content)
    found, fault = read_state(path)
    assert found is None and fault and "\n" not in fault


def test_other_torch_files_are_not_checkpoints(tmp_path: Path) -> None:
    torch.save({"model": torch.zeros(2)}, tmp_path / "other.pt")
    assert read_state(tmp_path / "other.pt") == (None, "it does not hold the state of a run")


def test_find_run_and_summary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        find_run(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    assert finished_summary(tmp_path) is None
    (tmp_path / "summary.json").write_text(json.dumps({"run": "before/it/was/moved", "top1": 1.0}))
    assert finished_summary(tmp_path) == {"run": str(tmp_path), "top1": 1.0}


# -- files


@pytest.mark.parametrize("text", ["", "{", "[]", None])
def test_a_damaged_file_of_a_run_is_one_line(tmp_path: Path, text: str | None) -> None:
    run = RunFolder(tmp_path)
    if text is not None:
        (tmp_path / "data.json").write_text(text)
    with pytest.raises(UserError, match=r"data\.json"):
        run.read_json("data.json")
    run.close()


def test_run_result(tmp_path: Path) -> None:
    """Paths, notes and next commands are printed; long lists stay in summary.json."""
    (tmp_path / "report.html").touch()
    summary = {"run": str(tmp_path), "top1": 50.0, "weights": "the best", "auto": [1], "classes": ["a"]}
    result = run_result(summary, Table(["top1"], [[50.0]]), ["frugalvit this", "frugalvit that"], ["drloc       hard"])
    assert [note.replace(str(tmp_path), "RUN") for note in result.notes] == [
        "run folder  RUN",
        "weights     the best",
        "drloc       hard",
        "report      RUN/report.html",
        "next        frugalvit this",
        "            frugalvit that",
    ]
    assert set(result.data) == {"run", "top1", "weights"}


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(handle: object) -> None:
        handle.write(b"new, but not all of it")  # type: ignore[attr-defined]
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_atomically(path, fail)
    assert path.read_text() == "old" and [child.name for child in tmp_path.iterdir()] == ["file"]


def test_the_old_file_gets_another_name(tmp_path: Path) -> None:
    path, before = tmp_path / "last", tmp_path / "previous"
    for text in ("1", "2", "3"):
        write_atomically(path, lambda handle, text=text: handle.write(text.encode()), keep=before)
    assert (path.read_text(), before.read_text()) == ("3", "2")
    assert sorted(child.name for child in tmp_path.iterdir()) == ["last", "previous"]


def test_partial_files_of_killed_writers_are_removed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / ".last.pt.123.part").write_bytes(b"half")
    (tmp_path / "model" / ".model.safetensors.123.part").write_bytes(b"half")
    (tmp_path / "last.pt").write_bytes(b"whole")
    remove_parts(tmp_path)
    assert sorted(child.name for child in tmp_path.rglob("*")) == ["last.pt", "model"]


@pytest.mark.parametrize(("started", "hint"), [(True, "Make it writable, or copy the run"), (False, "with --out")])
def test_unwritable_resumed_run_does_not_suggest_out(
    started: bool, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.yaml", "metrics.jsonl") if started else ():
        (tmp_path / name).write_text("")

    def refuse(path: Path, *_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "touch", refuse)
        with pytest.raises(UserError, match=f"Cannot write to {tmp_path} .*{hint}"):
            RunFolder(tmp_path)
    (tmp_path / ".lock").mkdir()  # a folder cannot be opened
    with pytest.raises(UserError, match=rf"\.lock .*{hint}"):
        RunFolder(tmp_path)
