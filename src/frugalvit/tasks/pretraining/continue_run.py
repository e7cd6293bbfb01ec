"""--continue: a new run with the weights, optimizer and options of another run, and new objectives.

EsViT §2.2: "load a checkpoint trained by L_V only, and add L_R for continual pre-training". The released code silently
loses the optimizer's state there; here the state is mapped by the names of the parameters.
"""

from operator import attrgetter
from pathlib import Path
from typing import Any

from torch.optim import AdamW

from frugalvit.backbones.weights.load import read_heads
from frugalvit.config.base import flat_fields
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.yaml import read_yaml
from frugalvit.engine.param_groups import remap_optimizer_state
from frugalvit.engine.step import total_steps
from frugalvit.errors import UserError
from frugalvit.experiment.resolve import AutoValue, AutoValues
from frugalvit.runs import layout
from frugalvit.runs.resume import check_command
from frugalvit.runs.run_folder import RunFolder, read_data_facts, read_summary
from frugalvit.tasks.pretraining.task import PretrainingTask
from frugalvit.utils import console
from frugalvit.utils.text import short_message

_NEVER_INHERITED = (
    *("data", "out", "init", "resume", "continue_from", "steps", "epochs", "backbone_args"),
    *("device", "devices", "nodes", "peer_timeout", "precision", "compile", "workers", "stream"),
    *("track", "report", "plugin"),
)
"""Start, length and machine belong to each run."""

_READING = ("images", "labels", "split", "val_fraction", "classes", "root")


class ContinuedRun:
    """The run that --continue names: its options and facts, read once."""

    def __init__(self, path: str) -> None:
        self.path, self.folder = path, layout.find_run(path)
        values = read_yaml(self.folder / layout.CONFIG)
        check_command(self.folder, values, PretrainConfig, "--continue takes runs of 'frugalvit pretrain'")
        self.config = PretrainConfig.from_stored(values)
        self.facts = read_data_facts(self.folder)

    def inherit_options(self, config: PretrainConfig, auto: AutoValues) -> PretrainConfig:
        """Return the options; inherit those not set. The length counts from the source run's first step."""
        source, set_options, reason = self.config, config.set_options(), f"inherited from {self.path}"
        inherited: dict[str, Any] = {}
        for name in self._inheritable(config):
            ours, value = attrgetter(name)(config), attrgetter(name)(source)
            if value not in ("auto", ours) and (ours == "auto" or name not in set_options):
                inherited[name] = value
        if config.data is None:
            inherited["data"] = source.data
        keywords = source.backbone_args | config.backbone_args
        if inherited.get("backbone", config.backbone) == source.backbone and keywords != config.backbone_args:
            inherited["backbone_args"] = keywords
        auto += [AutoValue(name, value, reason) for name, value in inherited.items()]
        if not set_options & {"steps", "epochs"}:
            resolved: Any = source  # because it is stored
            steps = source.steps or total_steps(None, resolved.epochs, self.facts["images"], resolved.batch)
            auto.append(AutoValue("steps", 2 * steps, f"twice the length of {self.path}"))
        config = auto.apply(config, PretrainConfig)
        done = (read_summary(self.folder) or {}).get("steps")
        if done is not None and config.steps is not None:  # before a folder is created
            _check_longer(self.path, done, config.steps)
        return config

    def describe_changes(self, config: PretrainConfig) -> str:
        """Return the options that differ from the source run, in one line; empty without any."""
        names = (*self._inheritable(config), "steps", "epochs")
        pairs = ((name, attrgetter(name)(config), attrgetter(name)(self.config)) for name in names)
        changes = [f"{name} {ours} (there {value})" for name, ours, value in pairs if ours != value]
        return f"unlike {self.path}: {', '.join(changes)}" if changes else ""

    def _inheritable(self, config: PretrainConfig) -> list[str]:
        """Return the names of the options to inherit; those for reading data only if the data is the same."""
        same_data = config.data is None or Path(config.data).resolve() == Path(str(self.config.data)).resolve()
        excluded = {*_NEVER_INHERITED, *(() if same_data else _READING)}
        return [name for name in flat_fields(PretrainConfig) if name not in excluded and not name.startswith("cache.")]

    def network_keywords(self, config: PretrainConfig) -> dict[str, Any]:
        """Return the keywords that the source run's network was built with, if the network is the same."""
        if (config.backbone, config.img_size) != (self.config.backbone, self.config.img_size):
            return {}
        return self.facts.get("network", {}) | config.backbone_args


