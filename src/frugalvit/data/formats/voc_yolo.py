"""Read boxes that are not COCO files: Pascal VOC's XML, YOLO's text files.

    JPEGImages/a.jpg, Annotations/a.xml, ImageSets/Main/train.txt       Pascal VOC; also XML files beside the images
    images/train/a.jpg, labels/train/a.txt, data.yaml or classes.txt    YOLO: "class x y width height", or polygons

Each becomes the content of a COCO file per split. File names are relative to the folder; ``truth`` is the file with an
image's objects.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from frugalvit.config.yaml import read_yaml
from frugalvit.data.bad_images import UnreadableImage
from frugalvit.data.formats.annotated_images import read_image_size
from frugalvit.data.formats.image_folder import SPLIT_NAMES, list_images
from frugalvit.errors import UserError
from frugalvit.utils.files import read_user_text

_LARGEST_XML = 2**20  # characters; an annotation has a few thousand

Objects = list[dict[str, Any]]  # name, bbox, and optionally segmentation and iscrowd
Images = list[tuple[Path, Path, Objects]]  # image, the file with its objects, objects


def read_annotations(root: Path) -> dict[str, dict[str, Any]]:
    """Return the content of a COCO file for every split of a folder; {} if it has none of these layouts."""
    for read in (_read_voc, _read_yolo):
        if splits := read(root):
            names = sorted({entry["name"] for images in splits.values() for *_, part in images for entry in part})
            return {split: _as_coco(root, images, names) for split, images in splits.items()}
    return {}


def _as_coco(root: Path, images: Images, names: list[str]) -> dict[str, Any]:
    entries, annotations = [], []
    for number, (path, truth, objects) in enumerate(images, 1):
        entries.append({"id": number, "file_name": path.relative_to(root).as_posix(), "truth": truth})
        for entry in objects:
            identity = {"id": f"{truth.name}, object {objects.index(entry) + 1}", "image_id": number}
            annotations.append(identity | entry | {"category_id": names.index(entry["name"]) + 1})
    categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
    return {"images": entries, "annotations": annotations, "categories": categories}


def _read_voc(root: Path) -> dict[str, Images]:
    """Read one XML file per image; lists in ImageSets/Main, or folders train, val and test, make the splits."""
    files = {path.stem: path for path in sorted(root.rglob("*.xml"))}
    if not files:
        return {}
    found = {Path(path).stem: Path(path) for path in list_images(str(root)) if "Segmentation" not in path}
    images = {stem: (found[stem], path, _voc_objects(path)) for stem, path in files.items() if stem in found}
    if missing := [path.name for stem, path in files.items() if stem not in found]:
        raise UserError(f"{root} has no image for {missing[0]}: an image and its XML file have the same name.")
    lists = {split: root / "ImageSets" / "Main" / f"{split}.txt" for split in ("train", "val", "test")}
    lists = {split: read_user_text(path, "utf-8-sig").split() for split, path in lists.items() if path.is_file()}
    if lists:
        return {split: [images[name] for name in names if name in images] for split, names in lists.items()}
    return _by_folder(root, images.values())


def _voc_objects(path: Path) -> Objects:
    text = read_user_text(path, "utf-8-sig")
    if len(text) > _LARGEST_XML or "<!ENTITY" in text:  # a few lines of entities can expand to gigabytes
        raise UserError(f"{path} is not an annotation of Pascal VOC.")
    try:
        objects: Objects = []
        for entry in ElementTree.fromstring(text).iter("object"):
            left, top, right, bottom = (float(entry.findtext(f"bndbox/{side}", "")) for side in _SIDES)
            box = [left - 1, top - 1, right - left + 1, bottom - top + 1]  # VOC counts pixels from 1
            difficult = int(entry.findtext("difficult") or 0)
            objects.append({"name": entry.findtext("name", ""), "bbox": box, "iscrowd": difficult})
        return objects
    except (ElementTree.ParseError, ValueError) as error:
        raise UserError(f"{path} is not an annotation of Pascal VOC ({error}).") from None


_SIDES = ("xmin", "ymin", "xmax", "ymax")


def _read_yolo(root: Path) -> dict[str, Images]:
    """Read one text file per image in a folder ``labels`` beside ``images``; images without a file have no objects."""
    if not any(path.suffix == ".txt" for folder in root.rglob("labels") for path in folder.rglob("*.txt")):
        return {}
    names, images = _yolo_names(root), []
    for path in map(Path, list_images(str(root))):
        parts = path.relative_to(root).parts
        if "images" in parts:
            place = len(parts) - 1 - parts[::-1].index("images")
            truth = root.joinpath(*parts[:place], "labels", *parts[place + 1 :]).with_suffix(".txt")
            images.append((path, truth if truth.is_file() else path, _yolo_objects(truth, path, names)))
    return _by_folder(root, images)


def _yolo_names(root: Path) -> dict[int, str]:
    """Return class names by number, from data.yaml or classes.txt; numbers without a name are their own name."""
    for path in (*sorted(root.glob("*.yaml")), *sorted(root.glob("*.yml"))):
        names = read_yaml(path).get("names")
        if isinstance(names, list | dict):
            pairs = names.items() if isinstance(names, dict) else enumerate(names)
            return {int(number): str(name) for number, name in pairs}
    listing = next((path for path in (root / "classes.txt", root / "labels" / "classes.txt") if path.is_file()), None)
    return {} if listing is None else dict(enumerate(read_user_text(listing, "utf-8-sig").splitlines()))


def _yolo_objects(truth: Path, image: Path, names: dict[int, str]) -> Objects:
    if not truth.is_file():
        return []
    try:
        height, width = read_image_size(image)
    except UnreadableImage:
        return []  # it is left out with a warning
    objects: Objects = []
    for line, text in enumerate(read_user_text(truth, "utf-8-sig").splitlines(), 1):
        if not (words := text.split()):
            continue
        try:
            number, *values = map(float, words)
        except ValueError:
            number, values = 0.0, []
        if len(values) < 4 or len(values) % 2 or not all(-0.01 <= value <= 1.01 for value in values):
            raise UserError(
                f"{truth}, line {line}: '{text:.60}' is not 'class x y width height' in shares of the image."
            )
        name = names.get(int(number), str(int(number)))
        points = [value * side for value, side in zip(values, (width, height) * (len(values) // 2), strict=True)]
        if len(values) == 4:
            x, y, wide, high = points
            objects.append({"name": name, "bbox": [x - wide / 2, y - high / 2, wide, high]})
        else:
            objects.append({"name": name, "segmentation": [points]})
    return objects


def _by_folder(root: Path, images: Iterable[tuple[Path, Path, Objects]]) -> dict[str, Images]:
    """Sort images into splits by the folders train, val and test in their path; the others are train."""
    splits: dict[str, Images] = {}
    for image in images:
        words = [part.lower() for part in image[0].relative_to(root).parts[:-1]]
        split = next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), "train")
        splits.setdefault(split, []).append(image)
    return {split: splits[split] for split in ("train", "val", "test") if split in splits}
