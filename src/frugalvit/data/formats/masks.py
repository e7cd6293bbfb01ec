"""Find the masks of images, and read their labels: the layouts of segmentation datasets."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from frugalvit.data.decode import known_formats
from frugalvit.data.formats.annotated_images import UNREADABLE, select_split
from frugalvit.data.formats.image_folder import SPLIT_NAMES, list_images
from frugalvit.errors import UserError
from frugalvit.utils.files import open_regular, read_user_text
from frugalvit.utils.text import short_message

Pairs = list[tuple[Path, Path]]
_MASK_FOLDERS = ("masks", "annotations", "labels")
_MASK_ENDINGS = ("", "_mask", "_labelIds", "_L")  # what follows an image's name in the name of its mask


def find_pairs(root: Path, only: str | None = None, mode: str = "given") -> tuple[dict[str, Pairs], str]:
    """Return (image, mask) paths by split, and the layout's name; only and mode: as in ``select_split``."""
    is_voc = (root / "JPEGImages").is_dir() and (root / "SegmentationClass").is_dir()
    splits: dict[str, Any]
    splits, layout = (_read_voc_lists(root), "voc") if is_voc else _find_folders(root)
    splits = select_split(splits, only, root, mode)
    return splits if is_voc else {split: match_masks(*folders) for split, folders in splits.items()}, layout


def _read_voc_lists(root: Path) -> dict[str, Pairs]:
    splits: dict[str, Pairs] = {}
    for split in ("train", "val", "test"):
        listing = root / "ImageSets" / "Segmentation" / f"{split}.txt"
        names = read_user_text(listing, "utf-8-sig").split() if listing.exists() else []
        if names:
            splits[split] = [(root / f"JPEGImages/{n}.jpg", root / f"SegmentationClass/{n}.png") for n in names]
    if not splits:
        raise UserError(f"{root} has no lists of images. Add ImageSets/Segmentation/train.txt.")
    return splits


def _find_folders(root: Path) -> tuple[dict[str, tuple[Path, Path]], str]:
    """Return the folders of images and masks by split, and the layout's name."""
    layout = "camvid" if "camvid" in root.resolve().name.lower() else "folders"
    masks = next((root / name for name in _MASK_FOLDERS if (root / name).is_dir()), root / "masks")
    folders: dict[str, tuple[Path, Path]] = {}
    for word, split in SPLIT_NAMES.items():
        is_present = (root / f"{word}annot").is_dir() or (root / "images" / word).is_dir()
        if is_present and split in folders:
            raise UserError(f"{root} has both '{folders[split][0].name}' and '{word}'. Leave only one as {split}.")
        if (root / f"{word}annot").is_dir():
            folders[split], layout = (root / word, root / f"{word}annot"), "camvid"
        elif (root / "images" / word).is_dir() and (split != "test" or (masks / word).is_dir()):
            # ADE20K's test images are published without masks
            folders[split] = root / "images" / word, masks / word
            layout = "ade20k" if word == "training" and masks.name == "annotations" else layout
    if not folders and masks.is_dir() and (root / "images").is_dir():
        folders["train"] = root / "images", masks
    if not folders:
        raise UserError(
            f"{root} has no known layout. Use images/train and masks/train (and val), or the folders of ADE20K, VOC or "
            "CamVid. To find single objects, use 'frugalvit detect train'."
        )
    return folders, layout


def match_masks(images: Path, masks: Path) -> Pairs:
    """Match each image with the mask of its name and subfolder. Masks may end in ``_mask``, ``_labelIds`` or ``_L``."""
    if not masks.is_dir():
        raise UserError(f"{images} has no masks: there is no folder {masks}.")
    by_name = {path.relative_to(masks).with_suffix(""): path for path in map(Path, list_images(str(masks)))}
    paths = [Path(path) for path in list_images(str(images))]
    if not paths:
        raise UserError(f"{images} has no images.")
    image_names = {path.relative_to(images).with_suffix("") for path in paths}
    pairs: Pairs = []
    for path in paths:
        name = path.relative_to(images).with_suffix("")
        names = [name.with_name(name.name + ending) for ending in _MASK_ENDINGS]
        # A mask such as a_L belongs to the image a_L if there is one.
        mask = next((by_name[n] for n in names if n in by_name and (n == name or n not in image_names)), None)
        if mask is None:
            raise UserError(f"No mask for {path}: there is no {masks / name}.png.")
        pairs.append((path, mask))
    return pairs


def read_labels(path: Path) -> np.ndarray:
    """Read the labels of a mask, uint8 (H, W)."""
    try:
        with open_regular(path) as file, Image.open(file, formats=known_formats()) as mask:
            if mask.format in ("JPEG", "MPO"):
                raise UserError(f"{path} is a JPEG, which changes labels. Save masks as PNG.")
            if mask.mode not in ("L", "P", "1", "I", "I;16"):
                raise UserError(
                    f"{path} is a colour image ({mask.mode}). A mask is a grey or palette PNG with one label per "
                    "pixel: map its colours to labels first."
                )
            labels = np.asarray(mask)
    except UNREADABLE as error:
        raise UserError(f"{path} is not a readable mask ({short_message(error)}).") from None
    if labels.size and (labels.max() > 255 or labels.min() < 0):
        raise UserError(f"{path} has the label {labels.max()}. Labels are numbers from 0 to 255.")
    return labels.astype(np.uint8)
