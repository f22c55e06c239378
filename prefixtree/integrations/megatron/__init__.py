"""Megatron-Core models on packed forests: `tree_spec`, `tree_logprobs` and `pack_batches`.

    spec = tree_spec(get_gpt_layer_local_spec(...))  # or any other layer spec with self-attention
    model = GPTModel(config, spec, ...)              # parameters and checkpoints as before

    scores = tree_logprobs(model, packed)            # a forest in, scored edges out
    pack_batches(model)                              # or: any THD batch, each distinct token once

No class of Megatron is changed: those that a spec names are subclassed, and a batch that is no
forest takes their code. `pack_batches` adds hooks to a model. `tree_logprobs` replaces the forward
of its output layer for one call. Importing this needs megatron-core.
"""

from prefixtree.integrations.megatron.version import check_version

check_version()

from prefixtree.integrations.megatron.batch_packing import pack_batches  # noqa: E402
from prefixtree.integrations.megatron.checks import check_model  # noqa: E402
from prefixtree.integrations.megatron.layers import tree_spec  # noqa: E402
from prefixtree.integrations.megatron.scoring import tree_logprobs, tree_outputs  # noqa: E402

__all__ = ["check_model", "pack_batches", "tree_logprobs", "tree_outputs", "tree_spec"]
