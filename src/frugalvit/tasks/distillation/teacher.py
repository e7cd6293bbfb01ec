"""Teacher: a frozen network that sees a student's images, as the target of ``distil`` or the guide of ``train``."""

import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn

from frugalvit.backbones import Backbone
from frugalvit.backbones.registry import is_model_name
from frugalvit.backbones.weights.published import has_published, is_published
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.data.cache.store import ImageStore
from frugalvit.data.paths import cache_root
from frugalvit.data.rng import to_device_packed
from frugalvit.engine.distributed import run_on_rank_zero
from frugalvit.engine.schedules import Schedule
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model, load_model
from frugalvit.features import Features
from frugalvit.objectives import FeatureDistillation, distillation_targets
from frugalvit.probing.extractor import model_hash
from frugalvit.utils import console
from frugalvit.utils.files import make_folder, write_atomically


class Teacher(nn.Module):
    """Returns the targets of a batch: ``distillation_targets`` of the frozen network's features.

    Its input is the student's: the pixels get the network's own normalization and size. A checkpoint holds only a hash
    of the weights. So a resumed run stops if the teacher has changed.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, model: Model, student: Backbone) -> None:
        super().__init__()
        network = model.backbone
        if (network.in_chans, network.pixel_type) != (student.in_chans, student.pixel_type):
            raise UserError(
                f"The teacher {model.name} takes {network.in_chans} channels of {network.pixel_type}, {student.name} "
                f"takes {student.in_chans} of {student.pixel_type}. "
                "Set --backbone-args '{in_chans: N}', or choose another teacher."
            )
        self.name, self.hash = model.name, model_hash(model)
        self.frozen = (network.requires_grad_(False).eval(),)  # in a tuple: neither trained, saved nor set to training
        self.grid = student.grid_size(student.img_size)
        (mean, std), (own_mean, own_std) = (
            (torch.tensor(values).view(1, -1, 1, 1) for values in (backbone.mean, backbone.std))
            for backbone in (student, network)
        )
        self.register_buffer("scale", std / own_std, persistent=False)
        self.register_buffer("shift", (mean - own_mean) / own_std, persistent=False)

    @property
    def network(self) -> Backbone:
        return self.frozen[0]

    @torch.no_grad()
    def forward(self, images: Tensor) -> Features:
        """images: (B, C, H, W), normalized for the student."""
        images = images * self.scale + self.shift
        if images.shape[-2:] != self.network.img_size:
            images = F.interpolate(images, self.network.img_size, mode="bicubic", antialias=True)
        return distillation_targets(self.network(images), self.grid)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move the network too, as ``to(device)`` moves submodules."""
        self.network._apply(fn)
        return super()._apply(fn, recurse)

    def get_extra_state(self) -> Tensor:
        return torch.tensor(list(bytes.fromhex(self.hash)), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        if not torch.equal(state.cpu(), self.get_extra_state()):
            raise UserError(f"The teacher {self.name} has other weights than at the start of the run. Restore them.")


def load_teacher(source: str, student: Backbone, size: int | None = None) -> Teacher:
    """Load the frozen network; the name of an architecture means its published weights."""
    is_name = not Path(source).exists() and is_model_name(source) and not is_published(source)
    if is_name and not has_published(source):
        raise UserError(f"'{source}' is only a name, and a teacher needs weights. Pass a run, a file or NAME.TAG.")
    with torch.random.fork_rng(()):  # the student's random numbers do not depend on the teacher
        model = load_model(source, img_size=size, pretrained=is_name)
    return Teacher(model, student)


class Guide(nn.Module):
    """The grid term of distillation as a further loss; ``weight`` falls to 0 within the run."""

    def __init__(self, teacher: Teacher, dim: int, weight: Schedule) -> None:
        super().__init__()
        self.frozen_teacher, self.weight = teacher, weight
        self.head = FeatureDistillation(dim, teacher.network.dim, pooled_weight=0.0)

    def targets(self, images: Tensor, step: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the grid to learn and the weight of the loss; None after the weight has reached 0."""
        if not self.weight.at(step):
            return None, None
        return self.frozen_teacher(images).grid, images.new_full((), self.weight.at(step), dtype=torch.float32)

    def loss(self, features: Features, grid: Tensor | None, weight: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        if grid is None or weight is None:
            # DDP needs the same parameters on every rank and step: these take part with weight zero.
            return 0.0 * torch.stack([parameter.sum() for parameter in self.head.parameters()]).sum(), {}
        loss = self.head.losses(features, Features(grid, features.pooled))["loss"]
        return weight * loss, {"guide_loss": loss.detach()}


class CachedTargets(NamedTuple):
    """The targets of every image for its plain view, mapped from files: grid (N, D, h, w), pooled (N, D), float16."""

    grid: np.ndarray
    pooled: np.ndarray

    def at(self, index: Tensor, flips: Tensor, device: torch.device) -> Features:
        """Return the targets of these images (CPU indices); the grids of flipped images are flipped too."""
        parts = [*(torch.from_numpy(array[index.numpy()]) for array in self), flips]
        grid, pooled, flipped = to_device_packed(parts, device)
        return Features(torch.where(flipped[:, None, None, None], grid.flip(3), grid), pooled)


def cache_targets(
    teacher: Teacher, store: ImageStore, augment: TrainAugment, batch: int, fabric: Fabric, fingerprint: str
) -> CachedTargets:
    """Run the teacher on the plain view of every image, once; later runs read the files.

    augment:     the student's; its crop makes the view, without flip and colours
    fingerprint: of the images; an unreadable one has the targets of its substitute
    """
    plain = {"flip": 0.0, "jitter": (0.0,) * 4, "grayscale": 0.0, "blur": 0.0, "erasing": 0.0}
    normalize, config = augment.normalize, augment.config.model_copy(update=plain)
    view = TrainAugment(config, augment.out_size, normalize.mean, normalize.std)
    facts = (teacher.hash, fingerprint, augment.out_size, teacher.grid, config.interpolation, len(store))
    key = hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
    folder = make_folder(cache_root() / "teachers", "Set FRUGALVIT_CACHE to another folder.")
    paths = [folder / f"{key}_{name}.npy" for name in Features._fields]

    def build() -> None:
        if all(path.exists() for path in paths):
            return
        everything, parts = torch.arange(len(store)), []
        fetcher = store.fetcher(lambda turn: everything[turn * batch :][:batch])
        fabric.to_device(teacher)
        with torch.inference_mode(), fabric.autocast():
            turns = range(math.ceil(len(store) / batch))
            for turn in console.progress(turns, len(turns), "running the teacher"):
                images, sizes, _ = fetcher.at(turn)
                targets = teacher(view.apply(images, sizes, torch.zeros(len(images), view.columns)))
                parts.append([target.half().cpu().numpy() for target in targets])
        for path, arrays in zip(paths, zip(*parts, strict=True), strict=True):
            write_atomically(path, lambda handle, arrays=arrays: np.save(handle, np.concatenate(arrays)))

    run_on_rank_zero(fabric, build)
    build()  # on machines with a cache of their own
    return CachedTargets(*(np.load(path, mmap_mode="r") for path in paths))
