"""``frugalvit train``: from a configuration to a classifier, a report and a model folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn

from frugalvit.backbones import Backbone
from frugalvit.backbones.weights.model_folder import save_model_folder
from frugalvit.config.train import TrainConfig
from frugalvit.data.augment.mixup import Mixing
from frugalvit.data.augment.transforms import TrainAugment
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.formats.folder import only_layout
from frugalvit.data.splits import absent_classes, check_trainable, only_class, subsample_labels
from frugalvit.engine.auto_batch import fit_to_memory
from frugalvit.engine.compile import compile_task
from frugalvit.engine.distributed import collective_timeout, run_on_rank_zero
from frugalvit.engine.param_groups import freeze_first
from frugalvit.engine.schedules import Constant, Cosine, Ramp, Schedule, warmup_steps
from frugalvit.engine.trainer import TrainPlan, fit
from frugalvit.errors import UserError
from frugalvit.experiment import builders
from frugalvit.experiment.auto_values import (
    PAIR,
    AutoValues,
    Facts,
    decide_common,
    decide_heads,
    decide_training,
    evaluation_interval,
    log_recipe,
)
from frugalvit.experiment.drloc_pairs import make_head
from frugalvit.experiment.experiment import adopt_init_architecture, run_experiment
from frugalvit.experiment.summary import (
    augmentation_sheet,
    decisions_table,
    finite,
    kept_weights,
    per_class_table,
    run_facts,
    run_result,
    save_pictures,
    summary_table,
    worst_mistakes,
)
from frugalvit.objectives import DenseLocalization, RelativeLocalization
from frugalvit.runs.data_record import record_data_usage
from frugalvit.runs.run_folder import RunFolder
from frugalvit.tasks.classification.task import ClassificationTask
from frugalvit.utils import console
from frugalvit.utils.tables import CommandResult, Table
from frugalvit.utils.text import pluralize

HARDLY = 0.8  # of the error of a constant answer, above which Drloc's task counts as hardly learned


def train(config: TrainConfig) -> CommandResult:
    """Train or fine-tune a classifier; the run folder holds everything afterwards."""
    if config.data is None and config.resume is None:
        raise UserError("What should be trained on? Give a folder of images: 'frugalvit train photos/'.")
    return run_experiment(config, "train", _open, _train, _result)


def _train(config: TrainConfig, source: DatasetSplits, run: RunFolder, fabric: Fabric) -> CommandResult:
    examples, validation, test = _splits(config, source)
    assert source.classes is not None
    decisions = AutoValues()
    log_recipe(config, decisions)
    adopt_init_architecture(config, decisions)
    facts = Facts(
        len(examples), len(source.classes), builders.median_side(examples.sample_images()), fabric.device.type
    )
    decide_common(config, facts, decisions)
    builders.decide_reading(config, examples, fabric, decisions)
    torch.manual_seed(config.seed)
    backbone = make_network(config, source.classes, pretrained=config.pretrained and builders.starts_from_init(config))
    decide_training(config, facts.with_backbone(backbone), decisions)
    decide_heads(config, backbone, decisions)
    _check_grid(config, backbone)
    # Without validation images the test images are only watched: they choose nothing.
    watched = validation if validation is not None else test
    assert watched is not None
    plan = make_plan(config, len(examples), len(watched), fabric.world_size)
    decisions.resolve(config, "evaluate_every", plan.evaluate_every, plan.describe_evaluation())
    builders.log_auto_values(source, decisions)
    source = _warned(source, validation)
    assert source.classes is not None
    builders.write_run_metadata(config, run, decisions, examples, source.classes, backbone)
    console.info(f"run folder: {run.folder}")

    builders.check_resumed_batch_size(config, plan, run, fabric)
    task = make_task(config, backbone, plan)
    batches = builders.make_batches(
        examples,
        backbone.img_size,
        plan,
        config,
        fabric,
        augment=TrainAugment(config.augment, backbone.img_size, backbone.mean, backbone.std),
        mixing=Mixing(config.mixing, len(source.classes)),
        balance=config.balance,
        keep_clean=config.localization.images == "clean" and task.localization is not None,
    )
    watch_set = builders.eval_set(watched, backbone, config, fabric)
    task.set_data(batches, watch_set, "val" if validation is not None else "test", fabric)
    record_data_usage(run, source.notes, {"train": batches, task.eval_split: watch_set.store})
    if config.auto_batch:
        plan = fit_to_memory(config, plan, task, run, fabric)
    compile_task(task, config, plan, fabric)
    unseen = test if validation is not None else None
    with builders.closing_readers(task):
        outcome = fit(task, plan, run, fabric)
        return _finish(config, source, run, fabric, task, outcome, watch_set, unseen, decisions)


def make_plan(config: TrainConfig, images: int, watched: int, world: int) -> TrainPlan:
    """The run in steps, for so many training images, images to evaluate on, and processes."""
    plan = TrainPlan.from_config(config, images, world, group=PAIR)
    assert isinstance(config.lr, float)
    warm = warmup_steps(config.optimizer.warmup, plan.steps_per_epoch, plan.steps)
    every = config.evaluate_every
    if every == "auto":
        every = evaluation_interval(plan.steps, plan.steps_per_epoch, plan.images_per_step, watched)
    lowest, first = config.lr * config.optimizer.min_lr, config.lr * 1e-3
    lr = Cosine(
        config.lr, lowest, _laid_out(config, plan), warm, warmup_from=first, whole=config.optimizer.whole_cosine
    )
    return replace(plan, lr=lr, evaluate_every=every)


def _laid_out(config: TrainConfig, plan: TrainPlan) -> int:
    """Steps that the schedules are for; the run may end before them."""
    return round(config.stretch * plan.steps)


def make_network(config: TrainConfig, classes: int | Sequence[str], *, pretrained: bool = False) -> Backbone:
    """The network of a run, with the grid that its localization loss looks at, and its first layers frozen."""
    keywords = {} if config.drop_path == "auto" else {"drop_path": config.drop_path}
    grid_norm = config.localization.grid == "normed"
    backbone = builders.make_backbone(config, classes, pretrained=pretrained, grid_norm=grid_norm, **keywords)
    if config.freeze:
        console.info(f"{freeze_first(backbone.model, config.freeze):,} parameters frozen")
    return backbone


def make_task(config: TrainConfig, backbone: Backbone, plan: TrainPlan) -> ClassificationTask:
    """The classifier with its localization loss (left out at λ = 0)."""
    settings = config.localization
    assert isinstance(settings.weight, float) and isinstance(config.ema, float)
    weight: Schedule = Constant(settings.weight)
    if settings.schedule == "ramp":
        up = warmup_steps(20, plan.steps_per_epoch, plan.steps)
        weight = Ramp(settings.weight, up, _laid_out(config, plan))
    return ClassificationTask(
        backbone,
        _localization(config, backbone) if settings.weight > 0 else None,
        settings,
        weight,
        ema=config.ema,
        weight_decay=config.optimizer.weight_decay,
        layer_decay=config.optimizer.layer_decay,
    ).train()


def _localization(config: TrainConfig, backbone: Backbone) -> RelativeLocalization | DenseLocalization:
    settings = config.localization
    if settings.variant == "dense":
        assert settings.grid_size != "auto"
        dims = backbone.block_dims()
        sizes = [settings.grid_size] * len(dims)
        width = settings.head_width(backbone.dim)
        head = DenseLocalization(dims, "l1", settings.pairs, width, sizes, settings.form, precision="autocast")
    else:
        head = make_head(settings, backbone.dim, backbone.grid_size(backbone.img_size))
    if settings.form == "released" and backbone.family in ("swin", "t2t"):
        head.apply(_start_as_released)
    return head


def _start_as_released(module: nn.Module) -> None:
    """The networks of Drloc's code for Swin and T2T set the weights of all they hold, the loss's head among them."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)


