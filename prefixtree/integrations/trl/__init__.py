"""TRL: trainers for GRPO, RLOO, DPO, KTO, SFT and rewards in place of TRL's (for distillation in
`distillation.py`), `tree_rollouts` to sample for them, and `use_tree_attention` for AsyncGRPO.

    from prefixtree.integrations.trl import PrefixTreeGRPOTrainer
    PrefixTreeGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=...).train()

No class of TRL is changed: the trainers are subclasses that override a few methods.
`use_tree_attention` replaces the attention that AsyncGRPO asks for, for all models of the process.
`contract.py` names what they rely on; a TRL in which that has changed is refused. The module of a
trainer, and TRL's with it, is imported where its name is.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from prefixtree.errors import near_name
from prefixtree.integrations.common import require

# runs before the modules that import TRL
require(__name__, "trl", "prefixtree-attention[trl]")

from prefixtree.integrations.trl.contract import TESTED, check_oldest, importing  # noqa: E402

check_oldest()

if TYPE_CHECKING:
    from prefixtree.integrations.trl.data_set_trainers import (
        PrefixTreeDPOTrainer,
        PrefixTreeSFTTrainer,
    )
    from prefixtree.integrations.trl.dropout import ShareDropout
    from prefixtree.integrations.trl.grpo import PrefixTreeGRPOTrainer
    from prefixtree.integrations.trl.kto import PrefixTreeKTOTrainer
    from prefixtree.integrations.trl.reward import PrefixTreeRewardTrainer
    from prefixtree.integrations.trl.rloo import PrefixTreeRLOOTrainer
    from prefixtree.integrations.trl.rollouts import tree_rollouts
    from prefixtree.integrations.trl.tree_rows import use_tree_attention

__all__ = [
    "TESTED",
    "PrefixTreeDPOTrainer",
    "PrefixTreeGRPOTrainer",
    "PrefixTreeKTOTrainer",
    "PrefixTreeRLOOTrainer",
    "PrefixTreeRewardTrainer",
    "PrefixTreeSFTTrainer",
    "ShareDropout",
    "tree_rollouts",
    "use_tree_attention",
]

_MODULES = {
    "PrefixTreeDPOTrainer": "data_set_trainers",
    "PrefixTreeGRPOTrainer": "grpo",
    "PrefixTreeKTOTrainer": "kto",
    "PrefixTreeRLOOTrainer": "rloo",
    "PrefixTreeRewardTrainer": "reward",
    "PrefixTreeSFTTrainer": "data_set_trainers",
    "ShareDropout": "dropout",
    "tree_rollouts": "rollouts",
    "use_tree_attention": "tree_rows",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        mend = near_name(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{mend}")
    # another TRL may not have all that the module imports
    with importing():
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
