"""Going on from another run: its heads and centres, or everything it had, with a new objective on top.

EsViT §2.2: "load a checkpoint trained by L_V only, and add L_R for continual pre-training". The released code loses
the optimiser's state on that way without saying so; here it is carried over by the names of the parameters.
"""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

from torch.optim import AdamW

from frugalvit.backbones.weights.load import read_heads
from frugalvit.config.base import flat_fields, set_dotted
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.engine.param_groups import remap_optimizer_state
from frugalvit.engine.step import total_steps
from frugalvit.errors import UserError
from frugalvit.experiment.auto_values import AutoValue, AutoValues
from frugalvit.experiment.resume import read_facts
from frugalvit.runs.run_folder import RunFolder, find_run, has_checkpoint, read_summary
from frugalvit.tasks.pretraining.task import PretrainingTask
from frugalvit.utils import console

_LEVELS = {"views": "view level", "regions": "region level"}
_ITS_OWN = (
    *("data", "out", "init", "resume", "continue_from", "steps", "epochs", "backbone_args"),
    *("device", "devices", "nodes", "peer_timeout", "precision", "compile", "workers", "stream", "track", "report"),
)
"""What a run has of its own, whatever it continues: its beginning and end, and where it runs."""

_READING = ("images", "labels", "split", "val_fraction", "classes", "root")


def inherit_options(config: PretrainConfig, decisions: AutoValues) -> PretrainConfig:
    """The run that is continued brings along whatever was not asked for; its length is that of both together."""
    if not config.continue_from or config.resume:
        return config
    folder = find_run(config.continue_from)
    theirs = PretrainConfig.from_run(folder / "config.yaml")
    asked, values, reason = config.set_options(), config.model_dump(), f"what {config.continue_from} has"
    for name in _inherited(config, theirs):
        ours, value = attrgetter(name)(config), attrgetter(name)(theirs)
        if value not in ("auto", ours) and (ours == "auto" or name not in asked):
            set_dotted(values, name, value)
            decisions.append(AutoValue(name, value, reason))
    if config.data is None:
        values["data"] = theirs.data
        decisions.append(AutoValue("data", theirs.data, reason))
    arguments = theirs.backbone_args | config.backbone_args
    if values["backbone"] == theirs.backbone and arguments != config.backbone_args:
        values["backbone_args"] = arguments
        decisions.append(AutoValue("backbone_args", arguments, reason))
    if not asked & {"steps", "epochs"}:
        planned = _planned(theirs, folder)
        values["steps"] = 2 * planned
        decisions.append(AutoValue("steps", 2 * planned, f"as many again as {config.continue_from} was to take"))
    done = (read_summary(folder) or {}).get("steps")
    if done is not None and values["steps"] is not None:  # known before there is a folder
        _check_longer(config.continue_from, done, values["steps"])
    return config.with_values(values)


def describe_changes(config: PretrainConfig) -> str:
    """In one line, what a run does otherwise than the one it continues; empty where it does nothing otherwise."""
    theirs = PretrainConfig.from_run(find_run(str(config.continue_from)) / "config.yaml")
    differing = [
        f"{name} {ours} (there {value})"
        for name in (*_inherited(config, theirs), "steps", "epochs")
        if (ours := attrgetter(name)(config)) != (value := attrgetter(name)(theirs))
    ]
    return f"unlike {config.continue_from}: {', '.join(differing)}" if differing else ""


def _inherited(config: PretrainConfig, theirs: PretrainConfig) -> list[str]:
    """Options that are the same in both runs unless asked for; how data are read, only of the same data."""
    same_data = config.data is None or Path(config.data).resolve() == Path(str(theirs.data)).resolve()
    own = {*_ITS_OWN, *(() if same_data else _READING)}
    return [name for name in flat_fields(PretrainConfig) if name not in own and not name.startswith("cache.")]


def _planned(theirs: PretrainConfig, folder: Path) -> int:
    """The steps that a run was to take."""
    images = read_facts(folder).get("images")
    if theirs.steps is None and (not images or "auto" in (theirs.epochs, theirs.batch)):
        raise UserError(f"{folder} does not say how long it was to be: give --steps or --epochs.")
    return total_steps(theirs, images or 0)


