"""slime and miles: every distinct token of a micro-batch is computed once, and every edge scored
once.

    --custom-megatron-init-path prefixtree.integrations.slime.use_slime
    --custom-megatron-init-path prefixtree.integrations.slime.use_miles

The trainer calls that function in each of its Megatron processes before it makes the model. It
replaces three names in the trainer's modules: the class of the model, whose layer spec becomes one
for forests; the model's provider, whose models get `pack_batches`; and the function that makes
log-probabilities of logits. `forward_step`, losses, schedules and checkpoints stay the trainer's.
Written against slime 0.3.1 (624b824) and its fork miles 0.1.0 (31f1ca9).
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import torch

from prefixtree.errors import Refusal, is_set, refuse
from prefixtree.registration import when_imported

_SLIME = "slime.backends.megatron_utils"
# the teachers' server, whose tests of tokens read logits
_SERVER = f"{_SLIME}.server.logprob_utils"
_MILES, _MILES_LOSSES = "miles.backends.megatron_utils", "miles.backends.training_utils"
# log p and entropy
_COLUMNS = 2

#: Arguments of slime or miles.
REFUSALS = (
    Refusal(
        "use_routing_replay",
        lambda args: any(
            getattr(args, f"use_{kind}_replay", False)
            for kind in ("routing", "rollout_routing", "indexer", "rollout_indexer")
        ),
        "{name} (or its rollout's, or an indexer's) records a row per token of the batch, where "
        "the packed model has one per distinct token; leave it out",
    ),
    Refusal(
        "true_on_policy_mode",
        is_set("true_on_policy_mode"),
        "{name} rounds logits as SGLang does, before the softmax; leave it out",
    ),
    Refusal(
        "qkv_format",
        is_set("qkv_format", "thd", None),
        "{name}={value!r} pads rows, of which nothing would be shared; set it to thd",
    ),
    Refusal(
        "lora_rank, multi_lora",
        lambda args: getattr(args, "multi_lora", False) or getattr(args, "lora_rank", None),
        "models with adapters ({name}) are made by another function of miles, and would not be "
        "packed; leave them out",
    ),
    Refusal(
        "enable_witness",
        is_set("enable_witness"),
        "{name} embeds a number per token of the batch; leave it out",
    ),
)


def use_slime(args: Any = None) -> None:
    """Makes slime's Megatron actors pack their micro-batches.

    The model's output is then [1, tokens, 2], scores in the place of logits. Where something else
    reads logits, they stay: in critics, with `--loss-type custom_loss`, with `--rollout-top-p`
    below 1 and in the server of teachers. Prefixes are computed once either way.

    Args:
        args: slime's arguments, which it passes.

    Raises:
        UnsupportedError: an argument that is not verified (`docs/refusals.md`); from models and
            forwards, as `pack_batches`.
    """
    refuse(REFUSALS, args)
    when_imported(f"{_SLIME}.model_provider", _make_tree_models)
    when_imported(f"{_SLIME}.model", _pack_models)
    # where the function is defined, and where it was imported by name
    for name in ("loss", "actor"):
        when_imported(f"{_SLIME}.{name}", _read_scores)


def use_miles(args: Any = None) -> None:
    """Makes miles' Megatron actors pack their micro-batches, as `use_slime`.

    With `--megatron-to-hf-mode bridge` the provider of Megatron-Bridge gets the layer spec, and
    logits stay. `--rollout-top-p` changes nothing: miles' log-probabilities are over the whole
    vocabulary.
    """
    refuse(REFUSALS, args)
    when_imported(f"{_MILES}.model_provider", _make_tree_models)
    when_imported(f"{_MILES}.model", _pack_models)
    for name in (f"{_MILES_LOSSES}.loss_hub.losses", f"{_MILES}.actor"):
        when_imported(name, _read_scores)


@functools.cache
def _make_tree_models(module: ModuleType) -> None:
    from prefixtree.integrations.megatron import tree_spec

    model_class = module.GPTModel

    @functools.wraps(model_class, updated=())
    def make(*args: Any, transformer_layer_spec: Any, **kwargs: Any) -> Any:
        spec = tree_spec(transformer_layer_spec)
        return model_class(*args, transformer_layer_spec=spec, **kwargs)

    module.GPTModel = make  # type: ignore[attr-defined]
    # miles sets a provider of Megatron-Bridge up here, before it finalizes it
    configure = getattr(module, "_apply_bridge_runtime_config", None)
    if configure is not None:

        @functools.wraps(configure)
        def configure_trees(provider: Any, args: Any) -> None:
            configure(provider, args)
            provider.transformer_layer_spec = tree_spec(provider.transformer_layer_spec)

        module._apply_bridge_runtime_config = configure_trees  # type: ignore[attr-defined]


@functools.cache
def _pack_models(module: ModuleType) -> None:
    from prefixtree.integrations.megatron import pack_batches

    provider_for = module.get_model_provider_func

    @functools.wraps(provider_for)
    def packed_provider_for(args: Any, role: str = "actor") -> Any:
        provide = provider_for(args, role)
        if _is_slimes(module):
            logits = args.rollout_top_p != 1.0
        else:
            # miles replaces the forward of these models
            logits = args.megatron_to_hf_mode == "bridge"
        logits = logits or role != "actor" or args.loss_type == "custom_loss"
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
        return (logits.new_empty(0), result) if _is_slimes(module) else result

    module.get_log_probs_and_entropy = log_probs_and_entropy  # type: ignore[attr-defined]


def _is_slimes(module: ModuleType) -> bool:
    return module.__name__.startswith("slime.")
