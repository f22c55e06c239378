"""Which optional packages are there."""

from __future__ import annotations

from prefixtree.kernels.runtime import installed


def test_a_package_is_there_or_not() -> None:
    assert installed("torch") and not installed("a_package_that_nobody_wrote")
