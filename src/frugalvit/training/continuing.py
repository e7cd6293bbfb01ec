"""Going on from another run: its heads and centres, or everything it had, with a new objective on top.

EsViT §2.2: "load a checkpoint trained by L_V only, and add L_R for continual pre-training". The released code loses
the optimiser's state on that way without saying so; here it is carried over by the names of the parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim import AdamW

from frugalvit import console
from frugalvit.backbones.weights import read_heads
from frugalvit.errors import UserError
from frugalvit.training.runs import Run, find_run, read_state
from frugalvit.training.selfsupervised import PretrainTask


def carry_over(where: str, task: PretrainTask, steps: int) -> dict[str, Any]:
    """The last checkpoint of another run as the first of this one: weights, teacher, centres, optimiser, position.

    A level the other run did not have keeps its fresh head (the teacher's equal to the student's) and a zero centre.
    """
    state = Run(find_run(where), writer=False).load_checkpoint()
    if state is None:
        raise UserError(f"{where} has no checkpoint to continue from.")
    if state["step"] >= steps:
        raise UserError(
            f"{where} has come to step {state['step']:,} and this run would end at {steps:,}: its length counts from "
            "the very beginning, so give more --epochs or --steps."
        )
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
    state["optimizer"] = _renumbered(state["optimizer"], AdamW(task.parameter_groups()).state_dict())
    state["task"] = task.state_dict()
    state["best"], state["best_step"], state["window"] = float("-inf"), -1, {}
    fresh = sorted({name.split(".")[0] for name in report.missing_keys})
    console.say(f"going on from {where} at step {state['step']}" + (f"; new: {', '.join(fresh)}" if fresh else ""))
    return state


def _renumbered(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The moments of ``old`` under the numbers its parameters have in ``new``; new parameters start without any."""
    number_of = {name: number for group in old["param_groups"] for name, number in _numbered(group)}
    moments = {
        number: old["state"][number_of[name]]
        for group in new["param_groups"]
        for name, number in _numbered(group)
        if number_of.get(name) in old["state"]
    }
    return {"state": moments, "param_groups": new["param_groups"]}


def _numbered(group: dict[str, Any]) -> list[tuple[str, int]]:
    return list(zip(group["param_names"], group["params"], strict=True))


def start_from_heads(task: PretrainTask, where: str) -> None:
    """Take heads and centres too, where ``--init`` has them: released EsViT and DINO files, runs of ours."""
    path = Path(where)
    if path.is_dir():
        checkpoint = path / "checkpoints" / "last.pt"
        if not checkpoint.exists():
            return
        state, fault = read_state(checkpoint)
        if state is None:
            raise UserError(f"{checkpoint} is damaged ({fault}); give --init {path}/model for the backbone alone.")
        ours = {name: value for name, value in state["task"].items() if name.startswith(("views.", "regions."))}
        fitting = {n: v for n, v in ours.items() if n in task.state_dict() and task.state_dict()[n].shape == v.shape}
        task.load_state_dict(fitting, strict=False)
        console.say(f"{len(fitting)} tensors of heads and centres taken from {checkpoint}")
    elif path.is_file():
        heads = read_heads(path)
        for level, tensors, center in (
            (task.views, heads.view, heads.view_center),
            (task.regions, heads.region, heads.region_center),
        ):
            if level is None or not tensors:
                continue
            ours = {name: value.shape for name, value in level.student.state_dict().items()}
            theirs = {name: value.shape for name, value in tensors.items()}
            if ours != theirs:
                prototypes, bottleneck = theirs["last_layer.weight_v"]
                raise UserError(
                    f"{path} has heads of another size: give --matching.prototypes {prototypes} --matching.bottleneck "
                    f"{bottleneck} --matching.hidden {theirs['mlp.0.weight'][0]} and the backbone they belong to."
                )
            level.student.load_state_dict(tensors)
            level.teacher.load_state_dict(tensors)
            if center is not None:
                level.center.copy_(center.view_as(level.center))
        console.say(f"heads and centres taken from {path}")
