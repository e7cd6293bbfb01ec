"""``frugalvit advise DATA``: look at the data and the machine, try a few steps, and propose commands with reasons.

What a run would use is decided by ``experiment/auto_values.py``, as in the run itself; here it is only asked and timed.
"""

from __future__ import annotations

import shlex
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from lightning_fabric import Fabric

from frugalvit.benchmarking.train_step import timed
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.tools import AdviseConfig
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.data import open_data
from frugalvit.data.augment.mixup import Mixing
from frugalvit.data.augment.transforms import MultiCrop, TrainAugment
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.inspect import inspect
from frugalvit.data.loader import Batches
from frugalvit.engine.hardware import pick_device
from frugalvit.engine.step import TrainPlan, TrainStep, make_optimizer
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.auto_values import AutoValues, Facts, decide_common, decide_pretraining, decide_training
from frugalvit.tasks.classification import train
from frugalvit.tasks.dense.annotation_kind import AnnotationInfo, find_annotation_kind
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.tasks.pretraining.health import Health
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

# A network with published weights that fits the machine: the papers' Swin, or on a CPU the smallest ViT of timm.
PUBLISHED = {"cpu": "vit_tiny_patch16_224", "gpu": "swin_tiny_patch4_window7_224"}
FEW = 50  # images a class; below this, learning from the images alone comes first
LITTLE = 200  # training images; below this a single score says little
LOOK = 300.0  # seconds of a first look at a run that takes long


@dataclass
class Proposal:
    """A command, the reason for it, and what it is expected to take."""

    command: str
    why: str
    seconds: float | None = None
    steps: int | None = None
    seconds_per_step: float | None = None
    decisions: AutoValues = field(default_factory=AutoValues)
    notes: list[str] = field(default_factory=list)


def advise(config: AdviseConfig) -> CommandResult:
    """Commands for this data on this machine, best first."""
    device = pick_device(config.device)
    source = open_data(config.data)
    examples = source.splits.get("train")
    if examples is None or len(examples) < 2:
        raise UserError(f"{source.location} has no training images to advise on.")
    looked = inspect(source, decode="headers", duplicates=False).data
    facts = Facts(len(examples), len(source.classes or ()), builders.median_side(examples), device)
    drawn = find_annotation_kind(source.location, source.classes)
    if drawn is not None:
        facts = replace(facts, images=drawn.splits.get("train", facts.images), classes=0)
        looked |= {"splits": {}, "notes": [drawn.masks] if drawn.masks else []}
        proposals = _drawn(config, drawn, facts)
    else:
        proposals = _labelled(config, source, facts) if source.classes else _unlabelled(config, source, facts)
    notes = _warnings(looked, facts)
    splits = {name: len(part) for name, part in source.splits.items()}
    data = {
        "data": source.location,
        "images": looked["images"] if drawn is None else sum(drawn.splits.values()),
        "classes": looked["classes"] if drawn is None else None,
        "drawn": None if drawn is None else drawn.text,
        "splits": splits if drawn is None else drawn.splits,
        "side": facts.side,
        "device": device,
        "proposals": [vars(p) | {"decisions": [vars(d) for d in p.decisions]} for p in proposals],
        "notes": notes,
    }
    return CommandResult(data, _tables(data, proposals), [*notes, *_reasons(proposals)])


# -- what to do


def _labelled(config: AdviseConfig, source: DatasetSplits, facts: Facts) -> list[Proposal]:
    place = shlex.quote(config.data)
    scratch = _train(config, source, facts, {})
    scratch.why = "the shortest way to a classifier and a report: from random weights, with Drloc"
    backbone = PUBLISHED["cpu" if facts.device == "cpu" else "gpu"]
    published = _train(config, source, facts, {"backbone": backbone, "pretrained": True})
    published.why = (
        "where a network can be reached: published weights. In the Drloc paper fine-tuning (Table 5) ends above "
        "training from scratch (Table 4) on all ten datasets"
    )
    learned = _pretrain(config, source, facts)
    learned.why = (
        "without other people's weights: learn from these images alone first, labels not used (add --images all where "
        "more lie beside them). On Flowers-102, with all its images, a classifier that began so reached 80 % instead "
        "of 72 % in 320 epochs"
    )
    untimed = config.model_copy(update={"trial": 0})
    start = _train(untimed, source, facts, {"recipe": "scratch"})
    start.command, start.why = (
        f"frugalvit train {place} --init RUN",
        "then start from its folder (RUN) instead of chance",
    )
    if scratch.seconds is not None and scratch.steps and start.steps:  # the same network, the same pace
        start.seconds, start.seconds_per_step = scratch.seconds * start.steps / scratch.steps, scratch.seconds_per_step
    weight = next((d.value for d in scratch.decisions if d.name == "localization.weight"), 0.1)
    compared = Proposal(
        f"frugalvit compare {place} --with localization.weight={weight:g} --without localization.weight=0 --seeds 3",
        "does the loss help on these images? Three seeds of each, with a paired interval",
        None if scratch.seconds is None else 6 * scratch.seconds,
    )
    if facts.device == "cpu":  # time is what is scarce: the quickest first
        return [*_first_look(scratch), scratch, learned, start, published, compared]
    if facts.images / max(1, facts.classes) < FEW:
        # With few labels a class, what can be learned without them comes before training from nothing.
        return [published, learned, start, scratch, compared]
    return [published, scratch, learned, start, compared]


