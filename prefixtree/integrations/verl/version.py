"""The verl version that these engines extend; imports nothing of it."""

from __future__ import annotations

import importlib.metadata

from prefixtree.errors import UnsupportedError, missing

# those that tests/integrations/verl passes with: engines change in patch releases too, and a
# change that went unseen could train on wrong gradients
VERIFIED = ("0.9.1",)


def check_version() -> None:
    """Refuses a verl whose engines may differ from those that were compared."""
    try:
        installed = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        raise missing(
            "prefixtree.integrations.verl", "verl", "prefixtree-attention[verl]"
        ) from None
    if installed not in VERIFIED:
        raise UnsupportedError(
            f"prefixtree.integrations.verl extends the engines of verl {', '.join(VERIFIED)}; this "
            f"is verl {installed}, whose engines may differ: install verl=={VERIFIED[-1]}"
        )
