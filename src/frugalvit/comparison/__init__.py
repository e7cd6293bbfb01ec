"""Compare settings over several seeds: frugalvit compare."""

import frugalvit.engine  # noqa: F401  (it imports Fabric without torchmetrics, which takes seconds)
