"""Files of the repository that the wheel leaves out: the baselines and tables in ``benchmarks/``."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from frugalvit.errors import UserError

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
"""The folder beside ``src/``; it exists in a checkout only."""


def has_benchmarks() -> bool:
    """True in a checkout of the repository, False in an installed wheel."""
    return (BENCHMARKS / "tables").is_dir()


def require_benchmarks(purpose: str) -> Path:
    """Return ``benchmarks/`` of the checkout; ``purpose`` says in the error what needs it."""
    if not has_benchmarks():
        raise UserError(
            f"{purpose} needs the folder benchmarks/ of the repository, which the wheel leaves out: "
            "clone the repository and install it with 'pip install -e .'."
        )
    return BENCHMARKS


def import_benchmark(name: str, purpose: str) -> ModuleType:
    """Import a module of ``benchmarks/``; its folder stays on the path for spawned workers."""
    folder = str(require_benchmarks(purpose))
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)
