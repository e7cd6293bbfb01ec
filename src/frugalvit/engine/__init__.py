"""A task (a backbone and its objectives), one loop that trains every task, and the folder a run lives in."""

import importlib
import sys


def _import_fabric() -> None:
    """Fabric asks torchmetrics for its version by importing all of it: seconds at every start, for nothing of ours."""
    if "torchmetrics" in sys.modules:
        return
    sys.modules["torchmetrics"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        importlib.import_module("lightning_fabric")
    finally:
        del sys.modules["torchmetrics"]


_import_fabric()
