"""The training steps that ``side_by_side.py`` times: ours, timm's and lightly's.

A peer takes the network, the batch, the rates and the schedules of our run. Its loader, transforms, losses, optimizer
and EMA are its own. Each peer is imported when it is used.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from frugalvit.backbones import Backbone, create_backbone
from frugalvit.config.pretrain import PretrainConfig
from frugalvit.config.train import TrainConfig
from frugalvit.data.augmentation.mixup import Mixing
from frugalvit.data.augmentation.multicrop import MultiCrop, local_crop_size
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.data.loader import Batches
from frugalvit.engine.compile import compile_task
from frugalvit.engine.param_groups import decay_groups, no_weight_decay_names
from frugalvit.tasks.pretraining.task import make_teacher
from train_step import make_step

Step = Callable[[], None]


class Ours:
    """The step of ``frugalvit train`` or ``pretrain``, fed by the cache of decoded images.

    options: of the run
    setting: device, precision, files, store and workers, as ``side_by_side.Setting`` has them
    """

    is_ours, queued = True, 0

    def __init__(self, name: str, options: TrainConfig | PretrainConfig, setting: Any) -> None:
        self.name = name
        self.step, self.config = make_step(options, setting.facts(), setting.fabric)
        self.task: Any = self.step.task
        compile_task(self.task, self.config, self.step.plan, setting.fabric)
        size, mixing = setting.options.img_size, None
        if isinstance(options, PretrainConfig):
            augment: Any = MultiCrop(self.config.crops, size)
        else:
            augment, mixing = TrainAugment(self.config.augment, size), Mixing(self.config.mixing, setting.classes)
        self.batch = self.step.plan.images_per_step
        self.task.batches = self.files = Batches(
            setting.store, self.batch, seed=options.seed, augment=augment, mixing=mixing
        )

    @contextmanager
    def feed(self, source: str) -> Iterator[Step]:
        """Yield a function that takes one step, from "files" or on one batch in "memory"."""
        batch = self.files.batch_at(0) if source == "memory" else None
        fetch = self.files.batch_at if batch is None else lambda _: batch
        with mock.patch.object(self.files, "batch_at", fetch):
            yield self.train

    def train(self) -> None:
        self.step.one_step()
        self.step.step += 1

    def epochs(self) -> Iterator[None]:
        """Train one epoch at each ``next``."""
        while True:
            for _ in range(self.step.plan.steps_per_epoch):
                self.train()
            yield

    @property
    def teacher(self) -> Any:
        return self.task.teacher


class Peer:
    """A peer's step, fed by its DataLoader, which starts and stops its workers in every turn.

    ours:    our step, which has the task, the plan and the resolved options
    setting: as for ``Ours``
    """

    name = ""
    is_ours = False

    def __init__(self, ours: Ours, setting: Any) -> None:
        self.setting, self.device, self.options = setting, setting.device, setting.options
        self.task, self.config, self.plan = ours.task, ours.config, ours.step.plan
        self.batch, self.step = self.plan.images_per_step, 0
        self.queued = 2 * setting.workers  # batches that the workers prepare in advance

    def make_loader(self, workers: int) -> Any:
        raise NotImplementedError

    def train(self, images: Any, labels: Tensor) -> None:
        raise NotImplementedError

    @contextmanager
    def feed(self, source: str) -> Iterator[Step]:
        """Yield a function that takes one step, from "files" or on one batch in "memory"."""
        batches = self._one_batch() if source == "memory" else self._repeat_forever()
        try:
            yield lambda: self.train(*next(batches))
        finally:
            batches.close()

    def _one_batch(self) -> Iterator[Any]:
        images, labels = next(iter(self.make_loader(0)))
        images = self.to_device(images)
        while True:
            yield images, labels.to(self.device)

    def _repeat_forever(self) -> Iterator[Any]:
        loader = self.make_loader(self.setting.workers)
        while True:
            yield from loader

    def to_device(self, images: Any) -> Any:
        if isinstance(images, Tensor):
            return images.to(self.device, non_blocking=True)
        return [view.to(self.device, non_blocking=True) for view in images]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip, set the rates of our schedules, and step."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self.plan.clip)
        for group in optimizer.param_groups:
            group["lr"] = self.plan.lr.at(self.step)
            if group["weight_decay"]:
                group["weight_decay"] = self.plan.weight_decay.at(self.step)
        optimizer.step()
        optimizer.zero_grad()
        self.step += 1

    def make_network(self, ours: Backbone) -> Backbone:
        """Build the network of ``--peer-backbone`` and check its size; without that option, copy ours."""
        name = self.options.peer_backbone or ours.name
        rate = self.config.drop_path
        network = create_backbone(name, img_size=ours.img_size, num_classes=ours.num_classes, drop_path=rate)
        theirs, own = (sum(parameter.numel() for parameter in model.parameters()) for model in (network, ours))
        if abs(theirs - own) > 0.01 * own:
            raise SystemExit(f"--peer-backbone {name} has {theirs:,} parameters, {ours.name} has {own:,}.")
        if name == ours.name:
            network.load_state_dict(ours.state_dict())  # both sides start from the same weights
        return network.to(self.device).train()

    def compile(self, network: Any) -> Any:
        return torch.compile(network) if self.options.compile_peers else network


class Timm(Peer):
    """timm's supervised step. Its train script scales the loss with fp16 only, so bf16 needs no ``NativeScaler``."""

    name = "timm"

    def __init__(self, ours: Ours, setting: Any) -> None:
        from timm.loss import SoftTargetCrossEntropy
        from timm.optim import create_optimizer_v2
        from timm.utils import ModelEmaV3

        super().__init__(ours, setting)
        self.model: Any = self.make_network(self.task.backbone).model
        decay = self.config.optimizer.weight_decay
        self.optimizer = create_optimizer_v2(self.model, "adamw", lr=self.config.lr, weight_decay=decay)
        self.average = ModelEmaV3(self.model, decay=self.config.ema)
        self.network, self.loss = self.compile(self.model), SoftTargetCrossEntropy()

    def make_loader(self, workers: int) -> Any:
        from timm.data import FastCollateMixup, ImageDataset, create_loader

        side, mixing, augment = self.options.img_size, self.config.mixing, self.config.augment
        # mmax9: at level 10, timm 1.0.31 posterizes to 0 bits, which Pillow 13 refuses
        policy = f"rand-m{augment.magnitude:g}-mstd{augment.magnitude_std:g}-mmax9-inc1"
        mix = FastCollateMixup(
            mixup_alpha=mixing.mixup, cutmix_alpha=mixing.cutmix, prob=mixing.prob, switch_prob=mixing.switch_prob,
            label_smoothing=mixing.smoothing, num_classes=self.task.backbone.num_classes,
        )  # fmt: skip
        return create_loader(
            ImageDataset("", reader=self.setting.files), (3, side, side), self.batch, is_training=True,
            auto_augment=policy, re_prob=augment.erasing,
            re_mode="pixel", interpolation="random", num_workers=workers, collate_fn=mix, device=self.device,
            pin_memory=self.device.type == "cuda",
        )  # fmt: skip

    def train(self, images: Tensor, labels: Tensor) -> None:
        with self.setting.autocast():
            loss = self.loss(self.network(images), labels)
        loss.backward()
        self.update(self.optimizer)
        self.average.update(self.model, step=self.step)


