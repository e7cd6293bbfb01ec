"""From options to a finished run: resolve "auto", build the parts, load weights, summarize."""

import frugalvit.engine  # noqa: F401  (it imports Fabric without torchmetrics, which takes seconds)
