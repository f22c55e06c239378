"""transformers models on packed forests: attention, families, checks, layers."""
