"""What a model needs to run on a packed forest."""
