"""Build the parts of a run from its configuration: Fabric, folder, data, backbone, batches."""

import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.timm_features import classifier_name
from frugalvit.backbones.weights.load import load_weights
from frugalvit.backbones.weights.model_config import class_names as names_in_folder
from frugalvit.backbones.weights.published import is_published
from frugalvit.config.resolved import ResolvedRunConfig
from frugalvit.config.train import DrlocConfig, RunConfig
from frugalvit.data import open_data
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.transforms import Augment, EvalTransform
from frugalvit.data.cache.build import CACHE_LOCATIONS, Location, build_store
from frugalvit.data.cache.store import ImageStore, SharedStores
from frugalvit.data.dataset import DatasetSplits, ImageDataset
from frugalvit.data.decode import PHOTO, PixelFormat
from frugalvit.data.image_size import median_side as median_side
from frugalvit.data.image_size import probe_images
from frugalvit.data.loader import Batches, BatchSource
from frugalvit.data.open import check_class_names, without_labels
from frugalvit.data.paths import is_inside
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.data.webdataset.stream import ShardStream
from frugalvit.data.webdataset.streaming_dataset import ShardSurvey, open_stream, should_stream
from frugalvit.data.webdataset.streaming_loader import StreamingBatches
from frugalvit.engine import distributed
from frugalvit.engine.hardware import configure_cuda, make_precision, pick_device, use_deterministic_algorithms
from frugalvit.engine.step import TrainPlan
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import eval_transform, find_init
from frugalvit.experiment.resolve import PAIR, AutoValue, AutoValues
from frugalvit.objectives import RelativeLocalization
from frugalvit.runs import layout
from frugalvit.runs.resume import network_keywords
from frugalvit.runs.run_folder import RunFolder, new_run_folder, read_data_facts
from frugalvit.runs.trackers import make_trackers
from frugalvit.utils import console
from frugalvit.utils.files import check_stored
from frugalvit.utils.system import cores
from frugalvit.utils.text import pluralize, truncate_list

C = TypeVar("C", bound=RunConfig)
S = TypeVar("S", bound=Sized)


