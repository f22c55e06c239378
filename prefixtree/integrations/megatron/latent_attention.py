"""`ForestLatentAttention`: Megatron's latent attention (MLA) along a packed forest.

Latent attention makes its rotary table itself and applies row i to token i. Wherever it is handed
packed parameters it also squeezes the batch away, for code that reads cu_seqlens. So its queries
and keys are made without them, from a table with a row per packed token, and only its core
attention sees the forest.

Legend: T packed tokens, P positions, D rotary dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from prefixtree.integrations.megatron.parameters import ForestParams

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention as _Attention
else:
    _Attention = object


class ForestLatentAttention(_Attention):
    """Stands before MLASelfAttention: the rotary positions of a forest are its depths."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """hidden_states [T, 1, d] of a forest, or a rank's part of them -> queries and keys
        [T, 1, H, qk + D], values [T, 1, H, v] and the compressed ones."""
        make = super().get_query_key_value_tensors
        if not isinstance(packed_seq_params, ForestParams):
            given = (key_value_states, position_ids, packed_seq_params)
            return make(hidden_states, *given, *args, **kwargs)
        # before the submodule, whose place it takes for this call
        self.__dict__["rotary_pos_emb"] = _AtDepths(self.rotary_pos_emb, packed_seq_params)
        try:
            return make(hidden_states, key_value_states, position_ids, None, *args, **kwargs)
        finally:
            del self.__dict__["rotary_pos_emb"]


class _AtDepths:
    """Megatron's rotary embedding of latent attention, with a row per packed token.

    Args:
        rotary: the layer's own.
        params: of the forest.
    """

    def __init__(self, rotary: Any, params: ForestParams) -> None:
        self._rotary, self._params = rotary, params

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        return int(self._params.max_seqlen_q)

    def __call__(self, length: int, packed_seq: bool = False) -> Any:
        """The table [T, 1, 1, D]; with YaRN also its factor."""
        # whole, as of packed sequences: context parallelism would cut it
        return self._params.latent_rows(lambda: self._rotary(length, packed_seq=True))


def is_served_latent(module: Any) -> bool:
    """Whether a class is Megatron's latent attention, and attends as that does."""
    return (
        isinstance(module, type)
        and issubclass(module, MLASelfAttention)
        and all(
            getattr(module, name) is getattr(MLASelfAttention, name)
            for name in ("forward", "get_query_key_value_tensors", "_qkv_down_projection")
        )
    )
