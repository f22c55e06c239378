"""`sequence_logprobs`: per-sequence scores of a packed forest, through a model."""
