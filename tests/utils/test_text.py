"""Numbers and lists in sentences."""

from __future__ import annotations

import pytest

from frugalvit.utils.text import pluralize, truncate_list


@pytest.mark.parametrize(
    ("count", "noun", "told"),
    [(0, "file", "0 files"), (1, "class", "1 class"), (2, "class", "2 classes"), (2000, "image", "2,000 images")],
)
def test_a_count_agrees_with_its_noun(count: int, noun: str, told: str) -> None:
    assert pluralize(count, noun) == told


def test_long_lists_are_cut() -> None:
    assert truncate_list(["a", "b"]) == "a, b"
    assert truncate_list([*"abcdefg"], count=5) == "a, b, c, d, e and 2 more"
