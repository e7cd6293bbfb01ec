"""Decode images once and keep them."""
