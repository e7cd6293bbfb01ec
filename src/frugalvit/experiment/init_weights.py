"""A run that was stopped has checkpoints, but no model yet: what ``--init`` takes from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.weights.model_config import find_model_folder, weights_in
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.experiment.resume import read_facts, verb_of
from frugalvit.runs.run_folder import read_state
from frugalvit.utils import console


class Weights(NamedTuple):
    """What a checkpoint holds of the network that would have been exported."""

    source: Path | Mapping[str, Any]
    """The file, or the backbone's tensors where a detector or segmenter is around it."""

    words: str
    classes: list[str] | None
    """The names of the classes its classifier tells apart; None where it has none."""


def is_unfinished_run(where: str | Path) -> bool:
    """Whether a place is the folder of a run that has not written its model yet."""
    path = Path(where)
    begun = all((path / name).is_file() for name in ("config.yaml", "data.json"))
    return begun and find_model_folder(path) is None and weights_in(path) == path


def build_run_network(run: str | Path) -> Backbone:
    """The network that a run trains, as its configuration says, with random weights."""
    values = read_yaml(Path(run) / "config.yaml")
    size = values["img_size"]
    if verb_of(Path(run)) not in ("train", "pretrain"):  # there it is a short side, or both sides of what is shown
        size = size if isinstance(size, int) else min(size)
    size = tuple(size) if isinstance(size, list) else size
    keywords = values["backbone_args"] | read_facts(run).get("network", {})
    return create_backbone(values["backbone"], img_size=size, **keywords)


def best_run_weights(run: str | Path) -> Weights:
    """The weights that the run would hand out if it ended now: the best by its score, or else the last.

    Label-free runs hand out the last teacher, whatever its score.
    """
    folder, verb = Path(run), verb_of(Path(run))
    for name in ("last.pt", "previous.pt") if verb == "pretrain" else ("best.pt", "last.pt", "previous.pt"):
        path = folder / "checkpoints" / name
        if not path.exists():
            continue
        state, fault = read_state(path)
        if state is None:
            console.warning(f"{path} is damaged ({fault})")
            continue
        words = f"{folder} is not finished: the weights of its checkpoints/{name}, step {state['step']:,}, are taken"
        classes = read_facts(folder).get("classes") if verb == "train" else None
        return Weights(_backbone_in(state["task"]) or path, words, classes)
    raise UserError(f"{folder} has saved no weights yet to start from: leave out --init, or wait for its checkpoint.")


def backbone_weights(checkpoint: Path) -> Path | Mapping[str, Any]:
    """What ``load_weights`` takes from one of a run's checkpoints."""
    state, fault = read_state(checkpoint)
    if state is None:
        raise UserError(f"{checkpoint} is damaged ({fault}): take another of its run's checkpoints, or the run itself.")
    return _backbone_in(state["task"]) or checkpoint


def _backbone_in(task: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The backbone's tensors where a detector or segmenter is built around it."""
    parted = {name.partition("pyramid.backbone.")[2]: tensor for name, tensor in task.items()}
    found = {name: tensor for name, tensor in parted.items() if name}
    return {"task": found} if found else None
