"""A function of flash-attn-4 as it would be if its module had other names in some places.

Nothing of flash-attn-4 is changed for it: the copy has globals of its own.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


def copied(call: Any, compile_cache: Any, names: dict[str, Any]) -> Any:
    """A copy of `_flash_attn_bwd`, or of another copy.

    Args:
        call: the function.
        compile_cache: where the copy keeps compiled kernels; it looks for it at its own name.
        names: what stands in the place of its module's names.
    """
    scope = dict(call.__globals__)
    made: Any = FunctionType(call.__code__, scope, call.__name__, call.__defaults__)
    made.compile_cache = compile_cache
    scope |= {call.__name__: made, **names}
    return made
