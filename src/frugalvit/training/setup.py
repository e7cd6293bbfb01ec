"""What every training command does before its first step: hardware, data, model, folder."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning_fabric import Fabric

from frugalvit import console
from frugalvit.backbones import Backbone, create_backbone
from frugalvit.backbones.weights import load_weights
from frugalvit.config.train import RunConfig
from frugalvit.data import open_data
from frugalvit.data.augment import EvalTransform
from frugalvit.data.cache import ImageStore, build_store
from frugalvit.data.examples import DataSource, Examples
from frugalvit.errors import UserError
from frugalvit.training import processes
from frugalvit.training.recipes import Decision, Decisions
from frugalvit.training.runs import Run, find_run, has_checkpoint, new_run_folder
from frugalvit.training.tracking import make_trackers

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


def pick_device(wanted: str) -> str:
    """The device asked for, or the best there is."""
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        return next(name for name in ("cuda", "mps", "cpu") if present[name])
    if not present[wanted]:
        raise UserError(f"There is no {wanted} device here. Use --device auto or --device cpu.")
    return wanted


def make_fabric(config: RunConfig) -> Fabric:
    """One process per device, launched if need be; under torchrun or SLURM the processes are already there."""
    device = pick_device(config.device)
    devices, nodes = processes.places(config.devices, config.nodes)
    if device == "cuda" and devices > torch.cuda.device_count():
        raise UserError(f"--devices {devices}, but there are {torch.cuda.device_count()} GPUs here.")
    fabric = Fabric(
        accelerator={"cuda": "cuda", "mps": "mps"}.get(device, "cpu"),
        devices=devices,
        num_nodes=nodes,
        strategy=processes.strategy(devices * nodes > 1, config.peer_timeout),
        precision=fabric_precision(config.precision, device),  # type: ignore[arg-type]
    )
    processes.launch(fabric)
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    return fabric


def fabric_precision(wanted: str, device: str) -> str:
    if wanted == "auto":
        wanted = ("bf16" if torch.cuda.is_bf16_supported() else "fp16") if device == "cuda" else "32"
    return {"32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[wanted]


def open_run(config: C, fabric: Fabric, *words: str) -> tuple[C, Run]:
    """The folder of a new run, or of the one to resume with the configuration it was started with."""
    if config.resume:
        folder = find_run(config.resume)
        stored = type(config).from_yaml(folder / "config.yaml")
        moved = {"resume": str(folder), "device": config.device, "devices": config.devices, "nodes": config.nodes}
        config = stored.model_copy(update=moved)
    else:
        folder = Path(processes.together(fabric, lambda: str(new_run_folder(config.out, *words))))
    opened: list[Run] = []
    processes.together(fabric, lambda: opened.append(Run(folder)))
    return config, opened[0] if opened else Run(folder, writer=False)


def begins_anew(config: RunConfig) -> bool:
    """Whether the weights come from ``--init`` or chance, not from a checkpoint of the run itself."""
    return not (config.resume and has_checkpoint(Path(config.resume)))


def record(config: RunConfig, run: Run, decisions: Decisions, examples: Examples, classes: tuple[str, ...]) -> None:
    """Write down what was decided and learned from; a resumed run keeps what it wrote, and looks what has changed."""
    if run.writer:
        run.trackers = make_trackers(config.track, run.folder, config.model_dump(mode="json"))
    facts = {"images": len(examples), "classes": list(classes), "fingerprint": examples.fingerprint()}
    if not config.resume or not (run.folder / "data.json").exists():
        run.save_json("decisions.json", [vars(decision) for decision in decisions])
        run.save_json("data.json", facts)
        run.save_config(config.model_copy(update={"resume": None}))  # last: it is what makes the folder a run
        return
    decisions[:] = [Decision(**stored) for stored in run.read_json("decisions.json")]
    before = run.read_json("data.json")
    if before["classes"] != facts["classes"]:
        raise UserError(
            f"The classes of {config.data} have changed since {run.folder} began ({len(before['classes'])} then, "
            f"{len(classes)} now): put them back, or start a new run with --init {run.folder}."
        )
    if before["fingerprint"] != facts["fingerprint"]:
        console.warn(
            f"the images of {config.data} have changed since {run.folder} began ({before['images']:,} then, "
            f"{len(examples):,} now): it goes on with them, but will not end as it would have"
        )


def open_source(config: RunConfig) -> DataSource:
    """The data a configuration names."""
    return open_data(
        str(config.data),
        split=config.split,
        val_fraction=config.val_fraction,
        classes=config.classes,
        root=config.root,
    )


def median_side(examples: Examples, sample: int = 64) -> int:
    """The median short side of up to ``sample`` images, from their headers."""
    indices = range(0, len(examples), max(1, len(examples) // sample))
    sides = []
    for index in indices:
        try:
            header = examples.header(index)
        except Exception as error:  # a bad file is the cache's to report; here it just does not vote
            console.warn(str(error))
            continue
        sides.append(min(header.width, header.height))
    return int(statistics.median(sides)) if sides else 224


def make_backbone(config: RunConfig, num_classes: int, decisions: Decisions, **keywords: Any) -> Backbone:
    """The backbone with its weights, as the configuration says; what "auto" chose for its size is said."""
    backbone = create_backbone(
        config.backbone,
        img_size=config.img_size,  # type: ignore[arg-type]
        num_classes=num_classes,
        **config.backbone_args,
        **keywords,
    )
    for note in backbone.notes:
        console.say(note)
    if config.init and begins_anew(config):
        report = load_weights(backbone, config.init)
        console.say(
            f"{config.init}: {report.kind}, {len(report.matched)} tensors taken, {len(report.missing)} missing"
            + (f" ({', '.join(report.missing[:4])}…)" if report.missing else "")
        )
    if config.checkpoint_activations:
        backbone.model.set_grad_checkpointing(True)  # type: ignore[operator]
    return backbone


def make_twin(backbone: Backbone) -> Backbone:
    """The same network with the same weights and no stochastic depth: a teacher."""
    spec = backbone.spec()
    twin = create_backbone(
        spec["name"],
        img_size=spec["img_size"],
        num_classes=spec["num_classes"],
        in_chans=spec["in_chans"],
        **spec["keywords"] | {"drop_path": 0.0},
    )
    twin.load_state_dict(backbone.state_dict())
    return twin


def eval_set(examples: Examples, backbone: Backbone, config: RunConfig, device: torch.device) -> EvalSet:
    """Images prepared for evaluation: resized and cropped in the middle."""
    transform = EvalTransform(backbone.img_size, mean=backbone.mean, std=backbone.std)
    store = store_of(examples, backbone.img_size, config, device)
    batch = config.batch if isinstance(config.batch, int) else 64
    return EvalSet(store, transform, max(64, batch) if device.type == "cuda" else min(batch, 64))


_stores: dict[tuple[object, ...], ImageStore] = {}
_STORES_KEPT = 4


def store_of(examples: Examples, img_size: tuple[int, int], config: RunConfig, device: torch.device) -> ImageStore:
    """Decoded images; several runs in one process (a comparison) share them."""
    key = (examples.fingerprint(), img_size, str(device), config.cache.model_dump_json())
    if key not in _stores:
        while len(_stores) >= _STORES_KEPT:
            _stores.pop(next(iter(_stores)))
        _stores[key] = _build(examples, img_size, config, device)
    return _stores[key]


def _build(examples: Examples, img_size: tuple[int, int], config: RunConfig, device: torch.device) -> ImageStore:
    return build_store(  # type: ignore[return-value]
        examples,
        img_size,
        device=device,
        where=config.cache.where,
        stored=config.cache.size,
        cache_dir=config.cache.folder,
        max_bad=config.cache.max_bad,
        workers=config.workers,
    )


def say_decisions(source: DataSource, decisions: Decisions) -> None:
    for note in source.notes:
        console.say(note)
    for decision in decisions:
        console.say(f"auto: {decision}")