def _finish(
    config: TrainConfig,
    source: DatasetSplits,
    run: RunFolder,
    fabric: Fabric,
    task: ClassificationTask,
    outcome: dict[str, Any],
    watched: builders.EvalSet,
    test: ImageDataset | None,
    decisions: AutoValues,
) -> CommandResult:
    """Score the best weights on the images nobody looked at, and leave everything a person needs in the folder."""
    best = run_on_rank_zero(
        fabric, run.load_best
    )  # the first process wrote them: others may not see them yet, or never
    if best is not None and best["step"] != outcome["steps"]:  # else they are those at hand, and may be scored already
        task.load_state_dict(best["task"])
        task.cached_scores = None
    final = builders.eval_set(test, task.backbone, config, fabric) if test is not None else watched
    assert source.classes is not None
    with collective_timeout(fabric, config.peer_timeout):
        scores = task.score(final)
    summary: dict[str, Any] = {"run": str(run.folder), "task": "train", **scores.summary()}
    summary |= {
        "scored_on": "test" if test is not None else task.eval_split,
        "scored_images": int(scores.confusion.sum()),
        "val_top1": finite(outcome["best"]),
        **kept_weights(outcome, task.eval_split),
        **task.localization_summary(),
        **run_facts(config, outcome, task.backbone),
    }
    if run.writer:
        assert task.batches is not None
        parts = {"train": task.batches, task.eval_split: watched.store, summary["scored_on"]: final.store}
        record_data_usage(run, source.notes, parts)
        meta = {"classes": list(source.classes), "data": source.name, "recipe": config.recipe, "top1": summary["top1"]}
        save_model_folder(task.result, run.folder / "model", classes=source.classes, meta=meta)
        more = {
            "classes": list(source.classes),
            "confusion": scores.confusion.tolist(),
            "auto": [vars(d) for d in decisions],
        }
        mistakes = worst_mistakes(task.result, final, source.classes, source.location)
        save_pictures(run, mistakes, augmentation_sheet(task.batches, task.backbone))
        run.table("summary", summary_table(summary))
        run.table("per_class", per_class_table(scores.confusion, source.classes))
        run.table("decisions", decisions_table(decisions))
        run.save_json("summary.json", summary | more)
        if config.report:
            from frugalvit.report.page import write_report

            shown = test or source.splits.get("val") or source.splits["train"]
            write_report([run.folder], run.folder / "report.html", model=task.result.cpu().eval(), examples=shown)
    return _result(summary)


