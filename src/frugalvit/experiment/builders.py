"""What every training command does before its first step: hardware, data, model, folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.weights.fit import classifier_name
from frugalvit.backbones.weights.load import load_weights
from frugalvit.backbones.weights.model_config import class_names as names_in_folder
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import RunConfig
from frugalvit.data import open_data
from frugalvit.data.augment.mixup import Mixing
from frugalvit.data.augment.transforms import Augment, EvalTransform
from frugalvit.data.cache.build import CACHE_LOCATIONS, Location, build_store
from frugalvit.data.cache.store import ImageStore, SharedStores
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.image_size import median_side as median_side
from frugalvit.data.image_size import probe_images
from frugalvit.data.loader import Batches, BatchSource
from frugalvit.data.open import classes_in_shards, without_labels
from frugalvit.data.paths import is_inside
from frugalvit.data.webdataset.streaming_dataset import ShardSurvey, open_stream, should_stream
from frugalvit.data.webdataset.streaming_loader import StreamingBatches
from frugalvit.engine import distributed
from frugalvit.engine.hardware import configure_cuda, make_precision, pick_device
from frugalvit.engine.step import TrainPlan
from frugalvit.errors import UserError
from frugalvit.experiment.auto_values import PAIR, AutoValue, AutoValues, decide_stream
from frugalvit.experiment.init_weights import best_run_weights, is_unfinished_run
from frugalvit.experiment.resume import load_resumed_config, network_keywords, read_facts
from frugalvit.runs.layout import RUN_FILES, TRANSFER_FILES
from frugalvit.runs.run_folder import RunFolder, find_run, has_checkpoint, new_run_folder
from frugalvit.runs.trackers import make_trackers
from frugalvit.utils import console
from frugalvit.utils.system import cores

C = TypeVar("C", bound=RunConfig)


@dataclass
class EvalSet:
    """Images to evaluate on: where they are kept, how they are prepared, how many at once."""

    store: ImageStore
    transform: EvalTransform
    batch: int

    @property
    def batches(self) -> int:
        """How many there are."""
        return -(-len(self.store) // self.batch)


def make_fabric(config: RunConfig) -> Fabric:
    """One process per device, launched if need be; under torchrun or SLURM the processes are already there."""
    device = pick_device(config.device)
    devices, nodes = distributed.devices_and_nodes(config.devices, config.nodes)
    if device == "cuda" and devices > torch.cuda.device_count():
        raise UserError(f"--devices {devices}, but there are {torch.cuda.device_count()} GPUs here.")
    if device == "mps" and devices * nodes > 1:
        raise UserError("Several processes cannot share Apple's GPU: use --devices 1, or --device cpu.")
    # What only the view level uses (a network's own pooling layers) rests where views are not matched.
    resting = isinstance(config, PretrainConfig) and config.matching.weights()[0] == 0
    fabric = Fabric(
        accelerator={"cuda": "cuda", "mps": "mps"}.get(device, "cpu"),
        devices=devices,
        num_nodes=nodes,
        strategy=distributed.strategy(devices * nodes > 1, config.peer_timeout, resting=resting),
        plugins=make_precision(config.precision, device),
    )
    distributed.launch(fabric, devices)
    if device == "cuda":
        configure_cuda()
    return fabric


def open_run(config: C, fabric: Fabric, *words: str) -> tuple[C, RunFolder]:
    """The folder of a new run, or of the one to resume with the configuration it was started with."""
    if config.resume:
        folder = find_run(config.resume)
        config = load_resumed_config(config)
    else:
        check_out_outside_data(config)
        names = TRANSFER_FILES if config.recipe_task() in ("detect", "segment") else RUN_FILES
        folder = Path(
            distributed.run_on_rank_zero(fabric, lambda: str(new_run_folder(config.out, *words, names=names)))
        )
    opened: list[RunFolder] = []
    distributed.run_on_rank_zero(fabric, lambda: opened.append(RunFolder(folder)))
    return config, opened[0] if opened else RunFolder(folder, writer=False)


def check_out_outside_data(config: RunConfig) -> None:
    """A run among the images would be taken for a class the next time; where none is named it goes into runs/."""
    if config.data and is_inside(Path(config.out or "runs"), config.data):
        what = f"--out {config.out}" if config.out else "runs/, where the run would go,"
        raise UserError(f"{what} lies among the images of {config.data}: choose a folder outside of it with --out.")


def starts_from_init(config: RunConfig) -> bool:
    """Whether the weights come from ``--init`` or chance, not from a checkpoint of the run itself."""
    return not (config.resume and has_checkpoint(Path(config.resume)))


def write_run_metadata(
    config: RunConfig,
    run: RunFolder,
    decisions: AutoValues,
    examples: ImageDataset,
    classes: tuple[str, ...],
    backbone: Backbone,
    truth: str | None = None,
) -> None:
    """Write down what was decided and learned from; a resumed run keeps what it wrote, and looks what has changed.

    ``truth`` is the fingerprint of the masks or annotations, where they lie in files of their own.
    """
    if run.writer:
        run.trackers = make_trackers(config.track, run.folder, config.model_dump(mode="json"))
    facts: dict[str, Any] = {
        "images": len(examples),
        "classes": list(classes),
        "network": backbone.architecture_kwargs(),
    }
    asked = config.requested("batch", config.batch)  # as it was typed
    facts["batch"] = int(asked) if str(asked).isdigit() else asked
    facts["content"] = examples.fingerprint(times=False)  # data is often copied anew for every part of a run
    facts["processes"] = math.prod(distributed.devices_and_nodes(config.devices, config.nodes))
    facts |= examples.run_facts()
    if truth is not None:
        facts["truth"] = truth
    if not config.resume or not (run.folder / "data.json").exists():
        if run.writer and not config.resume:
            (run.folder / "config.yaml").unlink(missing_ok=True)  # of a run that failed its checks
        run.save_json("decisions.json", [vars(decision) for decision in decisions])
        run.save_json("data.json", facts)
        run.save_config(config.model_copy(update={"resume": None}))  # last: it is what makes the folder a run
        return
    decisions[:] = [AutoValue(**stored) for stored in run.read_json("decisions.json", list)]
    before = run.read_json("data.json")
    if before["classes"] != facts["classes"]:
        raise UserError(
            f"The classes of {config.data} have changed since {run.folder} began ({len(before['classes'])} then, "
            f"{len(classes)} now): put them back, or start a new run with --init {console.shell_quote(run.folder)}."
        )
    if before.get("content", facts["content"]) != facts["content"]:  # folders of earlier versions have none
        console.warning(
            f"the images of {config.data} have changed since {run.folder} began ({before['images']:,} then, "
            f"{len(examples):,} now): it goes on with them, but will not end as it would have"
        )
    elif before.get("truth", truth) != truth:
        console.warning(
            f"the masks or annotations of {config.data} have changed since {run.folder} began: it goes on with them, "
            "but will not end as it would have"
        )
    if config.data:
        run.update_data_path(config.data)


def open_source(
    config: RunConfig,
    fabric: Fabric,
    *,
    labelled: bool = False,
    labels: str = "auto",
    loose: bool = False,
    whole: bool = False,
) -> DatasetSplits:
    """The data a configuration names; shards that lie elsewhere are not fetched but read in passing.

    labelled: labels are needed; labels and loose: as in ``open_data``; whole: what is read in passing is learned from
    to the last shard, and no val made of it
    """
    where = str(config.data)
    splitting: dict[str, Any] = {"split": config.split, "val_fraction": config.val_fraction}
    if not should_stream(where, config.stream):
        return open_data(where, classes=config.classes, root=config.root, labels=labels, loose=loose, **splitting)
    before = read_facts(config.resume).get("survey") if config.resume else None
    readers = fabric.world_size * (config.workers if isinstance(config.workers, int) else 1)
    source = open_stream(
        where,
        labelled=labelled,
        hold_out=not whole and labels != "ignore",
        readers=max(1, readers),
        classes=classes_in_shards(where, config.classes),
        known=None if before is None else ShardSurvey(**before),
        agree=lambda look: distributed.run_on_rank_zero(fabric, look),
        **splitting,
    )
    return without_labels(source) if labels == "ignore" else source


def check_enough(config: RunConfig, examples: ImageDataset, together: int = 1) -> None:
    """Every process must have images of its own in a step; a resumed run has its own word on processes.

    together: images that stay in one process, where there are several
    """
    world = math.prod(distributed.devices_and_nodes(config.devices, config.nodes))
    if config.resume or examples.streaming is not None or world == 1 or len(examples) >= together * world:
        return
    pairs = ", each of which takes them in pairs (for mixing)" if together == PAIR else ""
    raise UserError(
        f"{len(examples)} training images are too few for {world} processes{pairs}: use at most "
        f"{max(1, len(examples) // together)} (--devices, --nodes)."
    )


def make_backbone(config: RunConfig, classes: int | Sequence[str], **keywords: Any) -> Backbone:
    """The backbone with its weights, as the configuration says; what "auto" chose for its size is said.

    classes: the names of what it shall tell apart, or only how many; a classifier of ``--init`` that names its own
             classes is taken for the same names alone
    """
    backbone = create_backbone(
        config.backbone,
        img_size=config.img_size,  # type: ignore[arg-type]
        num_classes=classes if isinstance(classes, int) else len(classes),
        **network_keywords(config) | keywords,
    )
    return load_initial_weights(backbone, config, () if isinstance(classes, int) else classes)


def load_initial_weights(backbone: Backbone, config: RunConfig, classes: Sequence[str] = ()) -> Backbone:
    """A new backbone with the weights of ``--init``; what was decided, taken and left is said."""
    for note in backbone.notes:
        console.info(note)
    if config.init and starts_from_init(config):
        _take_weights(backbone, config.init, classes)
    if config.checkpoint_activations:
        backbone.model.set_grad_checkpointing(True)  # type: ignore[operator]
    return backbone


def _take_weights(backbone: Backbone, init: str, classes: Sequence[str]) -> None:
    source, theirs = init, names_in_folder(init)
    if is_unfinished_run(init):
        source, words, theirs = best_run_weights(init)
        console.info(words)
    same = theirs is None or theirs == list(classes)
    report = load_weights(backbone, source, classifier=same)
    counts = (
        f"{len(report.matched)} tensors taken",
        f"{len(report.missing)} missing{_in_brackets(report.missing)}",
        f"{len(report.left_over)} left over{_in_brackets(report.left_over)}",
    )
    console.info(f"{init}: {report.kind}, {', '.join(counts)}" + "".join(f"; {note}" for note in report.notes))
    if not backbone.num_classes:
        return
    if theirs is not None and not same:
        console.info(f"{init}: its classes are others{_in_brackets(theirs)}, so the classifier begins anew")
    elif theirs is None and f"{classifier_name(backbone.model)}.weight" in report.matched:
        console.info(f"{init}: its classifier is taken as it is, for the file does not name its classes")


def _in_brackets(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4]) + ("…" if len(names) > 4 else "")
    return f" ({shown})" if names else ""


def check_resumed_batch_size(config: RunConfig, plan: TrainPlan, run: RunFolder, fabric: Fabric) -> None:
    """Whether processes and parts of a step can share the batch of a resumed run; a new one has settled on its batch.

    With another batch it would have other steps and another schedule: its processes must share that one.
    """
    if plan.images_per_step == config.batch:
        return
    shared = f"processes ({fabric.world_size}) and parts of a step ({config.accumulate})"
    if run.read_json("data.json").get("processes", fabric.world_size) != fabric.world_size:
        raise UserError(
            f"{run.folder} takes {config.batch} images a step, which {shared} cannot share equally: resume it with as "
            "many --devices and --nodes as it was begun with."
        )
    console.info(f"batch {config.batch} becomes {plan.images_per_step}: {shared} share it equally")


def eval_set(examples: ImageDataset, backbone: Backbone, config: RunConfig, fabric: Fabric) -> EvalSet:
    """Images prepared for evaluation: resized and cropped in the middle."""
    transform = EvalTransform(backbone.img_size, mean=backbone.mean, std=backbone.std)
    store = get_image_store(examples, backbone.img_size, config, fabric.device, fabric)
    batch = config.batch if isinstance(config.batch, int) else 64
    return EvalSet(store, transform, max(64, batch) if fabric.device.type == "cuda" else min(batch, 64))


def make_batches(
    examples: ImageDataset,
    img_size: tuple[int, int],
    plan: Any,
    config: RunConfig,
    fabric: Fabric,
    *,
    augment: Augment,
    mixing: Mixing | None = None,
    balance: bool = False,
    keep_clean: bool = False,
) -> BatchSource:
    """Training batches of stored images, or of streamed shards."""
    batch = plan.images_per_step // plan.accumulate
    shared = {"seed": config.seed, "augment": augment, "mixing": mixing, "keep_clean": keep_clean}
    shared |= {"rank": fabric.global_rank, "world": fabric.world_size}
    stream = examples.streaming
    if stream is None:
        store = get_image_store(examples, img_size, config, fabric.device, fabric)
        return Batches(store, batch, balance=balance, **shared)
    if balance or augment.repeats > 1:
        raise UserError("--balance and --augment.repeats choose images one by one: use --stream false.")
    assert isinstance(config.workers, int)
    return StreamingBatches(
        stream.make_stream(config.seed),
        batch,
        cached_size=probe_images(stream.sample, img_size, config.cache.size)[0],
        steps_per_epoch=plan.steps_per_epoch * plan.accumulate,
        classes=None if mixing is None or stream.raw_labels is None else tuple(stream.raw_labels),
        device=fabric.device,
        workers=config.workers,
        max_bad=config.cache.max_bad,
        **shared,
    )


def decide_reading(config: RunConfig, examples: ImageDataset, fabric: Fabric, decisions: AutoValues) -> None:
    """Decide how many readers share streamed shards: the same number on every machine."""
    if examples.streaming is not None:
        fewest = -distributed.all_reduce_max(fabric, -cores())
        decide_stream(config, len(examples.streaming.shards), fabric.world_size, fewest, decisions)


@contextmanager
def closing_readers(task: Any) -> Iterator[None]:
    """End the processes that read shards when the training does, however that ends."""
    try:
        yield
    finally:
        if task.batches is not None:
            task.batches.close()


stores = SharedStores()


def get_image_store(
    examples: ImageDataset,
    img_size: tuple[int, int],
    config: RunConfig,
    device: torch.device,
    fabric: Fabric | None = None,
) -> ImageStore:
    """Decoded images; all that asks for them within a run shares them, and so do the runs of a comparison.

    fabric: of the processes that each ask for them now, and must get the same
    """
    key = (examples.fingerprint(), img_size, str(device), config.cache.model_dump_json())
    return stores.get(key, lambda: _build(examples, img_size, config, device, fabric))


def _build(
    examples: ImageDataset, img_size: tuple[int, int], config: RunConfig, device: torch.device, fabric: Fabric | None
) -> ImageStore:
    def agree(location: Location) -> Location:
        """The slowest location that any process needs."""
        if fabric is None:
            return location
        return CACHE_LOCATIONS[distributed.all_reduce_max(fabric, CACHE_LOCATIONS.index(location))]

    store = build_store(
        examples,
        img_size,
        device=device,
        where=config.cache.where,
        stored=config.cache.size,
        cache_dir=config.cache.folder,
        max_bad=config.cache.max_bad,
        workers=config.workers,
        agree=agree,
    )
    if fabric is not None:
        check_same_images(fabric, store.readable, len(examples), config)
    return store


def check_same_images(fabric: Fabric, found: int, given: int, config: RunConfig) -> None:
    """All processes must have as many: else a machine that lacks images would learn from others unnoticed."""
    if not distributed.all_ranks_equal(fabric, found):
        raise UserError(
            f"The processes can read different images of {config.data} (this one {found:,} of {given:,}): see that "
            "every machine has all of them, and give --cache.where off if some cannot be read anywhere."
        )


def log_auto_values(source: DatasetSplits, decisions: AutoValues) -> None:
    for note in source.notes:
        console.info(note)
    for decision in decisions:
        console.info(f"auto: {decision}")
