"""The Megatron-Core versions that the adapter was compared with; imports nothing of it."""

from __future__ import annotations

import importlib.metadata
import warnings

from packaging.version import Version

from prefixtree.errors import UnsupportedError, missing

#: Versions that the tests ran with, from the first to the last.
TESTED = ("0.18.0", "0.19.2")


def check_version() -> None:
    """Refuses a Megatron-Core older than the tested ones, and warns of a newer one."""
    current = installed()
    first, last = (Version(v) for v in TESTED)
    if Version(current) < first:
        raise UnsupportedError(
            f"prefixtree.integrations.megatron serves megatron-core {TESTED[0]} to {TESTED[1]}; "
            f"this is {current}: install megatron-core>={TESTED[0]}"
        )
    if Version(current).release[:2] > last.release[:2]:
        warnings.warn(
            f"prefixtree: megatron-core {current} is newer than {TESTED[1]}, the last one that "
            "the adapter was tested with; compare a few log-probabilities with those of unpacked "
            "sequences before you train",
            stacklevel=2,
        )


def installed() -> str:
    """The version of Megatron-Core that is installed."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        # Megatron-LM's sources on the path, as trainers have them, bring no metadata
        try:
            from megatron.core import __version__
        except ImportError:
            package, version = "megatron-core", f"megatron-core=={TESTED[1]}"
            raise missing("prefixtree.integrations.megatron", package, version) from None
        return str(__version__)
