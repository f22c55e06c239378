"""Attention to latents, gathered by the choices of queries: for long paths."""
