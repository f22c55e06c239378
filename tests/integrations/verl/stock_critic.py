"""verl's own critic engine with its model loaded as it is configured.

verl loads critics with flash_attention_2 whatever is set, which no CPU has. Everything but the one
argument is verl's.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from transformers import AutoModelForTokenClassification
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead


class StockCritic(FSDPEngineWithValueHead):
    """The critic that packed ones are compared with."""

    def _build_module(self) -> Any:
        load = AutoModelForTokenClassification.from_pretrained

        def from_pretrained(*args: Any, **kwargs: Any) -> Any:
            kwargs["attn_implementation"] = self.model_config.hf_config._attn_implementation
            return load(*args, **kwargs)

        with patch.object(AutoModelForTokenClassification, "from_pretrained", from_pretrained):
            return super()._build_module()
