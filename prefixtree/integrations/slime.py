"""slime: every distinct token of a micro-batch is computed once, and every edge scored once.

    --custom-megatron-init-path prefixtree.integrations.slime.use_slime

slime calls that function in each of its Megatron processes before it makes the model. It replaces
three names in slime's modules: the class of the model, whose layer spec becomes one for forests;
the model's provider, whose models get `pack_batches`; and the function that makes log-probabilities
of logits. `forward_step`, losses, schedules and checkpoints stay slime's. Written against slime
0.3.1.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import torch

from prefixtree.registration import when_imported

_ROOM = "slime.backends.megatron_utils"
# the teachers' server, whose tests of tokens read logits
_SERVER = f"{_ROOM}.server.logprob_utils"
# log p and entropy
_COLUMNS = 2


def use_slime(args: Any = None) -> None:
    """Makes slime's Megatron actors pack their micro-batches.

    The model's output is then [1, tokens, 2], scores in the place of logits. Where something else
    reads logits, they stay: in critics, with `--loss-type custom_loss`, with `--rollout-top-p`
    below 1 and in the server of teachers. Prefixes are computed once either way.

    Args:
        args: slime's arguments, which it passes. They are not read.

    Raises:
        UnsupportedError: from models and forwards, as `pack_batches`.
    """
    when_imported(f"{_ROOM}.model_provider", _make_tree_models)
    when_imported(f"{_ROOM}.model", _pack_models)
    # where the function is defined, and where it was imported by name
    for name in ("loss", "actor"):
        when_imported(f"{_ROOM}.{name}", _read_scores)


@functools.cache
def _make_tree_models(module: ModuleType) -> None:
    from prefixtree.integrations.megatron import tree_spec

    model_class = module.GPTModel

    @functools.wraps(model_class, updated=())
    def make(*args: Any, transformer_layer_spec: Any, **kwargs: Any) -> Any:
        spec = tree_spec(transformer_layer_spec)
        return model_class(*args, transformer_layer_spec=spec, **kwargs)

    module.GPTModel = make  # type: ignore[attr-defined]


@functools.cache
def _pack_models(module: ModuleType) -> None:
    from prefixtree.integrations.megatron import pack_batches

    provider_for = module.get_model_provider_func

    @functools.wraps(provider_for)
    def packed_provider_for(args: Any, role: str = "actor") -> Any:
        provide = provider_for(args, role)
        logits = role != "actor" or args.loss_type == "custom_loss" or args.rollout_top_p != 1.0
        temperature = None if logits or _SERVER in sys.modules else args.rollout_temperature

        @functools.wraps(provide)
        def packed(*given: Any, **more: Any) -> Any:
            return pack_batches(provide(*given, **more), temperature)

        return packed

    module.get_model_provider_func = packed_provider_for  # type: ignore[attr-defined]


@functools.cache
def _read_scores(module: ModuleType) -> None:
    of_logits = module.get_log_probs_and_entropy

    @functools.wraps(of_logits)
    def log_probs_and_entropy(
        logits: torch.Tensor,
        *,
        total_lengths: list[int],
        response_lengths: list[int],
        with_entropy: bool = False,
        **more: Any,
    ) -> Any:
        lengths = {"total_lengths": total_lengths, "response_lengths": response_lengths}
        if logits.shape[-1] != _COLUMNS:
            return of_logits(logits, **lengths, with_entropy=with_entropy, **more)
        ends = torch.tensor(total_lengths).cumsum(0).tolist()
        # the scores of a response stand before its tokens
        scores_of_rows = [
            logits[0, end - response - 1 : end - 1].unbind(1)
            for end, response in zip(ends, response_lengths, strict=True)
        ]
        result = {"log_probs": [scores for scores, _ in scores_of_rows]}
        if with_entropy:
            result["entropy"] = [entropy for _, entropy in scores_of_rows]
        return logits.new_empty(0), result

    module.get_log_probs_and_entropy = log_probs_and_entropy  # type: ignore[attr-defined]
