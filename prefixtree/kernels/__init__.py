"""Kernels on arrays and their backends, which know a mask and never a forest."""
