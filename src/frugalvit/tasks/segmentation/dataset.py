"""Images with a label for every pixel, in the layouts people have them in.

    images/<split>/…, masks/<split>/…            also annotations/ or labels/ for masks: CamVid, ADE20K, own data
    <split>/…, <split>annot/…                    CamVid as SegNet ships it
    JPEGImages/, SegmentationClass/, ImageSets/Segmentation/<split>.txt      Pascal VOC

A mask is a PNG whose grey values or palette indices are labels. Labels become classes 0, 1, … in order, without those
that count nowhere: 255 always, and one more (``--ignore-index``), which "auto" takes from a class called void, from
CamVid (11; its folder has that name or <split>annot/ in it) and from ADE20K (0, "reduce zero label").
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from frugalvit.data.decode import known_formats
from frugalvit.data.formats.folder import SPLIT_NAMES, list_images
from frugalvit.errors import UserError
from frugalvit.runs.data_record import SkippedFile
from frugalvit.tasks.dense.image_headers import (
    UNREADABLE,
    look_at_images,
    look_at_masks,
    make_splits,
    note_turned,
    turned_by_exif,
)
from frugalvit.tasks.detection.metrics import IGNORED
from frugalvit.tasks.segmentation.label_map import LabelMap, name_of
from frugalvit.utils import console
from frugalvit.utils.system import cores
from frugalvit.utils.text import pluralize, truncate_list

_MASK_FOLDERS = ("masks", "annotations", "labels", "annotation", "mask", "label")
_MOST = 256  # labels are bytes
_SPREAD = {"L;2": 85, "L;4": 17}  # Pillow spreads grey values of two and four bits over those of a byte
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
        """The file that says what is in the image."""
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
    """Read a dataset, check every pair, and make what splits are missing; every mistake is one line before training.

    only: the split that is wanted; nothing of the others is read.
    known: the labels of a model that is to be scored, for which these are taken; instead of ``count``.
    max_bad: the share of a split's images that may be none.
    """
    root = Path(where)
    if not root.is_dir():
        raise UserError(f"There is no folder {root}.")
    pairs, layout = find_pairs(root, only)
    if ignore != "auto" and not 0 <= int(ignore) <= IGNORED:
        raise UserError(f"--ignore-index {ignore} is no label: labels are numbers from 0 to 255.")
    if count != "auto" and not 1 <= int(count) <= _MOST:
        raise UserError(f"--label-count {count} is not possible: labels are numbers from 0 to 255, {_MOST} at most.")
    notes: list[str] = []
    bad: list[SkippedFile] = []
    splits = {name: _scenes(name, found, max_bad, notes, bad) for name, found in pairs.items()}
    names = class_names(root, layout)
    elsewhere = known is not None and known.differs(names)
    if known is not None and not elsewhere:
        ignore, count = known.ignored if ignore == "auto" else ignore, max(known.labels) + 1
        notes += known.renamed(names)
    ignored, reason = choose_ignored(ignore, layout, names)
    notes.append(f"label {IGNORED} counts nowhere" + (f", nor does {ignored}: {reason}" if ignored != IGNORED else ""))
    present = _labels(splits)
    if known is not None and elsewhere:
        table = known.table(names, present, ignored)
        notes.append(known.note(table, names, where))
        splits = make_splits(splits, split, val_fraction, notes)
        return SceneData(root.resolve().name, known.classes, table, ignored, splits, notes, bad)
    highest, kept_names = _count(count, names, present, ignored)
    for label, example in present.items():
        if label >= highest and label not in (ignored, IGNORED):
            if known is not None:
                raise UserError(
                    f"{example} holds the label {label}, but {known.model} was trained with the labels 0 to "
                    f"{highest - 1}: these are not its data. Mend the mask, or give --ignore-index {label} if it "
                    "should not count."
                )
            raise UserError(
                f"{example} holds the label {label}, but there are {highest} classes (0 to {highest - 1}); mend the "
                f"mask, give --label-count {label + 1}, or --ignore-index {label} if it should not count."
            )
    labels = [label for label in range(highest) if label not in (ignored, IGNORED)]
    counted = [label for label in present if label in labels]
    if IGNORED in present and len(labels if count != "auto" else counted) < 2:
        raise UserError(
            f"The masks of {root} hold {f'only {counted[0]}' if counted else 'nothing that counts'} beside {IGNORED}, "
            f"and {IGNORED} counts nowhere: write what it stands for as {0 if counted and counted[0] else 1}."
        )
    if len(labels) < 2:
        raise UserError(f"{root} has fewer than two classes: segmentation needs something to tell apart.")
    table = np.full(256, IGNORED, np.uint8)
    table[labels] = np.arange(len(labels))
    shown = tuple(name_of(label, kept_names) for label in labels)
    notes += _never_seen(labels, shown, present, bool(kept_names) or count != "auto") if only is None else []
    if labels == [*range(len(_CAMVID) + 1)] and known is None and not kept_names and (ignore, count) == ("auto",) * 2:
        notes.append(
            f"labels are 0 to {len(_CAMVID)}, without names: if this is CamVid, give --ignore-index 11, its void"
        )
    splits = make_splits(splits, split, val_fraction, notes)
    return SceneData(root.resolve().name, shown, table, ignored, splits, notes, bad)


def read_labels(path: Path) -> np.ndarray:
    """The labels of a mask, uint8 (H, W)."""
    try:
        with Image.open(path, formats=known_formats()) as picture:
            if picture.format in ("JPEG", "MPO"):
                raise UserError(f"{path} is a JPEG, which changes values: labels would be others. Save masks as PNG.")
            if picture.mode not in ("L", "P", "1", "I", "I;16"):
                raise UserError(
                    f"{path} is a colour picture ({picture.mode}); a mask has one label per pixel, as a grey or "
                    "palette PNG. Translate its colours to labels first."
                )
            spread = _SPREAD.get(_raw_mode(picture))
            labels = np.asarray(picture) if spread is None else np.asarray(picture) // spread
    except UNREADABLE as error:
        raise UserError(f"{path} is not a readable mask ({' '.join(str(error).split())[:100]}).") from None
    if labels.size and (labels.max() > 255 or labels.min() < 0):
        raise UserError(f"{path} holds the label {labels.max()}; labels are numbers from 0 to 255.")
    return labels.astype(np.uint8)


def _raw_mode(picture: Image.Image) -> str:
    """How Pillow will unpack the pixels, which it forgets once it has."""
    tiles = getattr(picture, "tile", None)
    how = tiles[0][3] if tiles else ""
    return str(how[0] if isinstance(how, tuple) else how)


# -- where things are


def find_pairs(root: Path, only: str | None = None) -> tuple[dict[str, Pairs], str]:
    """(image, mask) paths by split, and the layout's name; where one split is wanted, the others need not be whole."""
    places, layout = _find_splits(root)
    if only is not None and only not in places:
        raise UserError(f"{root} has no split '{only}': it has {', '.join(places)}.")
    return {split: list_pairs() for split, list_pairs in places.items() if only in (None, split)}, layout


