"""Read datasets of images with a label for every pixel, in the usual layouts.

    images/<split>/…, masks/<split>/…            also annotations/ or labels/ for masks: CamVid, ADE20K, your own data
    <split>/…, <split>annot/…                    CamVid as SegNet ships it
    JPEGImages/, SegmentationClass/, ImageSets/Segmentation/<split>.txt      Pascal VOC

A mask is a PNG whose grey values or palette indices are labels. Labels become classes 0, 1, … in order, without 255
and ``--ignore-index``. "auto" ignores a class called void, 11 in CamVid (also <split>annot/) and 0 in ADE20K.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from frugalvit.data.bad_images import SkippedFile
from frugalvit.data.formats.annotated_images import make_splits, read_image_sizes, select_split
from frugalvit.data.formats.masks import find_pairs, read_labels
from frugalvit.errors import UserError
from frugalvit.tasks.dense.loader import ImageReader
from frugalvit.tasks.segmentation.metrics import IGNORED
from frugalvit.utils import console
from frugalvit.utils.files import read_user_text
from frugalvit.utils.system import cores

_MAX_LABELS = 256
_FEWEST_MASKS = 5  # to tell whether their labels number objects
_VOID = {"void", "unlabelled", "unlabeled", "ignore", "ignored"}
_CAMVID = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist", "void",
)  # fmt: skip
_VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip


@dataclass
class Scene:
    """One image and its mask, the file ``truth``."""

    path: Path
    truth: Path
    height: int
    width: int


@dataclass
class SceneData:
    """Scenes by split. ``table[label]`` is the class of a label, ``IGNORED`` for ``ignored`` and 255."""

    name: str
    classes: tuple[str, ...]
    table: np.ndarray
    ignored: int
    splits: dict[str, list[Scene]]
    notes: list[str]
    bad: list[SkippedFile] = field(default_factory=list)
    instances: bool = False  # all labels above 0 are one class


class SegmentationDataset:
    """Images with a class for every pixel, uint8 on the CPU. Masks are cached if they fit beside the images."""

    def __init__(self, scenes: list[Scene], data: SceneData, pictures: ImageReader) -> None:
        self.scenes, self.data, self.pictures = scenes, data, pictures
        caches = pictures.is_cached and sum(scene.height * scene.width for scene in scenes) <= pictures.free_bytes
        self.labels = functools.cache(self._read) if caches else self._read

    def __len__(self) -> int:
        return len(self.scenes)

    def load(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the pixels and classes of a training image; of the next one if it is unreadable."""
        index, pixels = self.pictures.read_or_substitute(index)
        return pixels, self.labels(index)

    def _read(self, index: int) -> Tensor:
        return torch.from_numpy(self.data.table[read_labels(self.scenes[index].truth)])


def open_scenes(
    where: str,
    *,
    ignore: int | str = "auto",
    count: int | str = "auto",
    instances: bool | str = False,
    split: str = "auto",
    val_fraction: float = 0.1,
    only: str | None = None,
    max_bad: float = 0.05,
) -> SceneData:
    """Read and check a dataset (``only``: one split), and make the missing splits; mistakes are errors.

    instances: all labels above 0 become the class "object"; "auto" asks if the masks seem to number objects
    """
    root = Path(where)
    if not root.is_dir():
        raise UserError(f"There is no folder {root}.")
    pairs, layout = find_pairs(root, only, split)
    bad: list[SkippedFile] = []
    splits: dict[str, list[Scene]] = {}
    for name, files in pairs.items():
        sizes = read_image_sizes(name, [image for image, _ in files], max_bad, bad)
        splits[name] = [Scene(*pair, *size) for pair, size in zip(files, sizes, strict=True) if size is not None]
    names = _class_names(root, layout)
    ignored, reason = _choose_ignored(ignore, layout, names)
    notes = [f"ignored labels: {IGNORED}" + (f" and {ignored} ({reason})" if ignored != IGNORED else "")]
    present, table = _find_labels(splits, ask=instances == "auto" and not names), np.full(256, IGNORED, np.uint8)
    if instances is True:
        classes, table[:IGNORED] = ("background", "object"), 1
        table[0], table[ignored] = 0, IGNORED
    else:
        labels = _choose_labels(root, count, names, present, ignored)
        classes = tuple((names[k] if k < len(names) else str(k)) for k in labels)
        table[labels] = np.arange(len(labels))
    splits = select_split(make_splits(splits, split, val_fraction, notes), only, where)
    return SceneData(root.resolve().name, classes, table, ignored, splits, notes, bad, instances is True)


