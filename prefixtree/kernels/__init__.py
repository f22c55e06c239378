"""Tree attention on arrays: backends that know a mask, never a forest."""
