"""veRL: importing this registers engines that pack each micro-batch into its prefix forest.

    actor_rollout_ref.model.external_lib=prefixtree.integrations.verl
    +actor_rollout_ref.model.override_config.attn_implementation=prefixtree

The first setting makes verl import this module in every worker before engines are made. The second
switches packing on; without it the engines are verl's own. The trainer that keeps groups on one
rank is in `prefixtree.integrations.verl.trainer`. See docs/verl.md.
"""

import prefixtree.integrations.transformers  # noqa: F401  (registers the attention)
from prefixtree.integrations.verl.version import check_version

# before the engines, whose imports may not exist in another version
check_version()

from prefixtree.integrations.verl.engine import (  # noqa: E402
    PackedActorEngine,
    PackedCriticEngine,
)

__all__ = ["PackedActorEngine", "PackedCriticEngine"]
