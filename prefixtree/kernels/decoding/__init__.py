"""Attention of new tokens to the keys of a growing forest, and the draw of the next tokens."""