def import_checkpoint(path: str, task: PretrainingTask, steps: int) -> dict[str, Any]:
    """Return another run's last checkpoint as this run's first. A new level keeps its head and a zero center."""
    state = RunFolder(layout.find_run(path), writer=False).load_checkpoint()
    if state is None:
        raise UserError(f"{path} has no checkpoint to continue from.")
    _check_longer(path, state["step"], steps)
    for name, tensor in task.state_dict().items():
        other = state["task"].get(name)
        if other is not None and other.shape != tensor.shape:
            raise UserError(
                f"{path} has another shape ({name}: {tuple(other.shape)} there, {tuple(tensor.shape)} here). Use its "
                "--backbone and --img-size, and its --matching.prototypes, hidden and bottleneck."
            )
    report = task.load_state_dict(state["task"], strict=False)
    foreign = [name for name in report.missing_keys if not name.startswith(_OPTIONAL_PARTS)]
    if foreign:
        raise UserError(f"{path} has another backbone ({foreign[0]} is missing). Use the same one.")
    state["optimizer"] = remap_optimizer_state(state["optimizer"], AdamW(task.parameter_groups()).state_dict())
    state["task"] = task.state_dict()
    state["best"], state["best_step"], state["window"] = float("-inf"), -1, {}
    new = sorted({name.split(".")[0] for name in report.missing_keys})
    console.info(f"continuing {path} at step {state['step']}" + (f"; new: {', '.join(new)}" if new else ""))
    return state


_OPTIONAL_PARTS = ("regions.", "views.", "localization.", "objectives.")


def _check_longer(path: str, done: int, steps: int) -> None:
    if done >= steps:
        raise UserError(
            f"{path} is at step {done:,} and this run would end at {steps:,}. The length counts from the first step of "
            "that run: raise --epochs or --steps."
        )


def start_from_heads(task: PretrainingTask, path: str) -> None:
    """Load heads and centers from --init, if it has them: released EsViT and DINO files, and runs."""
    source = Path(path)
    if source.is_file():
        loaded = _load_file_heads(task, source)
    else:
        state = RunFolder(source, writer=False).load_checkpoint() if layout.has_checkpoint(source) else None
        theirs, ours = {} if state is None else state["task"], task.state_dict()
        names = [name for name in theirs if name.startswith(("views.", "regions.")) and name in ours]
        fitting = {name: theirs[name] for name in names if theirs[name].shape == ours[name].shape}
        task.load_state_dict(fitting, strict=False)
        loaded = f"{len(fitting)} of {len(names)} tensors" if fitting else ""
    console.info(f"heads of {source}: {loaded + ' loaded' if loaded else 'none fit, they start from scratch'}")


def _load_file_heads(task: PretrainingTask, path: Path) -> str:
    """Load the heads of a released file; return the names of the levels."""
    heads, loaded = read_heads(path), []
    for name, level, tensors, center in (
        ("view level", task.views, heads.view, heads.view_center),
        ("region level", task.regions, heads.region, heads.region_center),
    ):
        if level is None or not tensors:
            continue
        try:
            level.student.load_state_dict(tensors)
            level.teacher.load_state_dict(tensors)
            if center is not None:
                level.center.copy_(center.view_as(level.center))
        except RuntimeError as error:
            raise UserError(
                f"{path} has other projection heads. Set its --matching.prototypes, --matching.bottleneck and "
                f"--matching.hidden, or export its backbone with 'frugalvit export' ({short_message(error)})."
            ) from None
        loaded.append(name)
    return ", ".join(loaded)
