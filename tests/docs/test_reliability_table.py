"""Every test that docs/RELIABILITY.md and SECURITY.md name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["docs/RELIABILITY.md", "SECURITY.md"])
def test_the_tests_that_are_named_exist(page: str) -> None:
    here = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}
    file, named = None, 0
    for mention in re.findall(r"`((?:[\w/]*test_\w+\.py|…)(?:::\w+|…\w+)?|…_\w+)`", (ROOT / page).read_text("utf-8")):
        path, _, function = mention.partition("::")
        if path.endswith(".py"):
            file = here.get(Path(path).name)
            assert file is not None and str(file).endswith(path), f"{page} names {path}, which is not there"
        assert file is not None
        if function:
            named += 1
            assert f"def {function}(" in file.read_text(encoding="utf-8"), f"{page}: {file.name} has no {function}"
        elif mention.startswith("…_"):
            assert f"{mention[1:]}(" in file.read_text(encoding="utf-8"), f"{page}: {file.name} has no {mention}"
    assert named > 5 or page == "SECURITY.md"
