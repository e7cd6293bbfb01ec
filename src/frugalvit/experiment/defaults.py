"""The defaults: learning rate, batch size, length, Drloc, augmentation, teacher.

First the rules: one pure function per value, which returns the value and its reason. Then ``resolve_training``,
``resolve_pretraining`` and ``resolve_distillation``, which replace every "auto" once. ``dense_defaults.py``: detection
and segmentation.
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
from frugalvit.config.data import SMALL_INPUT
from frugalvit.config.distil import DistilConfig
from frugalvit.config.pretrain import Centering, PretrainConfig
from frugalvit.config.resolved import ResolvedDistilConfig, ResolvedPretrainConfig, ResolvedTrainConfig
from frugalvit.config.train import LocalizationConfig, RunConfig, TrainConfig
from frugalvit.config.types import Auto
from frugalvit.data.augmentation.transforms import as_pair, default_crop
from frugalvit.data.image_size import input_size, largest_input
from frugalvit.engine.param_groups import count_blocks
from frugalvit.engine.step import equal_parts, in_equal_parts, steps_per_epoch, total_steps
from frugalvit.errors import UserError
from frugalvit.objectives import LOCALIZATION_WEIGHTS
from frugalvit.utils.launch_env import devices_and_nodes
from frugalvit.utils.tables import as_text
from frugalvit.utils.text import pluralize

SMALL_NETWORK = 2_000_000  # parameters; smaller networks learn faster than those of the papers
LARGE_NETWORK = 10_000_000  # parameters; larger Swins gain from the classification form of Drloc
LONG_RUN = 180  # epochs; strong augmentation lowered accuracy after 100 and 167 epochs, not after 200 and 320
LONG_RUN_HYBRID = 60  # epochs; mixing raised the accuracy of such networks after 70 and 87 epochs
UNLABELLED_RATIO = 7  # unlabelled images per labelled one in a batch (FixMatch, FlexMatch, FreeMatch, SoftMatch)
FEW_STEPS = 5_000  # RandAugment lowered accuracy in runs of 1,500, 3,100 and 4,000 steps


@dataclass(frozen=True)
class Facts:
    """What the rules depend on."""

    images: int  # training images
    classes: int  # 0 without labels
    side: int  # median short side of the images, in pixels
    device: str  # "cpu", "cuda" or "mps"
    family: str = ""  # of the backbone
    parameters: int = 0  # of the backbone; 0 if unknown
    dim: int = 768  # channels of the backbone's grid
    eval_images: int = 0  # images of an evaluation while training
    unlabelled: int = 0  # further training images, of --unlabelled
    blocks: int = 0  # of the backbone; 0 if it does not define their order
    fits_classifier: bool = False  # published features and single images: logistic regression is possible
    tested: bool = False  # test images score the weights that val chose

    def with_backbone(self, backbone: Backbone) -> Facts:
        """Return a copy with the facts of the backbone."""
        count = sum(parameter.numel() for parameter in backbone.parameters())
        blocks = count_blocks(backbone.model)
        return replace(self, family=backbone.family, parameters=count, dim=backbone.dim, blocks=blocks)


def classifier_backbone(device: str) -> tuple[str, str]:
    """Return the network that learned most from labels at equal time (docs/FIRST_RUN.md)."""
    if device == "cpu":
        return "hybrid_nano", "no GPU here: a small network with convolutions, which two cores can train"
    return "hybrid_small", "best of 11 at equal time: 71.6 % on 408 unseen flowers, the papers' Swin-T 62.3 %"


def published_backbone(device: str) -> tuple[str, str]:
    """Return a published network that suits the device: timm's smallest ViT, or the papers' Swin."""
    if device == "cpu":
        return "vit_tiny_patch16_224", "published weights that a CPU can use: 5.7 M parameters"
    return "swin_tiny_patch4_window7_224", "published weights of the papers' Swin"


def papers_backbone(device: str) -> tuple[str, str]:
    """Return the papers' Swin on a GPU, the smallest one on a CPU."""
    if device == "cpu":
        return "swin_nano", "no GPU here: a small model that two cores can train"
    return "swin_tiny_w7", "the papers' 28 M parameter Swin"


# -- supervised training


