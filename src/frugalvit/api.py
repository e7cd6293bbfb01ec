"""Every command from Python: options as keywords, the result of ``--json`` as a dictionary.

result = fv.train("photos/", epochs=50, localization={"weight": 1.0})
fv.probe_knn(result["run"], "photos/")["top1"]
"""

import contextlib
import math
import multiprocessing
import os
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from typing import Any

from frugalvit.cli.main import find_command
from frugalvit.config.base import Config, flat_fields, merge, option_extras, set_dotted
from frugalvit.errors import GUARD, UserError
from frugalvit.utils import console, launch_env

PathLike = str | os.PathLike[str]

_lock = threading.RLock()


def run(command: str, *arguments: Any, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Run ``frugalvit COMMAND`` and return what it prints with ``--json``; a mistake is a ``UserError``.

    One command runs at a time, other threads wait: random numbers and torch's settings belong to the process.

    Args:
        command: its name: "train", "probe knn", "look explore" …
        arguments: the positional arguments, in the order of the command line.
        quiet: no progress and no messages on standard error, except warnings.
        options: as on the command line, with underscores for dashes (``img_size=64``) and dictionaries for groups
            (``localization={"weight": 1.0}``, or ``**{"localization.weight": 1.0}``). ``--continue`` is
            ``continue_from``. Instead of ``--config`` use ``**yaml.safe_load(…)``.
    """
    words = command.split()
    row = find_command(words) if words else None
    if row is None or row.name != " ".join(words):
        raise UserError(f"There is no command '{command}': see 'frugalvit --help'.")
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # spawned, and importing the main module
        raise UserError(
            f"{GUARD[0].upper()}{GUARD[1:]}. This is such a worker process, which must not start a command."
        )
    with _lock, console.quiet() if quiet else contextlib.nullcontext():
        model = row.load_config()
        config: Any = model.parse(_values(model, arguments, options))
        if row.distributed and config.devices > 1 and launch_env.needs_launch():
            from frugalvit.cli import subprocess_run

            return subprocess_run.run_in_subprocess(row.name, config, quiet=quiet)
        function = row.load_function()  # imports torch first, so that its settings can be restored
        with _preserve_environment(), _preserve_torch():
            data = function(config).data
            if row.distributed:
                _wait_for_ranks(config)
            return data


def _wait_for_ranks(config: Any) -> None:
    """Wait at the end: the program continues on every rank and may read what rank 0 writes."""
    if math.prod(launch_env.devices_and_nodes(config.devices, config.nodes)) > 1:
        from frugalvit.engine.distributed import barrier

        barrier()


@contextlib.contextmanager
def _preserve_environment() -> Iterator[None]:
    """Restore the environment variables that a command sets for its processes."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})


@contextlib.contextmanager
def _preserve_torch() -> Iterator[None]:
    """Restore torch's random state and settings after a command."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    attention = torch.backends.cuda.cudnn_sdp_enabled()
    from frugalvit.engine import hardware  # imports torch

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices), hardware.preserve_onednn(), _default_torch_modes(torch):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(attention)


@contextlib.contextmanager
def _default_torch_modes(torch: Any) -> Iterator[None]:
    """Run a command in torch's default modes, whatever modes the caller is in.

    A mode that is already the default is not entered: each mode slows every call of torch a little.
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(device):
                modes.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
        modes.callback(torch.set_default_dtype, dtype)
        torch.set_default_dtype(torch.float32)
        yield


def train(data: PathLike | None = None, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Train or fine-tune a classifier, as ``frugalvit train`` does.

    ``["run"]`` is the run folder, ``["top1"]`` the accuracy; ``fv.load(result["run"])`` loads the model.
    Options are those of ``frugalvit train --help``; see :func:`run`.
    """
    return run("train", data, quiet=quiet, **options)


def pretrain(data: PathLike | None = None, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Learn features without labels, as ``frugalvit pretrain`` does.

    ``["run"]`` is the run folder; pass it to :func:`train` as ``init``.
    Options are those of ``frugalvit pretrain --help``; see :func:`run`.
    """
    return run("pretrain", data, quiet=quiet, **options)


def distil(
    teacher: PathLike | None = None, data: PathLike | None = None, *, quiet: bool = False, **options: Any
) -> dict[str, Any]:
    """Learn the features of a trained network without labels, as ``frugalvit distil`` does; see :func:`run`."""
    return run("distil", teacher, data, quiet=quiet, **options)


def compare(data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Compare two or more settings over several seeds, as ``frugalvit compare`` does; see :func:`run`."""
    return run("compare", data, quiet=quiet, **options)


def evaluate(model: PathLike, data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Score a classifier on labelled images, as ``frugalvit eval`` does; see :func:`run`."""
    return run("eval", model, data, quiet=quiet, **options)


def predict(
    model: PathLike, images: PathLike | list[PathLike], *, quiet: bool = False, **options: Any
) -> dict[str, Any]:
    """Classify image files or folders, as ``frugalvit predict`` does; see :func:`run`."""
    return run("predict", model, images, quiet=quiet, **options)


def probe_knn(model: PathLike, data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Score frozen features by k-NN, as ``frugalvit probe knn`` does; see :func:`run`."""
    return run("probe knn", model, data, quiet=quiet, **options)


def probe_linear(model: PathLike, data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Score frozen features by a linear classifier, as ``frugalvit probe linear`` does; see :func:`run`."""
    return run("probe linear", model, data, quiet=quiet, **options)


def probe_logistic(model: PathLike, data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Score frozen features by logistic regression, as ``frugalvit probe logistic`` does; see :func:`run`."""
    return run("probe logistic", model, data, quiet=quiet, **options)


def probe_suite(model: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Score frozen features on many datasets, as ``frugalvit probe suite`` does; see :func:`run`."""
    return run("probe suite", model, quiet=quiet, **options)


def embed(model: PathLike, data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Write features of images, find neighbours and copies, as ``frugalvit embed`` does; see :func:`run`."""
    return run("embed", model, data, quiet=quiet, **options)


def export(model: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Export a model to timm, the hub, ONNX or torch.export, as ``frugalvit export`` does; see :func:`run`."""
    return run("export", model, quiet=quiet, **options)


def report(*runs: PathLike, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Write one page about one or several runs, as ``frugalvit report`` does; see :func:`run`."""
    return run("report", *runs, quiet=quiet, **options)


def look_correspond(model: PathLike, *images: PathLike, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Draw which regions of two views match, as ``frugalvit look correspond`` does; see :func:`run`."""
    return run("look correspond", model, *images, quiet=quiet, **options)


def look_attend(model: PathLike, image: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Draw what the last block attends to, as ``frugalvit look attend`` does; see :func:`run`."""
    return run("look attend", model, image, quiet=quiet, **options)


def advise(data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Propose commands for a dataset, as ``frugalvit advise`` does; see :func:`run`."""
    return run("advise", data, quiet=quiet, **options)


def detect_train(data: PathLike | None = None, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Train a detector, as ``frugalvit detect train`` does; see :func:`run`."""
    return run("detect train", data, quiet=quiet, **options)


def detect_evaluate(model: PathLike, data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Score a detector by COCO AP, as ``frugalvit detect eval`` does; see :func:`run`."""
    return run("detect eval", model, data, quiet=quiet, **options)


def detect_predict(
    model: PathLike, images: PathLike | list[PathLike], *, quiet: bool = False, **options: Any
) -> dict[str, Any]:
    """Find objects in images, as ``frugalvit detect predict`` does; see :func:`run`."""
    return run("detect predict", model, images, quiet=quiet, **options)


def segment_train(data: PathLike | None = None, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Train a segmenter, as ``frugalvit segment train`` does; see :func:`run`."""
    return run("segment train", data, quiet=quiet, **options)


def segment_evaluate(model: PathLike, data: PathLike, *, quiet: bool = False, **options: Any) -> dict[str, Any]:
    """Score a segmenter by mIoU, as ``frugalvit segment eval`` does; see :func:`run`."""
    return run("segment eval", model, data, quiet=quiet, **options)


def segment_predict(
    model: PathLike, images: PathLike | list[PathLike], *, quiet: bool = False, **options: Any
) -> dict[str, Any]:
    """Predict a class for every pixel, as ``frugalvit segment predict`` does; see :func:`run`."""
    return run("segment predict", model, images, quiet=quiet, **options)


def _command(name: str) -> Callable[..., dict[str, Any]]:
    """Return the function of a command that takes its arguments in the order of the command line."""

    def function(*arguments: Any, quiet: bool = False, **options: Any) -> dict[str, Any]:
        return run(name, *arguments, quiet=quiet, **options)

    function.__name__ = function.__qualname__ = name.replace(" ", "_")
    function.__doc__ = f"As ``frugalvit {name}``; see ``frugalvit {name} --help`` and :func:`run`."
    return function


data, data_pack = _command("data"), _command("data pack")
look_explore = _command("look explore")
pretrain_compare, detect_compare, segment_compare = map(
    _command, ("pretrain compare", "detect compare", "segment compare")
)
demo, bench, bench_step, reproduce = map(_command, ("demo", "bench", "bench step", "reproduce"))
doctor, replay, serve = _command("doctor"), _command("replay"), _command("serve")
list_datasets, list_recipes = _command("list datasets"), _command("list recipes")


def _values(model: type[Config], arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Map the arguments and options of a call to nested option values."""
    values: dict[str, Any] = {}
    remaining = [argument for argument in arguments if argument is not None]  # a resumed run needs no data
    for name, field in flat_fields(model).items():
        if not option_extras(field).get("positional") or not remaining:
            continue
        if typing.get_origin(field.annotation) is list and not isinstance(remaining[0], list):
            values[name], remaining = remaining, []  # a list takes all remaining arguments
        else:
            values[name] = remaining.pop(0)
    if remaining:
        raise UserError(f"{remaining[0]!r} is one argument too many: pass options by name.")
    for name, value in options.items():
        if name in values:
            raise UserError(f"'{name}' is passed twice.")
        nested: dict[str, Any] = {}
        set_dotted(nested, name, value)
        values = merge(values, nested)
    return values
