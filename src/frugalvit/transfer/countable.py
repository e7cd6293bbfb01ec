"""What of images and detections mask AP can be counted from, where some objects have a box alone.

COCO's own programs know no such objects: they end in an error, or take the object for one without pixels, which nobody
can find, and whoever has found it for wrong. Here neither is counted:

- An image whose objects all lack masks is left out with everything found in it. One without objects stays: whatever is
  found there is wrong.
- In other images an object without a mask is left out, and so is the detection that has found it by its box: whether
  its mask is right cannot be known. A second detection of the same object stays, and is wrong as always. A crowd, the
  other way to have COCO ignore something, would forgive all that lies in the box, and nothing that sticks out of it.
- A crowd without a mask forgives what lies in its box.

False alarms elsewhere in such an image count in full while some of its objects do not: with many objects without masks
mask AP is rather too low than too high.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from frugalvit.transfer.coco_data import CocoData, CocoImage
from frugalvit.transfer.matching import take_objects


def countable(
    images: list[CocoImage], data: CocoData, found: list[dict[str, Any]]
) -> tuple[list[CocoImage], list[dict[str, Any]]]:
    """The images, objects and detections that count for masks; the places of ``found`` are those of the new images."""
    found = [entry for entry in found if "segmentation" in entry]
    if all("segmentation" in entry for image in images for entry in image.objects):
        return images, found
    by_image: dict[int, list[dict[str, Any]]] = {}
    for entry in found:
        by_image.setdefault(entry["image"], []).append(entry)
    kept: list[CocoImage] = []
    left: list[dict[str, Any]] = []
    for place, image in enumerate(images):
        if image.learnable() and not image.drawn():
            continue
        left += [{**entry, "image": len(kept)} for entry in _judged(image, data, by_image.get(place, []))]
        kept.append(replace(image, objects=[*image.drawn(), *(_with_region(e) for e in image.objects if e["iscrowd"])]))
    return kept, left


def _judged(image: CocoImage, data: CocoData, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The detections of an image without those of objects that have no mask to judge them by."""
    classes = data.class_of()
    truth = [{**entry, "label": classes[entry["category_id"]]} for entry in image.learnable()]
    bare = {place for place, entry in enumerate(truth) if "segmentation" not in entry}
    taken = take_objects(truth, found) if bare else {}
    return [entry for place, entry in enumerate(found) if taken.get(place) not in bare]


def _with_region(crowd: dict[str, Any]) -> dict[str, Any]:
    """A crowd with its mask, or its box for one."""
    left, top, width, height = crowd["bbox"]
    right, bottom = left + width, top + height
    return {"segmentation": [[left, top, right, top, right, bottom, left, bottom]], **crowd}
