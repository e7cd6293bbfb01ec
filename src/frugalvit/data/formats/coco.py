"""Read COCO's JSON files (boxes, polygons, run-length masks) and their images; ``voc_yolo.py`` converts others to them.

| in the file | what happens |
| --- | --- |
| category ids with gaps | classes are numbered 1, 2, … in the order of the ids |
| images without objects | trained on: they show the background |
| crowds | not trained on; scored as COCO scores them |
| boxes without area inside their image | left out, with a note |
| boxes over the border | clipped |
| objects without a mask | their boxes are trained on and scored; masks are learned only if all objects have one |
| unreadable images | left out with their objects, with a warning |
"""

import codecs
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
import pydantic
from faster_coco_eval.core import mask as run_length
from pydantic import Field, FiniteFloat, NonNegativeInt
from typing_extensions import TypedDict

from frugalvit.data.bad_images import SkippedFile
from frugalvit.data.dataset import DatasetSplits, FileExamples
from frugalvit.data.formats.annotated_images import find_image_folder, make_splits, read_image_sizes, select_split
from frugalvit.data.formats.image_folder import SPLIT_NAMES
from frugalvit.data.formats.voc_yolo import read_annotations
from frugalvit.errors import UserError
from frugalvit.utils.files import read_bytes
from frugalvit.utils.text import pluralize

_MIN_BOX_SIDE = 1e-3  # pixels
_MAX_JSON = 8 * 2**30  # bytes; Objects365 has 5 GB
_OTHER_FILES = {"captions", "keypoints", "panoptic", "stuff", "image", "names"}
"""Words in the names of COCO's other JSON files."""


@dataclass
class CocoImage:
    """One image and its objects: cleaned annotations of the JSON file ``truth``."""

    id: Any
    path: Path
    height: int
    width: int
    truth: Path
    objects: list[dict[str, Any]] = field(default_factory=list)

    def trainable(self) -> list[dict[str, Any]]:
        """Return the objects a detector trains on: all but crowds."""
        return [entry for entry in self.objects if not entry["iscrowd"]]


@dataclass
class CocoData:
    """Images by split. Class k = 1, 2, … (0 is the background) stands for ``category_ids[k - 1]``."""

    name: str
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    splits: dict[str, list[CocoImage]]
    notes: list[str] = field(default_factory=list)
    bad: list[SkippedFile] = field(default_factory=list)

    def class_of(self) -> dict[int, int]:
        """Return {category id: class number}."""
        return {identity: number for number, identity in enumerate(self.category_ids, 1)}

    def masks(self) -> tuple[int, int]:
        """Count the training objects that have a mask, and all training objects."""
        objects = [entry for image in self.splits.get("train", []) for entry in image.trainable()]
        return sum("segmentation" in entry for entry in objects), len(objects)


def open_coco(
    where: str,
    split: str = "auto",
    val_fraction: float = 0.1,
    categories: str = "own",
    *,
    known: dict[int, str] | None = None,
    only: str | None = None,
    max_bad: float = 0.05,
) -> CocoData:
    """Read and check a dataset, and make the missing splits; every mistake is an error before training.

    Categories of all files are matched by name.

    categories: "own"; "super" merges them into their supercategories; "one" into one, object
    known:      {category id: name} of a model; by default the categories are those of the training file
    only:       read only this split of a folder
    max_bad:    share of a file's images that may be unreadable
    """
    only = only if Path(where).is_dir() else None
    files, contents = read_contents(Path(where), only, split)
    names = {name: _class_names(content, files[name], categories) for name, content in contents.items()}
    if known is None:
        known = names["train"] if "train" in names else next(iter(names.values()))
        if categories != "own":
            known = dict(enumerate(sorted(set(known.values())), 1))
    data = CocoData("", tuple(known.values()), tuple(known), {})
    for name, content in contents.items():
        images = _read_images(name, files[name], Path(where), content, max_bad, data.bad)
        _add_objects(files[name], content, images, names[name], data)
        data.splits[name] = [image for image in images.values() if image is not None]
    data.splits = select_split(make_splits(data.splits, split, val_fraction, data.notes), only, where)
    data.name = (Path(where) if Path(where).is_dir() else Path(where).parent).resolve().name
    return data


def open_box_labels(where: str) -> DatasetSplits:
    """Read boxes as labels: an image has the name of each of its objects. Crowds count, too."""
    data = open_coco(where, "given")
    classes, splits = data.class_of(), {}
    for split, images in data.splits.items():
        splits[split] = FileExamples([str(image.path) for image in images], None, str(Path(where)))
        splits[split].targets = targets = np.zeros((len(images), len(classes)), np.int8)
        for row, image in enumerate(images):
            targets[row, [classes[entry["category_id"]] - 1 for entry in image.objects]] = 1
    return DatasetSplits(data.name, where, "boxes", data.classes, splits, data.notes)


