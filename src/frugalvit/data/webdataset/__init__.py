"""WebDataset shards: read, write, stream."""
