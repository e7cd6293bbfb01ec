"""Which mask belongs to which image, where names have endings, and that none is given to two by chance."""

from __future__ import annotations

from pathlib import Path

import pytest

from frugalvit.errors import UserError
from frugalvit.tasks.segmentation.dataset import match


def made(root: Path, images: str, masks: str) -> tuple[Path, Path]:
    """Two folders with empty files of these names."""
    for kind, names in (("images", images), ("masks", masks)):
        for name in names.split():
            path = root / kind / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return root / "images", root / "masks"


@pytest.mark.parametrize(
    ("images", "masks", "wanted"),
    [
        ("a b", "a b", "a b"),
        ("a b", "a_L b_mask", "a_L b_mask"),
        ("a", "a_labelIds_mask", "a_labelIds_mask"),
        ("a_L", "a", "a"),
        ("a a_L", "a a_L", "a a_L"),  # both would be called a
        ("a a_L", "a_mask a_L_mask", "a_mask a_L_mask"),
        ("x", "x x_mask", "x"),
        ("f/a g/a", "f/a_L g/a_mask", "f/a_L g/a_mask"),
        ("f/a", "f/a_L g/a", "f/a_L"),
        ("f/a g/b", "a b", "a b"),
        ("f/a g/a", "a", "a a"),  # two looks at one scene
    ],
)
def test_the_mask_called_most_like_its_image(images: str, masks: str, wanted: str, tmp_path: Path) -> None:
    folders = made(tmp_path, images, masks)
    given, found = (
        [folder / f"{name}.png" for name in names.split()]
        for folder, names in zip(folders, (images, wanted), strict=True)
    )
    assert sorted(match(*folders)) == sorted(zip(given, found, strict=True))


@pytest.mark.parametrize(
    ("images", "masks", "words"),
    [
        ("x", "x_L x_mask", r"x.png may have the mask .*x_L.png or .*x_mask.png: call its mask x.png"),
        ("a a_L", "a_mask a_L", r"a.png may have the mask .*a_L.png or .*a_mask.png: call its mask a.png"),
        ("a", "f/a g/a", r"a.png may have the mask .*a.png or .*a.png: .* in a folder as the image's"),
        ("a a_L", "a_L", r"a.png has no mask: there should be .*masks/a.png"),
        ("a a_L", "a", r"a_L.png has no mask: there should be .*masks/a_L.png"),
        ("f/a g/a", "f/a", r"g/a.png has no mask"),
        ("a b c", "b", r"a.png and 1 more has no mask"),
    ],
)
def test_a_mask_in_doubt_is_one_line(images: str, masks: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error:
        match(*made(tmp_path, images, masks))
    assert "\n" not in str(error.value)