def _result(summary: dict[str, Any]) -> CommandResult:
    names = ["top1", "top5", "mean_per_class", "val_top1", "seconds"]
    table = Table(
        names,
        [[summary.get(name) for name in names]],
        f"{summary['scored_on']}: {pluralize(summary['scored_images'], 'image')}",
    )
    then = [f"frugalvit predict {console.shell_quote(summary['run'])} IMAGE…"]
    return run_result(summary, table, then, _hardly_localized(summary))


def _hardly_localized(summary: dict[str, Any]) -> list[str]:
    """A word where Drloc's task was not learned. Its form is no advice: "auto" has chosen what measured best."""
    error, guess = summary.get("localization_error"), summary.get("constant_answer_error")
    if error is None or guess is None or not error >= HARDLY * guess:  # nor where it is no number
        return []
    return [
        f"drloc       its task was hardly learned: an error of {error:.2f} grid cells, where the same answer for all "
        f"pairs has {guess:.2f}",
        "            a larger --localization.weight pulls harder, 0 leaves it out: 'frugalvit compare' tells",
    ]


# -- the data of a run


def _open(config: TrainConfig, fabric: Fabric) -> DatasetSplits:
    source = builders.open_source(config, fabric, labelled=True)
    _check_drawn(source)
    check_trainable(source)
    examples, *_ = _splits(config, source)  # what cannot be scored is said before there is a folder
    builders.check_enough(config, examples, PAIR)
    return replace(source, notes=[*source.notes, *absent_classes(source)])


def _check_drawn(source: DatasetSplits) -> None:
    """Whoever has boxes or masks does have labels, for other commands."""
    if source.classes is not None and not only_layout(source.classes):
        return
    from frugalvit.tasks.dense.annotation_kind import find_annotation_kind

    found = find_annotation_kind(source.location, source.classes)
    if found is not None:
        place = console.shell_quote(source.location)
        raise UserError(
            f"{source.location} has {found.text}, but no classes of whole images, which 'train' learns: 'frugalvit "
            f"{found.verb} train {place}' learns these (after 'frugalvit pretrain' with --init RUN). A classifier "
            "wants one folder per class, or a table with labels."
        )


def _splits(
    config: TrainConfig, source: DatasetSplits
) -> tuple[ImageDataset, ImageDataset | None, ImageDataset | None]:
    """Training, validation and test images. Without validation images the last weights count, not the best."""
    examples, validation, test = (source.splits.get(name) for name in ("train", "val", "test"))
    assert examples is not None
    if validation is None and test is None:
        if config.split in ("auto", "remake"):
            raise UserError(
                f"There is nothing to score on in {source.location}: every class has a single image, so none can be "
                "held out. Add images."
            )
        raise UserError(
            "There is nothing to score on: no val, no test. Use --split auto, which holds out a part of train."
        )
    if config.labels != 1 and examples.streaming is not None:
        raise UserError("Streamed images cannot be selected one by one: --labels needs --stream false.")
    if config.labels != 1:
        assert examples.labels is not None
        examples = examples.subset(subsample_labels(examples.labels, config.labels, config.seed))
    return examples, validation, test


def _warned(source: DatasetSplits, validation: ImageDataset | None) -> DatasetSplits:
    """The source with a note of validation images that cannot choose the best weights, which is also a warning."""
    only = None if validation is None or source.classes is None else only_class(validation, source.classes)
    if only is None:
        return source
    note = (
        f"val, which chooses the best weights, has images of one class only ('{only}'): the best are those that say it "
        "most often. Add images of the others, or let --split remake choose val anew"
    )
    console.warning(note)
    return replace(source, notes=[*source.notes, note])


def _check_grid(config: TrainConfig, backbone: Backbone) -> None:
    height, width = backbone.grid_size(backbone.img_size)
    if config.localization.weight != 0 and height * width < 2:
        raise UserError(
            f"{backbone.name} ends in a {height}×{width} grid at {backbone.img_size[0]}×{backbone.img_size[1]} px: "
            "there is nothing to localise. Use a larger --img-size, or --localization.weight 0."
        )
