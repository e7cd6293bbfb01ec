"""Every value that depends on the data is decided here, printed with its reason and saved.

``Facts`` is what we know about the data and the machine; each function turns facts into one value and says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from frugalvit.backbones import Backbone
from frugalvit.config.data import SMALL_INPUT
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.data.augment.transforms import as_pair, default_crop
from frugalvit.data.image_size import input_size, largest_input
from frugalvit.engine.step import equal_parts, in_equal_parts, steps_per_epoch, total_steps
from frugalvit.errors import UserError
from frugalvit.objectives import LOCALIZATION_WEIGHTS
from frugalvit.utils.launch_env import devices_and_nodes

SMALL_NETWORK = 2_000_000  # parameters below which a network learns faster than the papers'
LONG_RUN = 180  # epochs; images varied strongly did harm after 100 and 167, and none after 200 and 320
FEW_STEPS = 5_000  # RandAugment did harm in runs of 1,500 and 3,100 steps
PAIR = 2  # images that are mixed with each other, so that one process needs both
LARGE_NETWORK = 10_000_000  # parameters from which a Swin is known to gain from the stronger form of Drloc


@dataclass(frozen=True)
class Facts:
    """What the decisions rest on."""

    images: int  # training images
    classes: int  # 0 without labels
    side: int  # median short side of the images, in pixels
    device: str  # "cpu", "cuda" or "mps"
    family: str = ""  # of the backbone, once it is known
    parameters: int = 0  # of the backbone, once it is known

    def with_backbone(self, backbone: Backbone) -> Facts:
        """The same, with what the backbone adds."""
        count = sum(parameter.numel() for parameter in backbone.parameters())
        return replace(self, family=backbone.family, parameters=count)


@dataclass(frozen=True)
class AutoValue:
    """One value that "auto" chose, and why."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name} = {self.value}: {self.reason}"


class AutoValues(list[AutoValue]):
    """Decisions in the order they were taken; ``take`` writes one into the configuration."""

    def resolve(self, config: RunConfig, name: str, value: Any, reason: str) -> None:
        target: Any = config
        *groups, leaf = name.split(".")
        for group in groups:
            target = getattr(target, group)
        if getattr(target, leaf) == "auto":
            setattr(target, leaf, value)
            self.append(AutoValue(name, value, reason))


_WHY = {"scratch": "from random weights or a pre-training of ours", "finetune": "weights of elsewhere are moved gently"}


def log_recipe(config: RunConfig, decisions: AutoValues) -> None:
    """The recipe was chosen when the options were read, since its values lie beneath them; here it is written down."""
    inherited = any(decision.name == "recipe" for decision in decisions)  # of a run that is continued
    if config.recipe != "auto" and config.requested("recipe", "auto") == "auto" and not inherited:
        reason = _WHY.get(config.recipe, "the usual one, fitted to the data")
        decisions.append(AutoValue("recipe", config.recipe, reason))


def decide_common(config: RunConfig, facts: Facts, decisions: AutoValues) -> None:
    """Backbone and input size."""
    backbone, reason = usual_backbone(facts.device)
    decisions.resolve(config, "backbone", backbone, reason)
    reason = f"images are about {facts.side} px; at most {largest_input(facts.device)} px on {facts.device}"
    decisions.resolve(config, "img_size", input_size(facts.side, facts.device), reason)


def usual_backbone(device: str) -> tuple[str, str]:
    """The network, and why: the papers' where there is a GPU, else the smallest."""
    if device == "cpu":
        return "swin_nano", "no GPU here: a small model that two cores can train"
    return "swin_tiny_w7", "the papers' 28 M parameter Swin"


def resolve_batch_size(
    config: RunConfig, images: int, usual: tuple[int, str], decisions: AutoValues, *, together: int = 1
) -> int:
    """The batch that is used, before anything is decided from it: the one asked for, or else the ``usual`` one.

    It has no more images than there are, since drawing one twice in a step gains nothing, and processes and parts of
    a step share it equally. A resumed run keeps what it had.

    together: images that stay in one process, where there are several
    """
    reasons = [usual[1]] if config.batch == "auto" else []
    batch = max(usual[0], config.accumulate) if isinstance(config.batch, str) else config.batch
    if batch > images:
        if config.accumulate > images:
            raise UserError(f"{images} training images have no {config.accumulate} parts: lower --accumulate.")
        batch = images
        reasons.append("there are no more training images than that")
    world = math.prod(devices_and_nodes(config.devices, config.nodes))
    shared = in_equal_parts(batch, images, equal_parts(world, config.accumulate, together))
    if shared != batch and not config.resume:
        sharers = [f"{world} processes"] if world > 1 else []
        sharers += [f"{config.accumulate} parts of a step"] if config.accumulate > 1 else []
        pairs = " (two images that are mixed stay in one process)" if together == 2 and world > 1 else ""
        reasons.append(f"{' and '.join(sharers)} cannot share {batch} equally{pairs}")
        batch = shared
    config.batch = batch
    if reasons:
        decisions.append(AutoValue("batch", batch, "; ".join(reasons)))
    return batch


