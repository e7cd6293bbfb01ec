"""Resolve "auto": replace it by a value that depends on the data, the backbone or the machine, and record why.

``defaults.py`` holds the rules and their numbers. ``resolve_…`` applies the rules of a command and returns a frozen
configuration without "auto". ``dense_auto_values.py``: detection and segmentation.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from frugalvit.config.data import SMALL_INPUT
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.resolved import ResolvedPretrainConfig, ResolvedTrainConfig
from frugalvit.config.run import RunConfig
from frugalvit.config.train import TrainConfig
from frugalvit.config.types import Auto
from frugalvit.data.augmentation.transforms import as_pair, default_crop
from frugalvit.data.image_size import input_size, largest_input
from frugalvit.engine.step import equal_parts, in_equal_parts, steps_per_epoch, total_steps
from frugalvit.errors import UserError
from frugalvit.experiment import defaults
from frugalvit.experiment.defaults import Facts
from frugalvit.utils.launch_env import devices_and_nodes
from frugalvit.utils.text import pluralize

C = TypeVar("C", bound=RunConfig)
T = TypeVar("T")

PAIR = 2  # images mixed with each other: both must be on the same process


@dataclass(frozen=True)
class AutoValue:
    """One value that "auto" chose, and the reason."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


class AutoValues(list[AutoValue]):
    """The values that "auto" chose for one run, in the order of the rules."""

    def choose(self, name: str, option: T | Auto, value: T, reason: str) -> T:
        """Return ``option`` if the user set it; else record ``value`` with its reason and return it."""
        if option != "auto":
            return option
        self.append(AutoValue(name, value, reason))
        return value

    def apply(self, config: RunConfig, kind: type[C]) -> C:
        """Return a frozen copy of class ``kind`` with all recorded values."""
        return config.with_options({value.name: value.value for value in self}, kind)


# -- the rules of the commands


def record_recipe(config: RunConfig, auto: AutoValues) -> None:
    """Record the recipe that was chosen when the options were parsed."""
    inherited = any(value.name == "recipe" for value in auto)  # from the run that --continue names
    if config.recipe != "auto" and config.requested("recipe", "auto") == "auto" and not inherited:
        reasons = {"scratch": "from random weights or our own pre-training", "finetune": "published weights"}
        auto.append(AutoValue("recipe", config.recipe, reasons.get(config.recipe, "the default")))


def resolve_input(config: C, facts: Facts, auto: AutoValues) -> C:
    """Resolve backbone and input size."""
    auto.choose("backbone", config.backbone, *defaults.default_backbone(facts.device))
    _choose_size(config, facts, auto)
    return auto.apply(config, type(config))


def _choose_size(config: RunConfig, facts: Facts, auto: AutoValues) -> int:
    """Resolve the input size; return its longer side."""
    reason = f"images are about {facts.side} px; at most {largest_input(facts.device)} px on {facts.device}"
    size = auto.choose("img_size", config.img_size, input_size(facts.side, facts.device), reason)
    return max(as_pair(size))


def resolve_training(config: TrainConfig, facts: Facts, auto: AutoValues) -> ResolvedTrainConfig:
    """Resolve what supervised training needs: batch, length, learning rate, Drloc, augmentation, EMA, evaluation."""
    side, from_scratch = _choose_size(config, facts, auto), not (config.init or config.pretrained)
    batch = resolve_batch_size(config, facts.images, defaults.supervised_batch(facts), auto, group=PAIR)
    length = _resolve_length(config, auto, *defaults.supervised_epochs(facts, batch))
    lr = defaults.supervised_lr(batch, facts.parameters, finetune=config.recipe == "finetune")
    auto.choose("lr", config.lr, *lr)
    drloc = config.localization
    weight = auto.choose("localization.weight", drloc.weight, *defaults.localization_weight(facts.family))
    if weight:
        allowed = from_scratch and drloc.form == "paper" and drloc.grid_size is not None
        choice = defaults.localization_variant(facts.family, facts.parameters, from_scratch=allowed)
        variant = auto.choose("localization.variant", drloc.variant, *choice)
        grid = (None, "the grid of every block (Eq. 7)") if variant == "dense" else (7, "the paper's")
        auto.choose("localization.grid_size", drloc.grid_size, *grid)
    steps, per_epoch = total_steps(config.steps, length, facts.images, batch), steps_per_epoch(facts.images, batch)
    epochs = steps / per_epoch
    if config.mixing.mixup or config.mixing.cutmix:
        probability = defaults.mixing_probability(epochs, _changed_options(config, _MIXING))
        auto.choose("mixing.prob", config.mixing.prob, *probability)
    operations = defaults.augment_operations(epochs, steps, facts.parameters, from_scratch=from_scratch)
    if changed := _changed_options(config, _RANDAUGMENT):
        operations = 2, f"RandAugment as in the papers, because {changed[0]} is set"
    auto.choose("augment.operations", config.augment.operations, *operations)
    crop = default_crop(side)
    reason = "shifts of the full image, because it is small" if crop == "padded" else "random crops, as in the papers"
    auto.choose("augment.crop", config.augment.crop, crop, reason)
    auto.choose("ema", config.ema, *defaults.ema_rate(steps))
    if weight:
        _resolve_head_width(config, facts, auto)
    every = defaults.evaluation_interval(steps, per_epoch, batch, facts.eval_images)
    auto.choose("evaluate_every", config.evaluate_every, every, describe_interval(every, steps, per_epoch))
    return auto.apply(config, ResolvedTrainConfig)