class Lightly(Peer):
    """lightly's DINO: one pass per crop, as in its example, with our schedules and parameter groups."""

    name = "lightly"

    def __init__(self, ours: Ours, setting: Any) -> None:
        from lightly.loss import DINOLoss
        from lightly.models.modules import DINOProjectionHead

        super().__init__(ours, setting)
        matching, backbone = self.config.matching, self.make_network(self.task.student)
        self.teacher = make_teacher(backbone).to(self.device)
        self.teacher.load_state_dict(backbone.state_dict())
        widths = (backbone.pooled_dim, matching.hidden, matching.bottleneck, matching.prototypes)
        self.head, self.average = (DINOProjectionHead(*widths, freeze_last_layer=1).to(self.device) for _ in range(2))
        self.average.load_state_dict(self.head.state_dict())
        self.pairs = [(backbone, self.teacher), (self.head, self.average)]
        for _, average in self.pairs:
            average.requires_grad_(False)
        student = nn.ModuleList([backbone, self.head])
        fixed, decay = no_weight_decay_names(student), self.config.optimizer.weight_decay
        groups = decay_groups(student.named_parameters(), decay, undecayed=fixed)
        self.optimizer = torch.optim.AdamW(groups, lr=self.config.lr)
        self.loss = DINOLoss(matching.prototypes).to(self.device)
        self.networks = self.compile(backbone), self.compile(self.teacher)

    def make_loader(self, workers: int) -> Any:
        from lightly.transforms.dino_transform import DINOTransform
        from timm.data import ImageDataset

        side, crops = self.options.img_size, self.config.crops
        transform = DINOTransform(
            global_crop_size=side, global_crop_scale=crops.global_scale, n_local_views=crops.local_crops,
            local_crop_size=local_crop_size(crops, (side, side))[0], local_crop_scale=crops.local_scale,
            sigmas=crops.blur_sigma,
        )  # fmt: skip
        images: Any = ImageDataset("", reader=self.setting.files, transform=transform)
        return DataLoader(
            images, self.batch, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=workers > 0,
            pin_memory=self.device.type == "cuda",
        )  # fmt: skip

    def train(self, images: list[Tensor], labels: Tensor) -> None:
        from lightly.models.utils import update_momentum

        views, (student, teacher) = self.to_device(images), self.networks
        for network, average in self.pairs:
            update_momentum(network, average, m=self.task.momentum.at(self.step))
        with self.setting.autocast():
            with torch.no_grad():
                targets = [self.average(teacher(view).pooled) for view in views[:2]]
            outputs = [self.head(student(view).pooled) for view in views]
            loss = self.loss(targets, outputs, teacher_temp=self.task.teacher_temp.at(self.step))
        loss.backward()
        self.head.cancel_last_layer_gradients(current_epoch=int(self.step >= self.task.hold_last))
        self.update(self.optimizer)

    def epochs(self) -> Iterator[None]:
        """Train one epoch at each ``next``; the workers stay between epochs."""
        loader = self.make_loader(self.setting.workers)
        while True:
            for batch in loader:
                self.train(*batch)
            yield
