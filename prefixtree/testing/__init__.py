"""Packed against replicated: run both, compare them, and measure time and memory."""

from prefixtree.errors import need_training

need_training(__name__)
