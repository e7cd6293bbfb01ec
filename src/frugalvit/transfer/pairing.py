"""Which mask is whose: images and masks that are called the same, endings aside."""

from __future__ import annotations

from pathlib import Path

from frugalvit.data.listing import list_images
from frugalvit.errors import UserError

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
