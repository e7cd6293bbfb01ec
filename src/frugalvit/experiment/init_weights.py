"""--init: architecture and weights of a run, an exported folder or a checkpoint file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.registry import get_architecture
from frugalvit.backbones.weights.model_config import find_model_folder, weights_in
from frugalvit.backbones.weights.model_folder import load_model_folder
from frugalvit.config.run import RunConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.errors import UserError
from frugalvit.experiment.auto_values import AutoValues
from frugalvit.experiment.resume import command_of, find_command
from frugalvit.runs import layout
from frugalvit.runs.checkpoint import read_state
from frugalvit.runs.run_folder import read_data_facts
from frugalvit.utils import console

C = TypeVar("C", bound=RunConfig)


def adopt_init_architecture(config: C, auto: AutoValues, *, with_size: bool = True) -> C:
    """Take the architecture from the folder of --init, for what the user left open.

    with_size: the input size too
    """
    if not config.init or config.resume:
        return config
    folder = find_model_folder(config.init)
    if folder is None and not is_unfinished_run(config.init):
        return config
    try:
        network = build_run_network(config.init) if folder is None else load_model_folder(folder)[0]
    except UserError:
        if config.backbone == "auto":
            raise
        return config  # not our folder, and the user names the network: loading shows whether the weights fit
    backbone = auto.choose("backbone", config.backbone, network.name, f"the network of {config.init}")
    keywords = {key: network.keywords[key] for key in ("mean", "std") if key in network.keywords}
    wanted, stored = (get_architecture(name).partition(".")[0] for name in (backbone, network.name))
    if wanted == stored:
        keywords = network.architecture_kwargs() | ({} if network.in_chans == 3 else {"in_chans": network.in_chans})
        if with_size:
            auto.choose("img_size", config.img_size, network.img_size, f"the input size of {config.init}")
    keywords |= config.backbone_args
    if keywords.get("in_chans", 3) != network.in_chans:  # mean and std are per channel
        keywords = {key: value for key, value in keywords.items() if key not in ("mean", "std")} | config.backbone_args
    return auto.apply(config.with_options({"backbone_args": keywords}, type(config)), type(config))


class InitWeights(NamedTuple):
    """The weights that a run would export now."""

    source: Path | Mapping[str, Any]
    """The checkpoint file, or the backbone's tensors if a detector or segmenter contains the backbone."""

    note: str
    classes: list[str] | None
    """The class names of its classifier; None without a classifier."""


def is_unfinished_run(path: str | Path) -> bool:
    """Return whether the path is the folder of a run that has not written its model yet."""
    folder = Path(path)
    return layout.is_started(folder) and find_model_folder(folder) is None and weights_in(folder) == folder


def build_run_network(run: str | Path) -> Backbone:
    """Build the network of a run from its configuration, with random weights."""
    values = read_yaml(Path(run) / layout.CONFIG)
    size = values["img_size"]
    if find_command(values) not in ("train", "pretrain"):  # detection and segmentation store the short side
        size = size if isinstance(size, int) else min(size)
    size = tuple(size) if isinstance(size, list) else size
    keywords = values["backbone_args"] | read_data_facts(run).get("network", {})
    return create_backbone(values["backbone"], img_size=size, **keywords)


def best_run_weights(run: str | Path) -> InitWeights:
    """Return the weights that an unfinished run would export now: the best, else the last.

    Pre-training exports the last teacher, whatever its score.
    """
    folder, command = Path(run), command_of(Path(run))
    names = (layout.LAST, layout.PREVIOUS) if command == "pretrain" else layout.CHECKPOINT_FILES
    for name in names:
        path = folder / layout.CHECKPOINTS / name
        if not path.exists():
            continue
        state, fault = read_state(path)
        if state is None:
            console.warning(f"{path} is damaged ({fault})")
            continue
        note = f"{folder} is not finished: using checkpoints/{name} of step {state['step']:,}"
        classes = read_data_facts(folder).get("classes") if command == "train" else None
        return InitWeights(_backbone_in(state["task"]) or path, note, classes)
    raise UserError(f"{folder} has no checkpoint yet. Drop --init, or wait for its first checkpoint.")


def backbone_weights(checkpoint: Path) -> Path | Mapping[str, Any]:
    """Return what ``load_weights`` takes from a checkpoint of a run."""
    state, fault = read_state(checkpoint)
    if state is None:
        raise UserError(f"{checkpoint} is damaged ({fault}). Pass another checkpoint of the run, or the run itself.")
    return _backbone_in(state["task"]) or checkpoint


def _backbone_in(task: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the backbone's tensors inside a detector or segmenter; None for other tasks."""
    tensors = {name.partition("pyramid.backbone.")[2]: tensor for name, tensor in task.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if name}
    return {"task": tensors} if tensors else None
