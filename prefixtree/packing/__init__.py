"""From a forest to what a model and a kernel take."""
