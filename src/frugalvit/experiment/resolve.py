"""Replace every "auto" of a configuration once, by the rules of ``config/defaults.py``.

``resolve_dense.py`` does it for detection and segmentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar

from frugalvit.backbones import Backbone
from frugalvit.backbones.registry import describe_model
from frugalvit.backbones.weights.published import published_size, to_tag
from frugalvit.config import defaults
from frugalvit.config.data import SMALL_INPUT
from frugalvit.config.defaults import Facts
from frugalvit.config.distil import DistilConfig
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.resolved import ResolvedDistilConfig, ResolvedPretrainConfig, ResolvedTrainConfig
from frugalvit.config.train import LocalizationConfig, RunConfig, TrainConfig
from frugalvit.config.types import Auto
from frugalvit.data.augmentation.transforms import as_pair, default_crop
from frugalvit.data.image_size import input_size, largest_input
from frugalvit.engine.param_groups import count_blocks
from frugalvit.engine.step import equal_parts, in_equal_parts, steps_per_epoch, total_steps
from frugalvit.errors import UserError
from frugalvit.utils.launch_env import devices_and_nodes
from frugalvit.utils.tables import as_text
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

    def summarize(self) -> list[str]:
        """Return all values in a few lines: the report and decisions.json have the reasons."""
        cells = [f"{value.name} {as_text(value.value)}" for value in self]
        width = max(map(len, cells), default=0) + 3
        columns = max(1, 100 // width)
        rows = [cells[start : start + columns] for start in range(0, len(cells), columns)]
        rows = ["".join(cell.ljust(width) for cell in row).rstrip() for row in rows]
        return ["auto chose (the report says why):", *(f"  {row}" for row in rows)] if rows else []

    def apply(self, config: RunConfig, kind: type[C]) -> C:
        """Return a frozen copy of class ``kind`` with all recorded values."""
        return config.with_options({value.name: value.value for value in self}, kind)


def add_backbone_facts(facts: Facts, backbone: Backbone) -> Facts:
    """Return a copy with the facts of the backbone."""
    count = sum(parameter.numel() for parameter in backbone.parameters())
    blocks = count_blocks(backbone.model)
    return replace(facts, family=backbone.family, parameters=count, dim=backbone.dim, blocks=blocks)


def record_recipe(config: RunConfig, auto: AutoValues) -> None:
    """Record the recipe that was chosen when the options were parsed."""
    inherited = any(value.name == "recipe" for value in auto)  # from the run that --continue names
    if config.recipe != "auto" and config.requested("recipe", "auto") == "auto" and not inherited:
        reasons = {"scratch": "from random weights or our own pre-training", "finetune": "from trained weights"}
        auto.append(AutoValue("recipe", config.recipe, reasons.get(config.recipe, "the default")))


def resolve_input(config: C, facts: Facts, auto: AutoValues) -> C:
    """Resolve backbone and input size."""
    classifies = isinstance(config, TrainConfig) or getattr(config, "method", "") == "instances"
    rule = defaults.classifier_backbone if classifies else defaults.papers_backbone
    pretrained = isinstance(config, TrainConfig) and config.pretrained
    choice = (defaults.published_backbone if pretrained else rule)(facts.device)
    backbone = auto.choose("backbone", config.backbone, *choice)
    if isinstance(config, TrainConfig) and config.drop_path == "paper":
        family = describe_model(backbone).family
        rate = defaults.AUTHORS_DROP_PATHS.get(family, "auto")
        auto.append(AutoValue("drop_path", rate, f"what the authors of {family} use, else the model's own"))
    if pretrained:
        auto.choose("img_size", config.img_size, published_size(backbone), f"the input size of {to_tag(backbone)}")
        config = auto.apply(config, type(config))
    _choose_size(config, facts, auto)
    return auto.apply(config, type(config))


def _choose_size(config: RunConfig, facts: Facts, auto: AutoValues) -> int:
    """Resolve the input size; return its longer side."""
    reason = f"images are about {facts.side} px; at most {largest_input(facts.device)} px on {facts.device}"
    size = auto.choose("img_size", config.img_size, input_size(facts.side, facts.device), reason)
    return max(as_pair(size))


def resolve_training(config: TrainConfig, facts: Facts, auto: AutoValues) -> ResolvedTrainConfig:
    """Resolve supervised training: batch, length, learning rate, Drloc, augmentation, EMA, evaluation."""
    side, from_scratch = _choose_size(config, facts, auto), not (config.init or config.pretrained)
    if from_scratch and (config.lora or config.recipe == "finetune"):
        raise UserError("--lora and the recipe finetune keep trained weights: add --pretrained or --init.")
    labelled, semi = facts.images, config.semi
    ratio = defaults.UNLABELLED_RATIO if semi.ratio == "auto" else semi.ratio
    facts = replace(facts, images=defaults.images_per_epoch(labelled, facts.unlabelled, ratio))
    batch = resolve_batch_size(config, labelled, defaults.supervised_batch(facts), auto, group=PAIR)
    if facts.unlabelled:
        ratio = auto.choose("semi.ratio", semi.ratio, *defaults.unlabelled_ratio(batch, facts.unlabelled))
        if ratio * batch > facts.unlabelled:
            raise UserError(
                f"A step needs {ratio * batch} unlabelled images (--semi.ratio {ratio} times --batch {batch}), but "
                f"there are {facts.unlabelled:,}. Use a smaller --semi.ratio or --batch."
            )
        facts = replace(facts, images=defaults.images_per_epoch(labelled, facts.unlabelled, ratio))
    fitted = facts.fits_classifier
    if fitted:
        choice = "logistic", "fitted on the features of the frozen network; a random one would spoil them"
        fitted = auto.choose("classifier", config.classifier, *choice) == "logistic"
    is_short = fitted and facts.device == "cpu" and config.recipe == "finetune"
    epochs = defaults.finetuning_epochs(facts) if is_short else defaults.supervised_epochs(facts, batch)
    length = _resolve_length(config, auto, *epochs)
    auto.choose("target", config.target, facts.target, "what the labels of the data are")
    auto.choose("logit_adjustment", config.logit_adjustment, *defaults.logit_adjustment(facts, balance=config.balance))
    _resolve_optimizer(config, facts, auto, from_scratch=from_scratch and config.strategy == "ddp")
    auto.choose("freeze", config.freeze, *defaults.frozen_blocks(facts))
    seen = batch * (1 + ratio) if facts.unlabelled else batch  # images in a step
    lr = defaults.supervised_lr(batch, facts.parameters, family=facts.family, finetune=config.recipe == "finetune")
    if config.lora:
        lr = defaults.lora_lr(batch)
    elif is_short:
        lr = defaults.finetuning_lr(batch)
    auto.choose("lr", config.lr, *lr)
    drloc = config.localization
    wanted = drloc.weight == "paper" or bool(_changed_options(config, _LOCALIZATION))
    choice = defaults.localization_weight(facts, from_scratch=from_scratch, wanted=wanted)
    option: float | Auto = "auto" if drloc.weight == "paper" else drloc.weight
    weight = auto.choose("localization.weight", option, *choice)
    if weight:
        allowed = from_scratch and drloc.form == "paper" and drloc.grid_size is not None
        choice = defaults.localization_variant(facts, from_scratch=allowed)
        variant = auto.choose("localization.variant", drloc.variant, *choice)
        grid = (None, "the grid of every block (Eq. 7)") if variant == "dense" else (7, "the paper's")
        auto.choose("localization.grid_size", drloc.grid_size, *grid)
    steps, per_epoch = total_steps(config.steps, length, facts.images, batch), steps_per_epoch(facts.images, batch)
    epochs = steps / per_epoch
    operations = defaults.augment_operations(epochs, steps, facts.parameters, from_scratch=from_scratch)
    if is_short:
        operations = 0, "RandAugment is for longer runs"
    _resolve_augmentation(config, facts, steps, epochs, side, operations, auto)
    auto.choose("ema", config.ema, *defaults.ema_rate(steps))
    if weight:
        _resolve_head_width(config, facts, auto)
    if facts.unlabelled:
        reason = "pseudo-labels need confident predictions, which smoothing prevents"
        auto.choose("mixing.smoothing", config.mixing.smoothing, 0.0, reason)
        if semi.method == "softmatch":
            auto.choose("semi.momentum", semi.momentum, *defaults.threshold_momentum(steps))
        if semi.region_weight:
            auto.choose("semi.prototypes", semi.prototypes, *defaults.prototype_count(facts.unlabelled))
    elif facts.target != "class":
        auto.choose("mixing.smoothing", config.mixing.smoothing, 0.0, "smoothing is for one class per image")
    elif is_short:
        auto.choose("mixing.smoothing", config.mixing.smoothing, *defaults.FINETUNING_SMOOTHING)
    auto.choose("weights", config.weights, *defaults.exported_weights(facts))
    every = defaults.evaluation_interval(steps, per_epoch, seen, facts.eval_images)
    auto.choose("evaluate_every", config.evaluate_every, every, describe_interval(every, steps, per_epoch))
    return auto.apply(config, ResolvedTrainConfig)


def _resolve_optimizer(config: RunConfig, facts: Facts, auto: AutoValues, *, from_scratch: bool = False) -> None:
    auto.choose("optimizer.muon", config.optimizer.muon, *defaults.muon(facts, from_scratch=from_scratch))
    auto.choose("optimizer.layer_decay", config.optimizer.layer_decay, *defaults.layer_decay(facts))


def _resolve_augmentation(
    config: TrainConfig | PretrainConfig,
    facts: Facts,
    steps: int,
    epochs: float,
    side: int,
    operations: tuple[int, str],
    auto: AutoValues,
) -> None:
    """Resolve mixing, RandAugment and crops of a run with one view per image. operations: number and reason."""
    if config.mixing.mixup or config.mixing.cutmix:
        probability = defaults.mixing_probability(epochs, _changed_options(config, _MIXING), facts.family)
        auto.choose("mixing.prob", config.mixing.prob, *probability)
    if changed := _changed_options(config, _RANDAUGMENT):
        operations = 2, f"RandAugment as in the papers, because {changed[0]} is set"
    auto.choose("augment.operations", config.augment.operations, *operations)
    crop = default_crop(side)
    reason = "shifts of the full image, because it is small" if crop == "padded" else "random crops, as in the papers"
    auto.choose("augment.crop", config.augment.crop, crop, reason)


def resolve_pretraining(config: PretrainConfig, facts: Facts, auto: AutoValues) -> ResolvedPretrainConfig:
    """Resolve what pre-training needs: batch, length, learning rate, heads, teacher, crops."""
    if config.method == "instances":
        return _resolve_instances(config, facts, auto)
    side = _choose_size(config, facts, auto)
    batch = resolve_batch_size(config, facts.images, defaults.pretraining_batch(facts), auto)
    length = _resolve_length(config, auto, *defaults.pretraining_epochs(facts, side))
    auto.choose("lr", config.lr, *defaults.pretraining_lr(batch))
    _resolve_optimizer(config, facts, auto)
    steps = total_steps(config.steps, length, facts.images, batch)
    epochs = steps / steps_per_epoch(facts.images, batch)
    _resolve_matching(config, facts, steps, epochs, side, auto)
    reason = f"milder than the papers' up to {SMALL_INPUT} px" if side <= SMALL_INPUT else "the papers'"
    for name, value in config.crops.views(side)._asdict().items():
        auto.choose(f"crops.{name}", getattr(config.crops, name), value, reason)
    if config.localization.weight:
        _resolve_head_width(config, facts, auto)
    return auto.apply(config, ResolvedPretrainConfig)


def _resolve_matching(
    config: PretrainConfig, facts: Facts, steps: int, epochs: float, side: int, auto: AutoValues
) -> None:
    """Resolve the heads and the teacher of EsViT."""
    matching = config.matching
    wanted = matching.regions_from > 0 or matching.view_weight == 0
    default = defaults.region_weight(round(epochs * facts.images), wanted=wanted)
    auto.choose("matching.region_weight", matching.region_weight, *default)
    auto.choose("matching.prototypes", matching.prototypes, *defaults.prototype_count(facts.images))
    auto.choose("matching.momentum", matching.momentum, *defaults.teacher_momentum(steps, side))
    auto.choose("matching.teacher_temp", matching.teacher_temp, *defaults.teacher_temperature(epochs, side))
    auto.choose("matching.centering", matching.centering, *defaults.TEACHER_CENTERING)
    reason = f"four times the backbone's {facts.dim}, at most the paper's 2,048"
    auto.choose("matching.hidden", matching.hidden, min(2048, 4 * facts.dim), reason)


def _resolve_instances(config: PretrainConfig, facts: Facts, auto: AutoValues) -> ResolvedPretrainConfig:
    """Resolve instance classification: a supervised run from scratch with as many classes as images."""
    side = _choose_size(config, facts, auto)
    batch = resolve_batch_size(config, facts.images, defaults.supervised_batch(facts), auto, group=PAIR)
    length = _resolve_length(config, auto, *defaults.supervised_epochs(facts, batch))
    auto.choose("lr", config.lr, *defaults.supervised_lr(batch, facts.parameters, family=facts.family))
    _resolve_optimizer(config, facts, auto, from_scratch=config.init is None)
    steps = total_steps(config.steps, length, facts.images, batch)
    epochs = steps / steps_per_epoch(facts.images, batch)
    operations = defaults.augment_operations(epochs, steps, facts.parameters, from_scratch=not config.init)
    _resolve_augmentation(config, facts, steps, epochs, side, operations, auto)
    unused = AutoValues()  # a resolved configuration has no "auto", but nobody needs to read these
    _resolve_matching(config, facts, steps, epochs, side, unused)
    values = {value.name: value.value for value in [*auto, *unused]}
    return config.with_options(values, ResolvedPretrainConfig)


def resolve_distillation(config: DistilConfig, facts: Facts, auto: AutoValues) -> ResolvedDistilConfig:
    """Resolve distillation: batch, length, learning rate, crops. One view per image, so a step is a supervised one."""
    side = _choose_size(config, facts, auto)
    batch = resolve_batch_size(config, facts.images, defaults.supervised_batch(facts), auto)
    _resolve_length(config, auto, *defaults.pretraining_epochs(facts, side))
    auto.choose("lr", config.lr, *defaults.supervised_lr(batch, facts.parameters, family=facts.family))
    _resolve_optimizer(config, facts, auto)
    crop = ("center", "the cached teacher sees it") if config.cache_teacher else (default_crop(side), "as in training")
    auto.choose("augment.crop", config.augment.crop, *crop)
    auto.choose("augment.operations", config.augment.operations, 0, "the teacher's features change with them")
    return auto.apply(config, ResolvedDistilConfig)


def _resolve_head_width(config: TrainConfig | PretrainConfig, facts: Facts, auto: AutoValues) -> None:
    """Resolve the width of Drloc's head: checkpoints have this shape, so a run keeps it."""
    width = config.localization.head_width(facts.dim)
    reason = f"the backbone's {facts.dim}, less than the paper's 512" if width == facts.dim else "the paper's"
    auto.choose("localization.hidden", config.localization.hidden, width, reason)


