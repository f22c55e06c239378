"""Attention to latents, gathered by what queries chose: for long paths."""
