"""``frugalvit advise DATA``: propose commands for a dataset, with reasons and expected times.

``config/defaults.py`` chooses the values, as in a run. This module times a few steps of each training.
"""

import shlex
import statistics
import time
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric

from frugalvit.backbones.weights.published import is_online, locate_published
from frugalvit.config.defaults import Facts, published_backbone
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.tools import AdviseConfig
from frugalvit.config.train import RunConfig, TrainConfig
from frugalvit.data import open_data
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import MultiCrop
from frugalvit.data.augmentation.transforms import Augment, TrainAugment
from frugalvit.data.cache.build import build_store
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import PHOTO
from frugalvit.data.inspect import inspect
from frugalvit.data.loader import Batches
from frugalvit.engine.hardware import pick_device
from frugalvit.engine.step import TrainPlan, TrainStep, make_optimizer
from frugalvit.errors import UserError
from frugalvit.experiment import builders, resolve
from frugalvit.probing.floor import PIXELS, compute_floor, describe_floor
from frugalvit.tasks.classification import train
from frugalvit.tasks.dense.annotation_kind import AnnotationInfo, find_annotation_kind
from frugalvit.tasks.pretraining import train as pretrain
from frugalvit.tasks.pretraining.collapse import Health
from frugalvit.tasks.pretraining.instances import number_images
from frugalvit.tasks.pretraining.task import FeatureTask
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

FEW_PER_CLASS = 50  # with fewer images per class, pre-training comes before training from scratch
FLOOR_IMAGES = 2000  # of each split at most; decoding more takes too long for advice
SELECTED = 16  # images to label in a round
FEW_IMAGES = 200  # with fewer training images a single score says little

EXPECT = (
    "What to expect: 'train' with 2,000 images on a GPU had 77 % on 102 kinds of flowers (floor 34 %), and 80 % on 7 "
    "classes of paintings and sketches (floor 47 %). On two CPU cores it had 55 % on these.",
    "'train' after 'pretrain --method instances' on the same flowers had 83 %.",
    "Published weights that know such images had 96 % on the flowers, with 1,020 labels.",
)
"""What to expect, from docs/FIRST_RUN.md and docs/RESULTS_FEW_LABELS.md."""

REASONS = {
    "scratch": "the shortest way to a classifier and a report: from random weights",
    "features": "the right first model: a classifier on the features of published weights, in minutes on a CPU; "
    "predict, eval and export take its folder. A ViT-Ti had 96 % on Flowers-102 with 10 labels a class",
    "spread": ". The labels first spread to images without one: 92 instead of 84 % with 2 labels per class",
    "published": "published weights, from the hub or a folder FRUGALVIT_WEIGHTS. In the Drloc paper fine-tuning (Table "
    "5) scores higher than training from scratch (Table 4) on all ten datasets",
    "pretrain": "without published weights: pre-train on these images first, without labels (--images all adds val and "
    "test). On Flowers-102 this gave 30 points with 2 and 5 labels per class (and --unlabelled), 3 to 6 points with 20",
    "init": "then start from its folder (RUN) instead of random weights",
    "rest": "then learn from the images without a label too. On Flowers-102 this had 59 % with 2 labels per class and "
    "73 % with 5. From random weights (without --init) it gained nothing",
    "select": "which images to label next? next.csv and next.png list those that represent the others best. Fill in "
    "the labels, copy them into your data, and probe again",
    "unlabelled": "there are no labels: learn features from the images alone",
    "embed": "then write the features of the run (RUN is its folder)",
    "some labels": "or, with some images sorted into class folders, train a classifier",
    "dense": "from random weights, the shortest way to a first score",
    "dense published": "published weights (from the hub, or a folder FRUGALVIT_WEIGHTS)",
    "dense pretrain": "without published weights: pre-train on images of this kind first, not on those that are scored",
}


@dataclass
class Proposal:
    """A command, the reason for it, and its expected length."""

    command: str
    why: str
    seconds: float | None = None
    steps: int | None = None
    seconds_per_step: float | None = None
    decisions: resolve.AutoValues = field(default_factory=resolve.AutoValues)
    notes: list[str] = field(default_factory=list)