def resolve_batch_size(
    config: RunConfig, images: int, default: tuple[int, str], auto: AutoValues, *, group: int = 1
) -> int:
    """Return the option or default (with its reason), at most all images; ranks get equal parts of whole ``group``s."""
    reasons = [default[1]] if config.batch == "auto" else []
    batch = max(default[0], config.accumulate) if config.batch == "auto" else config.batch
    if batch > images:
        if config.accumulate > images:
            raise UserError(f"--accumulate {config.accumulate} is larger than the number of images, {images}.")
        batch = images
        reasons.append("limited by the number of training images")
    world = math.prod(devices_and_nodes(config.devices, config.nodes))
    parts = equal_parts(world, config.accumulate, group)
    if (equal := in_equal_parts(batch, images, parts)) != batch and not config.resume:
        reasons.append(f"a multiple of {parts} instead of {batch}, for equal parts (--accumulate, processes)")
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


_LOCALIZATION = tuple(f"localization.{name}" for name in LocalizationConfig.model_fields if name != "weight")
_MIXING = ("mixing.mixup", "mixing.cutmix", "mixing.switch_prob")
_RANDAUGMENT = ("augment.magnitude", "augment.magnitude_std", "augment.operation_prob")


def _changed_options(config: TrainConfig | PretrainConfig, names: Sequence[str]) -> list[str]:
    """Return the options that are neither the default nor 0: comparisons and recipes set all, so is_set is no help."""
    default = TrainConfig()
    return [name for name in names if attrgetter(name)(config) not in (0, attrgetter(name)(default))]
