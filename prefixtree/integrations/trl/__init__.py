"""TRL: trainers for GRPO, DPO and SFT in place of TRL's (for distillation in `distillation.py`),
`tree_rollouts` to sample for them, and `use_tree_attention` for AsyncGRPO.

    from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
    PrefixTreeGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...).train()

No class of TRL is changed: the trainers are subclasses that override a few methods.
`use_tree_attention` replaces the attention that AsyncGRPO asks for, for all models of the process.
`contract.py` names what they rely on; a TRL in which that has changed is refused.
"""

from prefixtree.integrations.common import require

# runs before the modules that import TRL
require(__name__, "trl", "prefixtree-attention[trl]")

from prefixtree.integrations.trl.contract import TESTED, check_installed  # noqa: E402

# runs before imports that an older TRL lacks
check_installed()

from prefixtree.integrations.trl.data_set_trainers import (  # noqa: E402
    PrefixTreeDPOTrainer,
    PrefixTreeSFTTrainer,
)
from prefixtree.integrations.trl.dropout import ShareDropout  # noqa: E402
from prefixtree.integrations.trl.grpo import PrefixTreeGRPOTrainer  # noqa: E402
from prefixtree.integrations.trl.rollouts import tree_rollouts  # noqa: E402
from prefixtree.integrations.trl.tree_rows import use_tree_attention  # noqa: E402

__all__ = [
    "TESTED",
    "PrefixTreeDPOTrainer",
    "PrefixTreeGRPOTrainer",
    "PrefixTreeSFTTrainer",
    "ShareDropout",
    "tree_rollouts",
    "use_tree_attention",
]
