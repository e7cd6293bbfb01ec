"""One architecture, one file."""
