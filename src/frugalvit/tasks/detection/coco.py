"""COCO-format data: JSON files that say where which object is, as boxes, polygons and run-length masks.

What a file may hold and how it is met: category ids with holes (classes are numbered 1, 2, … in the order of their
ids), images without objects (they teach what is not there), crowds (not learnt from; scored as COCO scores them), boxes
without area or outside their image (left out, said), objects without a usable mask (their boxes count, said), boxes
over the border (clipped), files that are no image (left out with their objects, named).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as run_length

from frugalvit.data.formats.folder import SPLIT_NAMES
from frugalvit.errors import UserError
from frugalvit.runs.data_record import SkippedFile
from frugalvit.tasks.dense.image_headers import (
    ImageHeader,
    find_folder,
    look_at_images,
    make_splits,
    note_turned,
    turned_by_exif,
)
from frugalvit.tasks.detection.coco_schema import LEAST, check_entries, check_runs, has_mask, is_polygon, say_bare
from frugalvit.utils.text import pluralize


def open_coco(
    where: str,
    split: str = "auto",
    val_fraction: float = 0.1,
    categories: str = "own",
    *,
    masks: bool = True,
    known: tuple[str, dict[int, str]] | None = None,
    only: str | None = None,
    max_bad: float = 0.05,
) -> CocoData:
    """Read a dataset, check it, and make what splits are missing; every mistake is one line before training.

    categories: "own"; "super" learns the supercategories instead; "one" calls everything an object.
    masks: whether to say what is wrong with them; False where nobody will look at them.
    known: a model's name and its categories by id, which the files' are taken for by their names.
    only: the split of a folder that is wanted; nothing of the others is read.
    max_bad: the share of a file's images that may be none.
    """
    files = find_annotations(Path(where))
    if only is not None and Path(where).is_dir():
        if only not in files:
            raise UserError(f"{where} has no split '{only}': it has {', '.join(files)}.")
        files = {only: files[only]}
    notes: list[str] = []
    bad: list[SkippedFile] = []
    contents = {name: read(path) for name, path in files.items()}
    first = "train" if "train" in contents else next(iter(contents))
    other, named = files[first].name, _categories(contents[first], files[first])
    if known and categories == "own":
        other, named = known
    splits, bare = {}, {}
    for name, content in contents.items():
        numbers = _numbers(content, files[name], named, other, notes)
        images = _images(name, files[name], Path(where), content, max_bad, notes, bad)
        bare[name] = _add_objects(files[name], content, images, numbers, notes, masks)
        splits[name] = [image for image in images.values() if image is not None]
    drawn = any(image.drawn() for images in splits.values() for image in images)
    meant = any(has_mask(entry.get("segmentation")) for entries in bare.values() for entry in entries)
    if masks and (drawn or meant):  # else these are boxes alone, and there is nothing to say of them
        for name, images in splits.items():
            notes += say_bare(files[name], bare[name], sum(len(image.learnable()) for image in images))
    if categories != "own":
        named = _merge(splits, _groups(contents[first], files[first], categories), known)
    root = Path(where) if Path(where).is_dir() else Path(where).parent
    splits = make_splits(splits, split, val_fraction, notes)
    return CocoData(root.resolve().name, tuple(named.values()), tuple(named), splits, notes, bad)


def rle(entry: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """The mask of an annotation as compressed run lengths, whether it is polygons or run lengths of either kind."""
    segmentation = entry["segmentation"]
    if isinstance(segmentation, list):
        return run_length.merge(run_length.frPyObjects(segmentation, height, width))  # type: ignore[arg-type]
    if isinstance(segmentation["counts"], list):
        return run_length.frPyObjects(segmentation, height, width)  # type: ignore[return-value]
    return segmentation


def masks_of(entries: Iterable[dict[str, Any]], height: int, width: int) -> np.ndarray:
    """(n, height, width) uint8 masks of annotations."""
    encoded = [rle(entry, height, width) for entry in entries]
    if not encoded:
        return np.zeros((0, height, width), np.uint8)
    return np.ascontiguousarray(np.asarray(run_length.decode(encoded)).transpose(2, 0, 1))


def ground_truth(images: Iterable[CocoImage], data: CocoData) -> dict[str, Any]:
    """The images as a COCO dataset in memory, for scoring."""
    images = list(images)
    annotations = [
        {
            **entry,
            "image_id": number,
            **({"segmentation": rle(entry, image.height, image.width)} if "segmentation" in entry else {}),
        }
        for number, image in enumerate(images, 1)
        for entry in image.objects
    ]
    for number, entry in enumerate(annotations, 1):
        entry["id"] = number
    return {
        "info": {},
        "images": [{"id": n, "height": i.height, "width": i.width} for n, i in enumerate(images, 1)],
        "annotations": annotations,
        "categories": [
            {"id": identity, "name": name} for identity, name in zip(data.category_ids, data.classes, strict=True)
        ],
    }


# -- reading one file


def _categories(content: dict[str, Any], path: Path) -> dict[int, str]:
    """Category id -> name, in the order of the ids."""
    categories: dict[int, str] = {}
    for entry in content["categories"]:
        if "name" not in entry:
            raise UserError(f"{path}: every category needs a number 'id' and a 'name'.")
        if entry["id"] in categories:
            raise UserError(
                f"{path}: '{categories[entry['id']]}' and '{entry['name']}' both have the category id {entry['id']}: "
                "give each its own."
            )
        categories[entry["id"]] = str(entry["name"])
    if not categories:
        raise UserError(f"{path} names no categories.")
    return dict(sorted(categories.items()))


def _numbers(
    content: dict[str, Any], path: Path, known: dict[int, str], first: str, notes: list[str]
) -> dict[int, int]:
    """A file's category id -> the id that means the same in ``first``, a file or model, ``known``: names decide.

    A category that ``first`` lacks has none; that is a mistake only where an annotation is of it.
    """
    own = _categories(content, path)
    numbers: dict[int, int] = {}
    for identity, name in own.items():
        same = [other for other, called in known.items() if called == name]
        if known.get(identity) == name:
            numbers[identity] = identity
        elif len(same) == 1:
            numbers[identity] = same[0]
    used = {entry["category_id"] for entry in content["annotations"]}
    absent = sorted(own.keys() & used - numbers.keys())
    if absent:
        name = own[absent[0]]
        what = "calls several so" if name in known.values() else "does not have"
        raise UserError(
            f"{path.name} has objects of category {absent[0]} '{name}', which {first} {what}: both must call "
            "the same things the same."
        )
    moved = [(identity, number) for identity, number in numbers.items() if identity != number and identity in used]
    if moved:
        identity, number = moved[0]
        notes.append(
            f"{path.name} numbers its categories otherwise than {first}: names decide ('{own[identity]}' is "
            f"{identity} there, {number} here)"
        )
    return numbers


def _groups(content: dict[str, Any], path: Path, categories: str) -> dict[int, str]:
    """Category id -> the name of the group it is merged into."""
    if categories == "one":
        return {int(entry["id"]): "object" for entry in content["categories"]}
    lacking = [str(entry["name"]) for entry in content["categories"] if not entry.get("supercategory")]
    if lacking:
        raise UserError(f"{path}: '{lacking[0]}' has no supercategory; use --categories own or one.")
    return {int(entry["id"]): str(entry["supercategory"]) for entry in content["categories"]}


def _merge(
    splits: dict[str, list[CocoImage]], groups: dict[int, str], known: tuple[str, dict[int, str]] | None
) -> dict[int, str]:
    """Give every object its group's number, a model's or 1, 2, … in the order of their names; number -> name."""
    model, named = known or ("", dict(enumerate(sorted(set(groups.values())), 1)))
    numbers = {name: number for number, name in named.items()}
    objects = [(entry, image.truth) for images in splits.values() for image in images for entry in image.objects]
    for entry, truth in objects:
        group = groups[entry["category_id"]]
        if group not in numbers:
            raise UserError(
                f"{truth.name} has objects of category '{group}', which {model} does not have: both must call "
                "the same things the same."
            )
        entry["category_id"] = numbers[group]
    return {number: name for name, number in numbers.items()}


def _images(
    split: str,
    path: Path,
    where: Path,
    content: dict[str, Any],
    max_bad: float,
    notes: list[str],
    bad: list[SkippedFile],
) -> dict[Any, CocoImage | None]:
    """The images of a file by their ids; None for one that cannot be read."""
    names = [entry["file_name"] for entry in content["images"]]
    if not names:
        raise UserError(f"{path} names no images.")
    root = find_folder(where if where.is_dir() else path.parent, path, names)
    paths = [root / name for name in names]
    images: dict[Any, CocoImage | None] = {}
    found = look_at_images(split, paths, max_bad, bad)
    for entry, place, seen in zip(content["images"], paths, found, strict=True):
        if entry["id"] in images:
            raise UserError(f"{path.name} names two images with the id {entry['id']}.")
        if seen is not None:
            _check_size(entry, place, seen, path)
        images[entry["id"]] = None if seen is None else CocoImage(entry["id"], place, *seen.size, path)
    readable = [(place, seen) for place, seen in zip(paths, found, strict=True) if seen is not None]
    notes += note_turned(path.name, "its objects", readable)
    return images


def _check_size(entry: dict[str, Any], place: Path, seen: ImageHeader, path: Path) -> None:
    height, width = seen.size
    said = (int(entry.get("height") or height), int(entry.get("width") or width))
    if said != seen.size:
        reason = f"but it is {width}×{height}: the objects of another size would lie elsewhere. Use the images the "
        reason += "annotations were made for."
        if turned := turned_by_exif(seen, said):
            reason = f"as it is stored, {turned}"
        raise UserError(f"{path.name} says that {place} is {said[1]}×{said[0]} px, {reason}")


def _add_objects(
    path: Path,
    content: dict[str, Any],
    images: dict[Any, CocoImage | None],
    numbers: dict[int, int],
    notes: list[str],
    masks: bool,
) -> list[dict[str, Any]]:
    """Give the images their objects; those that cannot be used are counted by their reasons, and the first named.

    Returns the annotations of those to learn from that have no usable mask.
    """
    left_out: dict[str, list[Any]] = {}
    spoilt: list[Any] = []
    bare: list[dict[str, Any]] = []
    for entry in content["annotations"]:
        if entry.get("image_id") not in images:
            raise UserError(
                f"{path.name}: annotation {entry.get('id')} is of image {entry.get('image_id')}, not listed."
            )
        if entry["category_id"] not in numbers:
            raise UserError(
                f"{path.name}: annotation {entry.get('id')} has category {entry['category_id']}, which is none of "
                f"the {len(content['categories'])} categories."
            )
        image = images[entry["image_id"]]
        if image is None:
            continue
        cleaned, reason = _clean(entry, image, path)
        if cleaned is None:
            left_out.setdefault(reason, []).append(entry.get("id"))
        else:
            image.objects.append(cleaned | {"category_id": numbers[entry["category_id"]]})
            if "segmentation" not in cleaned:
                bare += [] if cleaned["iscrowd"] else [entry]
            elif masks and len(cleaned["segmentation"]) < len(entry["segmentation"]):
                spoilt.append(entry.get("id"))
    for reason, ids in left_out.items():
        notes.append(f"{path.name}: {pluralize(len(ids), 'object')} {reason} left out ({_first_of(ids)})")
    if spoilt:
        notes.append(
            f"{path.name}: {pluralize(len(spoilt), 'object')} without those parts of the mask that are no polygon "
            f"({_first_of(spoilt)})"
        )
    return bare


def _first_of(ids: list[Any]) -> str:
    return f"annotation {ids[0]}" + (" is the first" if len(ids) > 1 else "")


def _plainly_seen(segmentation: Any, image: CocoImage) -> bool:
    """Whether a polygon lies inside the image and is a pixel thick on average: it need not be drawn to be known."""
    for part in segmentation if isinstance(segmentation, list) else []:
        x, y = np.asarray(part, dtype=float).reshape(-1, 2).T
        inside = x.min() >= 0 and y.min() >= 0 and x.max() <= image.width and y.max() <= image.height
        area = abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2
        if inside and area > 2 and area >= max(np.ptp(x), np.ptp(y)):
            return True
    return False


def _clean(entry: dict[str, Any], image: CocoImage, path: Path) -> tuple[dict[str, Any] | None, str]:
    """An annotation with a box inside its image, and its mask if that is usable; or None and what it lacks."""
    segmentation = entry.get("segmentation") or []
    if isinstance(segmentation, list):
        segmentation = [part for part in segmentation if is_polygon(part, image.height, image.width)]
    elif list(segmentation.get("size", ())) != [image.height, image.width]:
        height, width = (*segmentation.get("size", ()), "?", "?")[:2]
        raise UserError(
            f"{path.name}: the mask of annotation {entry.get('id')} is {width}×{height} px, its image "
            f"{image.path.name} {image.width}×{image.height}."
        )
    else:
        check_runs(segmentation, image.height, image.width, f"{path.name}: annotation {entry.get('id')}")
    box = entry.get("bbox")
    if segmentation and not (box and _plainly_seen(segmentation, image)):
        mask = rle({"segmentation": segmentation}, image.height, image.width)
        if not run_length.area(mask):  # outside the image, thinner than a pixel, or run lengths of zeros alone
            segmentation = []
        elif not box:
            box = run_length.toBbox(mask).tolist()
    if not box and not segmentation and entry.get("segmentation"):
        return None, "without a box and a usable mask"
    if not isinstance(box, list) or len(box) != 4:
        raise UserError(f"{path.name}: annotation {entry.get('id')} has no bbox [left, top, width, height].")
    left, top, width, height = (float(value) for value in box)
    if width < 0 or height < 0:
        return None, "with a box of negative width or height"
    if width < LEAST or height < LEAST:
        return None, "with a box without area"
    right, bottom = min(left + width, image.width), min(top + height, image.height)
    left, top = max(left, 0.0), max(top, 0.0)
    if right - left < LEAST or bottom - top < LEAST:
        return None, "with a box outside the image"
    area = entry.get("area") or 0.0
    if area <= 0:  # not said, or no area; COCO's is the mask's
        mask = rle({"segmentation": segmentation}, image.height, image.width) if segmentation else None
        area = (right - left) * (bottom - top) if mask is None else run_length.area(mask)
    cleaned = {
        "bbox": [left, top, right - left, bottom - top],
        "area": float(area),
        "iscrowd": int(entry.get("iscrowd") or 0),
    }
    return cleaned | ({"segmentation": segmentation} if segmentation else {}), ""


_ENOUGH_MASKS = 10
"""Objects with a mask from which on masks are learnt unasked, or half of the objects where those are fewer: a smaller
number is rather a slip of whoever drew boxes, and too little to learn outlines from."""


@dataclass
class CocoImage:
    """One image and its objects, as annotated; ``objects`` are cleaned annotations of the JSON file ``truth``."""

    id: Any
    path: Path
    height: int
    width: int
    truth: Path
    objects: list[dict[str, Any]] = field(default_factory=list)

    def learnable(self) -> list[dict[str, Any]]:
        """The objects a detector learns from: everything but crowds."""
        return [entry for entry in self.objects if not entry["iscrowd"]]

    def drawn(self) -> list[dict[str, Any]]:
        """Those of them that have a mask."""
        return [entry for entry in self.learnable() if "segmentation" in entry]


@dataclass
class CocoData:
    """Images by split. Class k = 1, 2, … (0 is the background) stands for ``category_ids[k - 1]``."""

    name: str
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    splits: dict[str, list[CocoImage]]
    notes: list[str]
    bad: list[SkippedFile] = field(default_factory=list)

    def class_of(self) -> dict[int, int]:
        return {identity: number for number, identity in enumerate(self.category_ids, 1)}

    def masks(self) -> tuple[int, int]:
        """How many of the objects to learn from have one, and how many there are."""
        images = self.splits.get("train", [])
        return sum(len(image.drawn()) for image in images), sum(len(image.learnable()) for image in images)

    def has_masks(self) -> bool:
        """Whether so many of them do that masks are worth learning."""
        return enough_masks(*self.masks())

    def about_masks(self) -> str:
        """Why masks are learnt, or are not."""
        return about_masks(*self.masks())

    def maskless(self) -> tuple[int, ...]:
        """The classes to learn that have no object with a mask."""
        images, classes = self.splits.get("train", []), self.class_of()
        known, drawn = (
            {classes[entry["category_id"]] for image in images for entry in part(image)}
            for part in (CocoImage.learnable, CocoImage.drawn)
        )
        return tuple(sorted(known - drawn))


def enough_masks(drawn: int, count: int) -> bool:
    """Whether masks are worth learning, where ``drawn`` of ``count`` training objects have one."""
    return 0 < drawn >= min(_ENOUGH_MASKS, count / 2)


def about_masks(drawn: int, count: int) -> str:
    """Why they are learnt then, or are not."""
    if drawn in (0, count):
        return "every training object has one" if drawn else "no training object has one"
    words = f"{drawn:,} of {count:,} training objects {'has' if drawn == 1 else 'have'} one"
    return words if enough_masks(drawn, count) else f"{words}: too few to learn from, unless --masks true asks for it"


_WORDS = list(SPLIT_NAMES)
"""Names of splits; where two files are of one split, the one with the earlier name is read."""


def find_annotations(where: Path) -> dict[str, Path]:
    """The JSON file of every split: ``instances_train.json``, ``annotations/instances_val2017.json``, ``train/…``."""
    if where.is_file():
        return {"train": where}
    if not where.is_dir():
        raise UserError(f"There is no folder or JSON file {where}.")
    candidates = sorted([*where.glob("*.json"), *where.glob("annotations/*.json"), *where.glob("*/*coco*.json")])
    named: list[tuple[bool, int, Path]] = []
    for path in candidates:
        words = path.stem.lower().replace("-", "_").rstrip("0123456789").split("_")
        words += [path.parent.name.lower()]
        word = next((_WORDS.index(word) for word in words if word in _WORDS), None)
        if word is not None and not {"captions", "keypoints", "panoptic", "stuff", "image", "names"} & set(words):
            named.append(("instances" not in path.stem, word, path))
    found: dict[str, Path] = {}
    for _, word, path in sorted(named):
        found.setdefault(SPLIT_NAMES[_WORDS[word]], path)
    if not found and len(candidates) == 1:
        found = {"train": candidates[0]}
    if not found:
        raise UserError(
            f"{where} holds no COCO annotations: there should be JSON files such as instances_train.json and "
            "instances_val.json in it or in its folder annotations."
        )
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def read(path: Path) -> dict[str, Any]:
    """The content of a file, every entry checked."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a readable JSON file ({' '.join(str(error).split())[:120]}).") from None
    needed = ("images", "annotations", "categories")
    missing = [key for key in needed if not isinstance(content, dict) or not isinstance(content.get(key), list)]
    if missing:
        raise UserError(f"{path} is not in COCO format: it has no list '{missing[0]}'.")
    check_entries(content, path)
    return content
