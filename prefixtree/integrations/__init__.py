"""Adapters: import the one for your stack; transformers' registers itself (`registration`)."""
