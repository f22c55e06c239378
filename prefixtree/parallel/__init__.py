"""Packed forests divided among ranks or steps: each computes a part and imports its ancestors."""