def _find_splits(root: Path) -> tuple[dict[str, Callable[[], Pairs]], str]:
    """What lists the pairs of each split, and the layout's name."""
    if (root / "JPEGImages").is_dir() and (root / "SegmentationClass").is_dir():
        return _voc(root), "voc"
    found: dict[str, Callable[[], Pairs]] = {}
    words: dict[str, str] = {}
    layout = "folders"
    masks = next((root / name for name in _MASK_FOLDERS if (root / name).is_dir()), None)
    for word, split in SPLIT_NAMES.items():
        if masks is not None and (root / "images" / word).is_dir():
            images, drawn = root / "images" / word, masks / word
            if split == "test" and not drawn.is_dir():
                continue  # ADE20K's test images are published without masks
            layout = "ade20k" if word == "training" and masks.name == "annotations" else layout
        elif (root / f"{word}annot").is_dir() and (root / word).is_dir():
            images, drawn, layout = root / word, root / f"{word}annot", "camvid"
        else:
            continue
        if split in words:
            raise UserError(f"{root} has both '{words[split]}' and '{word}': keep one of them as {split}.")
        words[split], found[split] = word, partial(match, images, drawn)
    if not found and masks is not None and (root / "images").is_dir():
        found["train"] = partial(match, root / "images", masks)
    if not found:
        raise UserError(
            f"{root} is in no layout known here: there should be images/train and masks/train (and val), or ADE20K's, "
            "VOC's or CamVid's folders."
        )
    if "camvid" in root.resolve().name.lower():
        layout = "camvid"
    return found, layout


def _voc(root: Path) -> dict[str, Callable[[], Pairs]]:
    found: dict[str, Callable[[], Pairs]] = {}
    for split in ("train", "val", "test"):
        listing = root / "ImageSets" / "Segmentation" / f"{split}.txt"
        names = listing.read_text(encoding="utf-8-sig").split() if listing.is_file() else []
        if names:
            found[split] = partial(_voc_pairs, root, listing, names)
    if not found:
        raise UserError(f"{root} has no lists of images: there should be ImageSets/Segmentation/train.txt in it.")
    return found


