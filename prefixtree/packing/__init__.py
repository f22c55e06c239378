"""The layout of a forest as a model and a kernel take it."""
