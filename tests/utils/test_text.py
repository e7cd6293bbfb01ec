"""Counts and lists in messages."""

import pytest

from frugalvit.utils.text import pluralize, truncate_list


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [(0, "file", "0 files"), (1, "class", "1 class"), (2, "class", "2 classes"), (2000, "image", "2,000 images")],
)
def test_pluralize(count: int, noun: str, expected: str) -> None:
    assert pluralize(count, noun) == expected


def test_truncate_list() -> None:
    assert truncate_list(["a", "b"]) == "a, b"
    assert truncate_list([*"abcdefg"], count=5) == "a, b, c, d, e and 2 more"
