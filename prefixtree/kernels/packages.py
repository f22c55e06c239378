"""Which optional packages are there."""

from functools import cache
from importlib.util import find_spec


@cache
def installed(package: str) -> bool:
    """Whether a package can be found. The answer is kept: a search takes longer than a launch."""
    return find_spec(package) is not None
