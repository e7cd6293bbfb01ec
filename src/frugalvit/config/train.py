"""Options that all training commands share (``RunConfig``), and those of train, predict and serve."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import pydantic

from frugalvit.config.base import Config, flatten, merge, option, set_dotted, with_file
from frugalvit.config.data import AugmentConfig, CacheConfig, MixingConfig
from frugalvit.config.recipes import recipe_values
from frugalvit.config.semi_supervised import SemiConfig
from frugalvit.config.types import (
    CLASSIFIER,
    COVERAGE,
    DATA,
    LABEL_PART,
    MIRROR,
    MODEL,
    OBJECTIVES,
    PRECISION,
    PUBLISHED,
    ROOT,
    TARGET,
    VAL_FRACTION,
    Auto,
    Count,
    Device,
    Factor,
    LabelPart,
    Objectives,
    Positive,
    Precision,
    Rate,
    Seed,
    Several,
    Side,
    Splitting,
    Strength,
    TargetKind,
    Whole,
    split_commas,
)
from frugalvit.config.yaml import read_yaml, read_yaml_text
from frugalvit.errors import UserError
from frugalvit.runs import layout  # file names; it imports only utils
from frugalvit.utils.files import expand_home, read_json

R = TypeVar("R", bound="RunConfig")


class OptimizerConfig(Config):
    """AdamW or Muon, and the learning-rate schedule."""

    weight_decay: float = option(0.05, "weight decay of matrices, not of biases, norms and position tables", ge=0)
    betas: Annotated[tuple[Rate, Rate], pydantic.BeforeValidator(split_commas)] = option((0.9, 0.999), "AdamW's betas")
    warmup: float = option(20.0, "warm-up in epochs, at most a fifth of the run", ge=0)
    cosine_from_start: bool = option(False, "start the cosine at the first step instead of after the warm-up")
    min_lr: float = option(0.005, "final learning rate as a share of the highest", ge=0, le=1)
    clip: float = option(5.0, "gradient norm limit; 0 for none", ge=0)
    clip_per: Literal["global", "tensor"] = option("global", "clip by one norm over all gradients, or by tensor")
    muon: bool | Auto = option(False, "orthogonal steps for matrices (Muon); auto: from random weights on a CPU")
    layer_decay: Factor | Auto = option(1.0, "learning-rate factor from each block to the one before it; auto: 0.75")


_RESERVED_KWARGS = {
    "name": "use --backbone",
    "img_size": "use --img-size",
    "num_classes": "the data sets it",
    "pretrained": "use --pretrained or --init",
}
"""Network arguments that --backbone-args refuses, and what sets them instead."""


class RunConfig(Config):
    """Data, hardware, length and output of a training command."""

    data: str | None = option(None, DATA, positional=True)
    recipe: str = option("auto", "a named set of values; see 'frugalvit list recipes'")
    backbone: str = option("auto", "a name of 'frugalvit list models' or any timm model")
    backbone_args: dict[str, Any] = option({}, "more arguments of the model, e.g. '{window_size: 8}'")
    stem: Literal["patch", "conv"] = option("patch", "conv: convolutions in place of the network's patches")
    img_size: Side | Auto | tuple[Side, Side] = option("auto", "input size in pixels, or height,width")
    epochs: Positive | Auto = option("auto", "passes over the training images")
    steps: int | None = option(None, "length in optimizer steps instead of epochs", ge=1)
    batch: Count | Auto = option("auto", "images per step, over all devices")
    accumulate: int = option(1, "split each step's batch into this many parts", ge=1)
    lr: Positive | Auto = option("auto", "highest learning rate; auto scales with the batch")
    seed: Seed = option(0, "seed of all random numbers; a val split made from train always uses 0")
    out: str | None = option(None, "run folder (default: runs/DATE_BACKBONE_DATA, runs/DATE_COMMAND_DATA)", short="-o")
    init: str | None = option(None, "start from the weights of a run, a checkpoint, an exported folder or NAME.TAG")
    resume: str | None = option(None, "resume this run (DATA only if it has moved); auto: that in --out, or start it")
    device: Device = option("auto", "device to compute on")
    devices: int = option(1, "processes per machine, one per device", ge=1)
    nodes: int = option(1, "machines", ge=1)
    strategy: Literal["ddp", "fsdp"] = option("ddp", "fsdp: ranks share weights, gradients and moments (train)")
    peer_timeout: float = option(300.0, "seconds to wait for another rank in a step before the run fails", gt=0)
    auto_batch: bool = option(False, "on a GPU, raise --accumulate until a step fits into memory")
    precision: Precision = option("auto", PRECISION)
    compile: bool | Literal["auto", "graphs"] = option("auto", "torch.compile; graphs: CUDA graphs; auto: by length")
    deterministic: bool = option(False, "equal bits in every run on one GPU for every network, not only Swins; slower")
    checkpoint_activations: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    workers: Whole | Auto = option("auto", "threads or processes that decode images")
    split: Splitting = option("auto", "auto: make a missing val; given: never; train+val: train on both")
    stream: bool | Auto = option("auto", "stream shards without storing them; auto: if remote or over a terabyte")
    root: str | None = option(None, ROOT)
    classes: str | None = option(None, "file with the classes to use, one name per line")
    val_fraction: float = option(0.1, VAL_FRACTION, gt=0, lt=1)
    log_every: int = option(10, "steps between two lines of metrics", ge=1)
    save_every: int = option(0, "steps between two checkpoints; 0: by epochs and minutes", ge=0)
    track: list[Literal["wandb", "mlflow", "trackio"]] = option([], "log to these services, besides TensorBoard files")
    plugin: list[str] = option(default_factory=list, help="Python files or modules to import first; their code runs")
    report: bool = option(True, "write report.html at the end")
    optimizer: OptimizerConfig = option(default_factory=OptimizerConfig)
    cache: CacheConfig = option(default_factory=CacheConfig)

    recipe_task: ClassVar[str] = "train"
    _requested: dict[str, Any] = pydantic.PrivateAttr(default_factory=dict)

    @pydantic.model_validator(mode="after")
    def _set_stem(self) -> Self:
        if self.stem != "patch":
            self.backbone_args["stem"] = self.stem
        return self

    @pydantic.field_validator("backbone_args")
    @classmethod
    def _check_backbone_args(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Read texts as YAML: these arguments have no types, and flags pass ``window_size=4`` as text."""
        arguments = {name: read_yaml_text(text) if isinstance(text, str) else text for name, text in value.items()}
        for name, hint in _RESERVED_KWARGS.items():
            if name in arguments:
                raise ValueError(f"'{name}' cannot be set here: {hint}")
        if arguments.get("in_chans", 3) not in (1, 3) and "pixel_type" not in arguments:
            raise ValueError("in_chans must be 3, or 1 for grey images")
        return arguments

    @pydantic.field_validator("img_size", mode="before")
    @classmethod
    def _split_img_size(cls, value: Any) -> Any:
        """Split ``40,56``, as the settings of a comparison write it; a single number stays unchanged."""
        return split_commas(value) if isinstance(value, str) and "," in value else value

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validate the values on top of those of their recipe."""
        name = values.get("recipe", "auto")
        if name == "auto":
            name = cls.default_recipe(values)
        recipe = recipe_values(str(name), cls.recipe_task)
        try:
            config = super().parse(merge(recipe, values | {"recipe": name}))
        except UserError as error:
            if not Path(str(name)).is_file():
                raise
            from_recipe = {option: value for option, value in flatten(recipe).items() if option not in flatten(values)}
            raise UserError(with_file(str(error), str(name), from_recipe)) from None
        config._requested = values
        return config

    @classmethod
    def from_run(cls, path: str | Path) -> Self:
        return cls.from_stored(read_yaml(path))

    @classmethod
    def from_stored(cls, values: dict[str, Any]) -> Self:
        """Return the stored options of a run. They are complete, so the recipe is not read again."""
        config = super().parse(values)
        config._requested = values
        return config

    def with_options(self, options: Mapping[str, Any], kind: type[R]) -> R:
        """Return a copy of class ``kind`` with these options (dotted names); ``requested`` does not change."""
        values = self.model_dump()
        for name, value in options.items():
            set_dotted(values, name, value)
        config = super(RunConfig, kind).parse(values)
        config._requested = self._requested
        return config

    def requested(self, name: str, default: Any) -> Any:
        """Return the value that the user set for a top-level option, or ``default``."""
        return self._requested.get(name, default)

    def is_set(self, name: str) -> bool:
        """True if the user set the option with this dotted name."""
        return any(f"{other}.".startswith(f"{name}.") for other in flatten(self._requested))

    def set_options(self) -> set[str]:
        """Return the dotted names of all options that the user set, directly or by naming a recipe."""
        if not self._requested:
            return set(flatten(self.model_dump(exclude_unset=True)))
        recipe = str(self._requested.get("recipe", "auto"))
        from_recipe = {} if recipe == "auto" else recipe_values(recipe, self.recipe_task)
        return {*flatten(self._requested), *flatten(from_recipe)}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _resolve_auto_resume(cls, values: Any) -> Any:
        """Resolve ``--resume auto``, for queues that repeat a command; before any rank writes, so that all agree."""
        if not isinstance(values, dict) or values.get("resume") != "auto":
            return values
        if not values.get("out"):
            raise ValueError("--resume auto needs --out: it resumes the run in that folder, or starts it")
        out = expand_home(values["out"])
        return values | {"resume": str(out) if layout.contains_run(out) else None}

    @pydantic.model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        sources = [flag for flag, value in self.weight_sources().items() if value]
        if len(sources) > 1:
            raise ValueError(f"{' and '.join(sources)} both set the initial weights; drop one of them")
        if isinstance(self.batch, int) and self.accumulate > self.batch:
            raise ValueError(f"--accumulate {self.accumulate} is larger than --batch {self.batch}")
        kind = self.recipe_task
        blocked = {f"'{kind}'": kind != "train", "--auto-batch": self.auto_batch}
        blocked |= {"--precision fp16": self.precision == "fp16", "--compile": self.compile not in ("auto", False)}
        blocked |= {"--optimizer.muon": getattr(self.optimizer, "muon", False) is True}
        if self.strategy == "fsdp" and any(blocked.values()):
            what = next(flag for flag, is_set in blocked.items() if is_set)
            raise ValueError(f"--strategy fsdp does not work with {what}; use --strategy ddp")
        return self

    def weight_sources(self) -> dict[str, object]:
        """Return every flag that sets the initial weights, with its value."""
        return {"--init": self.init}

    def has_unused_layers(self) -> bool:
        """True if no loss uses the pooled features: the layers that make them then get no gradients."""
        return False

    @classmethod
    def default_recipes(cls) -> dict[str, dict[str, Any]]:
        """Return the default recipe first, then the one for published weights if it differs."""
        names = dict.fromkeys(cls.default_recipe(values) for values in ({}, {"pretrained": True}))
        return {name: recipe_values(name, cls.recipe_task) for name in names}

    @classmethod
    def default_recipe(cls, values: dict[str, Any]) -> str:
        """Use finetune for published weights; our own pre-training scores higher with scratch (RESULTS.md)."""
        init = values.get("init")
        has_init = isinstance(init, str | os.PathLike) and bool(init)  # another type fails validation later
        return (
            "finetune" if values.get("pretrained") or (has_init and not _is_own_pretraining(str(init))) else "scratch"
        )


FREE_ON_RESUME = (
    *("device", "devices", "nodes", "peer_timeout", "workers", "cache.location", "cache.folder", "cache.max_bad"),
    *("strategy", "log_every", "save_every", "track", "report", "plugin"),
)
"""Options that do not affect the scores: they may change when a run or a comparison is resumed."""


_PATH_OPTIONS = ("data", "teacher", "unlabelled", "init", "continue_from", "recipe", "classes", "root")


def same_value(name: str, one: Any, other: Any) -> bool:
    """True if two values of an option are equal; paths are equal if they lead to the same file."""
    are_paths = all(isinstance(value, str) and not _URL.match(value) for value in (one, other))
    if name in _PATH_OPTIONS and are_paths:
        return os.path.realpath(one) == os.path.realpath(other)
    return one == other


_URL = re.compile(r"\w{2,}:")  # "hf:…", "https://…"; a single letter is a Windows drive


def _is_own_pretraining(init: str) -> bool:
    """True if the weights come from ``frugalvit pretrain``, judged by the config file nearest to the path."""
    path = expand_home(init).resolve()
    for folder in (path, *path.parents[:2]):
        try:
            if (folder / layout.CONFIG).is_file():
                return "matching" in read_yaml(folder / layout.CONFIG)
            exported = (read_json(folder / "config.json", dict) or {}).get("frugalvit")
        except UserError:  # another program's file
            return False
        if isinstance(exported, dict) and isinstance(exported.get("meta"), dict):
            return exported["meta"].get("task") == "pretrain"
    return False


class DrlocConfig(Config):
    """Drloc, the dense relative localization loss."""

    weight: Strength = option(0.0, "λ, the weight of the loss; 0 turns it off")
    variant: Literal["l1", "signed", "ce", "reg"] = option("l1", "Eq. 2, Eq. 3, Eq. 5 or Eq. 6 of the paper")
    form: Literal["paper", "released"] = option("paper", "targets divided by k as in the paper, or as in its code")
    pairs: Count | Literal["all"] = option(64, "m, token pairs drawn per image; all: every ordered pair")
    hidden: Count | Auto = option("auto", "width of the head; auto: the paper's 512, less for small models")
    grid_size: Several | None = option(7, "pool a finer grid to this many cells a side; none: no pooling")
    signed: bool = option(False, "with form released and ce or reg: 2k - 1 classes of signed offsets, not k")

    def head_width(self, dim: int) -> int:
        """Return the paper's 512 for its backbones (384 and wider), else the backbone's width."""
        return (512 if dim >= 384 else dim) if self.hidden == "auto" else self.hidden

    @pydantic.model_validator(mode="after")
    def _check_signed(self) -> Self:
        if self.signed and (self.form != "released" or self.variant not in ("ce", "reg")):
            raise ValueError("signed needs form released and variant ce or reg; elsewhere the variant decides")
        return self


class LocalizationConfig(DrlocConfig):
    """Drloc in supervised training."""

    weight: Strength | Literal["auto", "paper"] = option(  # type: ignore[assignment]
        "auto", "λ, the weight of the loss; 0: off; paper: its λ for the family; auto: paper where it helped"
    )
    variant: Literal["auto", "l1", "signed", "ce", "reg", "dense"] = option(  # type: ignore[assignment]
        "auto", "Eq. 2, 3, 5 or 6, or Eq. 7 (dense: all blocks); auto: Eq. 5 for large Swins from scratch, else Eq. 2"
    )
    grid_size: Several | Auto | None = option(  # type: ignore[assignment]
        "auto", "pool a finer grid to this many cells a side; none: no pooling; auto: 7, or none for dense"
    )
    schedule: Literal["constant", "ramp"] = option("constant", "λ constant (paper), or a rise and fall (released code)")
    images: Literal["mixed", "clean"] = option("mixed", "images after mixup and cutmix, or before (a second forward)")
    lr_scale: float = option(1.0, "learning rate of the head relative to the backbone's", gt=0)
    grid: Literal["normed", "raw"] = option("normed", "tokens after or before the final norm (dense: before)")


class GuideConfig(Config):
    """A trained network whose token grid guides the first part of the run."""

    model: str | None = option(None, f"learn the token grid of this network too, at first: {MODEL}", short="--guide")
    weight: float = option(1.0, "weight of the term at the start; it falls linearly to 0", gt=0, needs="model")
    until: float = option(0.5, "share of the run after which the term is 0", gt=0, le=1, needs="model")


class LabelledRunConfig(RunConfig):
    """What classification, detection and segmentation share: published weights, and weights chosen on val."""

    pretrained: bool = option(False, PUBLISHED)
    weights: Literal["auto", "best", "last"] = option(
        "auto", "weights to export; best: those with the best val score; auto: best if there is a test split, else last"
    )

    def weight_sources(self) -> dict[str, object]:
        return super().weight_sources() | {"--pretrained": self.pretrained}


class TrainConfig(LabelledRunConfig):
    """Supervised training: cross-entropy + λ · Drloc."""

    labels: LabelPart = option(1.0, LABEL_PART)
    unlabelled: str | None = option(
        None, "images without labels to learn from too: a folder, table or shards; rest: those of DATA without a label"
    )
    target: TargetKind = option("auto", TARGET)
    balance: bool = option(False, "draw classes equally often")
    logit_adjustment: Strength | Auto = option(
        "auto", "τ: the loss adds τ·log(share of the class) to the logits; auto: 1 if classes differ 20 times, else 0"
    )
    freeze: Whole | Auto = option(0, "freeze the embedding and the first N blocks; auto: half of them on a CPU, else 0")
    lora: Whole = option(0, "train only a change of this rank of each matrix (LoRA), and the classifier; 0: everything")
    classifier: Literal["auto", "random", "logistic"] = option(
        "auto",
        "first classifier; logistic: fitted on frozen features; auto: logistic for trained weights without a "
        "classifier of these classes, if the recipe is finetune or with --unlabelled",
    )
    drop_path: Rate | Literal["auto", "paper"] = option(
        "auto", "stochastic depth; auto: the model's own; paper: its authors' (0.2 for Swin, 0.1 for T2T)"
    )
    stretch: float = option(1.0, "use the schedules of a run this many times as long, and stop early", ge=1)
    ema: Rate | Auto = option("auto", "EMA rate of the weights that are evaluated and exported; 0: no EMA")
    evaluate_every: Count | Auto = option("auto", "steps between evaluations; auto: an epoch, more if they take long")
    rescue: bool = option(True, "go back to good weights with a lower rate if the network collapses; twice at most")
    objectives: Objectives = option(default_factory=dict, help=OBJECTIVES)
    localization: LocalizationConfig = option(default_factory=LocalizationConfig)
    guide: GuideConfig = option(default_factory=GuideConfig)
    augment: AugmentConfig = option(default_factory=AugmentConfig)
    mixing: MixingConfig = option(default_factory=MixingConfig)
    semi: SemiConfig = option(default_factory=SemiConfig)

    @pydantic.model_validator(mode="after")
    def _check_unlabelled(self) -> Self:
        """Reject options that have no effect without --unlabelled, and those that do not work together."""
        if self.balance and self.logit_adjustment not in ("auto", 0):
            raise ValueError("--logit-adjustment has no effect with --balance, which draws classes equally often")
        if self.unlabelled is None:
            for name in self.semi.changed_options():
                raise ValueError(f"--semi.{name.replace('_', '-')} has no effect without --unlabelled")
            return self
        if self.guide.model is not None:
            raise ValueError("--guide does not work with --unlabelled; drop one of them")
        if self.ema == 0:
            raise ValueError("--ema 0 does not work with --unlabelled: the EMA weights make the pseudo-labels")
        if self.localization.images == "clean" or self.localization.variant == "dense":
            option = "images clean" if self.localization.images == "clean" else "variant dense"
            raise ValueError(f"--localization.{option} cannot be used with --unlabelled. Remove one of them")
        return self


class PredictConfig(Config):
    """Classify images with the preprocessing and class names of the training."""

    model: str = option(help=CLASSIFIER, positional=True)
    images: list[str] = option(help="image files, folders or tables", positional=True)
    top: int = option(5, "number of classes to print", ge=1)
    format: Literal["table", "csv"] = option("table", "output format; or use --json")
    batch: int = option(64, "images per batch", ge=1)
    mirror: bool = option(False, MIRROR)
    coverage: float | None = option(None, COVERAGE)
    device: Device = option("auto", "device to compute on")


class ServeConfig(Config):
    """Answer photos on a web page, and as JSON at /predict."""

    model: str = option(help=CLASSIFIER, positional=True)
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 lets other machines in, without a password")
    port: int = option(8000, "port to listen on; 0: a free one", ge=0, le=65535)
    coverage: float = option(0.9, COVERAGE)
    device: Device = option("auto", "device to compute on")