def advise(config: AdviseConfig) -> CommandResult:
    """Propose commands for this data on this machine, best first."""
    device = pick_device(config.device)
    source = open_data(config.data, loose=True)
    examples = source.splits.get("train")
    if examples is None or len(examples) < 2:
        raise UserError(f"{source.location} has no training images.")
    inspected = inspect(source, decode="headers", duplicates=False).data
    facts = Facts(len(examples), len(source.classes or ()), builders.median_side(examples), device)
    facts = replace(facts, target=source.target)
    if examples.labels is not None:
        counts = np.bincount(examples.labels, minlength=facts.classes)
        facts = replace(facts, imbalance=float(counts.max() / max(1, counts.min())))
    annotations = find_annotation_kind(source.location, source.classes)
    if annotations is not None:
        facts = replace(facts, images=annotations.splits.get("train", facts.images), classes=0)
        inspected |= {"splits": {}, "notes": []}
        proposals = _propose_for_annotations(config, annotations, facts)
    else:
        propose = _propose_for_labels if source.classes else _propose_without_labels
        proposals = propose(config, source, facts)
    notes = _warnings(inspected, facts)
    is_classes = annotations is None and source.classes and source.target == "class"
    if is_classes and not _has_published(device):
        notes.append("Published weights are neither here nor within reach: commands that need them come later.")
    floor = _floor(source) if is_classes and examples.pixels == PHOTO else None
    if floor is not None:
        notes.append(
            f"The floor on {floor['scored_on']} ({pluralize(floor['scored_images'], 'image')}) is about "
            f"{describe_floor(floor)}. On few images it is rough."
        )
        notes.extend(EXPECT)
    splits = {name: len(part) for name, part in source.splits.items()}
    splits |= {f"{name} without a label": len(part) for name, part in source.loose.items()}
    data = {
        "data": source.location,
        "images": sum((splits if annotations is None else annotations.splits).values()),
        "classes": inspected["classes"] if annotations is None else None,
        "drawn": None if annotations is None else annotations.text,
        "splits": splits if annotations is None else annotations.splits,
        "side": facts.side,
        "device": device,
        "floor": floor,
        "proposals": [vars(p) | {"decisions": [vars(d) for d in p.decisions]} for p in proposals],
        "notes": notes,
    }
    return CommandResult(data, _tables(data, proposals), [*notes, *_explanations(proposals)])


def _floor(source: DatasetSplits) -> dict[str, Any] | None:
    """Return the floor on validation images, else test images, from at most ``FLOOR_IMAGES`` of each split."""
    name = next((name for name in ("val", "test") if name in source.splits), None)
    if name is None:
        return None
    stores = []
    with console.quiet():
        for part in (source.splits["train"], source.splits[name]):
            index = np.linspace(0, len(part) - 1, min(len(part), FLOOR_IMAGES)).astype(np.int64)
            stores.append(build_store(part.subset(index), PIXELS, where="ram", max_bad=1.0))
    floor = compute_floor(stores[0], stores[1], len(source.classes or ()), seed=0)
    facts = {"train_images": len(source.splits["train"]), "scored_on": name, "scored_images": stores[1].readable}
    return floor | facts


# -- proposals


def _propose_for_labels(config: AdviseConfig, source: DatasetSplits, facts: Facts) -> list[Proposal]:
    data = shlex.quote(config.data)
    scratch = _plan_training(config, source, facts, "scratch", {})
    published = _plan_training(config, source, facts, "published", {"pretrained": True})
    network = published_backbone(facts.device)[0]
    count = len(source.loose.get("train", ()))
    more = " --unlabelled rest" if count else ""
    command = f"frugalvit probe logistic {network} {data} --pretrained{more} --save probe"
    probe = Proposal(command, REASONS["features"] + (REASONS["spread"] if count else ""))
    if published.seconds_per_step is not None:  # a forward pass takes less than half of a step
        batch = next(value.value for value in published.decisions if value.name == "batch")
        parts = [*source.splits.values(), *source.loose.values()]
        probe.seconds = published.seconds_per_step / batch / 2 * sum(map(len, parts))
    features = _plan_pretraining(config, source, facts, "pretrain")
    start = replace(scratch, command=f"frugalvit train {data} --init RUN", why=REASONS["init"])
    rest = Proposal(f"frugalvit train {data} --unlabelled rest --init RUN", REASONS["rest"])
    start_from = [start] if count < facts.images else [start, rest]
    first = [probe] if source.splits["train"].pixels == PHOTO else []  # published networks see photos
    if first and count > SELECTED:
        select = f"frugalvit embed probe {data} --select {SELECTED} --known {data} --out next.csv"
        first.append(Proposal(select, REASONS["select"], probe.seconds))
    if not _has_published(facts.device):
        return [scratch, features, *start_from, *first, published]
    if facts.device == "cpu":  # the fastest first
        return [*first, published, scratch, features, *start_from]
    if facts.images / max(1, facts.classes) < FEW_PER_CLASS:
        return [*first, published, features, *start_from, scratch]
    return [*first, published, scratch, features, *start_from]


