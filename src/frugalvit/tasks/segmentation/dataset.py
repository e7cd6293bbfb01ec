"""Read datasets of images with a label for every pixel, in the usual layouts.

    images/<split>/…, masks/<split>/…            also annotations/ or labels/ for masks: CamVid, ADE20K, your own data
    <split>/…, <split>annot/…                    CamVid as SegNet ships it
    JPEGImages/, SegmentationClass/, ImageSets/Segmentation/<split>.txt      Pascal VOC

A mask is a PNG whose grey values or palette indices are labels. Labels become classes 0, 1, … in order, without the
ignored ones: 255 always, and one more (``--ignore-index``). "auto" ignores a class called void, 11 in CamVid (the
folder has that name, or contains <split>annot/) and 0 in ADE20K ("reduce zero label").
"""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from frugalvit.data.decode import known_formats
from frugalvit.data.formats.folder import SPLIT_NAMES, list_images
from frugalvit.errors import UserError
from frugalvit.runs.data_record import SkippedFile
from frugalvit.tasks.dense.image_headers import UNREADABLE, make_splits, read_image_sizes
from frugalvit.tasks.dense.loader import ImageReader
from frugalvit.tasks.segmentation.label_map import LabelMap, name_of
from frugalvit.tasks.segmentation.metrics import IGNORED
from frugalvit.utils import console
from frugalvit.utils.system import cores
from frugalvit.utils.text import truncate_list

Pairs = list[tuple[Path, Path]]
_MASK_FOLDERS = ("masks", "annotations", "labels", "annotation", "mask", "label")
_MASK_ENDINGS = ("_mask", "_labelIds", "_L")
"""What tools append to an image's name for its mask."""
_MAX_LABELS = 256
_GREY_STEPS = {"L;2": 85, "L;4": 17}  # Pillow scales grey values of two and four bits to the range of a byte
_VOID = {"void", "unlabelled", "unlabeled", "ignore", "ignored"}
_CAMVID = ("sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist")
_VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip


@dataclass
class Scene:
    """One image and its mask."""

    path: Path
    mask: Path
    height: int
    width: int

    @property
    def truth(self) -> Path:
        """The file with the ground truth."""
        return self.mask


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


