"""Seeing what a model learned: which regions match across views, and where each head looks."""
