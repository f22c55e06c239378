"""`ShareDropout`: LoRA's dropout in TRL's trainers, whose `ModelConfig` sets it to 0.05."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from prefixtree.models.dropout import share_dropout
from prefixtree.packing.arguments import at_least_one


class ShareDropout(TrainerCallback):
    """Has LoRA's dropout draw one mask per distinct token (`prefixtree.share_dropout`).

        PrefixTreeGRPOTrainer(..., peft_config=..., callbacks=[ShareDropout()])

    With `disable_dropout=True`, the default of DPO, KTO and rewards, nothing is dropped, as in TRL.

    Args:
        seed: of the first optimizer step; each later one has the next. Default: 0.
        steps: optimizer steps that have one seed. In GRPO, those of a generation
            (`steps_per_generation` x `num_iterations` / `gradient_accumulation_steps`): then old
            log-probabilities and the policy's have the same masks. Default: 1.

    Raises:
        ValueError: steps below 1.
    """

    def __init__(self, seed: int = 0, steps: int = 1) -> None:
        self.seed, self.steps = seed, at_least_one("steps", steps)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._share(state, **kwargs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._share(state, **kwargs)

    def _share(self, state: Any, model: nn.Module, **kwargs: Any) -> None:
        share_dropout(model, self.seed + state.global_step // self.steps)
