"""The face of the wing (`prefixtree.wings.OfLayers`)."""

from prefixtree.sparse.indexers import prepare_layers
from prefixtree.sparse.masks import UnpreparedMask, not_kept, plain_mask

__all__ = ["UnpreparedMask", "not_kept", "plain_mask", "prepare_layers"]
