"""Every command from Python: options as keywords, the result of ``--json`` as a dictionary.

result = fv.train("photos/", epochs=50, localization={"weight": 1.0})
fv.probe_knn(result["run"], "photos/")["top1"]
"""

import contextlib
import inspect
import math
import multiprocessing
import os
import sys
import threading
import typing
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

from frugalvit.cli.commands import COMMANDS
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
        command, arguments: its name ("train", "probe knn" …) and the positional arguments of the command line.
        quiet: no progress and no messages on standard error, except warnings.
        options: as on the command line, with underscores for dashes (``img_size=64``) and dictionaries for groups
            (``localization={"weight": 1.0}``). ``--continue`` is ``continue_from``.
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
        console.info_once.cache_clear()
        model = row.load_config()
        config: Any = model.parse(_values(model, arguments, options))
        if row.distributed and config.devices > 1 and launch_env.needs_launch():
            from frugalvit.cli import subprocess_run

            return subprocess_run.run_in_subprocess(row.name, config, quiet=quiet)
        function = row.load_function()  # imports torch first, so that its settings can be restored
        with _preserve_environment(), _preserve_torch():
            data = function(config).data
            if row.distributed and math.prod(launch_env.devices_and_nodes(config.devices, config.nodes)) > 1:
                from frugalvit.engine.distributed import barrier

                barrier()  # the program continues on every rank and may read what rank 0 writes
            return data


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
    """Run a command in torch's default modes, and restore torch's random state and settings after it.

    A mode that is already the default is not entered: each mode slows every call of torch a little.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        yield
        return
    from frugalvit.engine import hardware  # imports torch

    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(torch.backends.cuda.enable_cudnn_sdp, torch.backends.cuda.cudnn_sdp_enabled())
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        rng, onednn = torch.random.fork_rng(devices), hardware.preserve_onednn()
        for mode in (rng, onednn, torch.inference_mode(False), torch.enable_grad()):
            stack.enter_context(mode)
        for device in ("cpu", "cuda", "mps"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        yield


Result = dict[str, Any]
P = ParamSpec("P")


# The arguments of the functions below.
def _any(*arguments: Any, quiet: bool = False, **options: Any) -> Result: ...
def _data(data: PathLike, *, quiet: bool = False, **options: Any) -> Result: ...
def _new_run(data: PathLike | None = None, *, quiet: bool = False, **options: Any) -> Result: ...
def _model(model: PathLike, *, quiet: bool = False, **options: Any) -> Result: ...
def _model_data(model: PathLike, data: PathLike, *, quiet: bool = False, **options: Any) -> Result: ...
def _model_images(
    model: PathLike, images: PathLike | list[PathLike], *, quiet: bool = False, **options: Any
) -> Result: ...
def _model_image(model: PathLike, image: PathLike, *, quiet: bool = False, **options: Any) -> Result: ...
def _model_views(model: PathLike, *images: PathLike, quiet: bool = False, **options: Any) -> Result: ...
def _runs(*runs: PathLike, quiet: bool = False, **options: Any) -> Result: ...
def _distil(
    teacher: PathLike | None = None, data: PathLike | None = None, *, quiet: bool = False, **options: Any
) -> Result: ...


def _command(name: str, arguments: Callable[P, Result] = _any) -> Callable[P, Result]:
    """Return the function of a command, with the signature of ``arguments``; other options are those of its help."""
    signature = inspect.signature(arguments)

    def function(*words: P.args, **options: P.kwargs) -> Result:
        bound = signature.bind(*words, **options)
        return run(name, *bound.args, **bound.kwargs)

    about = next(command.help for command in COMMANDS if command.name == name)
    function.__doc__ = f"{about[0].upper()}{about[1:]}, as ``frugalvit {name}`` does; see :func:`run`."
    function.__name__ = function.__qualname__ = name.replace(" ", "_")
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


train = _command("train", _new_run)
pretrain = _command("pretrain", _new_run)
distil = _command("distil", _distil)
compare = _command("compare", _data)
evaluate = _command("eval", _model_data)
predict = _command("predict", _model_images)
probe_knn = _command("probe knn", _model_data)
probe_linear = _command("probe linear", _model_data)
probe_logistic = _command("probe logistic", _model_data)
probe_suite = _command("probe suite", _model)
embed = _command("embed", _model_data)
export = _command("export", _model)
report = _command("report", _runs)
look_correspond = _command("look correspond", _model_views)
look_attend = _command("look attend", _model_image)
advise = _command("advise", _data)
detect_train = _command("detect train", _new_run)
detect_evaluate = _command("detect eval", _model_data)
detect_predict = _command("detect predict", _model_images)
segment_train = _command("segment train", _new_run)
segment_evaluate = _command("segment eval", _model_data)
segment_predict = _command("segment predict", _model_images)
data, data_pack, look_explore = map(_command, ("data", "data pack", "look explore"))
pretrain_compare, doctor, serve = map(_command, ("pretrain compare", "doctor", "serve"))
detect_compare, segment_compare = map(_command, ("detect compare", "segment compare"))
demo, bench, bench_step, reproduce = map(_command, ("demo", "bench", "bench step", "reproduce"))
list_datasets, list_recipes = map(_command, ("list datasets", "list recipes"))


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
