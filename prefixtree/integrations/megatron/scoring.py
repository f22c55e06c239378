"""`tree_logprobs`: a packed forest through a Megatron model, each edge scored once.

The output layer is replaced for one forward. It gets the last hidden states, scores the edges in
chunks over the vocabulary of all ranks, and returns scores in the place of logits. So wrappers and
the hooks of the output layer, which may gather its weight, see an ordinary forward.

Legend: T packed tokens, P predictors, U scored edges, one per temperature, W vocabulary entries of
this rank, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from prefixtree.errors import ForestError, UnsupportedError, with_hints
from prefixtree.integrations.megatron.checks import (
    check_model,
    every_layer_attends,
    find_model,
    routed_tokens,
)
from prefixtree.integrations.megatron.context_parallel import (
    Alone,
    ForestParams,
    LocalForest,
    local_forest,
)
from prefixtree.integrations.megatron.routers import check_routes
from prefixtree.kernels.lm_head.eager import VocabularySlice
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs, lm_head_logprobs
from prefixtree.kernels.lm_head.measures import Measure
from prefixtree.models.changes import changing
from prefixtree.packing.copies import gather
from prefixtree.packing.layout import PackedForest
from prefixtree.planning.micro_batch import MicroBatch, own_of, packed_of
from prefixtree.scoring.edges import (
    DeviceEdges,
    ScoredEdges,
    SequenceScores,
    find_edges,
    scores_of,
)
from prefixtree.scoring.lm_head import Handed
from prefixtree.scoring.sampling_masks import over_sets


@with_hints
def tree_logprobs(
    model: Any,
    packed: PackedForest | MicroBatch,
    temperature: float | Sequence[Any] = 1.0,
    loss_mask: Sequence[Any] | None = None,
    *,
    return_entropy: bool = False,
    measure: Measure | None = None,
    sampling_masks: Sequence[Any] | None = None,
    chunk_size: int | None = None,
) -> SequenceScores | torch.Tensor:
    """Computes the log-probability of every token of every sequence; shared prefixes run once.

    Call it in a `forward_step`, on every pipeline stage, tensor- and context-parallel rank, with
    the same arguments. Ranks of Megatron's context-parallel group compute a part of the tokens
    each. Log-probabilities and entropies are differentiable. Their gradients are those of the
    replicated batch, up to rounding, after Megatron's own `finalize_model_grads`. The softmax is
    over the vocabulary as Megatron pads it, like that of its losses.

    Args:
        model: a GPTModel or HybridModel built from `tree_spec`, wrapped by Megatron's DDP or
            Float16Module or not; one stage, or one virtual stage.
        packed: the packed forest, on the model's device; under sequence parallelism padded to a
            multiple of the tensor-parallel size (`pack(forest, pad_to_multiple_of=size)`). If it
            has routes, the routers run these experts. Or a MicroBatch, as in `sequence_logprobs`.
        temperature: the divisor of the logits, above 0: as in `sequence_logprobs`. Default: 1.0.
        loss_mask: one mask [n] per sequence, 1 where a token is scored and 0 elsewhere. Entry 0 is
            ignored, as the first token has no predictor. Default: every token is scored.
        return_entropy: whether to compute entropies too. Default: False.
        measure: as in `sequence_logprobs`, of the logits of the whole padded vocabulary: under
            tensor parallelism each rank gathers them chunk by chunk, and measures all. Default:
            none.
        sampling_masks: as in `sequence_logprobs`. Ranks gather logits as for `measure`. Default:
            the whole vocabulary.
        chunk_size: the number of edges whose logits are in memory at once, the same on all ranks.
            Default: as in `sequence_logprobs`.

    Returns:
        On the last stage SequenceScores, the same on every tensor- and context-parallel rank:
        float32, or float64 from a model in float64. On earlier stages the hidden states [T, 1, d]
        that the schedule sends on (a part of the T rows under sequence or context parallelism).

    Raises:
        TypeError: `packed` that is no PackedForest and no MicroBatch, or a temperature that is no
            number.
        UnsupportedError: a model or a setting with which forests are not exact, with the reason.
        ForestError: masks that do not match the sequences or hold anything but 0 and 1, or a forest
            that has no token ids or lacks padding.
        ValueError: temperatures that do not match the sequences, are not finite and above 0, or
            require a gradient; a measure that does not return [r, C]; a chunk_size that is no
            integer >= 1; tokens or a device that do not match the model; context-parallel ranks
            whose calls differ.
        RuntimeError: another context-parallel rank refused the call.
    """
    forest_or_batch, language_model = packed, find_model(model)
    packed = packed_of(forest_or_batch, "tree_logprobs", lambda: _device_of(language_model))
    options = ScoreOptions(return_entropy, chunk_size=chunk_size, measure=measure)

    def check() -> ScoredEdges:
        check_model(language_model)
        needs_rows = measure is not None or sampling_masks is not None
        if needs_rows and language_model.config.context_parallel_size > 1:
            raise UnsupportedError(
                "measure= and sampling_masks= are not verified under context parallelism: leave "
                "them out, or set context_parallel_size=1"
            )
        _check_forest(language_model, packed)
        per_sequence = own_of(forest_or_batch, temperature, loss_mask, sampling_masks)
        scored = find_edges(packed, *per_sequence)
        if scored.sets is not None:
            _check_vocabulary(language_model, scored.sets.ids)
        if language_model.post_process:
            check_head(language_model)
        return scored

    local, scored = local_forest(language_model, packed, check, {"entropy": return_entropy})
    if not language_model.post_process:
        return _run(model, language_model, local)
    assert scored is not None
    edges, to_sequences = local.edges(scored)
    options = over_sets(options, scored.sets, packed.device)
    with scoring_layer(language_model.output_layer, edges, options) as handed:
        output = _run(model, language_model, local)
    scores = local.gathered_scores(returned_scores(output, handed), scored)
    return scores_of(scores, to_sequences, scored.lengths, options, found=scored)


def tree_outputs(model: Any, packed: PackedForest | MicroBatch) -> Any:
    """Runs a model over a packed forest and returns its output, in packed order.

    A model with a value head gives [1, T, 1], for example; `PackedForest.unpack` copies the values
    to the sequences. The last stage returns all tokens, under context parallelism too; earlier
    stages return hidden states.

    Args:
        model: as in `tree_logprobs`; its output layer may be any that treats every token alone.
        packed: as in `tree_logprobs`.

    Raises:
        UnsupportedError, ForestError, ValueError: as in `tree_logprobs`.
    """
    language_model = find_model(model)
    packed = packed_of(packed, "tree_outputs", lambda: _device_of(language_model))

    def check() -> None:
        check_model(language_model)
        _check_forest(language_model, packed)

    local, _ = local_forest(language_model, packed, check, {})
    output = _run(model, language_model, local)
    if not language_model.post_process:
        return output
    return local.gathered_output(output, packed.num_tokens)


def _run(model: Any, language_model: Any, local: LocalForest) -> Any:
    """Runs the model over the tokens of this rank."""
    tokens = routed_tokens(language_model, local)
    with every_layer_attends(language_model, local, tokens), changing(language_model) as changes:
        rotary = getattr(language_model, "rotary_pos_emb", None)
        if rotary is not None and local.is_part:
            # depths pick rows of the whole table
            changes.set(rotary, cp_group=Alone())
        return model(
            input_ids=local.input_ids,
            position_ids=local.position_ids[None],
            attention_mask=None,
            packed_seq_params=ForestParams.of(local),
            padding_mask=None if tokens is None else tokens.as_mask(),
        )


def _check_forest(language_model: Any, packed: PackedForest) -> None:
    config = language_model.config
    size = config.tensor_model_parallel_size
    if config.sequence_parallel and packed.num_tokens % size:
        raise ForestError(
            f"sequence parallelism cuts the tokens into {size} equal parts, got "
            f"{packed.num_tokens} packed tokens: pack(forest, pad_to_multiple_of={size})"
        )
    check_routes(language_model, packed)
    if packed.forest.tokens is not None:
        _check_vocabulary(language_model, packed.forest.tokens)
    if (device := _device_of(language_model)) != packed.device:
        raise ValueError(
            f"the packed forest is on {packed.device}, the model on {device}: "
            f"call packed = packed.to({str(device)!r})"
        )


def _check_vocabulary(language_model: Any, tokens: np.ndarray) -> None:
    if len(tokens) and int(tokens.max()) >= language_model.vocab_size:
        raise ValueError(
            f"token id {int(tokens.max())} is beyond the model's vocabulary of "
            f"{language_model.vocab_size}: the sequences were tokenised for another model"
        )


def _device_of(language_model: Any) -> torch.device:
    device: torch.device = next(language_model.parameters()).device
    return device


# ---- the output layer ----------------------------------------------------------------------------


def check_head(language_model: Any) -> None:
    """Refuses code that works on logits, since scores take their place."""
    kind, layer, config = type(language_model), language_model.output_layer, language_model.config
    forwards = (GPTModel.forward, HybridModel.forward)
    if kind.forward not in forwards or "forward" in vars(language_model):
        raise UnsupportedError(
            f"{kind.__name__}.forward is not Megatron's: what it does to logits would be lost, as "
            "scores take their place; use Megatron's class, or pack_batches(model)"
        )
    if type(layer).forward is not ColumnParallelLinear.forward or "forward" in vars(layer):
        raise UnsupportedError(
            f"the output layer is a {type(layer).__module__}.{type(layer).__name__}, expected "
            "Megatron's ColumnParallelLinear: what it does besides the product would be lost; use "
            "pack_batches(model), which calls it"
        )
    if getattr(config, "use_mup", False):
        raise UnsupportedError(
            "packed forests are not scored with use_mup=True: the model would scale scores as if "
            "they were logits; use pack_batches(model)"
        )
    if config.defer_embedding_wgrad_compute:
        raise UnsupportedError(
            "packed forests are not scored with defer_embedding_wgrad_compute=True: scoring gives "
            "the output layer its gradient at once; set it to False"
        )


def returned_scores(output: Any, handed: Handed) -> torch.Tensor:
    """The scores [U, columns] in the model's output."""
    if handed.values is None or handed.times != 1:
        raise UnsupportedError(
            f"the model called its output layer {handed.times} times in one forward, expected "
            "once: something replaced its forward"
        )
    expected = (1, *handed.values.shape)
    if not isinstance(output, torch.Tensor) or output.shape != expected:
        got = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise UnsupportedError(f"the model returned {got}, expected scores {list(expected)}")
    return handed.unchanged(output)


