"""Supervised training with Drloc: frugalvit train, eval, predict."""
