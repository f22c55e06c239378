"""Hugging Face transformers: importing this registers `attn_implementation="prefixtree"`.

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="prefixtree")
    scores = prefixtree.sequence_logprobs(model, packed)

The registered functions are in `models.attention`. The same model generates.
"""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface, __version__

from prefixtree.integrations.common import check_transformers
from prefixtree.models.attention import prefixtree_attention, prefixtree_mask
from prefixtree.models.families import allow_model_type, supported_model_types
from prefixtree.models.prepared import prepare

__all__ = ["allow_model_type", "prepare", "supported_model_types"]

_NAME = "prefixtree"

# other versions import too, and call both functions with other arguments
check_transformers(__version__)
AttentionInterface.register(_NAME, prefixtree_attention)
AttentionMaskInterface.register(_NAME, prefixtree_mask)