@contextmanager
def scoring_layer(layer: Any, edges: DeviceEdges, options: ScoreOptions) -> Iterator[Handed]:
    """A context in which the output layer scores `edges` and returns [U, 1, columns]."""
    handed = Handed()

    def forward(hidden: torch.Tensor, weight: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
        weight = layer.weight if weight is None else weight
        scores = _head_scores(layer, hidden, weight, edges, options)
        # the model turns it to [1, U, columns] again, in the same memory
        return handed.give(scores).transpose(0, 1), None

    with changing(layer) as changes:
        changes.set(layer, forward=forward)
        yield handed


def _head_scores(
    layer: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    edges: DeviceEdges,
    options: ScoreOptions,
) -> torch.Tensor:
    """Scores edges, [U, columns], from hidden [T, 1, d], or this rank's part, and weight [W, d]."""
    group, size = layer.tp_group, layer.tp_group.size()
    if layer.sequence_parallel:
        # linear_logprobs gives every rank the whole gradient, so nothing is left to sum
        hidden = gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=group
        )
    rows = hidden[:, 0].index_select(0, edges.predictors)
    numbers = None if options.measure is None else edges.numbers()
    if options.measure is not None and size > 1:

        def whole_logits(some: torch.Tensor) -> torch.Tensor:
            slices = F.linear(
                copy_to_tensor_model_parallel_region(some, group=group), weight, layer.bias
            )
            return gather_from_tensor_model_parallel_region(slices, group=group)

        return lm_head_logprobs(
            whole_logits,
            size * weight.shape[0],
            gather(rows, edges.to_predictors),
            edges.target,
            edges.temperature,
            options,
            numbers,
        )
    vocabulary = None
    if size > 1:
        vocabulary = VocabularySlice(group, group.rank() * weight.shape[0], weight.shape[0])
    return linear_logprobs(
        gather(rows, edges.to_predictors),
        weight,
        layer.bias,
        edges.target,
        edges.temperature,
        options,
        vocabulary,
        accumulate=torch.promote_types(hidden.dtype, torch.float32),
        numbers=numbers,
    )
