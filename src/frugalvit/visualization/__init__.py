"""Show what a model learned: matching regions of two views, and the attention of each head."""
