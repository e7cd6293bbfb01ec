"""Distillation: a student learns the features of a frozen teacher."""
