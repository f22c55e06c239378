"""Adapters: import the one for your stack, nothing here is imported for you."""
