"""The defaults that depend on the data: learning rate, batch size, length, Drloc, augmentation, teacher.

One pure function per value returns the value and its reason, which says the rule. ``experiment/resolve.py`` replaces
"auto" with them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from frugalvit.config.data import SMALL_INPUT
from frugalvit.config.pretrain import Centering

# λ per family: main paper section 4 (Swin, T2T, CvT) and supplement section 3 (ViT-B).
LOCALIZATION_WEIGHTS = {"swin": 0.5, "t2t": 0.1, "cvt": 0.1, "vit": 0.01}
AUTHORS_DROP_PATHS = {"swin": 0.2, "t2t": 0.1}
"""Stochastic depth in the code of each network's authors, which Drloc's runs start from."""
DENSE_STEPS_ON_CPU = 200
SMALL_NETWORK = 2_000_000  # parameters; smaller networks learn faster than those of the papers
LARGE_NETWORK = 10_000_000  # parameters; larger Swins gain from the classification form of Drloc
LONG_RUN = 180  # epochs; strong augmentation lowered accuracy after 100 and 167 epochs, not after 200 and 320
LONG_RUN_HYBRID = 60  # epochs; mixing raised the accuracy of such networks after 70 and 87 epochs
IMBALANCED = 20  # images of the largest class relative to the smallest, from which on the loss is adjusted
UNLABELLED_RATIO = 7  # unlabelled images per labelled one in a batch (FixMatch, FlexMatch, SoftMatch)
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
    target: str = "class"  # or "labels", "number"
    imbalance: float = 1.0  # training images of the largest class, relative to the smallest


def classifier_backbone(device: str) -> tuple[str, str]:
    """Return the network that learned most from labels at equal time (docs/FIRST_RUN.md)."""
    if device == "cpu":
        return (
            "hybrid_nano",
            "no GPU here: small, with convolutions; in minutes on two cores 55 % of PACS (docs/FIRST_RUN.md)",
        )
    return "hybrid_small", "best of 7 at equal time: 71.6 % on 408 unseen flowers, the papers' Swin-T 62.3 %"


def published_backbone(device: str) -> tuple[str, str]:
    if device == "cpu":
        return "vit_tiny_patch16_224", "published weights that a CPU can use: 5.7 M parameters"
    return "swin_tiny_patch4_window7_224", "published weights of the papers' Swin"


def papers_backbone(device: str) -> tuple[str, str]:
    if device == "cpu":
        return "swin_nano", "no GPU here: a small model that two cores can train"
    return "swin_tiny_w7", "the papers' 28 M parameter Swin"


# -- supervised training


def supervised_lr(batch: int, parameters: int = 0, *, family: str = "", finetune: bool = False) -> tuple[float, str]:
    """Return the paper's 1e-3 at batch 1,024, scaled with the square root of the batch (AdamW).

    Small networks take four times that rate (docs/RESULTS.md), hybrids twice (docs/FIRST_RUN.md), fine-tuning half.
    """
    small = 0 < parameters < SMALL_NETWORK
    factor, source = (4, "four times the paper's, for a small network") if small else (1, "the paper's")
    if family == "hybrid" and not small:
        factor, source = 2, "twice the paper's, for a hybrid"
    anchor = (5e-4 if finetune else 1e-3) * factor
    lr = float(f"{anchor * math.sqrt(batch / 1024):.2g}")
    return lr, f"{anchor:g} at batch 1,024 ({source}), scaled with the square root to batch {batch}"


def supervised_batch(facts: Facts) -> tuple[int, str]:
    """Return a power of two with at least sixteen steps per epoch: the 100 steps of a batch of 1,024 teach nothing."""
    return _power_of_two(facts, 16, 64 if facts.device == "cpu" else 256)


def _power_of_two(facts: Facts, steps: int, most: int) -> tuple[int, str]:
    """Return a batch of 8 to ``most`` images with at least these steps per epoch."""
    batch = max(8, min(most, 2 ** int(math.log2(max(8, facts.images / steps)))))
    return batch, f"{facts.images:,} images: about {max(1, facts.images // batch)} steps per epoch"


def supervised_epochs(facts: Facts, batch: int) -> tuple[int, str]:
    """Return the papers' 100 epochs, more if an epoch has few steps; fewer on a CPU (docs/RESULTS.md)."""
    per_epoch = max(1, facts.images // batch)
    if facts.device == "cpu":
        epochs = max(5, min(100, 3_000 // per_epoch))
        return epochs, f"about {epochs * per_epoch:,} steps: what a CPU does in reasonable time"
    epochs = max(100, min(500, 10_000 // per_epoch))
    reason = "about 10,000 steps, at most 500 epochs, at least the paper's 100"
    return epochs, f"{per_epoch} steps per epoch: {reason}"


def finetuning_epochs(facts: Facts) -> tuple[int, str]:
    epochs = max(1, min(20, round(3_000 / facts.images)))
    return epochs, f"a CPU sees about {epochs * facts.images:,} images; the classifier is already fitted"


def finetuning_lr(batch: int) -> tuple[float, str]:
    """Return a quarter of the rate of a long fine-tuning: the classifier is fitted, and the run is short.

    ViT-Ti on 918 flowers, validation accuracy after 0, 1, 2 and 3 epochs: 97.1, 91.2, 94.1 % and not run with the full
    rate, 97.1, 96.1, 94.1, 94.1 % with a quarter (one seed, 102 images). No rate was measured to gain.
    """
    lr = float(f"{1.25e-4 * math.sqrt(batch / 1024):.2g}")
    return lr, f"1.25e-4 at batch 1,024, scaled with the square root to batch {batch}: a fitted classifier moves little"


def lora_lr(batch: int) -> tuple[float, str]:
    """Return ten times the rate of fine-tuning: only small matrices learn, which start at zero.

    ViT-Ti on 1,020 flowers, rank 8, 20 epochs, 1,020 validation images: 94.9 % with the rate of fine-tuning, 97.5 with
    about ten times it; all weights 97.3, the frozen network 96.3 (one seed).
    """
    lr = float(f"{5e-3 * math.sqrt(batch / 1024):.2g}")
    return lr, f"5e-3 at batch 1,024 (ten times that of fine-tuning, for LoRA), scaled with the square root to {batch}"


FINETUNING_SMOOTHING = 0.0, "smoothing would move a fitted classifier away from its solution"
"""Last block and classifier of a ViT-Ti, 714 flowers, 3 epochs, rate 1e-4, 306 held-out images: 95.8 % at the start,
94.4 with smoothing 0.1, 96.4 without (one seed)."""


def logit_adjustment(facts: Facts, *, balance: bool) -> tuple[float, str]:
    """Return τ of the loss: 1 (balanced softmax) if the largest class has many times the images of the smallest.

    Other values of τ raise the mean per class less (docs/guides/labels.md).
    """
    ratio = f"the largest class has {facts.imbalance:.3g} times the images of the smallest"
    if facts.target != "class" or balance or facts.unlabelled:
        return 0.0, "only for one class per image, without --balance and --unlabelled"
    if facts.imbalance >= IMBALANCED:
        return 1.0, f"balanced softmax: {ratio}; it raises the mean per class, and may lower top-1"
    return 0.0, f"the plain loss: {ratio}, less than {IMBALANCED}"


def muon(facts: Facts, *, from_scratch: bool) -> tuple[bool, str]:
    if facts.device != "cpu" or facts.family != "hybrid" or not from_scratch:
        return False, "Muon is measured only for hybrids from random weights on a CPU (docs/FIRST_RUN.md)"
    return True, "orthogonal steps of matrices learn more in the same time (docs/FIRST_RUN.md)"


def layer_decay(facts: Facts) -> tuple[float, str]:
    """Return BEiT's and MAE's 0.75 for networks that define the order of their layers."""
    if not facts.blocks:
        return 1.0, "the network does not define the order of its layers"
    return 0.75, "early layers of published weights change less"


def frozen_blocks(facts: Facts) -> tuple[int, str]:
    if facts.device != "cpu" or facts.blocks < 4:
        return 0, "every block learns"
    return facts.blocks // 2, f"half of the {facts.blocks} blocks: fewer gradients on a CPU"


def exported_weights(facts: Facts) -> tuple[str, str]:
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

    Mixing lowers the accuracy of short runs (docs/RESULTS.md). Hybrids gain from it earlier (docs/FIRST_RUN.md).
    """
    long_run = LONG_RUN_HYBRID if family == "hybrid" else LONG_RUN
    if epochs < long_run and changed:
        return 0.5, f"mixup and cutmix on every other step, because {changed[0]} is set"
    if epochs < long_run:
        return 0.0, f"mixup and cutmix slow down runs below {long_run} epochs"
    return 0.5, f"mixup and cutmix on every other step: {epochs:.0f} epochs show each image often enough"


def augment_operations(epochs: float, steps: int, parameters: int, *, from_scratch: bool) -> tuple[int, str]:
    """Return RandAugment's operations per image: the papers' two, or none for short runs (docs/RESULTS.md)."""
    if 0 < parameters < SMALL_NETWORK and epochs < LONG_RUN:
        return 0, f"RandAugment slows down a small network in a run below {LONG_RUN} epochs"
    if from_scratch and epochs < LONG_RUN and steps < FEW_STEPS:
        return 0, f"RandAugment slows down a run from scratch below {FEW_STEPS:,} steps and {LONG_RUN} epochs"
    return 2, "RandAugment as in the papers"


def localization_weight(facts: Facts, *, from_scratch: bool, wanted: bool = False) -> tuple[float, str]:
    """Return the paper's λ where Drloc was measured to help, else 0.

    wanted: the user set the weight to "paper", or another option of Drloc: then the loss is on

    Only a large Swin from random weights gained (docs/RESULTS.md, docs/FIRST_RUN.md).
    """
    if not wanted and not (from_scratch and is_large_swin(facts)):
        return 0.0, "Drloc helped only a large Swin from random weights; --localization.weight paper turns it on"
    if facts.family in LOCALIZATION_WEIGHTS:
        return LOCALIZATION_WEIGHTS[facts.family], f"the paper's λ for {facts.family}"
    return 0.1, f"the paper has no λ for {facts.family or 'this family'}: the lower of its two common values"


def is_large_swin(facts: Facts) -> bool:
    return facts.family == "swin" and facts.parameters >= LARGE_NETWORK


def localization_variant(facts: Facts, *, from_scratch: bool) -> tuple[str, str]:
    """Return Drloc's form: "ce" (Eq. 5) for a large Swin from scratch, else the paper's "l1" (docs/RESULTS.md)."""
    if from_scratch and is_large_swin(facts):
        size = f"a Swin of {facts.parameters / 1e6:.0f} M parameters from random weights"
        return "ce", f"{size} learns Drloc's task as a classification (Eq. 5)"
    return "l1", "the paper's choice (Eq. 2)"


def unlabelled_ratio(batch: int, unlabelled: int) -> tuple[int, str]:
    return max(1, min(UNLABELLED_RATIO, unlabelled // batch)), f"at most {UNLABELLED_RATIO}, as in FixMatch and after"


def images_per_epoch(labelled: int, unlabelled: int, ratio: int) -> int:
    """Return the labelled images that an epoch draws: enough to draw every image once, unlabelled ones too."""
    return max(labelled, -(-unlabelled // ratio))


def threshold_momentum(steps: int) -> tuple[float, str]:
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
    lr = float(f"{5e-4 * max(batch, 64) / 256:.2g}")
    return lr, f"the paper's 5e-4 at batch 256, linear in the batch ({batch}, counted as at least 64)"


def pretraining_batch(facts: Facts) -> tuple[int, str]:
    """Return a power of two with about 32 steps per epoch, from 8 to 256 (32 on a CPU)."""
    return _power_of_two(facts, 32, 32 if facts.device == "cpu" else 256)


def pretraining_epochs(facts: Facts, side: int | None = None) -> tuple[int, str]:
    """Return 100 to 800 epochs, so that a GPU sees about two million images; a CPU sees 40,000.

    side: input size in pixels; up to 32 px an image is cheap and a GPU sees four times as many (docs/RESULTS.md)
    """
    if facts.device == "cpu":
        epochs = max(2, min(100, 40_000 // facts.images))
        return epochs, f"a CPU sees about {epochs * facts.images:,} images in reasonable time"
    seen = 8_000_000 if (side or facts.side) <= SMALL_INPUT else 2_000_000
    epochs = max(100, min(800, seen // facts.images))
    return epochs, f"{facts.images:,} images: the run sees about {epochs * facts.images:,}"


def prototype_count(images: int) -> tuple[int, str]:
    count = 2 ** round(math.log2(min(65536, max(256, images / 16))))
    return count, f"one per 16 images ({images:,}), from 256 to the paper's 65,536: on small data more stay unused"


def teacher_momentum(steps: int, side: int) -> tuple[float, str]:
    """Return the EMA rate of the teacher. A fast teacher forgets at 32 px (docs/RESULTS.md)."""
    rate = round(min(0.996, max(0.98, 1 - (10 if side <= SMALL_INPUT else 50) / steps)), 4)
    return rate, f"the teacher must move within {steps:,} steps (the paper's 0.996 has 750,000)"


def teacher_temperature(epochs: float, side: int) -> tuple[float, str]:
    """Return the teacher's temperature after warm-up. At 32 px it was measured with milder views (docs/RESULTS.md)."""
    if side <= SMALL_INPUT:
        return 0.04, f"a sharp teacher for inputs up to {SMALL_INPUT} px"
    if epochs >= 50:
        return 0.07, "the paper's, for runs of 50 epochs or more"
    return 0.04, "no warm-up in a short run: a sharp teacher starts faster"


REGIONS_FROM = 100_000_000
"""The images that a run sees from which L_R is on: between ours (up to 5 million) and the paper's (384 million)."""


def region_weight(seen: int, *, wanted: bool) -> tuple[float, str]:
    """Return the weight of L_R. wanted: another option asks for it."""
    if wanted:
        return 0.5, "the paper's; other options ask for L_R"
    if seen >= REGIONS_FROM:
        return 0.5, f"the paper's, for a run that sees {seen:,} images"
    return (
        0.0,
        f"L_V alone: in runs below {REGIONS_FROM:,} images it was as good or better in the same time (docs/RESULTS.md)",
    )


INSTANCES_UP_TO = 10_000
"""Up to this number of images above 32 px, instance classification learned better features (RESULTS_FEW_LABELS.md)."""


TEACHER_CENTERING: tuple[Centering, str] = "mean", "EsViT's"
"""How the teacher's outputs are centred: EsViT's way until another is measured to be better."""


# -- detection and segmentation


def dense_lr(batch: int, parameters: int, *, detecting: bool) -> tuple[float, str]:
    """Return the papers' rate, scaled with the root of the batch. At batch 16: 1e-4 (detection), 6e-5 (segmentation).

    A small network needs ten times that (docs/guides/detection.md, docs/guides/segmentation.md).
    """
    small = 0 < parameters < SMALL_NETWORK
    anchor = (1e-4 if detecting else 6e-5) * (10 if small else 1)
    source = "ten times the papers', for a small network" if small else "the papers'"
    lr = float(f"{anchor * math.sqrt(batch / 16):.2g}")
    return lr, f"{anchor:g} at batch 16 ({source}), scaled with the square root to batch {batch}"


def dense_epochs(facts: Facts, batch: int, detecting: bool) -> tuple[float, str]:
    """Return the papers' 12 (detection) or 127 (segmentation) epochs, more if these are few steps."""
    per_epoch = max(1, facts.images // batch)
    if facts.device == "cpu":
        epochs = max(1, round(DENSE_STEPS_ON_CPU / per_epoch))
        return epochs, f"about {epochs * per_epoch} steps: what a CPU does in reasonable time"
    published, least = (12, 3_000) if detecting else (127, 4_000)
    epochs = max(published, min(200, math.ceil(least / per_epoch)))
    return epochs, f"{per_epoch} steps per epoch: at least {least:,} steps or 200 epochs, never fewer than {published}"
