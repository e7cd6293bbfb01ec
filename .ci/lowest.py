"""Print constraints that pin every dependency to the lowest version pyproject.toml allows: ``name==bound`` lines.

    python .ci/lowest.py > constraints.txt && pip install -e ".[streams,video,science,export]" -c constraints.txt

The bounds of pyproject.toml are the only source; nothing else is written down, so nothing can go stale.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

EXTRAS = ("streams", "video", "science", "export", "dev")
_TOOLS = ("ruff", "pyright")  # they look at the code and are no part of what runs


def lowest(project: dict) -> list[str]:
    """One ``name==bound`` per requirement that states a lower bound."""
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    found = (re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", line) for line in wanted)
    return [f"{match[1]}=={match[2]}" for match in found if match and match[1] not in _TOOLS]


if __name__ == "__main__":
    settings = Path(__file__).parent.parent / "pyproject.toml"
    print("\n".join(lowest(tomllib.loads(settings.read_text(encoding="utf-8"))["project"])))