def import_checkpoint(where: str, task: PretrainingTask, steps: int) -> dict[str, Any]:
    """The last checkpoint of another run as the first of this one: weights, teacher, centres, optimiser, position.

    A level the other run did not have keeps its fresh head (the teacher's equal to the student's) and a zero centre.
    """
    state = RunFolder(find_run(where), writer=False).load_checkpoint()
    if state is None:
        raise UserError(f"{where} has no checkpoint to continue from.")
    _check_longer(where, state["step"], steps)
    for name, tensor in task.state_dict().items():
        other = state["task"].get(name)
        if other is not None and other.shape != tensor.shape:
            raise UserError(
                f"{where} has another shape ({name}: {tuple(other.shape)} there, {tuple(tensor.shape)} here): continue "
                "with its --backbone and --img-size, and its --matching.prototypes, hidden and bottleneck."
            )
    report = task.load_state_dict(state["task"], strict=False)
    foreign = [name for name in report.missing_keys if not name.startswith(("regions.", "views.", "localization."))]
    if foreign:
        raise UserError(
            f"{where} was trained with another backbone ({foreign[0]} is missing); continue with the same one."
        )
    state["optimizer"] = remap_optimizer_state(state["optimizer"], AdamW(task.parameter_groups()).state_dict())
    state["task"] = task.state_dict()
    state["best"], state["best_step"], state["window"] = float("-inf"), -1, {}
    fresh = sorted({name.split(".")[0] for name in report.missing_keys})
    console.info(f"going on from {where} at step {state['step']}" + (f"; new: {', '.join(fresh)}" if fresh else ""))
    return state


def _check_longer(where: str, done: int, steps: int) -> None:
    if done >= steps:
        raise UserError(
            f"{where} has come to step {done:,} and this run would end at {steps:,}: its length counts from the very "
            "beginning, so give more --epochs or --steps."
        )


def start_from_heads(task: PretrainingTask, where: str) -> None:
    """Take heads and centres too, where ``--init`` has them: released EsViT and DINO files, runs of ours."""
    path = Path(where)
    if path.is_file():
        _heads_of_file(task, path)
        return
    state = RunFolder(path, writer=False).load_checkpoint() if has_checkpoint(path) else None
    if state is None:
        console.info(f"{path} has no checkpoint with projection heads: they begin anew")
    else:
        _heads_of_run(task, state, path)


def _heads_of_run(task: PretrainingTask, state: dict[str, Any], run: Path) -> None:
    theirs = {name: value for name, value in state["task"].items() if name.startswith(("views.", "regions."))}
    ours = task.state_dict()
    fitting = {name: value for name, value in theirs.items() if name in ours and ours[name].shape == value.shape}
    task.load_state_dict(fitting, strict=False)
    others = sum(name in ours and name not in fitting for name in theirs)
    said = f"{len(fitting)} tensors of heads and centres taken from {run} at step {state['step']}" if fitting else ""
    levels = [word for name, word in _LEVELS.items() if any(tensor.startswith(f"{name}.") for tensor in fitting)]
    console.info(
        (f"{said} ({' and '.join(levels)})" if fitting else f"{run} has no heads for this run: they begin anew")
        + (f"; {others} are of another size and begin anew" if others else "")
    )


def _heads_of_file(task: PretrainingTask, path: Path) -> None:
    heads = read_heads(path)
    taken = []
    for name, level, tensors, center in (
        ("views", task.views, heads.view, heads.view_center),
        ("regions", task.regions, heads.region, heads.region_center),
    ):
        if level is None or not tensors:
            continue
        _check_head(path, level.student.state_dict(), tensors)
        if center is not None and center.numel() != level.center.numel():
            raise UserError(
                f"{path} has a centre of {center.numel():,} numbers beside heads of {level.center.numel():,} "
                "prototypes: the file is not whole; take it from its source again."
            )
        level.student.load_state_dict(tensors)
        level.teacher.load_state_dict(tensors)
        if center is not None:
            level.center.copy_(center.view_as(level.center))
        taken.append(f"{_LEVELS[name]}{'' if center is None else ' with its centre'}")
    if taken:
        console.info(f"heads taken from {path}: {', '.join(taken)}")
    else:
        console.info(f"{path} has no projection heads for this run: they begin anew")


def _check_head(path: Path, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Refuse a head of another kind by name, and one of another size with the options that make ours alike."""
    shapes = {name: tuple(value.shape) for name, value in theirs.items()}
    if shapes == {name: tuple(value.shape) for name, value in ours.items()}:
        return
    other = sorted(ours.keys() ^ shapes.keys()) + [
        name for name in ours if len(shapes.get(name, ())) != ours[name].ndim
    ]
    if other:
        raise UserError(
            f"{path} has projection heads of another kind ({other[0]} is not as in ours): to begin from its backbone "
            f"alone, make a folder of that first with 'frugalvit export {console.shell_quote(path)} --backbone NAME'."
        )
    prototypes, bottleneck = shapes["last_layer.weight_v"]
    raise UserError(
        f"{path} has heads of another size: give --matching.prototypes {prototypes} --matching.bottleneck "
        f"{bottleneck} --matching.hidden {shapes['mlp.0.weight'][0]} and the backbone they belong to."
    )