def _find_labels(splits: dict[str, list[Scene]], ask: bool) -> dict[int, Path]:
    """Return every label with a mask that has it. ``ask``: raise if labels seem to number objects, from 0 to k."""
    scenes = [scene for scenes in splits.values() for scene in scenes]
    examples: dict[int, Path] = {}
    counts: list[int] = []
    numbered = True
    with ThreadPoolExecutor(min(8, cores())) as pool:
        results = console.progress(pool.map(_labels_in, scenes), total=len(scenes), label="reading masks")
        for scene, labels in zip(scenes, results, strict=True):
            for label in labels:
                examples.setdefault(label, scene.truth)
            counts.append(len(labels) - (IGNORED in labels))
            numbered &= [label for label in labels if label != IGNORED] == list(range(counts[-1]))
    if ask and numbered and len(counts) >= _FEWEST_MASKS and len(set(counts)) > 2:
        raise UserError(
            f"The masks seem to number objects: each has the labels 0 to k, and k is {min(counts) - 1} to "
            f"{max(counts) - 1}. Pass --instances true to learn object against background, --instances false if the "
            "labels are classes, or use 'frugalvit detect train' to find single objects."
        )
    return dict(sorted(examples.items()))


def _labels_in(scene: Scene) -> list[int]:
    """Return the labels in a mask, after checking its size."""
    labels = read_labels(scene.truth)
    if labels.shape != (scene.height, scene.width):
        raise UserError(
            f"{scene.truth} has {labels.shape[1]}×{labels.shape[0]} px, but its image {scene.path.name} has "
            f"{scene.width}×{scene.height} (after EXIF rotation). Both must have the same size."
        )
    return np.flatnonzero(np.bincount(labels.ravel())).tolist()


# -- labels


def _class_names(root: Path, layout: str) -> tuple[str, ...]:
    """Return names by label from classes.txt, or those of a known dataset; else ()."""
    path = root / "classes.txt"
    if not path.exists():
        return {"voc": _VOC, "camvid": _CAMVID}.get(layout, ())
    names = [line.strip() for line in read_user_text(path, "utf-8-sig").splitlines() if line.strip()]
    if len(names) > _MAX_LABELS:
        raise UserError(f"{path} names {len(names)} classes. Labels are numbers from 0 to 255.")
    return tuple(names)


def _choose_ignored(wanted: int | str, layout: str, names: tuple[str, ...]) -> tuple[int, str]:
    """Return the label to ignore besides 255 (255 for none), and why."""
    if wanted != "auto":
        return int(wanted), "--ignore-index"
    if layout == "ade20k":
        return 0, "unlabelled in ADE20K"
    for label, name in enumerate(names):
        if name.lower() in _VOID:
            return label, f"its name is '{name}'"
    return IGNORED, ""


def _choose_labels(
    root: Path, count: int | str, names: tuple[str, ...], present: dict[int, Path], ignored: int
) -> list[int]:
    """Return the labels that are classes: all below ``count``, the named ones, or all up to the highest."""
    counted = [label for label in present if label not in (ignored, IGNORED)]
    number = int(count) if count != "auto" else len(names) or max(counted, default=-1) + 1
    above = next((label for label in counted if label >= number), None)
    if above is not None:
        raise UserError(
            f"{present[above]} has the label {above}, but the labels are 0 to {number - 1}. Fix the mask, or ignore "
            f"the label with --ignore-index {above}."
        )
    labels = [label for label in range(number) if label not in (ignored, IGNORED)]
    if len(labels) < 2 or (IGNORED in present and count == "auto" and len(counted) < 2):
        raise UserError(
            f"The masks of {root} have fewer than two classes. The label {IGNORED} is always ignored: if it is a "
            "class, give it another label."
        )
    return labels
