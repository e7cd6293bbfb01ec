"""What every training command can be told, whatever it trains."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic

from frugalvit.config.base import (
    Config,
    check_max_side,
    flatten,
    merge,
    option,
    positive,
    read_yaml,
    read_yaml_text,
    set_dotted,
    split_commas,
    with_file,
)
from frugalvit.config.data import CacheConfig
from frugalvit.config.recipes import is_file, recipe_values
from frugalvit.config.types import ROOT, Auto, Device, Precision, Rate, Seed, Splitting, Whole
from frugalvit.errors import UserError
from frugalvit.runs import layout  # file names; it imports only utils
from frugalvit.utils.files import read_json

R = TypeVar("R", bound="RunConfig")


class OptimizerConfig(Config):
    """AdamW and its schedules."""

    weight_decay: float = option(0.05, "weight decay of matrices (not of biases, norms and position tables)", ge=0)
    betas: Annotated[tuple[Rate, Rate], pydantic.BeforeValidator(split_commas)] = option(
        (0.9, 0.999), "AdamW's averaging rates"
    )
    warmup: float = option(20.0, "warm-up in epochs, at most a fifth of the run", ge=0)
    whole_cosine: bool = option(False, "the learning rate's cosine begins at the first step, under the warm-up")
    min_lr: float = option(0.005, "the last learning rate as a share of the highest", ge=0, le=1)
    clip: float = option(5.0, "gradient norm limit; 0 for none", ge=0)
    clip_per: Literal["global", "tensor"] = option("global", "one norm over all gradients, or one per tensor")
    layer_decay: float = option(1.0, "learning rate factor from each block to the one before it", gt=0, le=1)


_NO_KEYWORDS = {"name": "use --backbone", "img_size": "use --img-size", "num_classes": "the data say it"}
"""What every network is made with that is no keyword of the model, and where it comes from."""


class RunConfig(Config):
    """What every training command shares: data, hardware, length, and where results go."""

    data: str | None = option(None, "folder, CSV/JSONL, dataset name, hf:…, or WebDataset shards", positional=True)
    recipe: str = option("auto", "a named set of values; see 'frugalvit list recipes'")
    backbone: str = option("auto", "a name of 'frugalvit list models' or any timm model")
    backbone_args: dict[str, Any] = option(
        default_factory=dict, help="further keywords of the model, e.g. '{window_size: 8}'"
    )
    img_size: int | Auto | tuple[int, int] = option("auto", "input size in pixels, or height,width")
    epochs: float | Auto = option("auto", "passes over the training images")
    steps: int | None = option(None, "length in optimiser steps instead of epochs", ge=1)
    batch: int | Auto = option("auto", "images a step, over all devices")
    accumulate: int = option(1, "split each step's batch into this many parts", ge=1)
    lr: float | Auto = option("auto", "highest learning rate; auto scales with the batch")
    seed: Seed = option(0, "everything random follows from it but a made val, which is always the same")
    out: str | None = option(None, "run folder (default: runs/DATE_BACKBONE_DATA, or DATE_COMMAND_DATA)", short="-o")
    init: str | None = option(None, "start from these weights: a run, a checkpoint, an exported folder")
    resume: str | None = option(
        None,
        "continue this run to its end, to the bit; DATA only if it lies elsewhere now; auto: continue the run in --out "
        "if there is one, else begin it",
    )
    device: Device = option("auto", "where to compute")
    devices: int = option(1, "processes on this machine, one per device", ge=1)
    nodes: int = option(1, "machines", ge=1)
    peer_timeout: float = option(300.0, "seconds a process waits for another in a step, then gives the run up", gt=0)
    auto_batch: bool = option(
        False, "before a run on a GPU: split the batch (accumulate) until a step fits into its memory"
    )
    precision: Precision = option("auto", "auto: bf16 where the hardware has it")
    compile: bool | Literal["auto", "graphs"] = option(
        "auto",
        "torch.compile; auto: on a GPU, for runs long enough to gain from it, supervised Swins of ours (not timm's) "
        "with graphs; graphs: replay as CUDA graphs, faster for small batches and images on one GPU, with more memory",
    )
    checkpoint_activations: bool = option(False, "recompute activations in the backward pass: less memory, more time")
    workers: Whole | Auto = option("auto", "threads or processes that decode images")
    split: Splitting = option(
        "auto", "auto makes a missing val from train; given: none is made; train+val trains on both; remake splits anew"
    )
    stream: bool | Auto = option(
        "auto",
        "read shards in passing, not kept; auto: where they lie elsewhere or are larger than a terabyte; "
        "false fetches and keeps them",
    )
    root: str | None = option(None, ROOT)
    classes: str | None = option(None, "a file with the names of the classes to keep, one a line (ImageNet-100's list)")
    val_fraction: float = option(0.1, "share of train held out where there is no validation split", gt=0, lt=1)
    log_every: int = option(10, "steps between two lines of metrics", ge=1)
    save_every: int = option(0, "steps between two checkpoints; 0: by epochs and minutes", ge=0)
    track: list[Literal["wandb", "mlflow", "trackio"]] = option(
        default_factory=list, help="log to these services too (TensorBoard files are always written)"
    )
    report: bool = option(True, "write report.html at the end")
    optimizer: OptimizerConfig = option(default_factory=OptimizerConfig)
    cache: CacheConfig = option(default_factory=CacheConfig)

    _positive = pydantic.field_validator("epochs", "batch", "lr", "img_size")(positive)
    _pixels = pydantic.field_validator("img_size")(check_max_side)
    _given: dict[str, Any] = pydantic.PrivateAttr(default_factory=dict)

    @pydantic.field_validator("backbone_args")
    @classmethod
    def _as_yaml(cls, value: dict[str, Any]) -> dict[str, Any]:
        """A model's keyword has no type here: the 4 of ``backbone_args.window_size=4`` came as text."""
        keywords = {name: read_yaml_text(given) if isinstance(given, str) else given for name, given in value.items()}
        for name, way in _NO_KEYWORDS.items():
            if name in keywords:
                raise ValueError(f"'{name}' is not for these: {way}")
        if keywords.get("in_chans", 3) not in (1, 3):
            raise ValueError("images have 3 channels, or 1 in grey: leave in_chans out, or give 1")
        return keywords

    @pydantic.field_validator("img_size", mode="before")
    @classmethod
    def _height_and_width(cls, value: Any) -> Any:
        """Both in one word, as in the settings of a comparison; one number stays one."""
        return split_commas(value) if isinstance(value, str) and "," in value else value

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """The values over those of their recipe."""
        name = values.get("recipe", "auto")
        if name == "auto":
            name = cls.default_recipe(values)
        usual = recipe_values(str(name), cls.recipe_task())
        try:
            made = super().parse(merge(usual, values | {"recipe": name}))
        except UserError as error:
            if not is_file(str(name)):
                raise
            own = {option: value for option, value in flatten(usual).items() if option not in flatten(values)}
            raise UserError(with_file(str(error), str(name), own)) from None
        made._given = values
        return made

    @classmethod
    def from_run(cls, path: str | Path) -> Self:
        """Read the config.yaml of a run."""
        return cls.from_stored(read_yaml(path))

    @classmethod
    def from_stored(cls, values: dict[str, Any]) -> Self:
        """Return the stored options of a run. They are complete: the recipe, which may be gone, is not read."""
        made = super().parse(values)
        made._given = values
        return made

    def with_options(self, options: Mapping[str, Any], kind: type[R]) -> R:
        """Return a copy of class ``kind`` with these options (by dotted name); the record of set options stays."""
        values = self.model_dump()
        for name, value in options.items():
            set_dotted(values, name, value)
        made = super(RunConfig, kind).parse(values)
        made._given = self._given
        return made

    def requested(self, name: str, default: Any) -> Any:
        """What an option, by its plain name, was asked to be; ``default`` where it was not."""
        return self._given.get(name, default)

    def is_set(self, name: str) -> bool:
        """Whether an option, by its dotted name, was asked for, and not left to defaults and recipes."""
        values: Any = self._given
        for part in name.split("."):
            if not isinstance(values, dict) or part not in values:
                return False
            values = values[part]
        return True

    def set_options(self) -> set[str]:
        """The dotted names of all that was asked for: itself, or with a recipe that was; in Python, by being set."""
        if not self._given:
            return set(flatten(self.model_dump(exclude_unset=True)))
        recipe = str(self._given.get("recipe", "auto"))
        with_recipe = {} if recipe == "auto" else recipe_values(recipe, self.recipe_task())
        return {*flatten(self._given), *flatten(with_recipe)}

    @pydantic.model_validator(mode="before")
    @classmethod
    def _resolve_resume(cls, values: Any) -> Any:
        """Replace ``--resume auto`` by the folder in --out if it holds a run, else by nothing.

        This happens before any process writes, so all processes of a job see the same folder.
        """
        if not isinstance(values, dict) or values.get("resume") != "auto":
            return values
        if not values.get("out"):
            raise ValueError("--resume auto needs --out: it resumes the run in that folder, or starts it there")
        out = Path(values["out"]).expanduser()
        return values | {"resume": str(out) if layout.contains_run(out) else None}

    @pydantic.model_validator(mode="after")
    def _go_together(self) -> Self:
        """Options that contradict each other."""
        named = [flag for flag, value in self.weight_sources().items() if value]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} both say which weights to start from; leave one of them out")
        if isinstance(self.batch, int) and self.accumulate > self.batch:
            raise ValueError(
                f"a batch of {self.batch} images has no {self.accumulate} parts; lower --accumulate or raise --batch"
            )
        return self

    def weight_sources(self) -> dict[str, object]:
        """What can say which weights to start from: every such flag, and its value."""
        return {"--init": self.init}

    @classmethod
    def recipe_task(cls) -> str:
        return "train"

    @classmethod
    def default_recipes(cls) -> dict[str, dict[str, Any]]:
        """With the usual one first; published weights make it another, where a command has one for them."""
        names = dict.fromkeys(cls.default_recipe(values) for values in ({}, {"pretrained": True}))
        return {name: recipe_values(name, cls.recipe_task()) for name in names}

    @classmethod
    def default_recipe(cls, values: dict[str, Any]) -> str:
        """Published weights want to be moved gently; features learned here did better at the full rate (RESULTS.md)."""
        init = values.get("init")
        named = isinstance(init, str | os.PathLike) and bool(init)  # anything else is refused when it is checked
        return "finetune" if values.get("pretrained") or (named and not _learned_here(str(init))) else "scratch"


