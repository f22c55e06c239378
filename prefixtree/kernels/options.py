"""What shapes the scores besides the mask: shared by backends, which never import each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """Numbers of one call of `tree_attention`.

    Attributes:
        scale: factor on q k^T.
        window: depth distance; 0 for none.
        softcap: c in c tanh(scale q k^T / c); 0 for none.
        deterministic: gradients bitwise repeatable.
        lse_used: whether the caller sees lse, known in the forward alone; where not, it is saved
            for the backward and nothing else.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    deterministic: bool = False
    lse_used: bool = False