def decide_stream(config: RunConfig, shards: int, world: int, cores: int, decisions: AutoValues) -> None:
    """Reading in passing, and by how many: a resumed run must divide the shards among as many readers.

    cores: for each process, the same number in all of them
    """
    decisions.resolve(config, "stream", True, "the shards lie elsewhere, or are more than an index can hold")
    readers = max(1, min(16, cores, shards // world))
    decisions.resolve(config, "workers", readers, f"{cores} cores a process, {shards:,} shards for {world} of them")


def decide_training(config: TrainConfig, facts: Facts, decisions: AutoValues) -> None:
    """Batch, length, learning rate, λ: what a supervised run on this much data wants."""
    batch = resolve_batch_size(config, facts.images, supervised_batch(facts), decisions, together=PAIR)
    _decide_length(config, decisions, *supervised_epochs(facts, batch))
    lr, reason = supervised_lr(batch, facts.parameters, finetune=config.recipe == "finetune")
    decisions.resolve(config, "lr", lr, reason)
    weight, reason = localization_weight(facts.family)
    decisions.resolve(config, "localization.weight", weight, reason)
    if config.localization.weight:
        decide_localization(config, facts, decisions)
    steps = total_steps(config, facts.images)
    epochs = steps / steps_per_epoch(facts.images, batch)
    if config.mixing.mixup or config.mixing.cutmix:
        decisions.resolve(config, "mixing.prob", *mixing_probability(epochs, _asked_for(config, _OF_MIXING)))
    operations = augment_operations(epochs, steps, facts.parameters, from_scratch=_from_scratch(config))
    if wanted := _asked_for(config, _OF_OPERATIONS):
        operations = 2, f"RandAugment as in the papers, since {wanted[0]} was asked for"
    decisions.resolve(config, "augment.operations", *operations)
    crop = default_crop(_side(config, facts))
    reason = "shifts of the whole image, which is small" if crop == "padded" else "random parts, as in the papers"
    decisions.resolve(config, "augment.crop", crop, reason)
    ema = round(min(0.9998, max(0.9, 1 - 20 / max(steps, 1))), 5)
    decisions.resolve(config, "ema", ema, f"averages about the last twentieth of {steps} steps")


def decide_pretraining(config: PretrainConfig, facts: Facts, decisions: AutoValues) -> None:
    """Batch, length, learning rate, prototypes, momentum, temperature: what label-free learning wants here."""
    batch = resolve_batch_size(config, facts.images, pretraining_batch(facts), decisions)
    _decide_length(config, decisions, *pretraining_epochs(facts, _side(config, facts)))
    lr = float(f"{5e-4 * max(batch, 64) / 256:.2g}")
    reason = f"the paper's 5e-4 a batch of 256, linear in the batch ({batch}, counted as at least 64)"
    decisions.resolve(config, "lr", lr, reason)
    steps = total_steps(config, facts.images)
    count = 2 ** round(math.log2(min(65536, max(256, facts.images / 16))))
    told = f"one for about sixteen images ({facts.images:,}), 256 to the paper's 65,536: more stay empty on small data"
    decisions.resolve(config, "matching.prototypes", count, told)
    side = _side(config, facts)
    decisions.resolve(config, "matching.momentum", *teacher_momentum(steps, side))
    epochs = steps / steps_per_epoch(facts.images, batch)
    decisions.resolve(config, "matching.teacher_temp", *teacher_temperature(epochs, side))
    reason = f"milder than the papers' up to {SMALL_INPUT} px" if side <= SMALL_INPUT else "the papers'"
    for name, value in config.crops.views(side)._asdict().items():
        decisions.resolve(config, f"crops.{name}", value, reason)


def _side(config: RunConfig, facts: Facts) -> int:
    """Pixels of the longer side of an input."""
    return facts.side if config.img_size == "auto" else max(as_pair(config.img_size))


def teacher_momentum(steps: int, side: int) -> tuple[float, str]:
    """How slowly the teacher follows. At 32 px one that followed quickly lost what had been learned: k-NN 13 after 52
    epochs of CIFAR-100 with 0.9904, 29 with 0.996 (docs/RESULTS.md); 2,610 steps were enough for the latter.
    """
    slowly = round(min(0.996, max(0.98, 1 - (10 if side <= SMALL_INPUT else 50) / steps)), 4)
    return slowly, f"the teacher must get somewhere in {steps:,} steps (the paper's 0.996 has 750,000)"


def teacher_temperature(epochs: float, side: int) -> tuple[float, str]:
    """Where its warm-up ends. At 32 px a sharp teacher was measured together with milder views (docs/RESULTS.md)."""
    if side <= SMALL_INPUT:
        return 0.04, f"a sharp teacher for inputs up to {SMALL_INPUT} px"
    if epochs >= 50:
        return 0.07, "the paper's, for runs of 50 epochs and more"
    return 0.04, "no warm-up in a short run: a sharp teacher starts faster"


def _decide_length(config: RunConfig, decisions: AutoValues, epochs: int, reason: str) -> None:
    """Epochs, unless the length is given in steps; who gives both is told which counts."""
    if config.steps is None:
        decisions.resolve(config, "epochs", epochs, reason)
    elif config.epochs != "auto":
        decisions.append(AutoValue("steps", config.steps, f"they count, and not --epochs {config.epochs:g}"))


def pretraining_batch(facts: Facts) -> tuple[int, str]:
    """A power of two that leaves about 32 steps an epoch, from 8 to 256 (32 on a CPU)."""
    most = 32 if facts.device == "cpu" else 256
    batch = max(8, min(most, 2 ** int(math.log2(max(8, facts.images / 32)))))
    return batch, f"{facts.images:,} images: about {max(1, facts.images // batch)} steps an epoch"


def pretraining_epochs(facts: Facts, side: int | None = None) -> tuple[int, str]:
    """So many that about two million images are seen on a GPU, between 100 and 800; a CPU sees forty thousand.

    side: pixels of an input; up to 32, where an image costs little, four times as many are seen. CIFAR-100: k-NN on
        validation images 34 after 100 epochs, 43 after 60 more and 50 after 300 more (docs/RESULTS.md).
    """
    if facts.device == "cpu":
        epochs = max(2, min(100, 40_000 // facts.images))
        reason = f"about {epochs * facts.images:,} are seen, what a CPU does in reasonable time"
        return epochs, f"{facts.images:,} images: {reason}"
    seen = 8_000_000 if (side or facts.side) <= SMALL_INPUT else 2_000_000
    epochs = max(100, min(800, seen // facts.images))
    return epochs, f"{facts.images:,} images: about {epochs * facts.images:,} are seen in all"


def supervised_batch(facts: Facts) -> tuple[int, str]:
    """A power of two that leaves at least sixteen steps an epoch.

    The paper's batch of 1,024 makes one step an epoch of 2,040 images, and a hundred steps teach nothing.
    """
    most = 64 if facts.device == "cpu" else 256
    batch = 2 ** int(math.log2(max(8, facts.images / 16)))
    batch = max(8, min(most, batch))
    return batch, f"{facts.images:,} images: about {max(1, facts.images // batch)} steps an epoch"


def supervised_epochs(facts: Facts, batch: int) -> tuple[int, str]:
    """The papers' 100, and more where an epoch has few steps; fewer on a CPU, where time is what is scarce.

    With 2,040 images 320 epochs gave 11 points more than 100 from scratch (25 with every step mixed), and 14 more from
    pre-trained weights.
    """
    per_epoch = max(1, facts.images // batch)
    if facts.device == "cpu":
        epochs = max(5, min(100, 3_000 // per_epoch))
        return epochs, f"about {epochs * per_epoch:,} steps: what a CPU does in reasonable time"
    epochs = max(100, min(500, 10_000 // per_epoch))
    reason = "about 10,000 steps, at most 500 epochs, never fewer than the paper's 100"
    return epochs, f"{per_epoch} steps an epoch: {reason}"


def supervised_lr(batch: int, parameters: int = 0, *, finetune: bool = False) -> tuple[float, str]:
    """AdamW's learning rate scales with the root of the batch; the paper's 1e-3 at 1,024 is the anchor.

    The paper's networks have 20 million parameters and more. ``swin_nano`` on 510 images, from scratch, learned most
    with four to eight times that rate (docs/RESULTS.md); fine-tuning keeps its half.
    """
    small = 0 < parameters < SMALL_NETWORK
    anchor = (5e-4 if finetune else 1e-3) * (4 if small else 1)
    whose = "four times the paper's, for a small network" if small else "the paper's"
    lr = float(f"{anchor * math.sqrt(batch / 1024):.2g}")
    return lr, f"{anchor:g} at batch 1,024 ({whose}), scaled with the square root to batch {batch}"


def mixing_probability(epochs: float, asked: Sequence[str] = ()) -> tuple[float, str]:
    """How often a step's images are mixed by mixup and cutmix; the papers mix at every step.

    asked: options of mixup and cutmix that somebody has set, who wants some of it

    Swin-T, 2,040 images: after 100 epochs 41.2 with every step mixed, 49.3 with every other, 55.7 with none; after 320
    there is no difference. ``swin_mini`` on CIFAR-100: after 60 epochs 52.4, 58.9, 63.4 (docs/RESULTS.md).
    """
    if epochs < LONG_RUN and asked:
        return 0.5, f"mixup and cutmix on every other step, since {asked[0]} was asked for"
    if epochs < LONG_RUN:
        return 0.0, f"mixup and cutmix hold back runs below {LONG_RUN} epochs"
    return 0.5, f"mixup and cutmix on every other step: {epochs:.0f} epochs show each image often enough"


def augment_operations(epochs: float, steps: int, parameters: int, *, from_scratch: bool) -> tuple[int, str]:
    """RandAugment's operations an image: the papers' two, but for networks that do not see an image often.

    ``swin_nano`` on 510 images, 100 epochs, nothing mixed: 19.0 with two, 23.1 with none. Swin-T on 2,040, the same
    with Drloc: 61.4 and 64.7 (docs/RESULTS.md).
    """
    if 0 < parameters < SMALL_NETWORK and epochs < LONG_RUN:
        return 0, f"RandAugment holds back a small network in a run below {LONG_RUN} epochs"
    if from_scratch and epochs < LONG_RUN and steps < FEW_STEPS:
        return 0, f"RandAugment holds back a run from random weights below {FEW_STEPS:,} steps and {LONG_RUN} epochs"
    return 2, "RandAugment as in the papers"


_OF_MIXING = ("mixing.mixup", "mixing.cutmix", "mixing.switch_prob")
_OF_OPERATIONS = ("augment.magnitude", "augment.magnitude_std", "augment.operation_prob")


def _asked_for(config: TrainConfig, names: Sequence[str]) -> list[str]:
    """Those of the options that somebody has given another value to, and not to switch something off.

    Not what was typed: the runs of a comparison, and whoever names the recipe, are given all of them.
    """
    usual = TrainConfig()
    return [name for name in names if attrgetter(name)(config) not in (0, attrgetter(name)(usual))]


def _from_scratch(config: TrainConfig) -> bool:
    return not (config.init or config.pretrained)


def localization_weight(family: str) -> tuple[float, str]:
    """λ as the paper has it for a family of networks; a careful one where it has none."""
    if family in LOCALIZATION_WEIGHTS:
        return LOCALIZATION_WEIGHTS[family], f"the paper's λ for {family}"
    return 0.1, f"the paper has no λ for {family or 'this family'}; the lower of its two usual values"


def decide_localization(config: TrainConfig, facts: Facts, decisions: AutoValues) -> None:
    """Which form of Drloc, and on which grid.

    Swin-T from scratch hardly learns the paper's form (Eq. 2); asked as a classification (Eq. 5) the same question is
    learned completely, and the network gains 6.6 points where Eq. 2 gives 0.9. After pre-training, and for a small
    network, Eq. 5 takes points away (docs/RESULTS.md).
    """
    settings = config.localization
    large_swin = facts.family == "swin" and facts.parameters >= LARGE_NETWORK
    classify = _from_scratch(config) and large_swin and settings.form == "paper" and settings.grid_size is not None
    variant, reason = "l1", "the paper's choice (Eq. 2)"
    if classify:
        size = f"a Swin of {facts.parameters / 1e6:.0f} M parameters from random weights"
        variant, reason = "ce", f"{size} learns Drloc's task as a classification (Eq. 5)"
    decisions.resolve(config, "localization.variant", variant, reason)
    if settings.variant == "dense":
        decisions.resolve(config, "localization.grid_size", None, "every block's own grid (Eq. 7)")
    else:
        decisions.resolve(config, "localization.grid_size", 7, "the paper's, whatever the data")


def decide_heads(config: TrainConfig | PretrainConfig, backbone: Backbone, decisions: AutoValues) -> None:
    """How wide the heads are. Checkpoints have that shape, so a run keeps it whatever a later version decides."""
    if config.localization.weight:
        width = config.localization.head_width(backbone.dim)
        reason = f"the backbone's {backbone.dim}, less than the paper's 512" if width == backbone.dim else "the paper's"
        decisions.resolve(config, "localization.hidden", width, reason)
    if isinstance(config, PretrainConfig):
        reason = f"four times the backbone's {backbone.dim}, at most the paper's 2,048"
        decisions.resolve(config, "matching.hidden", matching_width(backbone.dim), reason)


def matching_width(dim: int) -> int:
    """How wide the heads of pre-training are on a backbone of ``dim`` channels: the paper's 2,048 for 512 and more."""
    return min(2048, 4 * dim)


def evaluation_interval(steps: int, per_epoch: int, batch: int, watched: int) -> int:
    """Steps between evaluations: an epoch, but at most fifty in a run and at most about a quarter of its time.

    An evaluated image costs a third of a trained one (no backward pass); four evaluations are always worth it.
    """
    affordable = int(0.75 * steps * batch / max(1, watched))
    count = max(4, min(50, affordable))
    return max(per_epoch, -(-steps // count))
