"""A wing: layers that carry a state."""