def supervised_lr(batch: int, parameters: int = 0, *, family: str = "", finetune: bool = False) -> tuple[float, str]:
    """Return the paper's 1e-3 at batch 1,024, scaled with the square root of the batch (AdamW).

    The paper's networks have 20 million parameters or more. ``swin_nano`` on 510 images, from scratch, learned most
    with four to eight times that rate (docs/RESULTS.md). A hybrid takes twice the paper's: 69.4 and 82.5 % on flowers
    and PACS, with four times 68.9 and 79.2 % (docs/FIRST_RUN.md). Fine-tuning takes half.
    """
    small = 0 < parameters < SMALL_NETWORK
    factor, source = (4, "four times the paper's, for a small network") if small else (1, "the paper's")
    if family == "hybrid" and not small:
        factor, source = 2, "twice the paper's, for a hybrid"
    anchor = (5e-4 if finetune else 1e-3) * factor
    lr = float(f"{anchor * math.sqrt(batch / 1024):.2g}")
    return lr, f"{anchor:g} at batch 1,024 ({source}), scaled with the square root to batch {batch}"


def supervised_batch(facts: Facts) -> tuple[int, str]:
    """Return a power of two with at least sixteen steps per epoch.

    The paper's batch of 1,024 makes one step per epoch of 2,040 images, and 100 steps teach nothing.
    """
    most = 64 if facts.device == "cpu" else 256
    batch = max(8, min(most, 2 ** int(math.log2(max(8, facts.images / 16)))))
    return batch, f"{facts.images:,} images: about {max(1, facts.images // batch)} steps per epoch"


