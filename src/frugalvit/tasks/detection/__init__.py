"""Mask R-CNN and Cascade Mask R-CNN: frugalvit detect."""
