"""Typed configuration, one module per group of commands. Without torch: it loads in milliseconds."""
