"""A tokenizer with a token per byte, and a template that marks turns as SmolLM2's does."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def byte_tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    out = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=_SPECIAL)
    out.eos_token = out.pad_token = _SPECIAL[1]
    out.chat_template = TEMPLATE
    return out
