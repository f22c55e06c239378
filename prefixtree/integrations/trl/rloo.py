"""`PrefixTreeRLOOTrainer`: TRL's RLOO with every distinct token of a step computed once."""

from __future__ import annotations

from trl import RLOOTrainer

from prefixtree.integrations.trl.grpo import SharesGenerations


class PrefixTreeRLOOTrainer(SharesGenerations, RLOOTrainer):
    """Trains as `trl.RLOOTrainer` does, and computes each distinct token once.

    Losses, gradients and metrics are the same. What differs from `RLOOTrainer` is what differs in
    `PrefixTreeGRPOTrainer`: log-probabilities come from packed forests, and micro-batches are
    shuffled, not rows. RLOO has no `rollout_func` and no tools.

    Args:
        recompute: as in `PrefixTreeGRPOTrainer`.
        max_tokens: as in `PrefixTreeGRPOTrainer`.
        keep_trunks: as in `PrefixTreeGRPOTrainer`.
        *args: as in `trl.RLOOTrainer`.
        **kwargs: as in `trl.RLOOTrainer`.

    Raises:
        UnsupportedError: a setting, a model or a batch that is not verified (`docs/refusals.md`).
    """

    trl_class = RLOOTrainer
