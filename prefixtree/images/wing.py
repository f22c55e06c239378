"""The face of the wing."""

from prefixtree.images.cost import cost_of_pictures
from prefixtree.images.refusals import check_pictures, check_sequences
from prefixtree.images.tower import compile_blocks
from prefixtree.images.vision import PlacedPictures

__all__ = [
    "PlacedPictures",
    "check_pictures",
    "check_sequences",
    "compile_blocks",
    "cost_of_pictures",
]
