"""Save and load trained detectors and segmenters (transfer.safetensors and transfer.json)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import safetensors
from lightning_fabric import Fabric
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes

from frugalvit import __version__
from frugalvit.backbones import Backbone
from frugalvit.backbones.factory import from_spec
from frugalvit.engine.hardware import numbered_device
from frugalvit.errors import UserError
from frugalvit.runs import layout
from frugalvit.tasks.dense.task import DenseTask
from frugalvit.utils.files import open_regular, read_json, write_atomically, write_text
from frugalvit.utils.text import short_message

WEIGHTS, FACTS = layout.DENSE_WEIGHTS, layout.DENSE_FACTS
T = TypeVar("T", bound=DenseTask)


def save_trained(folder: Path, task: DenseTask, facts: dict[str, Any]) -> None:
    """Save the weights, and the facts needed to build the network and to name its classes."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in task.net.state_dict().items()}
    # One key only: the library writes several in random order, and equal runs should write equal files.
    content = tensor_bytes(tensors, metadata={"frugalvit": __version__})
    write_atomically(folder / WEIGHTS, lambda handle: handle.write(content))
    backbone = task.backbone
    network = {"version": __version__, "backbone": backbone.spec(), "mean": backbone.mean, "std": backbone.std}
    write_text(folder / FACTS, json.dumps(network | facts, indent=1, ensure_ascii=False))


def load_trained(
    where: str, kind: str, build: Callable[[Backbone, dict[str, Any]], T], device: str, batch: int
) -> tuple[T, dict[str, Any]]:
    """Load a trained ``kind`` ("detect", "segment") into the task that ``build`` makes; return task and facts."""
    facts = read_facts(where, kind)
    backbone = from_spec(facts["backbone"], mean=facts["mean"], std=facts["std"], pretrained=False)
    task = build(backbone, facts)
    path = Path(where) / WEIGHTS
    try:
        with open_regular(path) as file:
            tensors = load_tensors(file.read())
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({short_message(error)}).") from None
    task.net.load_state_dict(tensors)
    task.fabric, task.eval_batch = single_device_fabric(device), batch
    return task.to(task.fabric.device).eval(), facts


def read_facts(where: str, kind: str) -> dict[str, Any]:
    folder = Path(where)
    facts = read_json(folder / FACTS, dict)
    if facts is None:
        raise UserError(f"{folder} is not a finished run of 'frugalvit {kind} train'.")
    if facts.get("kind") != kind:
        raise UserError(f"{folder} is a run of 'frugalvit {facts.get('kind')}', not of '{kind}'.")
    return facts


def single_device_fabric(device: str) -> Fabric:
    kind, number = numbered_device(device)
    return Fabric(accelerator=kind, devices=[number] if kind == "cuda" else 1, precision="32-true")