def resolve_pretraining(config: PretrainConfig, facts: Facts, auto: AutoValues) -> ResolvedPretrainConfig:
    """Resolve what pre-training needs: batch, length, learning rate, heads, teacher, crops."""
    matching, side = config.matching, _choose_size(config, facts, auto)
    batch = resolve_batch_size(config, facts.images, defaults.pretraining_batch(facts), auto)
    length = _resolve_length(config, auto, *defaults.pretraining_epochs(facts, side))
    auto.choose("lr", config.lr, *defaults.pretraining_lr(batch))
    steps = total_steps(config.steps, length, facts.images, batch)
    epochs = steps / steps_per_epoch(facts.images, batch)
    auto.choose("matching.prototypes", matching.prototypes, *defaults.prototype_count(facts.images))
    auto.choose("matching.momentum", matching.momentum, *defaults.teacher_momentum(steps, side))
    auto.choose("matching.teacher_temp", matching.teacher_temp, *defaults.teacher_temperature(epochs, side))
    reason = f"milder than the papers' up to {SMALL_INPUT} px" if side <= SMALL_INPUT else "the papers'"
    for name, value in config.crops.views(side)._asdict().items():
        auto.choose(f"crops.{name}", getattr(config.crops, name), value, reason)
    if config.localization.weight:
        _resolve_head_width(config, facts, auto)
    reason = f"four times the backbone's {facts.dim}, at most the paper's 2,048"
    auto.choose("matching.hidden", matching.hidden, min(2048, 4 * facts.dim), reason)
    return auto.apply(config, ResolvedPretrainConfig)


def _resolve_head_width(config: TrainConfig | PretrainConfig, facts: Facts, auto: AutoValues) -> None:
    """Resolve the width of Drloc's head: checkpoints have this shape, so a run keeps it."""
    width = config.localization.head_width(facts.dim)
    reason = f"the backbone's {facts.dim}, less than the paper's 512" if width == facts.dim else "the paper's"
    auto.choose("localization.hidden", config.localization.hidden, width, reason)


def resolve_batch_size(
    config: RunConfig, images: int, default: tuple[int, str], auto: AutoValues, *, group: int = 1
) -> int:
    """Return the batch size: the option or the default, at most the number of images, equal on all processes.

    A resumed run keeps its batch size.

    default: batch size and reason
    group:   images that must be on the same process
    """
    reasons = [default[1]] if config.batch == "auto" else []
    batch = max(default[0], config.accumulate) if config.batch == "auto" else config.batch
    if batch > images:
        if config.accumulate > images:
            raise UserError(f"--accumulate {config.accumulate} is larger than the number of images, {images}.")
        batch = images
        reasons.append("there are no more training images than that")
    world = math.prod(devices_and_nodes(config.devices, config.nodes))
    equal = in_equal_parts(batch, images, equal_parts(world, config.accumulate, group))
    if equal != batch and not config.resume:
        reasons.append(f"{world} processes and {config.accumulate} parts of a step cannot share {batch} equally")
        batch = equal
    if reasons:
        auto.append(AutoValue("batch", batch, "; ".join(reasons)))
    return batch


def _resolve_length(config: RunConfig, auto: AutoValues, epochs: int, reason: str) -> float:
    """Return the length in epochs; 0 if --steps sets it."""
    if config.steps is None:
        return auto.choose("epochs", config.epochs, epochs, reason)
    if config.epochs != "auto":
        auto.append(AutoValue("steps", config.steps, f"--steps overrides --epochs {config.epochs:g}"))
    return 0.0


def describe_interval(every: int, steps: int, per_epoch: int) -> str:
    """Return how often a run is evaluated, as text."""
    return f"{pluralize(-(-steps // every), 'evaluation')} in {pluralize(steps, 'step')}, {per_epoch:,} per epoch"


_MIXING = ("mixing.mixup", "mixing.cutmix", "mixing.switch_prob")
_RANDAUGMENT = ("augment.magnitude", "augment.magnitude_std", "augment.operation_prob")


def _changed_options(config: TrainConfig, names: Sequence[str]) -> list[str]:
    """Return the options with a value that is neither the default nor 0.

    ``config.is_set`` does not help: the runs of a comparison, and a named recipe, set all options.
    """
    default = TrainConfig()
    return [name for name in names if attrgetter(name)(config) not in (0, attrgetter(name)(default))]