def supervised_epochs(facts: Facts, batch: int) -> tuple[int, str]:
    """Return the papers' 100 epochs, more if an epoch has few steps; fewer on a CPU.

    With 2,040 images, 320 epochs gave 11 points more than 100 from scratch (25 with every step mixed), and 14 more from
    pre-trained weights.
    """
    per_epoch = max(1, facts.images // batch)
    if facts.device == "cpu":
        epochs = max(5, min(100, 3_000 // per_epoch))
        return epochs, f"about {epochs * per_epoch:,} steps: what a CPU does in reasonable time"
    epochs = max(100, min(500, 10_000 // per_epoch))
    reason = "about 10,000 steps, at most 500 epochs, at least the paper's 100"
    return epochs, f"{per_epoch} steps per epoch: {reason}"


def finetuning_epochs(facts: Facts) -> tuple[int, str]:
    """Return 1 to 20 epochs on a CPU, which sees about 3,000 images: the classifier starts as a trained one."""
    epochs = max(1, min(20, round(3_000 / facts.images)))
    return epochs, f"a CPU sees about {epochs * facts.images:,} images; the classifier is already fitted"


def finetuning_lr(batch: int) -> tuple[float, str]:
    """Return a quarter of the rate of a long fine-tuning: the classifier is fitted, and the run is short.

    ViT-Ti on 918 flowers, validation accuracy after 0, 1, 2 and 3 epochs: 97.1, 91.2, 94.1 % and not run with the full
    rate, 97.1, 96.1, 94.1, 94.1 % with a quarter (one seed, 102 images). No rate was measured to gain.
    """
    lr = float(f"{1.25e-4 * math.sqrt(batch / 1024):.2g}")
    return lr, f"1.25e-4 at batch 1,024, scaled with the square root to batch {batch}: a fitted classifier moves little"


def finetuning_smoothing() -> tuple[float, str]:
    """Return no label smoothing: a fitted classifier is sure of itself, and smoothing moves it away from its solution.

    Last block and classifier of a ViT-Ti, 714 flowers, 3 epochs, rate 1e-4, 306 held-out images: 95.8 % at the start,
    94.4 with smoothing 0.1, 96.4 without (one seed).
    """
    return 0.0, "smoothing would move a fitted classifier away from its solution"


def layer_decay(facts: Facts) -> tuple[float, str]:
    """Return BEiT's and MAE's 0.75 for networks that define the order of their layers."""
    if not facts.blocks:
        return 1.0, "the network does not define the order of its layers"
    return 0.75, "early layers of published weights change less"


def frozen_blocks(facts: Facts) -> tuple[int, str]:
    """Return half of the blocks on a CPU, which then computes fewer gradients; none elsewhere."""
    if facts.device != "cpu" or facts.blocks < 4:
        return 0, "every block learns"
    return facts.blocks // 2, f"half of the {facts.blocks} blocks: fewer gradients on a CPU"


def exported_weights(facts: Facts) -> tuple[str, str]:
    """Return which weights to export: images that score the weights must not choose them, too."""
    if facts.tested:
        return "best", "val chooses them, test scores them"
    return "last", "there is no second split, and the images that score the weights must not choose them"


def ema_rate(steps: int) -> tuple[float, str]:
    """Return the EMA rate of the evaluated weights: an average over a twentieth of the run."""
    rate = round(min(0.9998, max(0.9, 1 - 20 / max(steps, 1))), 5)
    return rate, f"averages about the last twentieth of {steps} steps"


def mixing_probability(epochs: float, changed: Sequence[str] = (), family: str = "") -> tuple[float, str]:
    """Return the share of steps whose images are mixed (mixup, cutmix); the papers mix every step.

    changed: options of mixup and cutmix that the user set: then some steps are always mixed

    Swin-T, 2,040 images: after 100 epochs 41.2 with every step mixed, 49.3 with every other, 55.7 with none; after 320
    there is no difference. ``swin_mini`` on CIFAR-100: after 60 epochs 52.4, 58.9, 63.4 (docs/RESULTS.md). Networks
    that begin with convolutions gain earlier: Visformer-S +4.9 after 87 epochs, +1.7 after 70 (docs/FIRST_RUN.md).
    """
    long_run = LONG_RUN_HYBRID if family == "hybrid" else LONG_RUN
    if epochs < long_run and changed:
        return 0.5, f"mixup and cutmix on every other step, because {changed[0]} is set"
    if epochs < long_run:
        return 0.0, f"mixup and cutmix slow down runs below {long_run} epochs"
    return 0.5, f"mixup and cutmix on every other step: {epochs:.0f} epochs show each image often enough"


def augment_operations(epochs: float, steps: int, parameters: int, *, from_scratch: bool) -> tuple[int, str]:
    """Return RandAugment's operations per image: the papers' two, or none for short runs.

    ``swin_nano`` on 510 images, 100 epochs, nothing mixed: 19.0 with two, 23.1 with none. Swin-T on 2,040, the same
    with Drloc: 61.4 and 64.7 (docs/RESULTS.md).
    """
    if 0 < parameters < SMALL_NETWORK and epochs < LONG_RUN:
        return 0, f"RandAugment slows down a small network in a run below {LONG_RUN} epochs"
    if from_scratch and epochs < LONG_RUN and steps < FEW_STEPS:
        return 0, f"RandAugment slows down a run from scratch below {FEW_STEPS:,} steps and {LONG_RUN} epochs"
    return 2, "RandAugment as in the papers"


def localization_weight(facts: Facts, *, from_scratch: bool, wanted: bool = False) -> tuple[float, str]:
    """Return the paper's λ where Drloc was measured to help, else 0.

    wanted: the user set the weight to "paper", or another option of Drloc: then the loss is on

    A large Swin from random weights gains 6.1 ± 0.6 points. Other networks change by -0.4 ± 2.0, a Swin after
    pre-training by -2.7 to 0.0 (docs/RESULTS.md), a hybrid by -0.5 and -0.8 (docs/FIRST_RUN.md).
    """
    if not wanted and not (from_scratch and is_large_swin(facts)):
        return 0.0, "Drloc helped only a large Swin from random weights; --localization.weight paper turns it on"
    if facts.family in LOCALIZATION_WEIGHTS:
        return LOCALIZATION_WEIGHTS[facts.family], f"the paper's λ for {facts.family}"
    return 0.1, f"the paper has no λ for {facts.family or 'this family'}: the lower of its two common values"


def is_large_swin(facts: Facts) -> bool:
    return facts.family == "swin" and facts.parameters >= LARGE_NETWORK


def localization_variant(facts: Facts, *, from_scratch: bool) -> tuple[str, str]:
    """Return the form of Drloc's loss: "ce" (Eq. 5) for a large Swin from scratch, else the paper's "l1" (Eq. 2).

    Swin-T from scratch hardly learns Eq. 2, which gives 0.9 points. It learns Eq. 5 completely and gains 6.6. After
    pre-training, and on a small network, Eq. 5 loses points (docs/RESULTS.md).
    """
    if from_scratch and is_large_swin(facts):
        size = f"a Swin of {facts.parameters / 1e6:.0f} M parameters from random weights"
        return "ce", f"{size} learns Drloc's task as a classification (Eq. 5)"
    return "l1", "the paper's choice (Eq. 2)"


def unlabelled_ratio(batch: int, unlabelled: int) -> tuple[int, str]:
    """Return the unlabelled images per labelled image of a batch: the papers' 7, or as many as there are."""
    return max(1, min(UNLABELLED_RATIO, unlabelled // batch)), f"at most {UNLABELLED_RATIO}, as in FixMatch and after"


def images_per_epoch(labelled: int, unlabelled: int, ratio: int) -> int:
    """Return the labelled images that an epoch draws: enough to draw every image once, unlabelled ones too."""
    return max(labelled, -(-unlabelled // ratio))


def threshold_momentum(steps: int) -> tuple[float, str]:
    """Return the EMA rate of the pseudo-labels' thresholds: the papers' 0.999, less below 20,000 steps."""
    rate = round(min(0.999, max(0.9, 1 - 20 / max(steps, 1))), 5)
    return rate, f"thresholds must move within {steps:,} steps (the papers' 0.999 has a million)"


def evaluation_interval(steps: int, per_epoch: int, batch: int, eval_images: int) -> int:
    """Return the steps between evaluations: an epoch or more. At most 50 evaluations, and a quarter of the time.

    Evaluating an image costs a third of training on it (no backward pass). At least four evaluations are allowed.
    """
    affordable = int(0.75 * steps * batch / max(1, eval_images))
    count = max(4, min(50, affordable))
    return max(per_epoch, -(-steps // count))


# -- pre-training


def pretraining_lr(batch: int) -> tuple[float, str]:
    """Return the paper's 5e-4 at batch 256, linear in the batch; a batch below 64 counts as 64."""
    lr = float(f"{5e-4 * max(batch, 64) / 256:.2g}")
    return lr, f"the paper's 5e-4 at batch 256, linear in the batch ({batch}, counted as at least 64)"


def pretraining_batch(facts: Facts) -> tuple[int, str]:
    """Return a power of two with about 32 steps per epoch, from 8 to 256 (32 on a CPU)."""
    most = 32 if facts.device == "cpu" else 256
    batch = max(8, min(most, 2 ** int(math.log2(max(8, facts.images / 32)))))
    return batch, f"{facts.images:,} images: about {max(1, facts.images // batch)} steps per epoch"


def pretraining_epochs(facts: Facts, side: int | None = None) -> tuple[int, str]:
    """Return 100 to 800 epochs, so that a GPU sees about two million images; a CPU sees 40,000.

    side: input size in pixels; up to 32 px an image is cheap and a GPU sees four times as many. CIFAR-100: k-NN on
          validation images is 34 after 100 epochs, 43 after 60 more and 50 after 300 more (docs/RESULTS.md).
    """
    if facts.device == "cpu":
        epochs = max(2, min(100, 40_000 // facts.images))
        return epochs, f"a CPU sees about {epochs * facts.images:,} images in reasonable time"
    seen = 8_000_000 if (side or facts.side) <= SMALL_INPUT else 2_000_000
    epochs = max(100, min(800, seen // facts.images))
    return epochs, f"{facts.images:,} images: the run sees about {epochs * facts.images:,}"


def prototype_count(images: int) -> tuple[int, str]:
    """Return one prototype per 16 images, as a power of two from 256 to the paper's 65,536."""
    count = 2 ** round(math.log2(min(65536, max(256, images / 16))))
    return count, f"one per 16 images ({images:,}), from 256 to the paper's 65,536: on small data more stay unused"


def teacher_momentum(steps: int, side: int) -> tuple[float, str]:
    """Return the EMA rate of the teacher.

    A fast teacher forgets at 32 px: k-NN after 52 epochs of CIFAR-100 is 13 with 0.9904 and 29 with 0.996
    (docs/RESULTS.md); 2,610 steps were enough for the latter.
    """
    rate = round(min(0.996, max(0.98, 1 - (10 if side <= SMALL_INPUT else 50) / steps)), 4)
    return rate, f"the teacher must move within {steps:,} steps (the paper's 0.996 has 750,000)"


def teacher_temperature(epochs: float, side: int) -> tuple[float, str]:
    """Return the teacher's temperature after warm-up. At 32 px it was measured with milder views (docs/RESULTS.md)."""
    if side <= SMALL_INPUT:
        return 0.04, f"a sharp teacher for inputs up to {SMALL_INPUT} px"
    if epochs >= 50:
        return 0.07, "the paper's, for runs of 50 epochs or more"
    return 0.04, "no warm-up in a short run: a sharp teacher starts faster"


def teacher_centering() -> tuple[Centering, str]:
    """Return how the teacher's outputs are centred: EsViT's way until another is measured to be better."""
    return "mean", "EsViT's"


# -- replace every "auto"

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


def record_recipe(config: RunConfig, auto: AutoValues) -> None:
    """Record the recipe that was chosen when the options were parsed."""
    inherited = any(value.name == "recipe" for value in auto)  # from the run that --continue names
    if config.recipe != "auto" and config.requested("recipe", "auto") == "auto" and not inherited:
        reasons = {"scratch": "from random weights or our own pre-training", "finetune": "published weights"}
        auto.append(AutoValue("recipe", config.recipe, reasons.get(config.recipe, "the default")))


AUTHORS_DROP_PATHS = {"swin": 0.2, "t2t": 0.1}
"""Stochastic depth in the code of each network's authors, which Drloc's runs start from."""


def resolve_input(config: C, facts: Facts, auto: AutoValues) -> C:
    """Resolve backbone and input size."""
    rule = classifier_backbone if isinstance(config, TrainConfig) else papers_backbone
    pretrained = isinstance(config, TrainConfig) and config.pretrained
    backbone = auto.choose("backbone", config.backbone, *(published_backbone if pretrained else rule)(facts.device))
    if isinstance(config, TrainConfig) and config.drop_path == "paper":
        family = describe_model(backbone).family
        rate = AUTHORS_DROP_PATHS.get(family, "auto")
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
    labelled, semi = facts.images, config.semi
    ratio = UNLABELLED_RATIO if semi.ratio == "auto" else semi.ratio
    facts = replace(facts, images=images_per_epoch(labelled, facts.unlabelled, ratio))
    batch = resolve_batch_size(config, labelled, supervised_batch(facts), auto, group=PAIR)
    if facts.unlabelled:
        ratio = _resolve_ratio(config, batch, facts.unlabelled, auto)
        facts = replace(facts, images=images_per_epoch(labelled, facts.unlabelled, ratio))
    fitted = facts.fits_classifier
    if fitted:
        choice = "logistic", "fitted on the features of the frozen network; a random one would spoil them"
        fitted = auto.choose("classifier", config.classifier, *choice) == "logistic"
    is_short = fitted and facts.device == "cpu"
    epochs = finetuning_epochs(facts) if is_short else supervised_epochs(facts, batch)
    length = _resolve_length(config, auto, *epochs)
    auto.choose("optimizer.layer_decay", config.optimizer.layer_decay, *layer_decay(facts))
    auto.choose("freeze", config.freeze, *frozen_blocks(facts))
    seen = batch * (1 + ratio) if facts.unlabelled else batch  # images in a step
    lr = supervised_lr(seen, facts.parameters, family=facts.family, finetune=config.recipe == "finetune")
    if is_short:
        lr = finetuning_lr(seen)
    auto.choose("lr", config.lr, *lr)
    drloc = config.localization
    wanted = drloc.weight == "paper" or bool(_changed_options(config, _LOCALIZATION))
    choice = localization_weight(facts, from_scratch=from_scratch, wanted=wanted)
    option: float | Auto = "auto" if drloc.weight == "paper" else drloc.weight
    weight = auto.choose("localization.weight", option, *choice)
    if weight:
        allowed = from_scratch and drloc.form == "paper" and drloc.grid_size is not None
        choice = localization_variant(facts, from_scratch=allowed)
        variant = auto.choose("localization.variant", drloc.variant, *choice)
        grid = (None, "the grid of every block (Eq. 7)") if variant == "dense" else (7, "the paper's")
        auto.choose("localization.grid_size", drloc.grid_size, *grid)
    steps, per_epoch = total_steps(config.steps, length, facts.images, batch), steps_per_epoch(facts.images, batch)
    epochs = steps / per_epoch
    if config.mixing.mixup or config.mixing.cutmix:
        probability = mixing_probability(epochs, _changed_options(config, _MIXING), facts.family)
        if facts.unlabelled:
            probability = 0.0, "mixup and cutmix are off with --unlabelled, as in FixMatch and after"
        auto.choose("mixing.prob", config.mixing.prob, *probability)
    operations = augment_operations(epochs, steps, facts.parameters, from_scratch=from_scratch)
    if is_short:
        operations = 0, "RandAugment is for longer runs"
    if changed := _changed_options(config, _RANDAUGMENT):
        operations = 2, f"RandAugment as in the papers, because {changed[0]} is set"
    auto.choose("augment.operations", config.augment.operations, *operations)
    crop = default_crop(side)
    reason = "shifts of the full image, because it is small" if crop == "padded" else "random crops, as in the papers"
    auto.choose("augment.crop", config.augment.crop, crop, reason)
    auto.choose("ema", config.ema, *ema_rate(steps))
    if weight:
        _resolve_head_width(config, facts, auto)
    if facts.unlabelled:
        reason = "pseudo-labels need confident predictions, which smoothing prevents"
        auto.choose("mixing.smoothing", config.mixing.smoothing, 0.0, reason)
        if semi.method != "flexmatch":
            auto.choose("semi.momentum", semi.momentum, *threshold_momentum(steps))
        if semi.region_weight:
            auto.choose("semi.prototypes", semi.prototypes, *prototype_count(facts.unlabelled))
    elif is_short:
        auto.choose("mixing.smoothing", config.mixing.smoothing, *finetuning_smoothing())
    auto.choose("weights", config.weights, *exported_weights(facts))
    every = evaluation_interval(steps, per_epoch, seen, facts.eval_images)
    auto.choose("evaluate_every", config.evaluate_every, every, describe_interval(every, steps, per_epoch))
    return auto.apply(config, ResolvedTrainConfig)


def _resolve_ratio(config: TrainConfig, batch: int, unlabelled: int, auto: AutoValues) -> int:
    """Return the unlabelled images per labelled image of a batch."""
    ratio = auto.choose("semi.ratio", config.semi.ratio, *unlabelled_ratio(batch, unlabelled))
    if ratio * batch > unlabelled:
        raise UserError(
            f"A step needs {ratio * batch} unlabelled images (--semi.ratio {ratio} times --batch {batch}), but there "
            f"are {unlabelled:,}. Use a smaller --batch, or leave --unlabelled out."
        )
    return ratio


def resolve_pretraining(config: PretrainConfig, facts: Facts, auto: AutoValues) -> ResolvedPretrainConfig:
    """Resolve what pre-training needs: batch, length, learning rate, heads, teacher, crops."""
    matching, side = config.matching, _choose_size(config, facts, auto)
    batch = resolve_batch_size(config, facts.images, pretraining_batch(facts), auto)
    length = _resolve_length(config, auto, *pretraining_epochs(facts, side))
    auto.choose("lr", config.lr, *pretraining_lr(batch))
    steps = total_steps(config.steps, length, facts.images, batch)
    epochs = steps / steps_per_epoch(facts.images, batch)
    auto.choose("matching.prototypes", matching.prototypes, *prototype_count(facts.images))
    auto.choose("matching.momentum", matching.momentum, *teacher_momentum(steps, side))
    auto.choose("matching.teacher_temp", matching.teacher_temp, *teacher_temperature(epochs, side))
    auto.choose("matching.centering", matching.centering, *teacher_centering())
    reason = f"milder than the papers' up to {SMALL_INPUT} px" if side <= SMALL_INPUT else "the papers'"
    for name, value in config.crops.views(side)._asdict().items():
        auto.choose(f"crops.{name}", getattr(config.crops, name), value, reason)
    if config.localization.weight:
        _resolve_head_width(config, facts, auto)
    reason = f"four times the backbone's {facts.dim}, at most the paper's 2,048"
    auto.choose("matching.hidden", matching.hidden, min(2048, 4 * facts.dim), reason)
    return auto.apply(config, ResolvedPretrainConfig)


def resolve_distillation(config: DistilConfig, facts: Facts, auto: AutoValues) -> ResolvedDistilConfig:
    """Resolve distillation: batch, length, learning rate, crops. One view per image, so a step is a supervised one."""
    side = _choose_size(config, facts, auto)
    batch = resolve_batch_size(config, facts.images, supervised_batch(facts), auto)
    _resolve_length(config, auto, *pretraining_epochs(facts, side))
    auto.choose("lr", config.lr, *supervised_lr(batch, facts.parameters, family=facts.family))
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
    """Return the batch size: the option or the default, at most the number of images.

    All processes get equal parts. A resumed run keeps its batch size.

    default: batch size and reason
    group:   images that must be on the same process
    """
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


def _changed_options(config: TrainConfig, names: Sequence[str]) -> list[str]:
    """Return the options with a value that is neither the default nor 0.

    ``config.is_set`` does not help: the runs of a comparison, and a named recipe, set all options.
    """
    default = TrainConfig()
    return [name for name in names if attrgetter(name)(config) not in (0, attrgetter(name)(default))]
