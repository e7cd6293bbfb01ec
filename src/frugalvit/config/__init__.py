"""Typed configuration, one module per room. Torch-free: importing it costs milliseconds."""
