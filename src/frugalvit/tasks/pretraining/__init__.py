"""Label-free pre-training with EsViT: frugalvit pretrain."""
