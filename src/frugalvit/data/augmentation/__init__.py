"""Batched transforms on the device."""
