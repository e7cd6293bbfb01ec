"""``benchmarks/`` of the repository: commands that the wheel leaves out."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from frugalvit.errors import UserError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"  # the folder beside ``src/``; it exists in a checkout only


def import_benchmark(name: str) -> ModuleType:
    """Import a module of ``benchmarks/``. Its folder stays on the path, because spawned workers import it too."""
    if not (BENCHMARKS / "tables").is_dir():
        raise UserError(
            "This command is in the folder benchmarks/ of the repository, which the wheel leaves out: "
            "clone the repository and install it with 'pip install -e .'."
        )
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return importlib.import_module(name)
