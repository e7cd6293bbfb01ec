"""COCO-format data: JSON files that say where which object is, as boxes, polygons and run-length masks.

What a file may hold and how it is met: category ids with holes (classes are numbered 1, 2, … in the order of their
ids), images without objects (they teach what is not there), crowds (not learnt from; scored as COCO scores them), boxes
without area or outside their image (left out, said), objects without a usable mask (their boxes count, said), boxes
over the border (clipped), files that are no image (left out with their objects, named).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as run_length

from frugalvit.errors import UserError
from frugalvit.training.used import LeftOut
from frugalvit.transfer.coco_check import LEAST, check_runs, has_mask, is_polygon, say_bare
from frugalvit.transfer.coco_data import CocoData, CocoImage
from frugalvit.transfer.coco_files import find_annotations, read
from frugalvit.transfer.places import Seen, arrange, find_folder, look_at_images, note_turned, turned_by_exif
from frugalvit.words import counted


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
    bad: list[LeftOut] = []
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
    splits = arrange(splits, split, val_fraction, notes)
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
    bad: list[LeftOut],
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


def _check_size(entry: dict[str, Any], place: Path, seen: Seen, path: Path) -> None:
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
        notes.append(f"{path.name}: {counted(len(ids), 'object')} {reason} left out ({_first_of(ids)})")
    if spoilt:
        notes.append(
            f"{path.name}: {counted(len(spoilt), 'object')} without those parts of the mask that are no polygon "
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