class SegmentationDataset:
    """Images with a class for every pixel, uint8 on the CPU. Masks are cached if they fit beside the images."""

    def __init__(self, scenes: list[Scene], data: SceneData, pictures: ImageReader) -> None:
        self.scenes, self.data, self.pictures = scenes, data, pictures
        self._caches = pictures.keeps and sum(scene.height * scene.width for scene in scenes) <= pictures.room
        self._cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.scenes)

    def load(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the pixels and classes of a training image; of the next one if it is unreadable."""
        index, pixels = self.pictures.to_learn(index)
        return pixels, self.labels(index)

    def labels(self, index: int) -> Tensor:
        """Return the classes (H, W) of an image."""
        classes = self._cache.get(index)
        if classes is None:
            classes = torch.from_numpy(self.data.table[read_labels(self.scenes[index].mask)])
            if self._caches:
                self._cache[index] = classes
        return classes


def open_scenes(
    where: str,
    *,
    ignore: int | str = "auto",
    count: int | str = "auto",
    split: str = "auto",
    val_fraction: float = 0.1,
    only: str | None = None,
    known: LabelMap | None = None,
    max_bad: float = 0.05,
) -> SceneData:
    """Read and check a dataset, and make the missing splits; every mistake is an error before training.

    only:    read only this split
    known:   the labels of a model; the dataset's labels are mapped to its classes, and ``count`` is not used
    max_bad: share of a split's images that may be unreadable
    """
    root = Path(where)
    if not root.is_dir():
        raise UserError(f"There is no folder {root}.")
    pairs, layout = find_pairs(root, only)
    notes: list[str] = []
    bad: list[SkippedFile] = []
    splits = {name: _read_scenes(name, files, max_bad, bad) for name, files in pairs.items()}
    names = class_names(root, layout)
    if known is not None and not known.differs(names):
        ignore, count = known.ignored if ignore == "auto" else ignore, max(known.labels) + 1
    ignored, reason = choose_ignored(ignore, layout, names)
    also = f" and {ignored} ({reason})" if ignored != IGNORED else ""
    notes.append(f"ignored labels: {IGNORED}{also}")
    present = _find_labels(splits)
    if known is not None and known.differs(names):
        classes, table = known.classes, known.table(names, present, ignored)
        notes.append(known.note(table, names, where))
    else:
        labels = _choose_labels(root, count, names, present, ignored, known)
        classes, table = tuple(name_of(label, names) for label in labels), np.full(256, IGNORED, np.uint8)
        table[labels] = np.arange(len(labels))
        absent = [name for label, name in zip(labels, classes, strict=True) if label not in present]
        if absent and only is None:
            notes.append(f"{len(absent)} of {len(labels)} classes are in no mask: {truncate_list(absent)}")
    splits = make_splits(splits, split, val_fraction, notes)
    return SceneData(root.resolve().name, classes, table, ignored, splits, notes, bad)


def read_labels(path: Path) -> np.ndarray:
    """Read the labels of a mask, uint8 (H, W)."""
    try:
        with Image.open(path, formats=known_formats()) as mask:
            if mask.format in ("JPEG", "MPO"):
                raise UserError(f"{path} is a JPEG, which changes labels. Save masks as PNG.")
            if mask.mode not in ("L", "P", "1", "I", "I;16"):
                raise UserError(
                    f"{path} is a colour image ({mask.mode}). A mask is a grey or palette PNG with one label per "
                    "pixel: map its colours to labels first."
                )
            step = _GREY_STEPS.get(_raw_mode(mask))
            labels = np.asarray(mask) if step is None else np.asarray(mask) // step
    except UNREADABLE as error:
        raise UserError(f"{path} is not a readable mask ({' '.join(str(error).split())[:100]}).") from None
    if labels.size and (labels.max() > 255 or labels.min() < 0):
        raise UserError(f"{path} has the label {labels.max()}. Labels are numbers from 0 to 255.")
    return labels.astype(np.uint8)


def _raw_mode(image: Image.Image) -> str:
    """Return how Pillow will unpack the pixels; this is only known before it does."""
    tiles: Any = getattr(image, "tile", None)
    mode = tiles[0][3] if tiles else ""
    return str(mode[0] if isinstance(mode, tuple) else mode)


# -- files


def find_pairs(root: Path, only: str | None = None) -> tuple[dict[str, Pairs], str]:
    """Return (image, mask) paths by split, and the layout's name; with ``only`` of one split."""
    listings, layout = _find_splits(root)
    if only is not None and only not in listings:
        raise UserError(f"{root} has no split '{only}'. It has: {', '.join(listings)}.")
    return {split: list_pairs() for split, list_pairs in listings.items() if only in (None, split)}, layout


def _find_splits(root: Path) -> tuple[dict[str, Callable[[], Pairs]], str]:
    """Return a function per split that lists its pairs, and the layout's name."""
    if (root / "JPEGImages").is_dir() and (root / "SegmentationClass").is_dir():
        return _voc_splits(root), "voc"
    listings: dict[str, Callable[[], Pairs]] = {}
    words: dict[str, str] = {}
    layout = "folders"
    masks = next((root / name for name in _MASK_FOLDERS if (root / name).is_dir()), None)
    for word, split in SPLIT_NAMES.items():
        if masks is not None and (root / "images" / word).is_dir():
            folders = root / "images" / word, masks / word
            if split == "test" and not folders[1].is_dir():
                continue  # ADE20K's test images are published without masks
            layout = "ade20k" if word == "training" and masks.name == "annotations" else layout
        elif (root / f"{word}annot").is_dir() and (root / word).is_dir():
            folders, layout = (root / word, root / f"{word}annot"), "camvid"
        else:
            continue
        if split in words:
            raise UserError(f"{root} has both '{words[split]}' and '{word}'. Keep one of them as {split}.")
        words[split], listings[split] = word, partial(match_masks, *folders)
    if not listings and masks is not None and (root / "images").is_dir():
        listings["train"] = partial(match_masks, root / "images", masks)
    if not listings:
        raise UserError(
            f"{root} has no known layout. Use images/train and masks/train (and val), or the folders of ADE20K, VOC or "
            "CamVid."
        )
    if "camvid" in root.resolve().name.lower():
        layout = "camvid"
    return listings, layout


def _voc_splits(root: Path) -> dict[str, Callable[[], Pairs]]:
    listings: dict[str, Callable[[], Pairs]] = {}
    for split in ("train", "val", "test"):
        listing = root / "ImageSets" / "Segmentation" / f"{split}.txt"
        names = listing.read_text(encoding="utf-8-sig").split() if listing.is_file() else []
        if names:
            listings[split] = partial(_voc_pairs, root, listing, names)
    if not listings:
        raise UserError(f"{root} has no lists of images. Add ImageSets/Segmentation/train.txt.")
    return listings


def _voc_pairs(root: Path, listing: Path, names: list[str]) -> Pairs:
    pairs = [(root / "JPEGImages" / f"{n}.jpg", root / "SegmentationClass" / f"{n}.png") for n in names]
    absent = next((path for pair in pairs for path in pair if not path.is_file()), None)
    if absent is not None:
        raise UserError(f"{listing} names {absent.stem}, but there is no file {absent}.")
    return pairs


def match_masks(images: Path, masks: Path) -> Pairs:
    """Match each image with the mask of its name, or its name and ``_mask``, ``_labelIds`` or ``_L``.

    A mask in the same subfolder wins over one elsewhere, and the exact name over one with an ending.
    """
    if not masks.is_dir():
        raise UserError(f"{images} has no masks: there is no folder {masks}.")
    by_stem: dict[str, list[Path]] = {}
    for mask in map(Path, list_images(str(masks)).images):
        by_stem.setdefault(mask.stem, []).append(mask)
    paths = [Path(path) for path in list_images(str(images)).images]
    if not paths:
        raise UserError(f"{images} has no images.")
    stems = {path.stem for path in paths}
    pairs: Pairs = []
    absent: list[Path] = []
    for path in paths:
        names = [path.stem + ending for ending in _MASK_ENDINGS]
        exact = by_stem.get(path.stem, [])
        named = [mask for name in names if name not in stems for mask in by_stem.get(name, [])]
        folder = masks / path.relative_to(images).parent
        nearby = [[mask for mask in group if mask.parent == folder] for group in (exact, named)]
        candidates = next((group for group in (*nearby, exact, named) if group), [])
        if len(candidates) > 1:
            raise UserError(
                f"{path} matches two masks, {candidates[0]} and {candidates[1]}. Keep one, with the image's name and "
                "subfolder."
            )
        pairs += [(path, mask) for mask in candidates]
        absent += [] if candidates else [path]
    if absent:
        more = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
        raise UserError(f"No mask for {absent[0]}{more}: there is no {masks / absent[0].stem}.png.")
    return pairs


def _read_scenes(split: str, pairs: Pairs, max_bad: float, bad: list[SkippedFile]) -> list[Scene]:
    sizes = read_image_sizes(split, [image for image, _ in pairs], max_bad, bad)
    return [Scene(*pair, *size) for pair, size in zip(pairs, sizes, strict=True) if size is not None]


def _find_labels(splits: dict[str, list[Scene]]) -> dict[int, Path]:
    """Read all masks; return every label with a mask that has it."""
    scenes = [scene for scenes in splits.values() for scene in scenes]
    examples: dict[int, Path] = {}
    with ThreadPoolExecutor(min(8, cores())) as pool:
        results = console.progress(pool.map(_labels_in, scenes), total=len(scenes), label="reading masks")
        for scene, labels in zip(scenes, results, strict=True):
            for label in labels:
                examples.setdefault(label, scene.mask)
    return dict(sorted(examples.items()))


def _labels_in(scene: Scene) -> list[int]:
    """Return the labels in a mask, after checking its size."""
    labels = read_labels(scene.mask)
    if labels.shape != (scene.height, scene.width):
        raise UserError(
            f"{scene.mask} has {labels.shape[1]}×{labels.shape[0]} px, but its image {scene.path.name} has "
            f"{scene.width}×{scene.height} (upright, as EXIF says). Both must have the same size."
        )
    return np.flatnonzero(np.bincount(labels.ravel())).tolist()


# -- labels


def class_names(root: Path, layout: str) -> tuple[str, ...]:
    """Return names by label from classes.txt or class_names.json, or those of a known dataset; else ()."""
    for name in ("classes.txt", "class_names.txt", "labels.txt", "classes.json", "class_names.json"):
        path = root / name
        if path.is_file():
            names = _names_from_json(path) if path.suffix == ".json" else _names_from_text(path)
            if len(names) > _MAX_LABELS:
                raise UserError(f"{path} names {len(names)} classes. Labels are numbers from 0 to 255.")
            return tuple(names)
    return {"voc": _VOC, "camvid": (*_CAMVID, "void")}.get(layout, ())


def _names_from_text(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    return [line.strip() for line in lines if line.strip()]


def _names_from_json(path: Path) -> list[str]:
    """Read names from a JSON file: a list in the order of the labels, {label: name} or {name: label}."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}).") from None
    if isinstance(content, dict):
        is_by_label = all(key.isdecimal() for key in content)
        names = content if is_by_label else {str(label): name for name, label in content.items()}
        wanted = [str(label) for label in range(len(names) - (str(IGNORED) in names))]
        is_complete = len(names) == len(content) and names.keys() - {str(IGNORED)} == set(wanted)
        content = [names[label] for label in wanted] if is_complete else None
    if not content or not isinstance(content, list) or not all(isinstance(name, str | int) for name in content):
        raise UserError(
            f'{path} must have one name for every label from 0: a list of names, {{"0": name, "1": name, …}} or '
            "{name: 0, name: 1, …}."
        )
    return [str(name) for name in content]


def choose_ignored(wanted: int | str, layout: str, names: tuple[str, ...]) -> tuple[int, str]:
    """Return the label to ignore besides 255 (255 if there is none), and why."""
    if wanted != "auto":
        return int(wanted), "--ignore-index"
    if layout == "ade20k":
        return 0, "unlabelled in ADE20K"
    for label, name in enumerate(names):
        if name.lower() in _VOID:
            return label, f"its name is '{name}'"
    return IGNORED, ""


def _choose_labels(
    root: Path,
    count: int | str,
    names: tuple[str, ...],
    present: dict[int, Path],
    ignored: int,
    known: LabelMap | None,
) -> list[int]:
    """Return the labels that are classes: all below ``count``, the named ones, or all up to the highest."""
    counted = [label for label in present if label not in (ignored, IGNORED)]
    number = int(count) if count != "auto" else len(names) or max(counted, default=-1) + 1
    above = next((label for label in counted if label >= number), None)
    if above is not None:
        owner = "the dataset" if known is None else known.model
        fix = "Fix the mask" + (f", use --label-count {above + 1}" if known is None else "")
        raise UserError(
            f"{present[above]} has the label {above}, but {owner} has the labels 0 to {number - 1}. {fix}, or ignore "
            f"the label with --ignore-index {above}."
        )
    labels = [label for label in range(number) if label not in (ignored, IGNORED)]
    if IGNORED in present and len(labels if count != "auto" else counted) < 2:
        raise UserError(
            f"The masks of {root} have {f'only the label {counted[0]}' if counted else 'no label'} besides {IGNORED}, "
            f"which is always ignored. Write {0 if counted and counted[0] else 1} instead of {IGNORED}."
        )
    if len(labels) < 2:
        raise UserError(f"{root} has fewer than two classes; segmentation needs at least two.")
    return labels
