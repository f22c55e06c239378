"""`sequence_logprobs`: per-sequence log-probabilities of a packed forest, through a model.

The model, wrapped or not, is called once. Inside its forward the lm_head gets the hidden states of
the predictors, scores the edges in chunks and returns the scores in place of logits. They come back
as `output.logits`, after whatever the wrappers do to outputs. So data-parallel and sharding
wrappers see an ordinary forward, which uses its parameters and returns its outputs.

Legend: S sequences, T packed tokens, R replicated tokens, U scored units (edge, temperature), P
predictors, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree.integrations.families import forward_inputs
from prefixtree.integrations.hybrids import prepare_states
from prefixtree.integrations.model_checks import check_model, every_layer_attends, find_causal_lm
from prefixtree.integrations.recompute.forward import Recompute, recomputed_forward
from prefixtree.integrations.replay import check_routes, replaying
from prefixtree.integrations.router_loss import router_keywords, router_loss
from prefixtree.integrations.scoring_lm_head import Units, logit_rule, scoring_lm_head
from prefixtree.kernels.logit_statistics import check_statistics
from prefixtree.packing.gather import GatherIndex, gather
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.transfers import move

# logits up to 3e8 divided by it are finite in float32
_LEAST_TEMPERATURE = 1e-30


@dataclass(frozen=True)
class SequenceScores:
    """The scores of a replicated batch, sequence by sequence, in input order.

    Attributes:
        logprobs: one float32 tensor [n - 1] per sequence, on the model's device: the natural
            log-probabilities of tokens 1 .. n - 1; 0 where the loss mask is 0.
        entropy: one float32 tensor [n - 1] per sequence, in nats: the entropies of the
            distributions of those tokens; 0 where the loss mask is 0. None without
            `return_entropy`.
        statistics: name -> one float32 tensor [n - 1] per sequence, without gradients; 0 where the
            loss mask is 0. It has the names of `return_statistics`.
        aux_loss: float32 [], differentiable: the load-balancing loss of a mixture of experts, as
            transformers' forward gives it for one padded batch of all sequences with its
            attention_mask. It is not yet multiplied by `config.router_aux_loss_coef`. None where
            it was not asked for.
        router_logits: [T, E] per layer of experts, differentiable, the logits by which
            `aux_loss` was computed, for losses of your own: weigh each packed token by
            `packed.multiplicity`. Empty without `aux_loss`.
    """

    logprobs: list[torch.Tensor]
    entropy: list[torch.Tensor] | None
    statistics: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    aux_loss: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] = ()


def sequence_logprobs(
    model: nn.Module,
    packed: PackedForest,
    temperature: float | Sequence[float] = 1.0,
    loss_mask: Sequence[Any] | None = None,
    return_entropy: bool = False,
    chunk_size: int | None = None,
    recompute: Recompute = None,
    return_statistics: Sequence[str] = (),
    output_router_logits: bool | None = None,
) -> SequenceScores:
    """Scores every sequence of a packed forest; the model runs once, over the distinct tokens.

    Log-probabilities and entropies are differentiable. The gradients are those of the replicated
    batch, up to rounding.

    Args:
        model: a causal language model of transformers with attn_implementation="prefixtree",
            wrapped (DDP, FSDP, PEFT) or not.
        packed: the packed forest, on the model's device. Where it has routes, the model's routers
            take them in the place of their own choice.
        temperature: the divisor of the logits, above 0: one number, or one per sequence.
            Default: 1.0.
        loss_mask: one mask per sequence, [n], nonzero where a token is scored; entry 0 has no
            predictor and is ignored. Default: every token is scored.
        return_entropy: whether to compute entropies too. Default: False.
        chunk_size: the number of edges whose logits are in memory at once. Default: with the
            Triton kernels, about 512 MiB of logits; otherwise about 2^26 / vocabulary edges
            (2^22 / vocabulary on a CPU).
        recompute: what layers compute again in the backward. "auto": as little as the free memory
            allows, planned anew for each forest (`plan_recomputation`). "all" (gradient
            checkpointing), "all_but_attention" (outputs of attention and of recurrences are kept)
            or "nothing": the same in all layers. Or a `RecomputePlan`. Default: None, as the model
            is set.
        return_statistics: which statistics of the distributions to compute too, without gradients:
            "mean_logits", the mean over the vocabulary of the logits divided by the temperature;
            "is_top1", 1 where the token has the largest logit (the first of equal ones);
            "log_sum_sq_probs", log sum p^2. Default: none.
        output_router_logits: whether to compute the load-balancing loss of a mixture of experts,
            `scores.aux_loss`. Default: what `config.output_router_logits` says.

    Returns:
        SequenceScores: log-probabilities (entropies, statistics), one tensor per sequence.

    Raises:
        TypeError: anything but a PackedForest, or a temperature that is no number.
        UnsupportedError: a model that does not run exactly on packed forests, with the reason.
        ForestError: masks that do not match the sequences, or a forest without token ids.
        ValueError: temperatures that do not match the sequences, or are not finite and above 0; a
            statistic that is not known; an unknown `recompute`, or a plan for another model; routes
            of other numbers of layers or experts than the model has.
        torch.OutOfMemoryError: recompute="auto" and a forest that does not fit with every layer
            recomputed; nothing was computed.
    """
    statistics = check_statistics(return_statistics)
    if not isinstance(packed, PackedForest):
        raise TypeError(
            f"sequence_logprobs takes a packed forest, got {type(packed).__name__}; "
            "pack(PrefixForest.from_sequences(sequences)) makes one"
        )
    causal_lm = find_causal_lm(model)
    check_model(model, causal_lm, packed)
    prepare_states(causal_lm)
    check_routes(model, causal_lm, packed)
    units = _make_units(packed, temperature, loss_mask)
    rule = logit_rule(causal_lm)
    loss = router_loss(causal_lm, packed, output_router_logits)
    inputs = forward_inputs(packed, causal_lm.config) | router_keywords(causal_lm.config, loss)
    with (
        recomputed_forward(
            model,
            causal_lm,
            packed,
            len(units.target),
            recompute,
            0 if loss is None else loss.held_bytes(),
        ),
        every_layer_attends(causal_lm, packed),
        replaying(causal_lm, packed),
        scoring_lm_head(
            causal_lm, units, rule, return_entropy, chunk_size, statistics, loss
        ) as handed,
    ):
        if loss is not None:
            loss.check()
        output = model(**inputs, logits_to_keep=units.predictors)
    scores = handed.returned(output)
    columns = gather(scores, units.to_sequences).split(units.lengths)
    entropy = [c[:, 1] for c in columns] if return_entropy else None
    others = {
        name: [c[:, at].detach() for c in columns]
        for at, name in enumerate(statistics, 1 + return_entropy)
    }
    logprobs = [c[:, 0] for c in columns]
    if loss is None:
        return SequenceScores(logprobs, entropy, others)
    return SequenceScores(logprobs, entropy, others, output.aux_loss, tuple(output.router_logits))


# ---- what is scored --------------------------------------------------------------------------


def _make_units(
    packed: PackedForest, temperature: float | Sequence[float], loss_mask: Sequence[Any] | None
) -> Units:
    forest, device = packed.forest, packed.device
    temperatures = _temperatures(temperature, forest.num_sequences)
    lengths = forest.sequence_lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    everything = np.empty(0, np.uint8)
    selected = everything if loss_mask is None else packed.flat_selection(loss_mask)
    predictor = packed.mask.host.predictor
    unit_of_copy = np.full(offsets[-1], -1, np.int32)
    tokens, unit_temperature, count = [], [], 0
    for value in np.unique(temperatures):
        sequences = np.flatnonzero(temperatures == value)
        index, _ = packed.copy_index(sequences, selected)
        scored = np.zeros(packed.num_tokens, bool)
        scored[index] = True
        token = np.flatnonzero(scored & (predictor >= 0))
        unit_of_token = np.full(packed.num_tokens, -1, np.int32)
        unit_of_token[token] = count + np.arange(len(token))
        # where the group's tokens stand among all replicated ones
        each = lengths[sequences]
        place = np.repeat(offsets[sequences] - (np.cumsum(each) - each), each)
        place += np.arange(len(place))
        if loss_mask is not None:
            place = place[selected[place] != 0]
        unit_of_copy[place] = unit_of_token[index]
        tokens.append(token)
        unit_temperature.append(np.full(len(token), value, np.float32))
        count += len(token)
    token = np.concatenate(tokens)
    predictors, row = np.unique(predictor[token], return_inverse=True)
    # two moves: the integers and the temperatures
    both = move(torch.from_numpy(np.concatenate([predictors.astype(np.int64), token])), device)
    predictor_ids, token_ids = both.split([len(predictors), len(token)])
    return Units(
        predictors=predictor_ids,
        to_predictors=GatherIndex(row.astype(np.int32), len(predictors), device),
        target=packed.model_inputs()["input_ids"][0, token_ids],
        temperature=move(torch.from_numpy(np.concatenate(unit_temperature)), device),
        to_sequences=GatherIndex(np.delete(unit_of_copy, offsets[:-1]), count, device),
        lengths=(lengths - 1).tolist(),
    )


def _temperatures(temperature: float | Sequence[float], count: int) -> np.ndarray:
    values = _as_numbers(temperature)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != count):
        raise ValueError(
            f"temperature must be one number or one per sequence ({count}), got shape "
            f"{list(values.shape)}"
        )
    if not (np.isfinite(values) & (values >= _LEAST_TEMPERATURE)).all():
        raise ValueError(
            f"temperatures must be finite and above 0 (at least {_LEAST_TEMPERATURE}, or logits "
            f"divided by them overflow float32), got {temperature}"
        )
    return np.broadcast_to(values, count)


def _as_numbers(temperature: Any) -> np.ndarray:
    """The temperature as float64, rounded to float32, in which the logits are divided."""
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.tolist()
    with suppress(TypeError, ValueError):
        # numpy takes truth values and the digits of a string for numbers
        if np.asarray(temperature).dtype.kind not in "bcSU":
            return np.asarray(temperature, np.float32).astype(np.float64)
    raise TypeError(f"temperature must be a number or one number per sequence, got {temperature!r}")
