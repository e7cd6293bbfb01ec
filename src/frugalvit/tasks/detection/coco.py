"""Read COCO-format datasets: JSON files with boxes, polygons and run-length masks, and their images.

| in the file | what happens |
| --- | --- |
| category ids with gaps | classes are numbered 1, 2, … in the order of the ids |
| images without objects | trained on: they show what is not there |
| crowds | not trained on; scored as COCO scores them |
| boxes without area inside their image | left out, with a note |
| boxes over the border | clipped |
| objects without a usable mask | their boxes train and count, with a note |
| unreadable images | left out with their objects, named |
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from faster_coco_eval.core import mask as run_length

from frugalvit.data.formats.folder import SPLIT_NAMES
from frugalvit.errors import UserError
from frugalvit.runs.data_record import SkippedFile
from frugalvit.tasks.dense.image_headers import find_image_folder, make_splits, read_image_sizes
from frugalvit.tasks.detection.coco_schema import check_run_lengths, is_polygon, read_coco_file
from frugalvit.utils.text import pluralize

_MIN_BOX_SIDE = 1e-3  # pixels
_ENOUGH_MASKS = 10
"""``--masks auto`` learns masks if this many training objects have one, or half of them.

A smaller number is more likely a slip of the annotator, and too little to learn outlines from.
"""
_SPLIT_WORDS = list(SPLIT_NAMES)
"""Names of splits. If two files are of one split, the one with the earlier name is read."""


@dataclass
class CocoImage:
    """One image and its objects: cleaned annotations of the JSON file ``truth``."""

    id: Any
    path: Path
    height: int
    width: int
    truth: Path
    objects: list[dict[str, Any]] = field(default_factory=list)

    def learnable(self) -> list[dict[str, Any]]:
        """Return the objects a detector trains on: all but crowds."""
        return [entry for entry in self.objects if not entry["iscrowd"]]

    def masked(self) -> list[dict[str, Any]]:
        """Return the trainable objects that have a mask."""
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
        """Return {category id: class number}."""
        return {identity: number for number, identity in enumerate(self.category_ids, 1)}

    def masks(self) -> tuple[int, int]:
        """Count the training objects that have a mask, and all training objects."""
        images = self.splits.get("train", [])
        return sum(len(image.masked()) for image in images), sum(len(image.learnable()) for image in images)

    def has_masks(self) -> bool:
        """True if enough training objects have a mask to learn masks."""
        return has_enough_masks(*self.masks())

    def about_masks(self) -> str:
        """Say why masks are learned, or not."""
        return describe_masks(*self.masks())

    def maskless(self) -> tuple[int, ...]:
        """Return the classes that have training objects, but none with a mask."""
        images, classes = self.splits.get("train", []), self.class_of()
        every, masked = (
            {classes[entry["category_id"]] for image in images for entry in objects(image)}
            for objects in (CocoImage.learnable, CocoImage.masked)
        )
        return tuple(sorted(every - masked))


def has_enough_masks(masked: int, count: int) -> bool:
    """True if ``masked`` of ``count`` training objects are enough to learn masks."""
    return 0 < masked >= min(_ENOUGH_MASKS, count / 2)


def describe_masks(masked: int, count: int) -> str:
    """Say why masks are learned from ``masked`` of ``count`` training objects, or not."""
    if masked in (0, count):
        return "every training object has one" if masked else "no training object has one"
    text = f"{masked:,} of {count:,} training objects {'has' if masked == 1 else 'have'} one"
    return text if has_enough_masks(masked, count) else f"{text}: too few to learn from; --masks true overrides this"


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
    """Read and check a dataset, and make the missing splits; every mistake is an error before training.

    categories: "own"; "super" merges them into their supercategories; "one" into one, object
    masks:      whether to note objects without a mask
    known:      a model's name and its categories by id; the file's categories are matched to them by name
    only:       read only this split of a folder
    max_bad:    share of a file's images that may be unreadable
    """
    files = find_annotations(Path(where))
    if only is not None and Path(where).is_dir():
        if only not in files:
            raise UserError(f"{where} has no split '{only}'. It has: {', '.join(files)}.")
        files = {only: files[only]}
    notes: list[str] = []
    bad: list[SkippedFile] = []
    contents = {name: read_coco_file(path) for name, path in files.items()}
    first = "train" if "train" in contents else next(iter(contents))
    source, named = files[first].name, _categories(contents[first], files[first])
    if known and categories == "own":
        source, named = known
    splits: dict[str, list[CocoImage]] = {}
    for name, content in contents.items():
        ids = _match_categories(content, files[name], named, source, notes)
        images = _read_images(name, files[name], Path(where), content, max_bad, bad)
        _add_objects(files[name], content, images, ids, notes)
        splits[name] = [image for image in images.values() if image is not None]
    if masks and any(image.masked() for images in splits.values() for image in images):
        for name, images in splits.items():
            count = sum(len(image.learnable()) for image in images)
            if missing := count - sum(len(image.masked()) for image in images):
                objects = f"{files[name].name}: {missing:,} of {pluralize(count, 'object')} without a usable mask"
                notes.append(f"{objects}: they count for boxes, not for masks")
    if categories != "own":
        named = _merge_categories(splits, _group_names(contents[first], files[first], categories), known)
    root = Path(where) if Path(where).is_dir() else Path(where).parent
    splits = make_splits(splits, split, val_fraction, notes)
    return CocoData(root.resolve().name, tuple(named.values()), tuple(named), splits, notes, bad)


def find_annotations(where: Path) -> dict[str, Path]:
    """Find the JSON file of every split.

    For example ``instances_train.json``, ``annotations/instances_val2017.json``, ``train/_annotations.coco.json``.
    """
    if where.is_file():
        return {"train": where}
    if not where.is_dir():
        raise UserError(f"There is no folder or JSON file {where}.")
    candidates = sorted([*where.glob("*.json"), *where.glob("annotations/*.json"), *where.glob("*/*coco*.json")])
    named: list[tuple[bool, int, Path]] = []
    for path in candidates:
        words = path.stem.lower().replace("-", "_").rstrip("0123456789").split("_")
        words += [path.parent.name.lower()]
        word = next((_SPLIT_WORDS.index(word) for word in words if word in _SPLIT_WORDS), None)
        if word is not None and not {"captions", "keypoints", "panoptic", "stuff", "image", "names"} & set(words):
            named.append(("instances" not in path.stem, word, path))
    files: dict[str, Path] = {}
    for _, word, path in sorted(named):
        files.setdefault(SPLIT_NAMES[_SPLIT_WORDS[word]], path)
    if not files and len(candidates) == 1:
        files = {"train": candidates[0]}
    if not files:
        raise UserError(
            f"{where} holds no COCO annotations: put JSON files such as instances_train.json and instances_val.json "
            "into it, or into its folder annotations."
        )
    return {split: files[split] for split in ("train", "val", "test") if split in files}


def rle(entry: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """Return the mask of an annotation, polygons or run lengths, as compressed run lengths."""
    segmentation = entry["segmentation"]
    if isinstance(segmentation, list):
        return run_length.merge(run_length.frPyObjects(segmentation, height, width))  # type: ignore[arg-type]
    if isinstance(segmentation["counts"], list):
        return run_length.frPyObjects(segmentation, height, width)  # type: ignore[return-value]
    return segmentation


def masks_of(entries: Iterable[dict[str, Any]], height: int, width: int) -> np.ndarray:
    """Rasterize the masks of n annotations: (n, height, width) uint8."""
    encoded = [rle(entry, height, width) for entry in entries]
    if not encoded:
        return np.zeros((0, height, width), np.uint8)
    return np.ascontiguousarray(np.asarray(run_length.decode(encoded)).transpose(2, 0, 1))


# -- categories


def _categories(content: dict[str, Any], path: Path) -> dict[int, str]:
    """Return {category id: name} in the order of the ids."""
    categories: dict[int, str] = {}
    for entry in content["categories"]:
        identity, name = entry["id"], entry["name"]
        if identity in categories:
            raise UserError(f"{path}: '{categories[identity]}' and '{name}' have the same category id {identity}.")
        categories[identity] = str(name)
    if not categories:
        raise UserError(f"{path} has no categories.")
    return dict(sorted(categories.items()))


def _match_categories(
    content: dict[str, Any], path: Path, named: dict[int, str], source: str, notes: list[str]
) -> dict[int, int]:
    """Match a file's category ids to those in ``named`` by their names.

    named:  {category id: name} of ``source``, a file or a model
    Returns {id in the file: id in named}. A category that ``source`` lacks is an error only if an object has it.
    """
    categories = _categories(content, path)
    ids: dict[int, int] = {}
    for identity, name in categories.items():
        same = [other for other, other_name in named.items() if other_name == name]
        if named.get(identity) == name:
            ids[identity] = identity
        elif len(same) == 1:
            ids[identity] = same[0]
    used = {entry["category_id"] for entry in content["annotations"]}
    if absent := sorted(categories.keys() & used - ids.keys()):
        name = categories[absent[0]]
        problem = "has several times" if name in named.values() else "does not have"
        raise UserError(
            f"{path.name} has objects of category {absent[0]} '{name}', which {source} {problem}. Use the same "
            "category names in both."
        )
    moved = [identity for identity, other in ids.items() if identity != other and identity in used]
    if moved:
        notes.append(
            f"{path.name} and {source} have different category ids: matched by name ('{categories[moved[0]]}' is "
            f"{moved[0]} and {ids[moved[0]]})"
        )
    return ids


def _group_names(content: dict[str, Any], path: Path, categories: str) -> dict[int, str]:
    """Return {category id: name of the group it is merged into}."""
    if categories == "one":
        return {entry["id"]: "object" for entry in content["categories"]}
    missing = [entry["name"] for entry in content["categories"] if not entry.get("supercategory")]
    if missing:
        raise UserError(f"{path}: '{missing[0]}' has no supercategory. Use --categories own or one.")
    return {entry["id"]: entry["supercategory"] for entry in content["categories"]}


def _merge_categories(
    splits: dict[str, list[CocoImage]], groups: dict[int, str], known: tuple[str, dict[int, str]] | None
) -> dict[int, str]:
    """Give every object its group's id: a model's, or 1, 2, … in the order of their names. Returns {id: name}."""
    model, named = known or ("", dict(enumerate(sorted(set(groups.values())), 1)))
    ids = {name: identity for identity, name in named.items()}
    for image in (image for images in splits.values() for image in images):
        for entry in image.objects:
            group = groups[entry["category_id"]]
            if group not in ids:
                raise UserError(
                    f"{image.truth.name} has objects of category '{group}', which {model} does not have. Use the same "
                    "category names in both."
                )
            entry["category_id"] = ids[group]
    return {identity: name for name, identity in ids.items()}


# -- images and objects


def _read_images(
    split: str, path: Path, where: Path, content: dict[str, Any], max_bad: float, bad: list[SkippedFile]
) -> dict[Any, CocoImage | None]:
    """Return {image id: image}; None for an unreadable one."""
    names = [entry["file_name"] for entry in content["images"]]
    if not names:
        raise UserError(f"{path} has no images.")
    folder = find_image_folder(where if where.is_dir() else path.parent, path, names)
    sizes = read_image_sizes(split, [folder / name for name in names], max_bad, bad)
    images: dict[Any, CocoImage | None] = {}
    for entry, size in zip(content["images"], sizes, strict=True):
        if entry["id"] in images:
            raise UserError(f"{path.name} has two images with the id {entry['id']}.")
        images[entry["id"]] = None
        if size is not None:
            image = images[entry["id"]] = CocoImage(entry["id"], folder / entry["file_name"], *size, path)
            stated = (int(entry.get("height") or size[0]), int(entry.get("width") or size[1]))
            if stated != size:
                raise UserError(
                    f"{path.name} gives {image.path} a size of {stated[1]}×{stated[0]} px, but it has "
                    f"{size[1]}×{size[0]} (upright, as EXIF says). Use the images that were annotated."
                )
    return images


def _add_objects(
    path: Path, content: dict[str, Any], images: dict[Any, CocoImage | None], ids: dict[int, int], notes: list[str]
) -> None:
    """Add the usable objects of a file to its images."""
    left_out: list[Any] = []
    for entry in content["annotations"]:
        where = f"{path.name}: annotation {entry.get('id')}"
        if entry["image_id"] not in images:
            raise UserError(f"{where} belongs to image {entry['image_id']}, which the file does not list.")
        if entry["category_id"] not in ids:
            raise UserError(f"{where} has category {entry['category_id']}, which the file does not list.")
        image = images[entry["image_id"]]
        if image is None:
            continue
        cleaned = _clean_annotation(entry, image, where)
        if cleaned is None:
            left_out.append(entry.get("id"))
        else:
            image.objects.append(cleaned | {"category_id": ids[entry["category_id"]]})
    if left_out:
        count = pluralize(len(left_out), "object")
        notes.append(f"{path.name}: {count} left out: no box with an area inside the image (first: {left_out[0]})")


def _clean_annotation(entry: dict[str, Any], image: CocoImage, where: str) -> dict[str, Any] | None:
    """Return an annotation with its box clipped to the image. Return None without such a box."""
    segmentation = entry.get("segmentation") or []
    if isinstance(segmentation, list):
        segmentation = [part for part in segmentation if is_polygon(part, image.height, image.width)]
    elif segmentation["size"] != [image.height, image.width]:
        height, width = segmentation["size"]
        raise UserError(
            f"{where} has a mask of {width}×{height} px, but its image {image.path.name} has "
            f"{image.width}×{image.height}."
        )
    else:
        check_run_lengths(segmentation, image.height, image.width, where)
    box = entry.get("bbox") or []
    if len(box) not in (0, 4):
        raise UserError(f"{where} has the bbox {box}. Write [left, top, width, height].")
    if segmentation and not (box and _is_visible(segmentation, image)):
        mask = rle({"segmentation": segmentation}, image.height, image.width)
        if not run_length.area(mask):  # outside the image, thinner than a pixel, or empty run lengths
            segmentation = []
        elif not box:
            box = run_length.toBbox(mask).tolist()
    left, top, width, height = (float(value) for value in box or (0, 0, 0, 0))
    right, bottom = min(left + width, image.width), min(top + height, image.height)
    left, top = max(left, 0.0), max(top, 0.0)
    if min(width, height, right - left, bottom - top) < _MIN_BOX_SIDE:
        return None
    area = entry.get("area") or 0.0
    if area <= 0:  # COCO's area is the mask's
        mask = rle({"segmentation": segmentation}, image.height, image.width) if segmentation else None
        area = (right - left) * (bottom - top) if mask is None else run_length.area(mask)
    cleaned = {
        "bbox": [left, top, right - left, bottom - top],
        "area": float(area),
        "iscrowd": entry.get("iscrowd") or 0,
    }
    return cleaned | ({"segmentation": segmentation} if segmentation else {})


def _is_visible(segmentation: Any, image: CocoImage) -> bool:
    """True if a polygon is inside the image and a pixel thick on average. It need not be rasterized then."""
    for part in segmentation if isinstance(segmentation, list) else []:
        x, y = np.asarray(part, dtype=float).reshape(-1, 2).T
        inside = x.min() >= 0 and y.min() >= 0 and x.max() <= image.width and y.max() <= image.height
        area = abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2
        if inside and area > 2 and area >= max(np.ptp(x), np.ptp(y)):
            return True
    return False
