"""The training engine: the step and the loop of every task, devices, ranks and schedules."""

import importlib
import sys

if "torchmetrics" not in sys.modules:
    # Fabric only reads the version of torchmetrics, and the import takes seconds.
    sys.modules["torchmetrics"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        importlib.import_module("lightning_fabric")
    finally:
        del sys.modules["torchmetrics"]
