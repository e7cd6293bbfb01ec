"""Backbones put to use where things are, not only what they are: detection, instance and semantic segmentation."""

import frugalvit.training  # noqa: F401  (it imports Fabric in the quick way)
