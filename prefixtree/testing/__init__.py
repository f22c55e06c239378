"""Packed against replicated: run both, compare them, and measure time and memory."""