def _has_published(device: str) -> bool:
    return locate_published(published_backbone(device)[0]) is not None or is_online()


def _propose_without_labels(config: AdviseConfig, source: DatasetSplits, facts: Facts) -> list[Proposal]:
    data = shlex.quote(config.data)
    return [
        _plan_pretraining(config, source, facts, "unlabelled"),
        Proposal(f"frugalvit embed RUN {data} --out features.npz", REASONS["embed"]),
        Proposal("frugalvit train LABELLED/ --init RUN", REASONS["some labels"]),
    ]


def _propose_for_annotations(config: AdviseConfig, annotations: AnnotationInfo, facts: Facts) -> list[Proposal]:
    """Propose detection or segmentation; pre-training must not use images that are scored."""
    command = f"frugalvit {annotations.verb} train {shlex.quote(config.data)}"
    published = f"{command} --backbone {published_backbone(facts.device)[0]} --pretrained"
    return [
        Proposal(command, f"there are {annotations.text}: {REASONS['dense']}"),
        Proposal(published, REASONS["dense published"]),
        Proposal("frugalvit pretrain MORE_IMAGES/", REASONS["dense pretrain"]),
        Proposal(f"{command} --init RUN", REASONS["init"]),
    ]


def _plan_training(
    config: AdviseConfig, source: DatasetSplits, facts: Facts, reason: str, options: dict[str, Any]
) -> Proposal:
    assert source.classes is not None
    flags = "".join(f" --{k}" if v is True else f" --{k} {v}" for k, v in options.items())
    settings = TrainConfig.parse({"data": config.data, "device": config.device, **options})
    decisions = resolve.AutoValues()
    validation_images = len(source.splits.get("val") or source.splits.get("test") or ())
    tested = {"val", "test"} <= source.splits.keys()
    facts = replace(facts, eval_images=validation_images, fits_classifier=settings.pretrained, tested=tested)
    settings = resolve.resolve_input(settings, facts, decisions)
    with console.quiet():
        settings = builders.resolve_pixels(settings, source.splits["train"], decisions)
        backbone = train.make_network(settings, source.classes)
    settings = resolve.resolve_training(settings, resolve.add_backbone_facts(facts, backbone), decisions)
    plan = train.make_plan(settings, facts.images, 1)
    command = f"frugalvit train {shlex.quote(config.data)}{flags}"
    proposal = Proposal(command, REASONS[reason], steps=plan.steps, decisions=decisions, notes=backbone.notes)
    if config.trial:
        fabric = builders.make_fabric(settings)
        task = train.make_task(settings, backbone, plan)
        store, decoding = _load_sample(source.splits["train"], plan, backbone.img_size, settings, fabric)
        augment = TrainAugment(settings.augment, backbone.img_size, backbone.mean, backbone.std)
        mixing = Mixing(settings.mixing, len(source.classes))
        task.set_data(Batches(store, plan.images_per_step, seed=0, augment=augment, mixing=mixing), None, "val", fabric)
        held_out = sum(len(source.splits[name]) for name in ("val", "test") if name in source.splits)
        evaluated = plan.steps / plan.evaluate_every * validation_images + held_out
        # A forward pass takes about a third of a training step.
        _estimate(proposal, task, plan, fabric, config.trial, evaluated / 3, decoding * (facts.images + held_out))
    return proposal


def _plan_pretraining(config: AdviseConfig, source: DatasetSplits, facts: Facts, reason: str) -> Proposal:
    facts = replace(facts, images=facts.images + len(source.loose.get("train", ())))
    method = "instances" if pretrain.suits_instances(facts.images, facts.side) else "esvit"
    settings = PretrainConfig.parse({"data": config.data, "device": config.device, "method": method})
    decisions = resolve.AutoValues()
    settings = resolve.resolve_input(settings, facts, decisions)
    with console.quiet():
        settings = builders.resolve_pixels(settings, source.splits["train"], decisions)
        student = pretrain.make_network(settings)
    settings = resolve.resolve_pretraining(settings, resolve.add_backbone_facts(facts, student), decisions)
    plan = pretrain.make_plan(settings, facts.images, 1)
    command = f"frugalvit pretrain {shlex.quote(config.data)}{' --method instances' if method == 'instances' else ''}"
    proposal = Proposal(command, REASONS[reason], steps=plan.steps, decisions=decisions)
    if config.trial:
        fabric = builders.make_fabric(settings)
        proposal.notes = student.notes
        if method == "instances":
            task: FeatureTask = pretrain.make_instance_task(settings, student, plan, len(source.splits["train"]))
            augment: Augment = TrainAugment(settings.augment, student.img_size, student.mean, student.std)
            mixing = Mixing(settings.mixing, len(source.splits["train"]))
        else:
            task, mixing = pretrain.make_task(settings, student, plan), None
            augment = MultiCrop(settings.crops, student.img_size, student.mean, student.std)
        images = number_images(source.splits["train"])
        store, decoding = _load_sample(images, plan, student.img_size, settings, fabric)
        batches = Batches(store, plan.images_per_step, seed=0, augment=augment, mixing=mixing)
        task.set_data(batches, None, Health(settings.matching.prototypes, plan.steps, plan.steps), fabric)
        # The health metrics embed up to nine times health.images; one embedding takes about a twelfth of an image's
        # share of a step (ten crops, gradients, teacher).
        embedded = min(facts.images, 9 * settings.health.images) * plan.steps / plan.evaluate_every
        _estimate(proposal, task, plan, fabric, config.trial, embedded / 12, decoding * facts.images)
    return proposal


