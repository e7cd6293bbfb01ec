"""Probes: score frozen features (EsViT §4.1, §4.2, B.3)."""
