"""Recompute only what does not fit: a memory model of a backward, plans, and layers that follow.

`choose` is the door: what a forward was asked for becomes a plan (`plan`) from what is known of
the layers (`measured`, `probes`), which the layers then follow (`layers`).
"""