def _first_look(whole: Proposal) -> list[Proposal]:
    """A few minutes of a run that takes long: does everything work, is anything learned?"""
    if whole.seconds is None or whole.seconds_per_step is None or whole.seconds < 3 * LOOK:
        return []
    steps = max(1, round(LOOK / whole.seconds_per_step))
    command = f"{whole.command} --steps {steps}"
    return [
        Proposal(
            command,
            "a few minutes of it first: does everything work, is anything learned?",
            LOOK,
            steps,
            whole.seconds_per_step,
        )
    ]


def _unlabelled(config: AdviseConfig, source: DatasetSplits, facts: Facts) -> list[Proposal]:
    place = shlex.quote(config.data)
    learned = _pretrain(config, source, facts)
    learned.why = "there are no labels: learn features from views and regions of the images"
    return [
        learned,
        Proposal(f"frugalvit embed RUN {place} --out features.npz", "then use the run's features (RUN is its folder)"),
        Proposal(
            "frugalvit train LABELLED/ --init RUN", "or, with some images sorted into class folders, a classifier"
        ),
    ]


def _drawn(config: AdviseConfig, drawn: AnnotationInfo, facts: Facts) -> list[Proposal]:
    """Boxes and masks are labels of another kind. Features are learned first from images that nothing is scored on."""
    command = f"frugalvit {drawn.verb} train {shlex.quote(config.data)}"
    backbone = PUBLISHED["cpu" if facts.device == "cpu" else "gpu"]
    proposals = [
        Proposal(command, f"there are {drawn.text}: from random weights, the shortest way to a first score"),
        Proposal(f"{command} --backbone {backbone} --pretrained", "where a network can be reached: published weights"),
    ]
    if drawn.folder is not None:
        asked = config.model_copy(update={"data": str(drawn.folder)})
        learned = _pretrain(asked, open_data(asked.data, split="given", labels="ignore"), facts)
        learned.why = (
            "without other people's weights: learn from the training images first (not from those that are scored on; "
            "more of the kind beside them help)"
        )
    else:
        learned = Proposal(
            "frugalvit pretrain MORE_IMAGES/",
            "without other people's weights: learn from other images of the kind first, or from a folder of the "
            "training images alone (here they lie among those that are scored on)",
        )
    start = Proposal(f"{command} --init RUN", "then start from its folder (RUN) instead of chance")
    return [*proposals, learned, start]


def _train(config: AdviseConfig, source: DatasetSplits, facts: Facts, extra: dict[str, Any]) -> Proposal:
    assert source.classes is not None
    flags = "".join(f" --{k}" if v is True else f" --{k} {v}" for k, v in extra.items())
    settings = TrainConfig.parse({"data": config.data, "device": config.device, **extra})
    decisions = AutoValues()
    decide_common(settings, facts, decisions)
    with console.quiet():  # what it has to say stands with the reasons
        backbone = train.make_network(settings, source.classes)
    decide_training(settings, facts.with_backbone(backbone), decisions)
    watched = len(source.splits.get("val") or source.splits.get("test") or ())
    plan = train.make_plan(settings, facts.images, watched, 1)
    proposal = Proposal(f"frugalvit train {shlex.quote(config.data)}{flags}", "", steps=plan.steps, decisions=decisions)
    proposal.notes = backbone.notes
    if config.trial:
        fabric = builders.make_fabric(settings)
        task = train.make_task(settings, backbone, plan)
        store, decoding = _store(source.splits["train"], plan, backbone.img_size, settings, fabric)
        augment = TrainAugment(settings.augment, backbone.img_size, backbone.mean, backbone.std)
        mixing = Mixing(settings.mixing, len(source.classes))
        batches = Batches(store, plan.images_per_step, seed=0, augment=augment, mixing=mixing)
        task.set_data(batches, None, "val", fabric)
        pace = _pace(task, plan, fabric, config.trial, settings.backbone)
        seen = sum(len(source.splits[name]) for name in ("val", "test") if name in source.splits)
        looks = plan.steps / plan.evaluate_every * watched
        # A forward pass alone is about a third of a training step.
        evaluation = (looks + seen) * pace / plan.images_per_step / 3
        proposal.seconds_per_step = pace
        proposal.seconds = plan.steps * pace + evaluation + decoding * (facts.images + seen)
    return proposal


