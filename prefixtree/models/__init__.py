"""Models of transformers on packed forests: attention, families, checks, layers."""
