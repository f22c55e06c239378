"""TRL: `PrefixTreeGRPOTrainer` in place of `GRPOTrainer`, and `use_tree_attention` for AsyncGRPO.

    from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
    PrefixTreeGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...).train()

Nothing of TRL is patched: the trainer is a subclass that overrides four methods, and the attention
is registered with transformers under the name that AsyncGRPO asks for. `contract.py` names what
both rely on; another TRL is refused where that has changed.
"""

from prefixtree.integrations.trl.contract import TESTED
from prefixtree.integrations.trl.grpo import PrefixTreeGRPOTrainer
from prefixtree.integrations.trl.tree_rows import use_tree_attention

__all__ = ["TESTED", "PrefixTreeGRPOTrainer", "use_tree_attention"]
