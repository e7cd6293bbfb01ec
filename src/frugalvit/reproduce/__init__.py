"""Rerun the tables of docs/RESULTS.md: frugalvit reproduce."""
