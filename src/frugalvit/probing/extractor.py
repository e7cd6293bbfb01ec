"""Extract the features of images with a frozen model, and cache them on disk.

The key of the cache is a hash of the weights, the images (names, sizes and times), the preprocessing and the kind of
features. So another model, a changed file or another input size never gets wrong features. The cache is written in
chunks: an interrupted call resumes.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from frugalvit.config.data import AugmentConfig
from frugalvit.data.augmentation.transforms import TrainAugment
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.dataset import ImageDataset
from frugalvit.data.image_size import probe_images
from frugalvit.data.paths import cache_root
from frugalvit.data.preprocessing import CenterCrop
from frugalvit.data.rng import generator_for
from frugalvit.engine.hardware import precision_name
from frugalvit.errors import UserError
from frugalvit.experiment.load_model import Model
from frugalvit.probing.validation import require_finite
from frugalvit.utils import console
from frugalvit.utils.files import write_atomically
from frugalvit.utils.system import cap_workers

Kind = Literal["pooled", "last_blocks", "grid"]
Prepare = Callable[[Tensor, Tensor], Tensor]  # decoded images, their sizes -> network inputs
CHUNK = 1024  # images between two writes
MAX_UNREADABLE = 0.05  # share of the images
_VERSION = 5  # of the files; raise it when the features of an equal key change
_DTYPES = {"32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHORT_NAMES = {"32-true": "32", "bf16-mixed": "bf16", "16-mixed": "fp16"}


@dataclass
class FeatureSet:
    """Features of a split in the order of its images, without the unreadable ones.

    features:  float32 on the CPU, (N, D), or (N, D, h, w) for the grid
    labels:    (N,) or None
    targets:   (N, C) for several labels per image, or None
    positions: the index of each row's image in the split; names may occur twice
    copies:    the first image of every row's group of copies (``group_copies``), if train may be split
    """

    features: Tensor
    labels: Tensor | None
    targets: Tensor | None
    names: list[str]
    keys: list[str]
    bad: list[tuple[str, str]] = field(default_factory=list)
    from_cache: bool = False
    positions: list[int] = field(default_factory=list)
    copies: np.ndarray | None = None
    copies_note: str = ""

    def __len__(self) -> int:
        return len(self.features)


class FeatureExtractor:
    """Extracts features with one model."""

    def __init__(
        self,
        model: Model,
        *,
        kind: Kind = "pooled",
        blocks: int = 4,
        batch: int = 64,
        precision: str = "auto",
        workers: int | Literal["auto"] = "auto",
        cache: bool = True,
    ) -> None:
        self.model, self.kind, self.blocks, self.batch = model, kind, blocks, batch
        self.device = next(model.backbone.parameters()).device
        self.precision = resolve_precision(precision, self.device)
        self.threads = max(1, cap_workers(workers, CHUNK))
        self.folder = cache_root() / "features" if cache else None
        self.weights = model_hash(model)

    def __call__(
        self,
        examples: ImageDataset,
        label: str = "features",
        view: int | None = None,
        seed: int = 0,
        mirrored: bool = False,
    ) -> FeatureSet:
        """Extract the features of all images; ``view``: of a random crop and flip with this number, from ``seed``."""
        if len(examples) == 0:
            raise UserError(f"{label} has no images.")
        examples = examples.with_pixels(self.model.transform.pixels)  # the model decides how images are read
        # Views are cropped from images of one size; a centre crop must not depend on the other images.
        rectangle = None if view is None else probe_images(examples, self.model.transform.out_size)[0]
        folder = None if self.folder is None else self._folder(examples, rectangle, view, seed, mirrored)
        numbers = range(-(-len(examples) // CHUNK))
        parts = {} if folder is None else {n: part for n in numbers if (part := _load(folder, n)) is not None}
        missing = [number for number in numbers if number not in parts]
        limit = max(1, int(MAX_UNREADABLE * len(examples)))
        bad = sum(len(part.bad) for part in parts.values())
        done = sum(len(part.positions) for part in parts.values())
        progress = console.ProgressBar(len(examples), label, done, "images")
        for decoded in _read_chunks(examples, missing, rectangle, self.model.transform.crop, self.threads):
            bad += len(decoded.bad)
            if bad > limit:
                first = "; ".join(f"{name}: {reason}" for name, reason in decoded.bad[:3])
                raise UserError(f"{bad} of {len(examples)} images are unreadable: {first}. Fix or remove them.")
            prepare = self._prepare(view, seed, decoded.number, mirrored)
            features = self._features(decoded, prepare, progress)
            require_finite(features, f"features of {self.model.name}")
            part = parts[decoded.number] = _Part(features.numpy(), np.array(decoded.positions, int), decoded.bad)
            if folder is not None:
                _save(folder, decoded.number, part)
        progress.close()
        return self._assemble(examples, [parts[number] for number in numbers], not missing)

    def settings(self) -> dict[str, object]:
        """Return everything but the images that the features depend on."""
        return {
            "version": _VERSION,
            "weights": self.weights,
            "transform": self.model.transform.spec(),
            "features": [self.kind, self.blocks if self.kind == "last_blocks" else 0],
            "precision": self.precision,
        }

    @torch.inference_mode()
    def images(self, images: Tensor) -> Tensor:
        """Compute the features (B, …) of network inputs, float32."""
        backbone, dtype = self.model.backbone, _DTYPES[self.precision]
        with torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            if self.kind == "last_blocks":
                features = backbone.last_blocks(images, self.blocks, class_token=True)
            else:
                output = backbone(images)
                features = output.grid if self.kind == "grid" else output.pooled
        return features.float()

    def _features(self, decoded: _Decoded, prepare: Prepare, progress: console.ProgressBar) -> Tensor:
        features = []
        for start in range(0, len(decoded.images), self.batch):
            rows = slice(start, start + self.batch)
            images = torch.stack(decoded.images[rows])
            features.append(self.images(prepare(images.to(self.device), decoded.sizes[rows])).cpu())
            progress.show(decoded.number * CHUNK + start + len(images))
        return torch.cat(features) if features else torch.zeros(0, 1)

    def _prepare(self, view: int | None, seed: int, number: int, mirrored: bool) -> Prepare:
        if mirrored:
            return lambda images, sizes: self._prepare(view, seed, number, False)(images, sizes).flip(-1)
        if view is None:
            return lambda images, _: self.model.transform(images)
        backbone = self.model.backbone
        crop = TrainAugment(_view_config(), self.model.transform.out_size, backbone.mean, backbone.std)
        generator = generator_for(seed, f"probe view {view}", number)
        return lambda images, sizes: crop(images, sizes, generator)

    def _folder(
        self, examples: ImageDataset, rectangle: tuple[int, int] | None, view: int | None, seed: int, mirrored: bool
    ) -> Path:
        identity = (
            self.settings()
            | {
                "images": examples.fingerprint(labels=False),
                "rectangle": rectangle,
                "view": None if view is None else [seed, view, _view_config().model_dump(mode="json"), self.batch],
            }
            | ({"mirrored": True} if mirrored else {})
        )
        assert self.folder is not None
        return self.folder / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]

    def _assemble(self, examples: ImageDataset, parts: list[_Part], from_cache: bool) -> FeatureSet:
        positions = np.concatenate([part.positions for part in parts])
        bad = [entry for part in parts for entry in part.bad]
        if not len(positions):
            raise UserError(f"All {len(examples)} images are unreadable; the first: {bad[0][0]}: {bad[0][1]}.")
        for name, reason in bad:
            console.warning(f"left out: {name}: {reason}")
        labels = None if examples.labels is None else torch.from_numpy(examples.labels[positions])
        targets = None if examples.targets is None else torch.from_numpy(examples.targets[positions])
        features = np.concatenate([part.features for part in parts if len(part.positions)])
        names, keys = ([texts[i] for i in positions] for texts in (examples.names, examples.keys))
        return FeatureSet(torch.from_numpy(features), labels, targets, names, keys, bad, from_cache, positions.tolist())


def resolve_precision(precision: str, device: torch.device) -> str:
    """Resolve "auto" as training does: half precision if the hardware has it, 32 on a CPU."""
    return _SHORT_NAMES[precision_name(precision, device.type)]


def model_hash(model: Model) -> str:
    """Hash the weights and the architecture of a model, which decide its features."""
    spec = {key: value for key, value in model.backbone.spec().items() if key != "num_classes"}
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.backbone.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _view_config() -> AugmentConfig:
    """Return the augmentation of the released linear probe: random resized crop and flip."""
    return AugmentConfig(crop="resized", operations=0, erasing=0.0, flip=0.5)


@dataclass
class _Decoded:
    """The decoded images of one chunk."""

    number: int
    images: list[Tensor]  # n of (C, S, S')
    sizes: Tensor  # (n, 2)
    positions: list[int]
    bad: list[tuple[str, str]]


def _read_chunks(
    examples: ImageDataset, numbers: list[int], rectangle: tuple[int, int] | None, crop: CenterCrop, threads: int
) -> Iterator[_Decoded]:
    """Decode chunks in threads, one chunk ahead.

    rectangle: the size that all images are resized to, for random views; None: evaluation's ``crop``
    """

    def read_one(position: int) -> tuple[np.ndarray, tuple[int, int]] | UnreadableImage:
        try:
            return examples.read_sized(position, rectangle or crop.size, None if rectangle else crop)
        except UnreadableImage as error:
            return error

    def read(number: int) -> _Decoded:
        positions = range(number * CHUNK, min((number + 1) * CHUNK, len(examples)))
        images, sizes, readable, bad = [], [], [], []
        for position, result in zip(positions, decoders.map(read_one, positions), strict=True):
            if isinstance(result, UnreadableImage):
                bad.append((result.name, result.reason))
                continue
            images.append(torch.from_numpy(result[0]).permute(2, 0, 1))
            sizes.append(result[1])
            readable.append(position)
        return _Decoded(number, images, torch.tensor(sizes).view(-1, 2), readable, bad)

    with ThreadPoolExecutor(threads) as decoders, ThreadPoolExecutor(1) as ahead:
        waiting = [ahead.submit(read, number) for number in numbers[:1]]
        for index in range(len(numbers)):
            decoded = waiting.pop().result()
            waiting = [ahead.submit(read, number) for number in numbers[index + 1 : index + 2]]
            yield decoded


@dataclass
class _Part:
    """One chunk in the cache."""

    features: np.ndarray
    positions: np.ndarray
    bad: list[tuple[str, str]]


def _save(folder: Path, number: int, part: _Part) -> None:
    arrays = {"features": part.features, "positions": part.positions, "bad": np.array(json.dumps(part.bad))}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{number:06d}.npz", lambda handle: np.savez(handle, **arrays))  # type: ignore[arg-type]
    except OSError as error:
        raise UserError(f"Cannot write features to {folder} ({error.strerror}): pass --no-cache.") from None


def _load(folder: Path, number: int) -> _Part | None:
    """Load a chunk of an earlier call; None if it is missing or damaged, so that it is computed again."""
    path = folder / f"{number:06d}.npz"
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            bad = [(name, reason) for name, reason in json.loads(str(arrays["bad"]))]
            return _Part(arrays["features"], arrays["positions"], bad)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        console.warning(f"{path} is damaged ({error}); computing it again")
        return None
