"""Every test that docs/RELIABILITY.md and SECURITY.md name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MENTION = re.compile(r"`(tests/[\w/]+\.py|…)(?:::(\w+))?`")  # "…" is the file named before


@pytest.mark.parametrize(("page", "at_least"), [("docs/RELIABILITY.md", 80), ("SECURITY.md", 3)])
def test_named_tests_exist(page: str, at_least: int) -> None:
    file, missing, functions = ROOT, [], 0
    for path, function in MENTION.findall((ROOT / page).read_text(encoding="utf-8")):
        file = file if path == "…" else ROOT / path
        functions += bool(function)
        if not file.exists() or (function and f"def {function}(" not in file.read_text(encoding="utf-8")):
            missing.append(f"{file.relative_to(ROOT)}::{function}")
    assert missing == []
    assert functions >= at_least