def read_contents(
    where: Path, only: str | None = None, mode: str = "given"
) -> tuple[dict[str, Path], dict[str, dict[str, Any]]]:
    """Return file and content of every split; the file is the folder itself if it has no COCO files.

    only, mode: as in ``select_split``
    """
    others = read_annotations(where) if where.is_dir() and not _list_candidates(where) else {}
    if others:
        others = select_split(others, only, where, mode)
        return dict.fromkeys(others, where), others
    files = select_split(find_annotations(where), only, where, mode)
    return files, {name: read_coco_file(path) for name, path in files.items()}


def _list_candidates(where: Path) -> list[Path]:
    return sorted({*where.glob("*.json"), *where.glob("annotations/*.json"), *where.glob("*/*coco*.json")})


def find_annotations(where: Path) -> dict[str, Path]:
    """Find the JSON file of every split.

    For example ``instances_train.json``, ``annotations/instances_val2017.json``, ``train/_annotations.coco.json``.
    """
    if where.is_file():
        return {"train": where}
    if not where.is_dir():
        raise UserError(f"There is no folder or JSON file {where}.")
    candidates = _list_candidates(where)
    files: dict[str, Path] = {}
    for path in sorted(candidates, key=lambda path: "instances" not in path.stem):
        words = [*re.split("[_-]", path.stem.lower().rstrip("0123456789")), path.parent.name.lower()]
        split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)
        if split is not None and _OTHER_FILES.isdisjoint(words):
            files.setdefault(split, path)
    if not files and len(candidates) == 1:
        files = {"train": candidates[0]}
    if not files:
        raise UserError(
            f"{where} holds no boxes that frugalvit reads: COCO files (instances_train.json, in it or in its folder "
            "annotations), Pascal VOC's XML files, or YOLO's labels/*.txt."
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


# -- the file format

Pixels = Annotated[FiniteFloat, Field(gt=0)]


class _ImageEntry(TypedDict):
    id: int | str
    file_name: Annotated[str, Field(pattern=r"^[^\x00]+$")]
    height: NotRequired[Pixels | None]
    width: NotRequired[Pixels | None]


class _RunLengths(TypedDict):
    counts: list[NonNegativeInt] | str
    size: Annotated[list[int], Field(min_length=2, max_length=2)]  # height, width


class _Annotation(TypedDict):
    id: NotRequired[Any]
    image_id: int | str
    category_id: int
    bbox: NotRequired[list[FiniteFloat] | None]  # left, top, width, height
    segmentation: NotRequired[list[list[FiniteFloat]] | _RunLengths | None]
    area: NotRequired[FiniteFloat | None]
    iscrowd: NotRequired[Literal[0, 1] | None]


class _Category(TypedDict):
    id: int
    name: str | int
    supercategory: NotRequired[str | None]


class _CocoFile(TypedDict):
    images: Annotated[list[_ImageEntry], Field(min_length=1)]
    annotations: list[_Annotation]
    categories: Annotated[list[_Category], Field(min_length=1)]


_SCHEMA = pydantic.TypeAdapter(_CocoFile)


def read_coco_file(path: Path) -> dict[str, Any]:
    """Read and check a COCO file; the error names its first wrong entry."""
    try:
        content = read_bytes(path, _MAX_JSON).removeprefix(codecs.BOM_UTF8)
        return dict(_SCHEMA.validate_json(content, strict=True))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}).") from None
    except pydantic.ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        entry = ".".join(str(part) for part in first["loc"][:3])
        raise UserError(f"{path} is not in COCO format: {entry} {first['msg']}.") from None


def _class_names(content: dict[str, Any], path: Path, categories: str) -> dict[int, str]:
    """Return {category id: class name} in the order of the ids. Merged categories have one name."""
    names: dict[int, str] = {}
    for entry in sorted(content["categories"], key=lambda entry: entry["id"]):
        name = {"own": str(entry["name"]), "super": entry.get("supercategory"), "one": "object"}[categories]
        if categories == "super" and not name:
            raise UserError(f"{path}: '{entry['name']}' has no supercategory. Use --categories own or one.")
        if entry["id"] in names or (categories == "own" and name in names.values()):
            raise UserError(f"{path} has two categories with the id {entry['id']} or the name '{name}'.")
        names[entry["id"]] = name
    return names


# -- images and objects


