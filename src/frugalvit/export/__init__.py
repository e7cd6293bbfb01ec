"""Export a model and load it again."""