def _voc_pairs(root: Path, listing: Path, names: list[str]) -> Pairs:
    pairs = [(root / "JPEGImages" / f"{n}.jpg", root / "SegmentationClass" / f"{n}.png") for n in names]
    absent = next((path for pair in pairs for path in pair if not path.is_file()), None)
    if absent is not None:
        raise UserError(f"{listing} names {absent.stem}, but there is no file {absent}.")
    return pairs


# -- which labels


def class_names(root: Path, layout: str) -> tuple[str, ...]:
    """Names by label from classes.txt or class_names.json, or those of a known dataset; empty where there are none."""
    for name in ("classes.txt", "class_names.txt", "labels.txt"):
        if (root / name).is_file():
            lines = (root / name).read_text(encoding="utf-8-sig").splitlines()
            return _not_too_many(root / name, [line.strip() for line in lines if line.strip()])
    for name in ("classes.json", "class_names.json"):
        if (root / name).is_file():
            return _not_too_many(root / name, _names_in(root / name))
    return {"voc": _VOC, "camvid": (*_CAMVID, "void")}.get(layout, ())


def _not_too_many(path: Path, names: list[str]) -> tuple[str, ...]:
    if len(names) > _MOST:
        raise UserError(f"{path} names {len(names)} classes; labels are numbers from 0 to 255, {_MOST} at most.")
    return tuple(names)


def _names_in(path: Path) -> list[str]:
    """Names by label from a JSON file: a list in the order of the labels, {label: name} or {name: label}."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}).") from None
    if isinstance(content, list) and all(isinstance(name, str | int) for name in content):
        return [str(name) for name in content]
    labels: list[tuple[int, str]] = []
    if isinstance(content, dict) and all(_is_label(label) and isinstance(name, str) for label, name in content.items()):
        labels = [(int(label), name) for label, name in content.items()]
    elif isinstance(content, dict) and all(_is_label(label) for label in content.values()):
        labels = [(int(label), name) for name, label in content.items()]
    if not labels:
        raise UserError(
            f'{path} must be a list of names in the order of the labels, {{"0": name, "1": name, …}} or '
            "{name: 0, name: 1, …}."
        )
    names = dict(labels)
    highest = max((label for label in names if label != IGNORED), default=-1)  # 255 counts nowhere: it may stand apart
    gap = next((label for label in range(highest + 1) if label not in names), None)
    if gap is not None or len(names) < len(labels):
        what = f"no name for the label {gap}" if gap is not None else "two names for one label"
        raise UserError(f"{path} has {what}: every label from 0 to {highest} needs one name.")
    return [names[label] for label in range(highest + 1)]


def _is_label(value: object) -> bool:
    if isinstance(value, str):
        return value.isdecimal()
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def choose_ignored(wanted: int | str, layout: str, names: tuple[str, ...]) -> tuple[int, str]:
    """The label that counts nowhere beside 255, and why."""
    if wanted != "auto":
        return int(wanted), "--ignore-index"
    if layout == "ade20k":
        return 0, "ADE20K's 0 is what nobody labelled; classes start at 1"
    for label, name in enumerate(names):
        if name.lower() in _VOID:
            return label, f"it is called '{name}'" if layout != "camvid" else "CamVid's void"
    return IGNORED, "nothing else is known"


def _count(
    wanted: int | str, names: tuple[str, ...], present: dict[int, Path], ignored: int
) -> tuple[int, tuple[str, ...]]:
    """How many labels there are, ignored ones included, and their names."""
    if wanted != "auto":
        return int(wanted), names
    if names:
        return len(names), names
    return max((label for label in present if label not in (ignored, IGNORED)), default=-1) + 1, ()


def _never_seen(labels: list[int], names: tuple[str, ...], present: dict[int, Path], known: bool) -> list[str]:
    """A note on classes that no mask holds: where nobody named or counted them, one stray value may have made them."""
    absent = [name for label, name in zip(labels, names, strict=True) if label not in present]
    if not absent:
        return []
    whole = f"{len(absent)} of {pluralize(len(labels), 'class')} in no mask: {truncate_list(absent)}"
    if known:
        return [whole]
    highest = labels[-1]
    return [f"{whole}; the highest label is {highest}, in {present[highest]}: --ignore-index {highest} if it is a slip"]


def _scenes(split: str, pairs: Pairs, max_bad: float, notes: list[str], bad: list[SkippedFile]) -> list[Scene]:
    images = look_at_images(split, [image for image, _ in pairs], max_bad, bad)
    masks = look_at_masks([mask for _, mask in pairs])
    scenes, readable = [], []
    for (image, mask), seen, drawn in zip(pairs, images, masks, strict=True):
        if seen is None:
            continue
        size, other = seen.size, drawn.stored  # masks are read as they are stored
        if size != other:
            reason = f"its image {image.name} {size[1]}×{size[0]}: a mask must have its image's size."
            if turned := turned_by_exif(seen, other):
                reason = f"as its image {image.name} is stored, {turned}"
            raise UserError(f"{mask} is {other[1]}×{other[0]} px, {reason}")
        scenes.append(Scene(image, mask, *size))
        readable.append((image, seen))
    notes += note_turned(split, "its mask", readable)
    return scenes


def _labels(splits: dict[str, list[Scene]]) -> dict[int, Path]:
    """Every label that occurs, and a mask it occurs in."""
    paths = [scene.mask for scenes in splits.values() for scene in scenes]
    found: dict[int, Path] = {}
    with ThreadPoolExecutor(min(8, cores())) as pool:
        counted = pool.map(lambda path: np.flatnonzero(np.bincount(read_labels(path).ravel())), paths)
        for path, labels in zip(paths, console.progress(counted, total=len(paths), label="reading masks"), strict=True):
            for label in labels.tolist():
                found.setdefault(label, path)
    return dict(sorted(found.items()))


Pairs = list[tuple[Path, Path]]
_ENDINGS = ("_mask", "_labelIds", "_L")
"""What tools append to an image's name for its mask."""


