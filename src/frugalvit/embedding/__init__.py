"""Write features to files, select images to label, find near duplicates: frugalvit embed."""

import frugalvit.engine  # noqa: F401  (it imports Fabric without torchmetrics, which takes seconds)
