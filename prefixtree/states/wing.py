"""The face of the wing (`prefixtree.wings.OfLayers`)."""

from prefixtree.states.layers import prepare_layers

__all__ = ["prepare_layers"]