def match(images: Path, masks: Path) -> Pairs:
    """Each image with the mask that is called most like it; in the same folder within theirs where one fits there.

    The fewer endings two names differ by the more alike they are: ``a_L.png`` is the mask of ``a.png`` where there is
    no mask ``a.png``, unless an image ``a_L.png`` has a better claim to it. Two that fit equally are refused.
    """
    if not masks.is_dir():
        raise UserError(f"{images} has no masks: there should be a folder {masks}.")
    in_folder: dict[Path, list[tuple[int, Path]]] = {}
    anywhere: dict[str, list[tuple[int, Path]]] = {}
    for mask in map(Path, list_images(str(masks)).images):
        folder = mask.relative_to(masks).parent
        for endings, name in enumerate(_names(mask)):
            in_folder.setdefault(folder / name, []).append((endings, mask))
            anywhere.setdefault(name, []).append((endings, mask))
    found = [Path(path) for path in list_images(str(images)).images]
    if not found:
        raise UserError(f"{images} holds no images.")
    matched: dict[Path, tuple[tuple[bool, int], Path]] = {}
    for path in found:
        folder, names = path.relative_to(images).parent, _names(path)
        near = [in_folder.get(folder / name, []) for name in names]
        fitting = near if any(near) else [anywhere.get(name, []) for name in names]
        between: dict[Path, int] = {}
        for own, fits in enumerate(fitting):
            for theirs, mask in fits:
                between.setdefault(mask, own + theirs)  # the first is the least
        least = min(between.values(), default=0)
        best = [mask for mask, endings in between.items() if endings == least]
        if len(best) > 1:
            raise UserError(
                f"{path} may have the mask {best[0]} or {best[1]}: call its mask {path.stem}{best[0].suffix}, in a "
                "folder as the image's."
            )
        if best:
            matched[path] = ((not any(near), least), best[0])
    nearest: dict[Path, tuple[bool, int]] = {}
    for distance, mask in matched.values():
        nearest[mask] = min(distance, nearest.get(mask, distance))
    # A mask that another image has a better claim to is none of this one's.
    absent = [path for path in found if path not in matched or matched[path][0] > nearest[matched[path][1]]]
    if absent:
        more = f" and {len(absent) - 1:,} more" if len(absent) > 1 else ""
        raise UserError(f"{absent[0]}{more} has no mask: there should be {masks / absent[0].stem}.png.")
    return [(path, mask) for path, (_, mask) in matched.items()]


def _names(path: Path) -> list[str]:
    """A file's name, and what is left of it without one ending, without two, …"""
    names = [path.stem]
    for ending in _ENDINGS:
        if names[-1].endswith(ending):
            names.append(names[-1].removesuffix(ending))
    return names