# -- times


def _load_sample(
    examples: ImageDataset, plan: TrainPlan, img_size: tuple[int, int], settings: RunConfig, fabric: Fabric
) -> tuple[Any, float]:
    """Return a sample of the images in memory, and the seconds to decode one of them."""
    count = min(len(examples), max(64, plan.images_per_step))
    sample = examples.subset(np.linspace(0, len(examples) - 1, count).astype(np.int64))
    in_memory = settings.model_copy(update={"cache": settings.cache.model_copy(update={"location": "ram"})})
    start = time.monotonic()
    store = builders.get_image_store(sample, img_size, in_memory, fabric.device)
    return store, (time.monotonic() - start) / count


def _estimate(
    proposal: Proposal, task: Any, plan: TrainPlan, fabric: Fabric, trial: int, extra_images: float, decoding: float
) -> None:
    """Time ``trial`` steps after a warm-up step, and set the expected time of the run.

    extra_images: images besides those of the steps, each as costly as an image of a step
    decoding:     seconds to decode all images
    """
    module, optimizer = fabric.setup(task, make_optimizer(task, plan, fabric))
    stepper = TrainStep(task, module, optimizer, plan, fabric)
    times = []
    for stepper.step in console.progress(range(trial + 1), label=f"timing '{proposal.command}'"):
        start = time.perf_counter()
        stepper.one_step()
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    proposal.seconds_per_step = statistics.median(times[1:])
    proposal.seconds = proposal.seconds_per_step * (plan.steps + extra_images / plan.images_per_step) + decoding


# -- output


def _warnings(inspected: dict[str, Any], facts: Facts) -> list[str]:
    notes = list(inspected["notes"])
    if inspected["bad"]:
        files = pluralize(len(inspected["bad"]), "file")
        notes.append(
            f"{files} cannot be read: see 'frugalvit data'. Training skips them if they are few, else it stops."
        )
    per_class = inspected["splits"].get("train", {}).get("per_class")
    if per_class and per_class["max"] >= 5 * max(1, per_class["min"]):
        notes.append(
            f"Classes have between {per_class['min']} and {per_class['max']} training images. Read the mean per class "
            "beside the accuracy. --balance, or --logit-adjustment 1 (auto from a ratio of 20), helps rare classes."
        )
    if facts.images < FEW_IMAGES:
        notes.append(
            f"{facts.images:,} training images are very few: compare over several seeds. Published weights "
            "(--pretrained) or more images help more than any option."
        )
    if facts.device == "cpu":
        notes.append("There is no GPU: networks and images are small. On a GPU the same commands choose larger ones.")
    return notes


def _tables(data: dict[str, Any], proposals: list[Proposal]) -> list[Table]:
    labels = data["drawn"] or (f"{data['classes']:,} classes" if data["classes"] else "no labels")
    splits = ", ".join(f"{name} {count:,}" for name, count in data["splits"].items())
    images = f"{data['images']:,} images ({splits}), {labels}, about {data['side']} px"
    rows: list[list[object]] = [
        [p.command, None if p.seconds is None else console.clock(p.seconds), p.steps] for p in proposals
    ]
    return [Table(["try", "takes about", "steps"], rows, f"{data['data']}: {images}, on {data['device']}")]


def _explanations(proposals: list[Proposal]) -> list[str]:
    """List each command with its reason and the values that no earlier command shows."""
    lines: list[str] = []
    shown: set[str] = set()
    for proposal in proposals:
        values = [*map(str, proposal.decisions), *proposal.notes]
        new = [value for value in values if value not in shown]
        shown.update(values)
        end = "" if proposal.why.endswith("?") else "."
        lines += ["", proposal.command, f"    {proposal.why}{end}", *(f"    {value}" for value in new)]
    return lines
