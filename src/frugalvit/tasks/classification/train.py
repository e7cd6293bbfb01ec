"""``frugalvit train``: from images with labels to a classifier, a report and a model folder."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning_fabric import Fabric
from torch import nn

from frugalvit.backbones import Backbone
from frugalvit.backbones.lora import add_lora, merge_lora
from frugalvit.backbones.weights.model_config import class_names
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.backbones.weights.published import locate_published
from frugalvit.config.defaults import Facts, images_per_epoch, published_backbone
from frugalvit.config.resolved import ResolvedTrainConfig
from frugalvit.config.semi_supervised import REST
from frugalvit.config.train import TrainConfig
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import PHOTO
from frugalvit.data.formats.image_folder import are_layout_folders
from frugalvit.data.splits import absent_classes, check_trainable, subsample_labels
from frugalvit.engine.distributed import collective_timeout, run_on_rank_zero
from frugalvit.engine.loop import TrainPlan, describe_rescue
from frugalvit.engine.param_groups import freeze_first
from frugalvit.engine.schedules import Constant, Cosine, Linear, Polynomial, Schedule, warmup_steps
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.builders import EvalSet, make_localization
from frugalvit.experiment.calibration import Calibration, calibrate, save_calibration, spread_rows
from frugalvit.experiment.experiment import Experiment
from frugalvit.experiment.extra_objectives import make_objectives
from frugalvit.experiment.load_model import find_init
from frugalvit.experiment.resolve import PAIR, resolve_input, resolve_training
from frugalvit.experiment.summary import (
    Answers,
    augmentation_sheet,
    collect_answers,
    describe_weights,
    finite,
    run_facts,
    run_result,
    save_pictures,
)
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.probing.floor import check_floor, compute_floor, describe_floor
from frugalvit.probing.logistic import fit_on_features
from frugalvit.probing.saved_probe import learned_images
from frugalvit.runs import layout
from frugalvit.runs.data_record import record_data_usage
from frugalvit.tasks.classification.health import SupervisedHealth
from frugalvit.tasks.classification.semi_supervised import (
    SemiSupervisedTask,
    add_unlabelled,
    make_semi_task,
    open_unlabelled,
    separate_streams,
)
from frugalvit.tasks.classification.target import Target, check_options, make_target
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.tasks.distillation.teacher import Guide, load_teacher
from frugalvit.utils import console
from frugalvit.utils.files import utf8_safe
from frugalvit.utils.scores import read_scores, score_table
from frugalvit.utils.tables import CommandResult

SHORTEST_RESCUED = 100
"""The shortest run, in steps, that can be rescued: ten lines of metrics are too few to tell a collapse."""

_AT_CHANCE = (
    "the run ended at chance: it predicts hardly better than without looking at the images. Change --lr, lengthen "
    "--optimizer.warmup, train longer (--epochs), or start from trained weights (--pretrained, --init)"
)

MOST_FITTED = 50_000
"""The most images whose features "auto" fits a classifier on: more take minutes, in which other ranks wait."""

HARDLY = 0.8  # of the error of a constant answer; above it Drloc's task counts as hardly learned


def train(config: TrainConfig) -> CommandResult:
    """Train or fine-tune a classifier."""
    return ClassificationExperiment(config).run()


class ClassificationExperiment(Experiment[TrainConfig, ResolvedTrainConfig]):
    command = "train"
    data: DatasetSplits
    task: ClassificationTask
    images: ImageDataset  # to train on, with labels
    target: Target
    unlabelled: ImageDataset | None = None  # to train on without labels, of --unlabelled
    evaluated: ImageDataset  # of the evaluations while training
    eval_split: str  # "val", or "test", which never chooses the best weights
    unseen: ImageDataset | None  # test, if there is also val
    learned_val: bool = False  # the classifier was fitted on val too

    def open_data(self, fabric: Fabric | None) -> DatasetSplits:
        rest = self.options.unlabelled == REST
        source = builders.open_source(separate_streams(self.options)[0], fabric, loose=rest)
        _refuse_dense_labels(source)
        check_trainable(source)
        check_options(self.options, source.target)
        chosen = builders.choose_splits(source.splits, source.location)
        self.images, self.evaluated, self.eval_split, self.unseen = chosen
        if (labels := self.options.labels) != 1 and self.images.streaming is not None:
            raise UserError("--labels needs access to single images, which a stream does not have: use --stream false.")
        if labels != 1 and self.images.truth is not None:
            groups = np.zeros(len(self.images), np.int64) if self.images.labels is None else self.images.labels
            self.images = self.images.subset(subsample_labels(groups, labels, self.options.seed))
        builders.check_enough_images(self.options, self.images, PAIR)
        if self.options.unlabelled is not None:
            scored = [self.evaluated, *([self.unseen] if self.unseen else [])]
            self.unlabelled = open_unlabelled(self.options, source, fabric, scored).with_pixels(self.images.pixels)
        return replace(source, notes=[*source.notes, *absent_classes(source), *self._seen_by_init()])

    def load_best(self, outcome: dict[str, Any], weights: str) -> bool:
        counts = self.task.last_counts.clone() if isinstance(self.task, SemiSupervisedTask) else None
        loaded = super().load_best(outcome, weights)
        if counts is not None:  # the report shows the pseudo-labels of the run's end, not of its best step
            self.task.last_counts.copy_(counts)  # type: ignore[union-attr, operator]
        return loaded

    def _seen_by_init(self) -> list[str]:
        """Return a note if the classifier of --init, a saved probe, may know the images that score this run."""
        options, images = self.options, self.evaluated
        if options.init is None or images.streaming is not None or not Path(options.init).is_dir():
            return []
        seen = learned_images(Path(options.init), options.data, self.eval_split, images.keys)
        where = f"{seen:,} of the {len(images):,} images of {self.eval_split}"
        note = f"the classifier of --init {options.init} may have learned from {where}: their score is too high"
        return [f"{note}. --pretrained starts without this"] if seen else []

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes or ()

    def facts(self) -> Facts:
        side, labels = builders.median_side(self.images.sample_images()), self.images.labels
        counts = np.ones(1) if labels is None else np.bincount(labels, minlength=len(self.classes))
        return Facts(
            images=len(self.images),
            classes=len(self.classes),
            side=side,
            device=self.fabric.device.type,
            eval_images=len(self.evaluated),
            unlabelled=len(self.unlabelled or ()),
            fits_classifier=self._can_fit_classifier(),
            tested=self.unseen is not None,
            target=self.data.target,
            imbalance=float(counts.max() / max(1, counts.min())),
        )

    def _can_fit_classifier(self) -> bool:
        """Whether learned features need a classifier for these classes, and few enough images are there to fit it."""
        options = self.options
        if options.resume:  # the run has chosen
            return False
        # Unlabelled images spread the labels; without them, a run from the user's own pre-training does not need it.
        learned = options.recipe == "finetune" or (
            self.unlabelled is not None and any(options.weight_sources().values())
        )
        if not learned or len(self.images) > MOST_FITTED or self.images.streaming is not None:
            return False
        return self.data.target != "number" and not self._init_fits()

    def _init_fits(self) -> bool:
        """Whether --init has a classifier of these classes; no if a checkpoint replaces it: --init may be gone."""
        init = self.options.init if builders.needs_initial_weights(self.options) else None
        return init is not None and class_names(find_init(init)) == list(self.classes)

    def resolve_input(self, options: TrainConfig, facts: Facts) -> TrainConfig:
        published = published_backbone(facts.device)[0]
        if options.backbone == "auto" and not any(options.weight_sources().values()) and locate_published(published):
            console.info(f"published weights of {published} are on this machine: --pretrained usually scores higher")
        options = resolve_input(options, facts, self.auto_values)
        options = builders.resolve_pixels(options, self.images, self.auto_values)
        both = [self.images] if self.unlabelled is None else [self.images, self.unlabelled]
        streams = [(len(images.streaming.paths), images) for images in both if images.streaming is not None]
        fewest = min(streams, key=lambda stream: stream[0])[1] if streams else self.images
        return builders.resolve_readers(options, fewest, self.fabric, self.auto_values)

    def build_backbone(self, options: TrainConfig) -> Backbone:
        pretrained = options.pretrained and builders.needs_initial_weights(options)
        return make_network(options, self.classes, pretrained=pretrained)

    def resolve_values(self, options: TrainConfig, facts: Facts) -> ResolvedTrainConfig:
        config, network = resolve_training(options, facts, self.auto_values), self.backbone
        height, width = network.grid_size(network.img_size)
        if config.localization.weight != 0 and height * width < 2:
            raise UserError(
                f"{network.name} ends in a {height}×{width} grid at {network.img_size[0]}×{network.img_size[1]} px: "
                "there is nothing to localize. Use a larger --img-size, or --localization.weight 0."
            )
        return config

    def build_plan(self) -> TrainPlan:
        images, ratio = len(self.images), self.config.semi.ratio
        if self.unlabelled is not None and ratio != "auto":
            images = images_per_epoch(images, len(self.unlabelled), ratio)
        return make_plan(self.config, images, self.fabric.world_size)

    def training_files(self) -> tuple[ImageDataset, Sequence[str], str | None]:
        others = None if self.unlabelled is None else self.unlabelled.fingerprint(times=False)
        return self.images, self.classes, others

    def build_task(self) -> ClassificationTask:
        self.target = make_target(self.config, self.classes, self.images)
        if builders.needs_initial_weights(self.config):
            if self.config.classifier == "logistic":
                if self.images.streaming is not None:
                    raise UserError("--classifier logistic needs access to single images: use --stream false.")
                self._fit_classifier(self.backbone)
            else:
                self.target.start_classifier(self.backbone, loaded=self._init_fits())
        return make_task(self.config, self.backbone, self.plan, len(self.unlabelled or ()), self.target)

    def _fit_classifier(self, network: Backbone, *others: EvalSet) -> None:
        """Set the classifier to the logistic regression on the training images and the others."""
        make = partial(builders.eval_set, backbone=self.backbone, config=self.config, fabric=self.fabric)
        datasets, rest, unlabelled, count = [make(self.images), *others], self.unlabelled, None, ""
        # Of more images the neighbour graph takes minutes, in which other ranks wait.
        if rest is not None and rest.streaming is None and len(rest) <= MOST_FITTED and self.target.kind == "class":
            unlabelled, count = make(rest), f"{len(rest):,} unlabelled and "
        weight, bias, strength = run_on_rank_zero(
            self.fabric, lambda: fit_on_features(network, datasets, len(self.classes), self.fabric, unlabelled)
        )
        network.set_classifier(weight, self.target.adjust_fitted(bias))
        console.info(
            "the classifier is a logistic regression on the frozen features of "
            f"{count}{len(datasets[0].store):,} labelled images (λ = {strength:g})"
        )

    def build_batches(self) -> None:
        config, backbone, task = self.config, self.backbone, self.task
        batches = builders.make_batches(
            self.images,
            backbone.img_size,
            self.plan,
            config,
            self.fabric,
            augment=TrainAugment(config.augment, backbone.img_size, backbone.mean, backbone.std),
            mixing=Mixing(config.mixing, len(self.classes)),
            balance=config.balance,
            keep_clean=config.localization.images == "clean" and task.localization is not None,
        )
        if self.unlabelled is not None:
            batches = add_unlabelled(batches, self.unlabelled, backbone, self.plan, config, self.fabric)
        self.eval_set = builders.eval_set(self.evaluated, backbone, config, self.fabric)
        task.set_data(batches, self.eval_set, self.eval_split, self.fabric)
        self.health = task.health = make_health(config, self.plan, self.target, self.images, self.evaluated)
        self._record_data({self.eval_split: self.eval_set.store})

    def _record_data(self, stores: dict[str, ImageStore]) -> None:
        batches: Any = self.task.batches  # --auto-batch may have replaced them
        parts = {"train": batches} if self.unlabelled is None else batches.parts()
        record_data_usage(self.run_folder, self.data.notes, parts | stores)

    def score(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """Score the best weights on test; without it, on the images of the evaluations."""
        config, task = self.config, self.task
        if self.load_best(outcome, config.weights):
            task.cached_scores = None
        kept_start = outcome["best_step"] == 0 and (config.classifier, config.weights) == ("logistic", "best")
        self.learned_val = kept_start and self.unseen is not None and config.labels == 1  # else val scores, or is spare
        if self.learned_val:  # val has chosen, and a probe also learns from it
            self._fit_classifier(task.result, self.eval_set)
            console.info("no later weights were better on val: the first stay, and the classifier learns from val too")
        self.final_set, unseen = self.eval_set, self.unseen
        if unseen is not None:
            self.final_set = builders.eval_set(unseen, task.backbone, config, self.fabric)
        with collective_timeout(self.fabric, config.peer_timeout):
            if task.eval_split == "val":
                self.target.tune(lambda: task.score(self.eval_set))
            self.scores = task.score(self.final_set)
        top = self.scores.summary()
        floor = self._floor() if self.run_folder.writer else {"skipped": "rank 0 computes it"}
        below, at_chance = self._check_floor(top, floor), self.scores.is_at_chance()
        at_chance |= self.target.kind == "class" and self.health.learned_nothing(top["mean_per_class"])
        for alarm in below:
            console.warning(alarm)
        alarms = [*map(str, self.health.all_alarms()), *(f"rescue {describe_rescue(r)}" for r in outcome["rescues"])]
        return {
            "run": str(self.run_folder.folder),
            "task": "train",
            "target": self.target.kind,
            "learned_val": self.learned_val,
            **top,
            "floor": floor,
            **self.scores.facts("test" if unseen is not None else task.eval_split),
            f"val_{task.best_metric}": finite(outcome["best"]),
            **describe_weights(outcome, task.eval_split, config.weights),
            **task.localization_summary(),
            "at_chance": at_chance,
            "health": "nothing learned" if at_chance and not self.health.raised else self.health.verdict(),
            "rescues": outcome["rescues"],
            "alarms": [*alarms, *([_AT_CHANCE] if at_chance else []), *below],
            **task.pseudo_label_scores(),
            **run_facts(config, outcome, task.backbone),
        }

    def _floor(self) -> dict[str, Any]:
        """Score simple methods on the images of the final score, or say why this is not possible."""
        if self.target.kind != "class":
            return {"skipped": "the simple methods predict one class per image"}
        if self.images.streaming is not None:
            return {"skipped": "the training images are a stream"}
        if self.images.pixels != PHOTO:
            return {"skipped": "it describes colours, and these images are not 8-bit RGB"}
        # The run has this store: without fabric, because only rank 0 is here.
        store = builders.get_image_store(self.images, self.task.backbone.img_size, self.config, self.fabric.device)
        if store.decodes_on_demand or self.final_set.store.decodes_on_demand:
            return {"skipped": "the images are not cached (--cache.location off)"}
        return compute_floor(store, self.final_set.store, len(self.classes), self.config.seed)

    def _check_floor(self, scores: dict[str, Any], floor: dict[str, Any]) -> list[str]:
        return check_floor(scores.get("top1", 0.0), floor, pretrained=any(self.options.weight_sources().values()))

    def save_results(self, summary: dict[str, Any]) -> dict[str, Any]:
        run, task, classes, target = self.run_folder, self.task, self.classes, self.target
        batches: Any = task.batches
        self._record_data({self.eval_split: self.eval_set.store, summary["scored_on"]: self.final_set.store})
        meta = {"classes": list(classes), "data": self.data.name, "recipe": self.config.recipe}
        meta |= {name: summary[name] for name in list(self.scores.summary())[:1]} | target.meta()
        merge_lora(task.result)
        training, answers = self._training_set(), None
        if target.kind == "class":
            answers = collect_answers(task.result, self.final_set, "collecting mistakes")
            calibration, known = self._calibrate(training, answers)
            console.info(str(calibration))
        else:
            calibration, known = None, self._score_training(training)
        mistakes, table, details = target.details(self.scores, answers, self.final_set, self.data.location, calibration)
        save_pictures(run, mistakes, augmentation_sheet(batches, task.backbone))
        run.table("per_class", table)
        details |= {"classes": list(classes)} | ({"training_images": known} if known else {})
        target.finish(task.result)
        meta |= save_calibration(calibration, run.path(layout.MODEL))
        save_model_folder(task.result, run.path(layout.MODEL), classes=classes, meta=meta)
        if self.unlabelled is None:
            return details
        table = task.pseudo_label_table(classes)
        run.table("pseudo_labels", table)
        return details | {"pseudo_labels": {"columns": table.columns, "rows": table.rows}}

    def _training_set(self) -> EvalSet | None:
        """Return training images without augmentation, for the report and the calibration; None for a stream."""
        if self.images.streaming is not None:
            return None
        images = self.images.subset(spread_rows(len(self.images)).numpy())
        transform, config, device = self.final_set.transform, self.config, self.fabric.device
        # Rank 0 is here alone, and the share of unreadable images may be higher in a sample.
        config = config.model_copy(update={"cache": config.cache.model_copy(update={"max_bad": 1.0})})
        with console.quiet():
            store = builders.get_image_store(images, transform.out_size, config, device, crop=transform.crop)
        return EvalSet(store, transform, self.final_set.batch)

    def _score_training(self, training: EvalSet | None) -> dict[str, Any]:
        """Return the main score of training images; {} if none is readable."""
        if training is None:
            return {}
        with console.quiet():
            scores = self.task.scores(training, alone=True)
        count = scores.facts("train")["scored_images"]
        return dict(list(scores.summary().items())[:1]) | {"count": count} if count else {}

    def _calibrate(self, training: EvalSet | None, final: Answers) -> tuple[Calibration | str, dict[str, Any]]:
        """Calibrate on val, or say why not; return the accuracy on training images too, and record their names.

        final: the answers to the images of the final score, which may be those of val
        """
        gallery, known = None, {}
        if training is not None:
            with console.quiet():
                answers = collect_answers(self.task.result, training, "scoring training images")
            gallery, count = answers.pooled, len(answers.labels)
            known = {"top1": 100 * answers.right.double().mean().item(), "count": count} if count else {}
            named = zip(answers.index.tolist(), answers.labels.tolist(), strict=True)
            names = training.store.names
            rows = [{"file": utf8_safe(names[index]), "label": self.classes[label]} for index, label in named]
            self.run_folder.save_json(layout.TRAINING_IMAGES, rows)
        if self.eval_split != "val":
            why = "not calibrated: there is no val split, and test must only score. --split auto makes one from train"
            return why, known
        if self.learned_val:
            return "not calibrated: the classifier learned from val too", known
        held_out = final
        if self.final_set is not self.eval_set:
            held_out = collect_answers(self.task.result, self.eval_set, "calibrating on val")
        return calibrate(held_out.logits, held_out.labels, "val", gallery, held_out.pooled), known

    def report_inputs(self) -> dict[str, Any]:
        images = self.unseen or self.data.splits.get("val") or self.data.splits["train"]
        return {"model": self.task.result.cpu().eval(), "examples": images}

    def result(self, summary: dict[str, Any]) -> CommandResult:
        floor = summary["floor"]
        table = score_table(read_scores(summary))
        commands = [f"frugalvit predict {console.shell_quote(summary['run'])} IMAGE…"]
        rescues = [f"{'rescue':<12}{describe_rescue(rescue)}" for rescue in summary["rescues"]]
        notes = [f"{'floor':<12}{describe_floor(floor, summary.get('top1'))}"]
        notes += [f"{'alarm':<12}{alarm}" for alarm in self._check_floor(summary, floor)]
        notes += [*rescues, *_describe_losses(summary)]
        result = run_result(summary, table, commands, notes)
        result.notes += [f"{'failed':<12}{_AT_CHANCE}"] if summary["at_chance"] else []
        return result


def make_health(
    config: ResolvedTrainConfig, plan: TrainPlan, target: Target, images: ImageDataset, evaluated: ImageDataset
) -> SupervisedHealth:
    """Build the health checks; the labels of a stream are unknown, so its classes count as equally frequent."""
    chance, deviation = target.chance_loss(images.truth, config.mixing.label_smoothing(), balance=config.balance)
    return SupervisedHealth(
        chance,
        deviation / math.sqrt(plan.images_per_step * plan.log_every),
        len(target.classes) if evaluated.labels is None else len(np.unique(evaluated.labels)),
        len(evaluated),
        plan.steps,
        warmup_steps(config.optimizer.warmup, plan.steps_per_epoch, plan.steps),
        plan.log_every,
        config.lr,
        target.loss_name,
    )


def make_plan(config: ResolvedTrainConfig, images: int, world: int) -> TrainPlan:
    """Build the schedule of a run in steps, for ``images`` training images on ``world`` processes."""
    plan = TrainPlan.from_config(config, images, world, group=PAIR)
    optimizer = config.optimizer
    warmup = warmup_steps(optimizer.warmup, plan.steps_per_epoch, plan.steps)
    length, options = round(config.stretch * plan.steps), {"from_zero": optimizer.cosine_from_start}
    lr = Cosine(config.lr, config.lr * optimizer.min_lr, length, warmup, warmup_from=config.lr * 1e-3, **options)
    rescues = 2 if config.rescue and plan.steps >= SHORTEST_RESCUED else 0
    first = config.classifier == "logistic"
    return replace(plan, lr=lr, evaluate_every=config.evaluate_every, evaluate_first=first, rescues=rescues)


def make_network(config: TrainConfig, classes: int | Sequence[str], *, pretrained: bool = False) -> Backbone:
    """Build the classifier's network."""
    grid_norm = config.localization.grid == "normed"
    return builders.make_backbone(config, classes, pretrained=pretrained, grid_norm=grid_norm)


