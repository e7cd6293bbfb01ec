"""The life of a command that trains: launch, open data and folder, run, and leave nothing half done."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from lightning_fabric import Fabric

from frugalvit.backbones.registry import get_architecture
from frugalvit.backbones.weights.model_config import find_model_folder
from frugalvit.backbones.weights.model_folder import load_model_folder
from frugalvit.config.train import RunConfig
from frugalvit.engine.distributed import SETUP_TIMEOUT, check_shared_filesystem, fail_on_lost_rank
from frugalvit.engine.trainer import RunInterrupted
from frugalvit.errors import UserError
from frugalvit.experiment import builders, resume
from frugalvit.experiment.auto_values import AutoValues
from frugalvit.experiment.init_weights import build_run_network, is_unfinished_run
from frugalvit.runs.layout import missing_parents, remove_empty_run
from frugalvit.runs.run_folder import RunFolder, finished_summary
from frugalvit.runs.trackers import check_trackers
from frugalvit.utils import console, launch_env
from frugalvit.utils.tables import CommandResult

C = TypeVar("C", bound=RunConfig)


@builders.stores.shared()
def run_experiment(
    config: C,
    command: str,
    open_source: Callable[[C, Fabric], Any],
    body: Callable[[C, Any, RunFolder, Fabric], CommandResult],
    shown: Callable[[dict[str, Any]], CommandResult],
) -> CommandResult:
    """Run ``body`` in a new folder, or in the one to resume; a finished run is shown, a stopped one can go on."""
    check_trackers(config.track)
    config = config.model_copy(deep=True)  # what is decided for this run is nothing that its caller has asked for
    if config.resume:
        resume.check_resume(config)
    elif config.init and not Path(config.init).exists():
        raise UserError(f"--init {config.init}: there is no such run, exported folder or checkpoint file.")
    else:
        _look_before_launch(config, command, open_source)
    fabric = builders.make_fabric(resume.load_resumed_config(config))  # in the precision that the run was begun in
    resume.check_ranks_agree(config, fabric)
    if config.resume:
        done = finished_summary(config.resume)
        if done:
            return shown(done)
    with fail_on_lost_rank(fabric, Path(config.resume) if config.resume else None, SETUP_TIMEOUT):
        source = _opened(config, command, open_source, fabric)
        label = command if config.backbone == "auto" else config.backbone.replace("/", "-")
        made = missing_parents(Path(config.out)) if config.out and not config.resume else []
        config, run = builders.open_run(config, fabric, label, source.name)
        made = [run.folder] if not config.out and not config.resume else made
    try:
        with fail_on_lost_rank(fabric, run.folder, SETUP_TIMEOUT):
            check_shared_filesystem(fabric, run.folder)
            result = body(config, source, run, fabric)
            result.asked_to_stop = run.asked_to_stop
            return result
    except RunInterrupted as stop:
        more = "".join(
            f" --{name} {count}" for name in ("devices", "nodes") if (count := getattr(config, name)) not in (1, "auto")
        )
        way = f"frugalvit {command} --resume {console.shell_quote(run.folder)}{more}"
        console.warning(f"{stop}: saved; continue with '{way}'")
        return CommandResult({"run": str(run.folder), "stopped": str(stop), "resume": way, "exit": 3})
    except UserError as error:
        run.close()
        if run.writer:
            remove_empty_run(made, error)
        raise
    finally:
        run.close()


def _opened(config: C, command: str, open_source: Callable[[C, Fabric], Any], fabric: Any) -> Any:
    try:
        return open_source(resume.load_resumed_config(config), fabric)
    except UserError as error:
        raise type(error)(f"{error}{resume.moved_data_hint(config, command)}") from None


def _look_before_launch(config: C, command: str, open_source: Callable[[C, Fabric], Any]) -> None:
    """Several processes take their time to start: data that is not there is said before, by opening it in vain."""
    data = config.data
    plain = data is not None and not any(sign in data for sign in ":*{[")  # neither an address nor a pattern
    if (
        plain
        and math.prod(launch_env.devices_and_nodes(config.devices, config.nodes)) > 1
        and not Path(str(data)).exists()
    ):
        _opened(config, command, open_source, None)


def adopt_init_architecture(config: RunConfig, decisions: AutoValues, *, with_size: bool = True) -> None:
    """Weights from a folder bring their network along: what the user left open is taken from there.

    with_size: the input size too
    """
    if not config.init or config.resume:
        return
    folder = find_model_folder(config.init)
    if folder is None and not is_unfinished_run(config.init):
        return
    try:
        found = build_run_network(config.init) if folder is None else load_model_folder(folder)[0]
    except UserError:
        if config.backbone == "auto":
            raise
        return  # somebody else's folder, whose network the user names: its weights will show whether they fit
    decisions.resolve(config, "backbone", found.name, f"what {config.init} holds")
    theirs = {key: found.keywords[key] for key in ("mean", "std") if key in found.keywords}
    asked, held = (get_architecture(name).partition(".")[0] for name in (config.backbone, found.name))
    if asked == held:
        theirs = found.architecture_kwargs() | ({} if found.in_chans == 3 else {"in_chans": found.in_chans})
        if with_size:
            decisions.resolve(config, "img_size", found.img_size, f"what {config.init} was trained at")
    wanted = theirs | config.backbone_args
    if wanted.get("in_chans", 3) != found.in_chans:  # the mean of grey pixels says nothing of three channels
        wanted = {key: value for key, value in wanted.items() if key not in ("mean", "std")} | config.backbone_args
    config.backbone_args = wanted
