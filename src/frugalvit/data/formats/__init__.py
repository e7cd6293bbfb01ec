"""One file for each way people store images."""
