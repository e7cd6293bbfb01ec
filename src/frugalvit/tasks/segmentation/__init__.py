"""UperNet: frugalvit segment."""