def _read_images(
    split: str, path: Path, root: Path, content: dict[str, Any], max_bad: float, bad: list[SkippedFile]
) -> dict[Any, CocoImage | None]:
    """Return {image id: image}; None for an unreadable one."""
    names = [entry["file_name"] for entry in content["images"]]
    folder = find_image_folder(root if root.is_dir() else path.parent, path, names)
    sizes = read_image_sizes(split, [folder / name for name in names], max_bad, bad)
    images: dict[Any, CocoImage | None] = {}
    for entry, size in zip(content["images"], sizes, strict=True):
        if entry["id"] in images:
            raise UserError(f"{path.name} has two images with the id {entry['id']}.")
        images[entry["id"]] = None
        if size is not None:
            truth = entry.get("truth", path)
            image = images[entry["id"]] = CocoImage(entry["id"], folder / entry["file_name"], *size, truth)
            stated = (int(entry.get("height") or size[0]), int(entry.get("width") or size[1]))
            if stated != size:
                raise UserError(
                    f"{path.name} gives {image.path} a size of {stated[1]}×{stated[0]} px, but it has "
                    f"{size[1]}×{size[0]} (after EXIF rotation). Use the images that were annotated."
                )
    return images


def _add_objects(
    path: Path, content: dict[str, Any], images: dict[Any, CocoImage | None], names: dict[int, str], data: CocoData
) -> None:
    """Add the usable objects of a file to its images. ``names`` are its categories by id."""
    numbers = dict(zip(data.classes, data.category_ids, strict=True))
    left_out: list[Any] = []
    for entry in content["annotations"]:
        title = f"{path.name}: annotation {entry.get('id')}"
        for kind, listed in (("image", images), ("category", names)):
            if (identity := entry[f"{kind}_id"]) not in listed:
                raise UserError(f"{title} has {kind} {identity}, which the file does not list.")
        name = names[entry["category_id"]]
        if name not in numbers:
            raise UserError(f"{title} has category '{name}', which the model or the training file does not have.")
        image = images[entry["image_id"]]
        if image is None:
            continue
        cleaned = _clean_annotation(entry, image, title)
        if cleaned is None:
            left_out.append(entry.get("id"))
        else:
            image.objects.append(cleaned | {"category_id": numbers[name]})
    if left_out:
        count = pluralize(len(left_out), "object")
        data.notes.append(f"{path.name}: {count} left out: no box with an area inside the image (first: {left_out[0]})")


def _clean_annotation(entry: dict[str, Any], image: CocoImage, title: str) -> dict[str, Any] | None:
    """Return an annotation with its box clipped to the image; None if no box is left."""
    segmentation, box, area = entry.get("segmentation") or [], entry.get("bbox") or [], entry.get("area") or 0.0
    if isinstance(segmentation, list):
        segmentation = [part for part in segmentation if _is_polygon(part, image.height, image.width)]
    elif segmentation["size"] != [image.height, image.width]:
        height, width = segmentation["size"]
        raise UserError(
            f"{title} has a mask of {width}×{height} px, but its image {image.path.name} has "
            f"{image.width}×{image.height}."
        )
    else:
        _check_run_lengths(segmentation, image, title)
    if len(box) not in (0, 4):
        raise UserError(f"{title} has the bbox {box}. Write [left, top, width, height].")
    if segmentation and not (box and area > 0):
        mask = rle({"segmentation": segmentation}, image.height, image.width)
        box = box or run_length.toBbox(mask).tolist()
        area = area if area > 0 else float(run_length.area(mask))  # COCO's area is the mask's
    left, top, width, height = (float(value) for value in box or (0, 0, 0, 0))
    right, bottom = min(left + width, image.width), min(top + height, image.height)
    left, top = max(left, 0.0), max(top, 0.0)
    if min(width, height, right - left, bottom - top) < _MIN_BOX_SIDE:
        return None
    cleaned = {
        "bbox": [left, top, right - left, bottom - top],
        "area": float(area if area > 0 else (right - left) * (bottom - top)),
        "iscrowd": entry.get("iscrowd") or 0,
    }
    return cleaned | ({"segmentation": segmentation} if segmentation else {})


def _is_polygon(part: list[float], height: int, width: int) -> bool:
    """True for three or more corners, each at most one image side outside the image.

    Tools write ``[[]]`` or two corners for an object with only a box. Rasterizing follows the outline pixel by pixel:
    one corner at 1e9 would fill the memory.
    """
    inside = zip(part, (width, height) * (len(part) // 2), strict=False)
    return len(part) >= 6 and len(part) % 2 == 0 and all(-side <= value <= 2 * side for value, side in inside)


def _check_run_lengths(segmentation: dict[str, Any], image: CocoImage, title: str) -> None:
    """Raise UserError unless the run lengths cover the image. The library checks this only when it decodes."""
    try:
        run_length.decode(rle({"segmentation": segmentation}, image.height, image.width))
    except (ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"{title} has a damaged mask: {' '.join(str(error).split())[:120]}.") from None
