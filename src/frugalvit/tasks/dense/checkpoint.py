"""Save and load trained detectors and segmenters (transfer.safetensors and transfer.json)."""

import json
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensor_bytes

from frugalvit import __version__
from frugalvit.backbones import Backbone, create_backbone
from frugalvit.errors import UserError
from frugalvit.runs import layout
from frugalvit.tasks.dense.task import DenseTask
from frugalvit.utils.files import read_json, write_atomically, write_text

WEIGHTS, FACTS = layout.DENSE_WEIGHTS, layout.DENSE_FACTS


def save_trained(folder: Path, task: DenseTask, facts: dict[str, Any]) -> None:
    """Save the weights, and the facts needed to build the network and to name its classes."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in task.net.state_dict().items()}
    # One key only: the library writes several in random order, and equal runs should write equal files.
    content = tensor_bytes(tensors, metadata={"frugalvit": __version__})
    write_atomically(folder / WEIGHTS, lambda handle: handle.write(content))
    backbone = task.backbone
    described = {
        "version": __version__,
        "backbone": backbone.spec(),
        "mean": backbone.mean,
        "std": backbone.std,
        **facts,
    }
    write_text(folder / FACTS, json.dumps(described, indent=1, ensure_ascii=False))


def read_facts(where: str, kind: str) -> dict[str, Any]:
    """Read transfer.json of a trained ``kind`` ("detect" or "segment")."""
    folder = Path(where)
    facts = read_json(folder / FACTS, dict)
    if facts is None:
        if (folder / layout.CONFIG).is_file():
            name = {"detect": "detector", "segment": "segmenter"}[kind]
            raise UserError(f"{folder} has no trained {name} yet. Finish the run of 'frugalvit {kind} train' first.")
        raise UserError(f"There is no run at {folder}. Use the folder that 'frugalvit {kind} train' printed.")
    if facts.get("kind") != kind:
        raise UserError(f"{folder} is a run of 'frugalvit {facts.get('kind')}', not of '{kind}'.")
    return facts


def rebuild_backbone(facts: dict[str, Any]) -> Backbone:
    spec = facts["backbone"]
    size = spec["img_size"]
    return create_backbone(
        spec["name"],
        img_size=tuple(size) if isinstance(size, list) else size,
        num_classes=spec["num_classes"],
        in_chans=spec["in_chans"],
        **spec["keywords"] | {"mean": facts["mean"], "std": facts["std"]},
    )


def load_weights(task: DenseTask, where: str) -> None:
    """Load the weights of a trained run into an equal network."""
    path = Path(where) / WEIGHTS
    try:
        tensors = load_tensors(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({' '.join(str(error).split())[:100]}).") from None
    task.net.load_state_dict(tensors)
