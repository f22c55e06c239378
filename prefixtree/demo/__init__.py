"""A small tool-use environment, and GRPO on it both ways."""
