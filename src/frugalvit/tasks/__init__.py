"""What can be trained: one folder per task."""

import frugalvit.engine  # noqa: F401  (it imports Fabric without torchmetrics, which takes seconds)
