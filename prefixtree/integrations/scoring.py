"""`sequence_logprobs`: per-sequence log-probabilities of a packed forest, through the model's own
forward.

The model, wrapped or not, is called once. Inside its forward the output embedding is handed the
hidden states of the predictors, scores the edges in chunks and gives the scores in place of logits;
they come back as `output.logits`, through whatever the wrappers do to outputs. So data-parallel and
sharding wrappers see an ordinary forward, with its parameters used and its outputs returned.

Legend: S sequences, T packed tokens, R replicated tokens, U scored units (edge, temperature), P
predictors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.families import (
    check_checkpointing,
    check_config,
    check_modules,
    check_tokens,
    family_of,
)
from prefixtree.kernels.head import LogitRule
from prefixtree.kernels.logprobs import head_logprobs, linear_logprobs
from prefixtree.packing.gather import GatherPlan, gather
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import move


@dataclass(frozen=True)
class SequenceScores:
    """What a replicated batch would have given, sequence by sequence, in input order.

    Attributes:
        logprobs: float32 [n - 1] each, log p of tokens 1 .. n - 1; 0 where the loss mask is 0.
        entropy: float32 [n - 1] each, in nats, of the distributions those tokens were drawn from,
            0 where the loss mask is 0; None unless asked for.
    """

    logprobs: list[torch.Tensor]
    entropy: list[torch.Tensor] | None


def sequence_logprobs(
    model: nn.Module,
    packed: PackedForest,
    temperature: float | Sequence[float] = 1.0,
    loss_mask: Sequence[Any] | None = None,
    return_entropy: bool = False,
    chunk_size: int | None = None,
) -> SequenceScores:
    """Log-probabilities of every sequence, each distinct token computed once; differentiable.

    Args:
        model: a causal language model with attn_implementation="prefixtree", wrapped or not.
        packed: the packed forest, on the model's device.
        temperature: one number, or one a sequence; logits are divided by it.
        loss_mask: per sequence [n], nonzero where a token is scored; entry 0 has no predictor.
        return_entropy: entropies too, differentiable as well.
        chunk_size: edges whose logits are in memory at once; unless said, about 2^26 / vocabulary.

    Raises:
        UnsupportedError: a model that does not run exactly on packed forests.
        ForestError, ValueError: masks or temperatures that do not match the sequences.
    """
    causal_lm = _find_causal_lm(model)
    _check_model(model, causal_lm, packed)
    units = _make_units(packed, temperature, loss_mask)
    rule = _logit_rule(causal_lm.config)
    inputs = packed.model_inputs()
    if (rows := family_of(causal_lm.config).position_rows) > 1:
        inputs["position_ids"] = inputs["position_ids"].expand(rows, 1, -1)
    with _scoring_head(causal_lm, units, rule, return_entropy, chunk_size):
        output = model(**inputs, logits_to_keep=units.predictors)
    scores = _scores_of(output)
    columns = gather(scores, units.to_sequences).split(units.lengths)
    entropy = [c[:, 1] for c in columns] if return_entropy else None
    return SequenceScores([c[:, 0] for c in columns], entropy)


# ---- what is scored --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Units:
    """The distinct (edge, temperature) pairs.

    Attributes:
        predictors: int64 [P], packed tokens whose hidden states the head needs, ascending.
        to_predictors: from hidden states [P, d] to one row a unit [U, d].
        target: int64 [U] token ids. temperature: float32 [U].
        to_sequences: from scores [U, ...] to [R - S, ...], every sequence but its first token.
        lengths: n - 1 of each sequence.
    """

    predictors: torch.Tensor
    to_predictors: GatherPlan
    target: torch.Tensor
    temperature: torch.Tensor
    to_sequences: GatherPlan
    lengths: list[int]


def _make_units(
    packed: PackedForest, temperature: float | Sequence[float], loss_mask: Sequence[Any] | None
) -> _Units:
    forest, device = packed.forest, packed.device
    temperatures = _temperatures(temperature, forest.num_sequences)
    lengths = forest.sequence_lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    everything = np.empty(0, np.uint8)
    selected = everything if loss_mask is None else packed.flat_selection(loss_mask)
    predictor = packed.mask.plan.predictor
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
    return _Units(
        predictors=predictor_ids,
        to_predictors=GatherPlan(row.astype(np.int32), len(predictors), device),
        target=packed.model_inputs()["input_ids"][0, token_ids],
        temperature=move(torch.from_numpy(np.concatenate(unit_temperature)), device),
        to_sequences=GatherPlan(np.delete(unit_of_copy, offsets[:-1]), count, device),
        lengths=(lengths - 1).tolist(),
    )


def _temperatures(temperature: float | Sequence[float], count: int) -> np.ndarray:
    if isinstance(temperature, torch.Tensor):
        temperature = temperature.tolist()
    values = np.asarray(temperature, np.float32).astype(np.float64)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != count):
        raise ValueError(
            f"temperature must be one number or one a sequence ({count}), got shape "
            f"{list(values.shape)}"
        )
    if not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(f"temperatures must be finite and above 0, got {temperature}")
    return np.broadcast_to(values, count)


# ---- the model -------------------------------------------------------------------------------


def _find_causal_lm(model: nn.Module) -> Any:
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            if module.get_output_embeddings() is None:
                break
            return module
    raise UnsupportedError(
        f"sequence_logprobs needs a transformers model with a language-model head, such as "
        f"AutoModelForCausalLM gives; {type(model).__name__} has none"
    )


def _check_model(model: nn.Module, causal_lm: Any, packed: PackedForest) -> None:
    config = causal_lm.config
    check_config(config, causal_lm.training)
    if (text := config.get_text_config()) is not config:
        check_config(text, causal_lm.training)
    check_modules(model)
    if causal_lm.training and torch.is_grad_enabled():
        check_checkpointing(causal_lm, text)
    if packed.forest.tokens is not None:
        check_tokens(config, packed.forest.tokens)
    if config._attn_implementation != "prefixtree":
        raise UnsupportedError(
            f"the model runs attn_implementation={config._attn_implementation!r}, which ignores "
            'the tree; load it with attn_implementation="prefixtree" or call '
            'model.set_attn_implementation("prefixtree")'
        )
    device = next(causal_lm.parameters()).device
    # parameters on the CPU may be offloaded ones: then the forward will tell
    if device.type not in ("cpu", "meta") and device != packed.device:
        raise ValueError(
            f"the packed forest is on {packed.device}, the model on {device}: "
            "call packed = packed.to(model.device)"
        )


def _logit_rule(config: Any) -> LogitRule:
    family = family_of(config)
    config = config.get_text_config()

    def number(name: str | None) -> float | None:
        value = None if name is None else getattr(config, name, None)
        return None if value is None else float(value)

    scale = number(family.scale) or 1.0
    return LogitRule(scale / (number(family.divisor) or 1.0), number(family.softcap) or 0.0)


@contextmanager
def _scoring_head(
    causal_lm: Any,
    units: _Units,
    rule: LogitRule,
    with_entropy: bool,
    chunk_size: int | None,
) -> Iterator[None]:
    """While open, the output embedding scores `units` and the model's logits are the scores."""
    head = causal_lm.get_output_embeddings()
    _check_hooks(head)
    head_forward, lm_forward = head.forward, causal_lm.forward
    plain = _is_plain_linear(head) and "forward" not in vars(head)
    scores: list[torch.Tensor] = []

    def score(hidden: torch.Tensor) -> torch.Tensor:
        rows = gather(hidden[0], units.to_predictors)
        rest = (units.target, units.temperature, rule, with_entropy, chunk_size)
        if plain:
            result = linear_logprobs(rows, head.weight, head.bias, *rest)
        else:
            vocabulary = causal_lm.config.get_text_config().vocab_size
            result = head_logprobs(head_forward, vocabulary, rows, *rest)
        # no view: in-place arithmetic on one would lose the hooks of sharding wrappers
        return result[None].clone()

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        # behind the hooks of a wrapper of the head: what they return is what it can follow
        scores.append(output)

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = lm_forward(*args, **kwargs)
        if len(scores) != 1 or not hasattr(output, "logits"):
            raise UnsupportedError(
                f"{type(causal_lm).__name__} called its output embedding {len(scores)} times in "
                f"one forward and returned a {type(output).__name__}; expected once, and an "
                "output with logits (config.return_dict)"
            )
        # not what the family's own treatment of logits made of the scores
        output.logits = scores.pop()
        return output

    handle = head.register_forward_hook(keep)
    # they are other functions in every call, which torch.compile(model) would trace anew each time;
    # the model's own forward, called inside, is compiled
    outer = torch.compiler.disable(forward, recursive=False)
    inner = torch.compiler.disable(score)
    with _own_forward(head, inner), _own_forward(causal_lm, outer):
        try:
            yield
        finally:
            handle.remove()


@contextmanager
def _own_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Gives one module another forward; what wrapped it before (accelerate's autocast) returns."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


def _check_hooks(head: nn.Module) -> None:
    for hook in head._forward_hooks.values():
        # sharding wrappers' own are fine: they return what they get
        if not (getattr(hook, "__module__", None) or "").startswith("torch."):
            raise UnsupportedError(
                f"the output embedding has a forward hook ({hook!r}): it would see scores, never "
                "logits; remove it while scoring"
            )


def _scores_of(output: Any) -> torch.Tensor:
    """The scores [U, columns] of what the outermost module returned."""
    scores = getattr(output, "logits", None)
    if not isinstance(scores, torch.Tensor):
        raise UnsupportedError(
            f"the wrapped model returned a {type(output).__name__} without logits; a wrapper's "
            "forward must return the model's output"
        )
    if scores.dtype != torch.float32:
        raise UnsupportedError(
            f"a wrapper cast the log-probabilities to {scores.dtype}; keep outputs in float32 "
            "(MixedPrecisionPolicy(output_dtype=torch.float32) for FSDP2)"
        )
    return scores[0]


def _is_plain_linear(head: nn.Module) -> bool:
    # sharding wrappers change the class by a subclass of the same forward
    return isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
