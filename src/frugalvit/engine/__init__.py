"""The training engine: the step and the loop of every task, devices, ranks and schedules."""

import importlib
import sys


def _import_fabric() -> None:
    """Import Fabric without torchmetrics: Fabric only reads its version, and the import takes seconds."""
    if "torchmetrics" in sys.modules:
        return
    sys.modules["torchmetrics"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        importlib.import_module("lightning_fabric")
    finally:
        del sys.modules["torchmetrics"]


_import_fabric()