def _pretrain(config: AdviseConfig, source: DatasetSplits, facts: Facts) -> Proposal:
    settings = PretrainConfig.parse({"data": config.data, "device": config.device})
    decisions = AutoValues()
    decide_common(settings, facts, decisions)
    decide_pretraining(settings, facts, decisions)
    plan = pretrain.make_plan(settings, facts.images, 1)
    proposal = Proposal(f"frugalvit pretrain {shlex.quote(config.data)}", "", steps=plan.steps, decisions=decisions)
    if config.trial:
        fabric = builders.make_fabric(settings)
        with console.quiet():
            student = pretrain.make_network(settings)
        proposal.notes = student.notes
        task = pretrain.make_task(settings, student, plan)
        store, decoding = _store(source.splits["train"], plan, student.img_size, settings, fabric)
        augment = MultiCrop(settings.crops, student.img_size, student.mean, student.std)
        batches = Batches(store, plan.images_per_step, seed=0, augment=augment)
        assert isinstance(settings.matching.prototypes, int)
        task.set_data(batches, None, Health(settings.matching.prototypes, plan.steps, plan.steps), fabric)
        pace = _pace(task, plan, fabric, config.trial, "pretraining")
        # A look at the features embeds up to nine times health.images; one embedding is about a twelfth of the work
        # that ten crops, their gradients and the teacher are.
        looked = min(facts.images, 9 * settings.health.images) * plan.steps / plan.evaluate_every
        proposal.seconds_per_step = pace
        proposal.seconds = plan.steps * pace + looked * pace / plan.images_per_step / 12 + decoding * facts.images
    return proposal


# -- how long


def _store(
    examples: ImageDataset, plan: TrainPlan, img_size: tuple[int, int], settings: RunConfig, fabric: Fabric
) -> tuple[Any, float]:
    """A sample of the images in memory, and the seconds that decoding one of them took."""
    count = min(len(examples), max(64, plan.images_per_step))
    sample = examples.subset(np.linspace(0, len(examples) - 1, count).astype(np.int64))
    kept = settings.model_copy(deep=True)
    kept.cache.where = "ram"
    began = time.monotonic()
    store = builders.get_image_store(sample, img_size, kept, fabric.device)
    return store, (time.monotonic() - began) / count


def _pace(task: Any, plan: TrainPlan, fabric: Fabric, steps: int, label: str) -> float:
    """Median seconds of a step as the run would take it; the first one only warms up."""
    module, optimizer = fabric.setup(task, make_optimizer(task, plan, fabric))
    stepper = TrainStep(task, module, optimizer, plan, fabric)
    taken = []
    for stepper.step in console.progress(range(steps + 1), label=f"trying {label}"):
        taken.append(timed(lambda _: stepper.one_step(), 1, fabric.device, group=1))
    return statistics.median(taken[1:])


# -- what to say


def _warnings(looked: dict[str, Any], facts: Facts) -> list[str]:
    notes = list(looked["notes"])
    if looked["bad"]:
        notes.append(
            f"{pluralize(len(looked['bad']), 'file')} cannot be read and will be left out: see 'frugalvit data'."
        )
    spread = looked["splits"].get("train", {}).get("per_class")
    if spread and spread["max"] >= 5 * max(1, spread["min"]):
        notes.append(
            f"Classes have between {spread['min']} and {spread['max']} training images: consider --balance, and read "
            "the mean per class beside the accuracy."
        )
    if facts.images < LITTLE:
        notes.append(
            f"{facts.images:,} training images are very few: scores will change with the seed, so compare over several "
            "seeds. Published weights (--pretrained), or more images, will help more than any setting."
        )
    if facts.side <= 64:
        notes.append(
            f"The images are about {facts.side} px: networks get a finer stem, so that a grid is left to localise."
        )
    if facts.device == "cpu":
        notes.append("No GPU here: small networks, small images. The same commands on a GPU choose larger ones.")
    return notes


def _tables(data: dict[str, Any], proposals: list[Proposal]) -> list[Table]:
    labels = data["drawn"] or (f"{data['classes']:,} classes" if data["classes"] else "no labels")
    parts = ", ".join(f"{name} {count:,}" for name, count in data["splits"].items())
    title = (
        f"{data['data']}: {data['images']:,} images ({parts}), {labels}, about {data['side']} px, on {data['device']}"
    )
    rows: list[list[object]] = [
        [p.command, None if p.seconds is None else console.clock(p.seconds), p.steps] for p in proposals
    ]
    return [Table(["try", "takes about", "steps"], rows, title)]


def _reasons(proposals: list[Proposal]) -> list[str]:
    """Each command with its reason and what it would use; what an earlier one has said is not said again."""
    lines: list[str] = []
    said: set[str] = set()
    for proposal in proposals:
        values = [*map(str, proposal.decisions), *proposal.notes]
        new = [value for value in values if value not in said]
        said.update(values)
        end = "" if proposal.why.endswith("?") else "."
        lines += ["", proposal.command, f"    {proposal.why}{end}", *(f"    {value}" for value in new)]
        if values and len(new) < len(values):
            lines.append("    the rest as above" if new else "    all values as above")
    return lines