def make_task(
    config: ResolvedTrainConfig, backbone: Backbone, plan: TrainPlan, unlabelled: int = 0, target: Target | None = None
) -> ClassificationTask:
    """Build the classifier and its losses for this many unlabelled images. Freeze layers, or add LoRA."""
    if config.freeze:
        console.info(f"{freeze_first(backbone.model, config.freeze):,} parameters frozen")
    if config.lora:
        console.info(f"LoRA: {add_lora(backbone.model, config.lora):,} parameters learn")
    options = config.localization
    weight: Schedule = Constant(options.weight)
    if options.schedule == "ramp":
        warmup = warmup_steps(20, plan.steps_per_epoch, plan.steps)
        weight = Polynomial(options.weight, round(config.stretch * plan.steps), warmup=warmup)
    guide = None
    if config.guide.model is not None:
        fading = Linear(config.guide.weight, 0.0, round(config.guide.until * plan.steps))
        guide = Guide(load_teacher(config.guide.model, backbone), backbone.dim, fading)
    build = partial(make_semi_task, config, unlabelled, plan.steps) if unlabelled else ClassificationTask
    return build(
        backbone,
        _make_localization(config, backbone) if options.weight > 0 else None,
        options,
        weight,
        ema=config.ema,
        weight_decay=config.optimizer.weight_decay,
        layer_decay=config.optimizer.layer_decay,
        objectives=make_objectives(config.objectives, backbone.dim, ["localization"] if options.weight > 0 else []),
        guide=guide,
        target=target or make_target(config, [str(number) for number in range(backbone.num_classes)]),
    ).train()


