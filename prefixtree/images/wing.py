"""The face of the wing."""

from prefixtree.images.cost import with_images
from prefixtree.images.encoder import compile_blocks
from prefixtree.images.refusals import check_images, check_sequences
from prefixtree.images.vision import PlacedImages

__all__ = [
    "PlacedImages",
    "check_images",
    "check_sequences",
    "compile_blocks",
    "with_images",
]
