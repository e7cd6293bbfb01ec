"""The names of all files in a run folder and in a comparison folder.

config.yaml       every option; "auto" stays if each machine chooses the value, or if training does not use it
data.json         what the run learns from: images, classes, network, files it skipped
decisions.json    the values that "auto" chose, with reasons
metrics.jsonl     one line per logged step
checkpoints/      last.pt, previous.pt (the one before), best.pt; good.pt while a run may need to go back to it
model/            model.safetensors + config.json, for timm and for frugalvit
summary.json      the final result
report.html       one page to read
"""

import contextlib
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path

from frugalvit.errors import UserError
from frugalvit.utils.files import FolderLock, is_part, read_json

CONFIG = "config.yaml"
DATA = "data.json"
DECISIONS = "decisions.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
REPORT = "report.html"
MODEL = "model"
TENSORBOARD = "tensorboard"
TRACKERS = "trackers.json"
FAULT = "fault"
LENS = "lens.json"
PROBES = "probes.json"
PROBE_SCORES = "reproduced.json"  # all probes of a pre-training, for comparisons
AUGMENTATIONS = "augmentations.jpg"
TRAINING_IMAGES = "training_images.json"  # the images whose features the model folder stores
MISTAKES = "mistakes.json"
MISTAKES_PICTURE = "mistakes.jpg"
REQUEST = "asked.json"  # the options that a comparison requested from its run

CHECKPOINTS = "checkpoints"
BEST, LAST, PREVIOUS, GOOD = "best.pt", "last.pt", "previous.pt", "good.pt"
CHECKPOINT_FILES = (BEST, LAST, PREVIOUS)

DENSE_WEIGHTS, DENSE_FACTS = "transfer.safetensors", "transfer.json"
DENSE_REPORT = "transfer_report.json"
PICTURES = "pictures"

COMPARISON = "comparison.json"
COMPARISON_TABLES = ("comparison.md", "comparison.csv", "comparison.tex")
COMPARISON_CHART = "comparison.png"

AT_START = (CONFIG, DATA, DECISIONS)  # written before the first step
BEFORE_STEPS = (*AT_START, TRACKERS)
RUN_FILES = (
    *BEFORE_STEPS,
    *(CHECKPOINTS, METRICS, TENSORBOARD, FAULT, MODEL, SUMMARY, REPORT, LENS),
    *(AUGMENTATIONS, MISTAKES, MISTAKES_PICTURE, TRAINING_IMAGES),
)
DENSE_FILES = (*RUN_FILES, DENSE_WEIGHTS, DENSE_FACTS, DENSE_REPORT, PICTURES)  # written by detectors and segmenters
COMPARISON_FILES = (*COMPARISON_TABLES, COMPARISON_CHART, COMPARISON, REPORT)
EMPTY_RUN_FILES = {*AT_START, REQUEST, ".lock", CHECKPOINTS}


# -- what a folder holds


def contains_run(folder: Path) -> bool:
    """Return whether the folder holds a run worth keeping. A run that failed before step 0 does not count."""
    if not (folder / CONFIG).exists():
        return False
    if not all((folder / name).exists() for name in AT_START):
        return True  # a config.yaml that is not ours, or a run that lost files
    has_results = any((folder / name).exists() for name in (METRICS, SUMMARY))
    return has_results or not all(map(is_part, (folder / CHECKPOINTS).glob("*")))


def has_checkpoint(folder: Path) -> bool:
    return any((folder / CHECKPOINTS / name).exists() for name in (LAST, PREVIOUS))


def find_run(path: str | Path) -> Path:
    """Return the folder of a run, or raise."""
    folder = Path(path)
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no run (no {CONFIG}). Pass the folder that a run printed at its start.")
    return folder


def write_error_hint(folder: Path) -> str:
    """Return what to do if the folder is not writable."""
    if contains_run(folder):
        return "Make it writable, or copy the run and resume the copy."
    return "Choose another folder with --out."


# -- no overwriting, and cleaning up


def check_free_for_run(folder: Path, names: Iterable[str] = RUN_FILES) -> None:
    """Refuse a folder where a run would overwrite the user's files, but not those of a run without a first step."""
    failed = (folder / ".lock").exists() or all((folder / name).exists() for name in AT_START)
    _refuse_overwriting(folder, [name for name in names if not (failed and name in BEFORE_STEPS)])


def check_free_for_comparison(folder: Path) -> None:
    """Refuse a folder where a comparison would overwrite the user's files, unless it holds a comparison."""
    started = any(folder.glob(f"*/seed_*/{REQUEST}"))
    ours = started or "settings" in (read_json(folder / COMPARISON, dict) or {})
    _refuse_overwriting(folder, () if ours else COMPARISON_FILES)


def _refuse_overwriting(folder: Path, names: Iterable[str]) -> None:
    taken = []
    for path in (folder / name for name in names):
        # Writing loses something; partial files of killed runs do not count.
        lost = not all(map(is_part, path.iterdir())) if path.is_dir() else path.exists() or path.is_symlink()
        taken += [path.name] if lost else []
    if taken:
        shown = ", ".join(taken[:3]) + (" …" if len(taken) > 3 else "")
        raise UserError(f"{folder} already has {shown}, which would be overwritten. Choose another folder.")


def missing_parents(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist yet, innermost first."""
    return list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))


def remove_empty_run(created: list[Path]) -> None:
    """Remove the folders (of ``missing_parents``) created for a run that failed before its first step."""
    if not created or not created[0].is_dir():
        return
    folder, *parents = created
    if {entry.name for entry in folder.iterdir()} - EMPTY_RUN_FILES or any((folder / CHECKPOINTS).glob("*")):
        return
    try:
        with FolderLock(folder):  # not while another process starts a run in the same new folder
            pass
    except UserError:
        return
    shutil.rmtree(folder, ignore_errors=True)
    for path in parents:
        with contextlib.suppress(OSError):  # not empty any more
            path.rmdir()
