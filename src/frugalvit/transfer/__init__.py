"""Backbones put to use where things are, not only what they are: detection, instance and semantic segmentation."""