def _make_localization(config: ResolvedTrainConfig, backbone: Backbone) -> RelativeLocalization | DenseLocalization:
    options = config.localization
    settings = options.head_settings()
    if options.variant == "dense":
        dims = backbone.block_dims()
        sizes = [settings.grid_size] * len(dims)
        shape = {"pairs": settings.pairs, "hidden": settings.head_width(backbone.dim), "form": settings.form}
        head = DenseLocalization(dims, grid_sizes=sizes, precision="autocast", **shape)
    else:
        head = make_localization(settings, backbone.dim, backbone.grid_size(backbone.img_size))
    if settings.form == "released" and backbone.family in ("swin", "t2t"):
        # Drloc's code for Swin and T2T initializes all modules, the loss's head too.
        for module in head.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
    return head


def _describe_losses(summary: dict[str, Any]) -> list[str]:
    """Return notes on the pseudo-labels, and on Drloc's task if it was hardly learned."""
    used, right = summary.get("pseudo_labels_used"), summary.get("pseudo_labels_right")
    known = "" if right is None else f"; {right:.1f} % of these were right (hidden labels)"
    notes = [] if used is None else [f"pseudo      {used:.1f} % of the pseudo-labels counted{known}"]
    error, constant = summary.get("localization_error"), summary.get("constant_answer_error")
    if error is None or constant is None or not error >= HARDLY * constant:  # also for NaN
        return notes
    answers = f"the error is {error:.2f} grid cells, a constant answer has {constant:.2f}"
    advice = "raise --localization.weight, or set it to 0; 'frugalvit compare' shows which is better"
    return [*notes, f"drloc       its task was hardly learned: {answers}", f"{'':12}{advice}"]


# -- data


def _refuse_dense_labels(source: DatasetSplits) -> None:
    """Raise if the data has boxes or masks instead of classes: they are for other commands."""
    if source.target != "class":
        return
    if source.classes is not None and not are_layout_folders(source.classes):
        return
    from frugalvit.tasks.dense.annotation_kind import find_annotation_kind

    kind = find_annotation_kind(source.location, source.classes)
    if kind is not None:
        path = console.shell_quote(source.location)
        raise UserError(
            f"{source.location} has {kind.text}, but no image classes. Use 'frugalvit {kind.verb} train {path}' (with "
            "--init RUN after 'frugalvit pretrain'). A classifier needs one folder per class, or a table with labels"
            f"{', or --target labels, which learns the objects of an image' if kind.verb == 'detect' else ''}."
        )