@dataclass
class EvalSet:
    """Images to evaluate on, their transform and the batch size."""

    store: ImageStore
    transform: EvalTransform
    batch: int

    @property
    def batches(self) -> int:
        return -(-len(self.store) // self.batch)


def make_fabric(config: RunConfig) -> Fabric:
    """Launch one process per device, unless torchrun or SLURM already did."""
    device = pick_device(config.device)
    devices, nodes = distributed.devices_and_nodes(config.devices, config.nodes)
    if device == "cuda" and devices > torch.cuda.device_count():
        raise UserError(f"--devices {devices} is more than the {torch.cuda.device_count()} GPUs of this machine.")
    if device == "mps" and devices * nodes > 1:
        raise UserError("Several processes cannot share Apple's GPU: use --devices 1, or --device cpu.")
    fabric = Fabric(
        accelerator={"cuda": "cuda", "mps": "mps"}.get(device, "cpu"),
        devices=devices,
        num_nodes=nodes,
        strategy=distributed.strategy(
            config.strategy, devices * nodes, config.peer_timeout, has_unused=config.has_unused_layers()
        ),
        plugins=make_precision(config.precision, device),
    )
    distributed.launch(fabric, devices)
    if device == "cuda":
        configure_cuda()
    if config.deterministic:
        use_deterministic_algorithms()
    return fabric


def open_run(config: RunConfig, fabric: Fabric, *words: str, files: Sequence[str] = layout.RUN_FILES) -> RunFolder:
    """Open the run to resume, or a new run named after ``words`` that will write ``files``. Rank 0 writes."""
    if config.resume:
        folder = Path(config.resume)
    else:
        check_out_outside_data(config)
        folder = Path(
            distributed.run_on_rank_zero(fabric, lambda: str(new_run_folder(config.out, *words, names=files)))
        )
    opened: list[RunFolder] = []
    distributed.run_on_rank_zero(fabric, lambda: opened.append(RunFolder(folder)))
    return opened[0] if opened else RunFolder(folder, writer=False)


def check_out_outside_data(config: RunConfig) -> None:
    """Refuse an output folder inside the dataset: it would be read as a class next time."""
    for data in (config.data, getattr(config, "unlabelled", None)):
        if data and is_inside(Path(config.out or "runs"), data):
            folder = f"--out {config.out}" if config.out else "runs/, the default output folder,"
            raise UserError(f"{folder} is inside the images of {data}. Choose a folder outside with --out.")


def needs_initial_weights(config: RunConfig) -> bool:
    """Return whether the weights come from --init or the seed, not from a checkpoint of the run itself."""
    return not (config.resume and layout.has_checkpoint(Path(config.resume)))


def write_run_metadata(
    config: RunConfig,
    run: RunFolder,
    auto: AutoValues,
    examples: ImageDataset,
    classes: tuple[str, ...],
    backbone: Backbone,
    truth: str | None,
    evaluation: Mapping[str, ImageDataset],
) -> None:
    """Write config.yaml, data.json and decisions.json. A resumed run reads them and reports what changed.

    truth:      fingerprint of the masks or annotations, if they are in files of their own
    evaluation: the files that scores depend on, by split
    """
    if run.writer:
        run.trackers = make_trackers(config.track, run.folder, config.model_dump(mode="json"))
    batch = config.requested("batch", config.batch)  # as typed
    facts: dict[str, Any] = {
        "images": len(examples),
        "classes": list(classes),
        "network": backbone.architecture_kwargs(),
        "batch": int(batch) if str(batch).isdigit() else batch,
        "content": examples.fingerprint(times=False),  # without times: data is often copied before a resume
        "processes": math.prod(distributed.devices_and_nodes(config.devices, config.nodes)),
        "threads": torch.get_num_threads(),
        "evaluation": {
            split: {"files": len(files), "content": files.fingerprint(times=False)}
            for split, files in evaluation.items()
        },
        **examples.run_facts,
        **({} if truth is None else {"truth": truth}),
    }
    if not config.resume or not run.path(layout.DATA).exists():
        if run.writer and not config.resume:
            run.path(layout.CONFIG).unlink(missing_ok=True)  # of a run that failed before its first step
        run.save_json(layout.DECISIONS, [vars(value) for value in auto])
        run.save_json(layout.DATA, facts)
        run.save_config(config)  # last: it makes the folder a run
        return
    auto[:] = check_stored(list[AutoValue], run.read_json(layout.DECISIONS, list), run.path(layout.DECISIONS))
    before = run.read_json(layout.DATA)
    if before["classes"] != facts["classes"]:
        raise UserError(
            f"The classes of {config.data} have changed since {run.folder} started ({len(before['classes'])} then, "
            f"{len(classes)} now). Restore them, or start a new run with --init {console.shell_quote(run.folder)}."
        )
    unlabelled = getattr(config, "unlabelled", None)
    changed: dict[str, str] = {}  # what, and how many
    if before["content"] != facts["content"]:
        changed[f"the images of {config.data}"] = f" ({before['images']:,} images then, {len(examples):,} now)"
    if before.get("truth") != truth:
        changed[f"the images of --unlabelled {unlabelled}" if unlabelled else f"the annotations of {config.data}"] = ""
    for what, counts in changed.items():
        console.warning(
            f"{what} have changed since {run.folder} started{counts}: the run continues, its result differs"
        )
    stored = before["evaluation"]
    for split in sorted(stored.keys() | facts["evaluation"].keys()):
        then, now = stored.get(split, {"files": 0}), facts["evaluation"].get(split, {"files": 0})
        if now != then:
            console.warning(
                f"{split} of {config.data} has changed since {run.folder} started ({then['files']:,} files then, "
                f"{now['files']:,} now): scores before and after cannot be compared, and the best weights may differ"
            )
    if config.data:
        run.update_data_path(config.data)


def restore_threads(run: RunFolder, fabric: Fabric) -> None:
    """Compute with as many CPU threads as at the start of the run: sums of another number differ in the last bits."""
    # Rank 0 wrote the file; other ranks may not see it yet.
    threads = distributed.run_on_rank_zero(fabric, lambda: run.read_json(layout.DATA).get("threads"))
    if threads is not None and fabric.device.type == "cpu" and threads != torch.get_num_threads():
        console.info(f"using {pluralize(threads, 'CPU thread')}, as at the start of the run, to compute the same bits")
        torch.set_num_threads(threads)


def open_source(
    config: RunConfig, fabric: Fabric | None, *, labels: str = "auto", loose: bool = False, keep_all: bool = False
) -> DatasetSplits:
    """Open the data of a configuration; remote shards are streamed.

    labels and loose: as in ``open_data``
    keep_all:         do not hold out shards of a stream for validation
    fabric:           None before the launch
    """
    path = str(config.data)
    splitting: dict[str, Any] = {"split": config.split, "val_fraction": config.val_fraction}
    if not should_stream(path, config.stream):
        target = getattr(config, "target", "auto")
        return open_data(
            path, classes=config.classes, root=config.root, labels=labels, loose=loose, target=target, **splitting
        )
    if config.classes is not None:
        raise UserError("--classes needs access to single images, which a stream does not have: use --stream false.")
    before = read_data_facts(config.resume).get("survey") if config.resume else None
    source = open_stream(
        path,
        hold_out=not keep_all and labels != "ignore",
        max_bad=config.cache.max_bad,
        known=None if before is None else ShardSurvey(**before),
        agree=lambda survey: survey() if fabric is None else distributed.run_on_rank_zero(fabric, survey),
        **splitting,
    )
    return without_labels(source) if labels == "ignore" else check_class_names(source)


def choose_splits(splits: Mapping[str, S], where: object) -> tuple[S, S, str, S | None]:
    """Return training images, evaluation images, their split's name, and test images if val exists.

    Without val the run is evaluated on test and exports its last weights: test must not choose the best.
    """
    train, validation, test = (splits.get(name) or None for name in ("train", "val", "test"))
    if train is None:
        raise UserError(f"{where} has no training images; its splits are {', '.join(splits) or 'empty'}.")
    if validation is not None:
        return train, validation, "val", test
    if test is not None:
        return train, test, "test", None
    raise UserError(
        f"{where} has no images to score on. --split auto makes val from train; it needs two images of some class "
        "(label more), or two shards of a stream."
    )


def check_enough_images(config: RunConfig, examples: ImageDataset, group: int = 1) -> None:
    """Raise if a process would get no images in a step; ``group`` of them must be on the same process."""
    world = math.prod(distributed.devices_and_nodes(config.devices, config.nodes))
    if config.resume or examples.streaming is not None or world == 1 or len(examples) >= group * world:
        return
    pairs = " with two images each (for mixing)" if group == PAIR else ""
    raise UserError(
        f"{len(examples)} training images are too few for {world} processes{pairs}: use at most "
        f"{max(1, len(examples) // group)} (--devices, --nodes)."
    )


def make_backbone(config: RunConfig, classes: int | Sequence[str], **keywords: Any) -> Backbone:
    """Build the backbone with its initial weights; a classifier of --init with other class names is not loaded."""
    size, drop_path = config.img_size, getattr(config, "drop_path", "auto")
    keywords |= {} if drop_path in ("auto", "paper") else {"drop_path": drop_path}
    backbone = create_backbone(
        config.backbone,
        img_size=224 if size == "auto" else size,
        num_classes=classes if isinstance(classes, int) else len(classes),
        **network_keywords(config) | keywords,
    )
    return load_initial_weights(backbone, config, () if isinstance(classes, int) else classes)


def load_initial_weights(backbone: Backbone, config: RunConfig, classes: Sequence[str] = ()) -> Backbone:
    """Load the weights of --init into a new backbone, and log what was loaded."""
    for note in backbone.notes:
        console.info(note)
    sources = config.weight_sources()
    if is_published(str(config.backbone)) and not any(sources.values()) and needs_initial_weights(config):
        flag = "--pretrained" if "--pretrained" in sources else f"--init {config.backbone}"
        console.info_once(f"{config.backbone}: this run starts from random weights; {flag} takes the published ones")
    if config.init and needs_initial_weights(config):
        _load_init(backbone, config.init, classes)
    if config.checkpoint_activations:
        backbone.model.set_grad_checkpointing(True)  # type: ignore[operator]
    return backbone


def _load_init(backbone: Backbone, init: str, classes: Sequence[str]) -> None:
    path = find_init(init)
    stored = names_in_folder(path)
    same_classes = stored is None or stored == list(classes)
    report = load_weights(backbone, path, classifier=same_classes)
    parts = [f"{len(report.matched)} tensors loaded"]
    for names, text in ((report.missing, "missing"), (report.left_over, "left over")):
        parts += [f"{len(names)} {text} ({truncate_list(names, 4)})"] if names else []
    console.info(f"{init}: {report.kind}, {', '.join(parts)}" + "".join(f"; {note}" for note in report.notes))
    if not backbone.num_classes:
        return
    if stored is not None and not same_classes:
        console.info(f"{init}: its classes differ ({truncate_list(stored, 4)}), so the classifier starts from scratch")
    elif stored is None and f"{classifier_name(backbone.model)}.weight" in report.matched:
        console.info(f"{init}: its classifier is loaded; the file does not name its classes")


def check_resumed_batch_size(config: ResolvedRunConfig, plan: TrainPlan, run: RunFolder, fabric: Fabric) -> None:
    """Raise if a resumed run's processes cannot share its batch equally. Another batch changes the schedule."""
    if plan.images_per_step == config.batch:
        return
    parts = f"{fabric.world_size} processes with --accumulate {config.accumulate}"
    if run.read_json(layout.DATA)["processes"] != fabric.world_size:
        raise UserError(
            f"{run.folder} has {config.batch} images per step, which {parts} cannot share equally. Resume it with the "
            "--devices and --nodes of its start."
        )
    console.info(f"batch {config.batch} becomes {plan.images_per_step}: {parts} share it equally")


def eval_set(examples: ImageDataset, backbone: Backbone, config: ResolvedRunConfig, fabric: Fabric) -> EvalSet:
    """Prepare images for evaluation: resize and center crop."""
    transform = eval_transform(backbone)
    store = get_image_store(examples, backbone.img_size, config, fabric.device, fabric, transform.crop)
    return EvalSet(store, transform, max(64, config.batch) if fabric.device.type == "cuda" else min(config.batch, 64))


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
    """Build training batches from cached images, or from streamed shards."""
    batch = plan.images_per_step // plan.accumulate
    shared = {"seed": config.seed, "augment": augment, "mixing": mixing, "keep_clean": keep_clean}
    shared |= {"rank": fabric.global_rank, "world": fabric.world_size}
    stream = examples.streaming
    if stream is None:
        store = get_image_store(examples, img_size, config, fabric.device, fabric)
        return Batches(store, batch, balance=balance, steps=plan.steps * plan.accumulate, **shared)
    if balance or augment.repeats > 1:
        raise UserError("--balance and --augment.repeats need access by index: use --stream false.")
    return StreamingBatches(
        ShardStream(stream.paths, stream.counts, seed=config.seed),
        batch,
        cached_size=probe_images(examples.sample_images(), img_size, config.cache.size)[0],
        steps_per_epoch=plan.steps_per_epoch * plan.accumulate,
        classes=None if mixing is None or stream.raw_labels is None else tuple(stream.raw_labels),
        device=fabric.device,
        workers=1 if config.workers == "auto" else config.workers,
        max_bad=config.cache.max_bad,
        **shared,
    )


def resolve_readers(config: C, examples: ImageDataset, fabric: Fabric, auto: AutoValues) -> C:
    """Resolve how many readers share the shards of a stream: equal on all ranks and after a resume."""
    if examples.streaming is None:
        return config
    min_cores = -distributed.all_reduce_max(fabric, -cores())
    shards, world = len(examples.streaming.paths), fabric.world_size
    auto.choose("stream", config.stream, True, "the shards are remote, or too large for an index")
    reason = f"{min_cores} cores per process, {shards:,} shards for {world}"
    auto.choose("workers", config.workers, max(1, min(16, min_cores, shards // world)), reason)
    return auto.apply(config, type(config))


def resolve_pixels(config: C, examples: ImageDataset, auto: AutoValues) -> C:
    """Resolve the channels, the pixel type and the statistics of a network for other images than 8-bit RGB."""
    arguments, pixels = config.backbone_args, examples.pixels
    channels = arguments.get("in_chans", 3 if pixels == PHOTO else pixels.channels)
    stored = PixelFormat(arguments.get("pixel_type", pixels.type), channels)
    if stored != pixels and (pixels != PHOTO or stored.type != "uint8"):
        source = f"--init {config.init}" if config.init else "--backbone-args"
        raise UserError(f"{source}: the network takes {stored}, but {config.data} holds {pixels}.")
    if pixels == PHOTO or {"pixel_type", "mean", "std"} <= arguments.keys():  # of --init or of the resumed run
        return config
    mean, std, images = examples.measure_statistics()
    reason = f"the files hold {pixels}; mean and deviation are those of {pluralize(images, 'training image')}"
    auto.append(AutoValue("backbone_args.in_chans", channels, reason))
    measured = {"pixel_type": pixels.type, "in_chans": channels, "mean": mean, "std": std}
    typed = config.requested("backbone_args", {})
    return config.with_options({"backbone_args": arguments | measured | typed}, type(config))


stores = SharedStores()


def get_image_store(
    examples: ImageDataset,
    img_size: tuple[int, int],
    config: RunConfig,
    device: torch.device,
    fabric: Fabric | None = None,
    crop: CenterCrop | None = None,
) -> ImageStore:
    """Return decoded images, shared by all users in a run. All ranks of ``fabric`` call this, and get the same."""
    cache = config.cache

    def agree(location: Location) -> Location:
        """Return the slowest location that any rank needs, so that all ranks use the same."""
        if fabric is None:
            return location
        return CACHE_LOCATIONS[distributed.all_reduce_max(fabric, CACHE_LOCATIONS.index(location))]

    def build() -> ImageStore:
        where = {"where": cache.location, "stored": cache.size, "cache_dir": cache.folder, "max_bad": cache.max_bad}
        others = {"device": device, "workers": config.workers, "agree": agree, "crop": crop}
        store = build_store(examples, img_size, **where, **others)
        if fabric is not None:
            check_same_images(fabric, store.readable, len(examples), config)
        return store

    key = (examples.fingerprint(), examples.pixels, img_size, str(device), cache.model_dump_json(), crop)
    return stores.get(key, build)


def check_same_images(fabric: Fabric, readable: int, total: int, config: RunConfig) -> None:
    """Raise if the ranks can read different numbers of images: they would train on different data."""
    if not distributed.all_ranks_equal(fabric, readable):
        raise UserError(
            f"The processes can read different images of {config.data} (this one {readable:,} of {total:,}). Check "
            "that every machine has all of them; use --cache.location off if some are unreadable everywhere."
        )


def make_localization(settings: DrlocConfig, dim: int, largest: tuple[int, int]) -> RelativeLocalization:
    """Build the loss for grids of ``dim`` channels and at most ``largest`` cells. Hidden layers run in autocast."""
    variant, grid_size = settings.variant, settings.grid_size
    if grid_size is None and variant in ("ce", "reg"):
        grid_size = largest  # the number of classes depends on it
    width = settings.head_width(dim)
    absolute = False if settings.signed else None
    return RelativeLocalization(
        dim, variant, settings.pairs, width, grid_size, settings.form, absolute=absolute, precision="autocast"
    )
