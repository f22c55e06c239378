"""Measures what sequences share, what they fail to share, and what sharing saves."""