FREE_ON_RESUME = (
    *("device", "devices", "nodes", "peer_timeout", "workers", "cache.where", "cache.folder", "cache.max_bad"),
    *("log_every", "save_every", "track", "report"),
)
"""Options that no score follows from, by their dotted names: a run, or a comparison, may go on with others."""

_PLACES = ("data", "init", "continue_from", "recipe", "classes", "root")
"""Options that may say where something lies."""


def same_value(name: str, one: Any, other: Any) -> bool:
    """Whether two values of an option mean the same: ``photos/`` and the full path of ``photos`` are one place."""
    local = all(isinstance(value, str) and not _ADDRESS.match(value) for value in (one, other))
    if name in _PLACES and local:
        return os.path.realpath(one) == os.path.realpath(other)
    return one == other


_ADDRESS = re.compile(r"\w{2,}:")  # "hf:…", "https://…"; one letter is a drive


def _learned_here(where: str) -> bool:
    """Whether weights are those of a pre-training of ours, as the nearest folder with a word on it says.

    That is RUN of RUN, RUN/model and RUN/checkpoints/last.pt; an exported folder, of it and of its file.
    """
    place = Path(where).expanduser().resolve()
    for folder in (place, *place.parents[:2]):
        try:
            if (folder / layout.CONFIG).is_file():
                return "matching" in read_yaml(folder / layout.CONFIG)
            ours = (read_json(folder / "config.json", dict) or {}).get("frugalvit")
        except UserError:  # somebody else's file of that name
            return False
        if isinstance(ours, dict) and isinstance(ours.get("meta"), dict):
            return ours["meta"].get("task") == "pretrain"
    return False
