"""Configuration to objects: build, resume, initialise, resolve auto values."""

import frugalvit.engine  # noqa: F401  (it imports Fabric without torchmetrics, which takes seconds)
