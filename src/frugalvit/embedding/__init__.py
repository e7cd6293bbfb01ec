"""Features in files, what to label next, near duplicates: frugalvit embed."""

import frugalvit.engine  # noqa: F401  (it imports Fabric without torchmetrics, which takes seconds)
