"""`sequence_logprobs`: per-sequence log-probabilities of a packed forest, through a model.

The model, wrapped or not, is called once. Inside its forward the lm_head gets the hidden states of
the predictors, scores the edges in chunks and returns the scores in place of logits. They come back
as `output.logits`, after whatever the wrappers do to outputs. So data-parallel and sharding
wrappers see an ordinary forward, which uses its parameters and returns its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from prefixtree.errors import with_hints
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.lm_head.measures import Measure, measure_bytes
from prefixtree.models.checks import check_model, every_layer_attends, find_causal_lm, warn_past_ddp
from prefixtree.models.hybrids import prepare_states
from prefixtree.models.layers import device_of
from prefixtree.models.routers import (
    RouterLoss,
    check_routes,
    replaying,
    router_keywords,
    router_loss,
)
from prefixtree.models.rows_alone import check_layers
from prefixtree.models.vision import EncodedPictures, PlacedPictures, check_pictures
from prefixtree.packing.layout import PackedForest
from prefixtree.packing.mask import TreeMask
from prefixtree.parallel.agreement import num_ranks
from prefixtree.parallel.run import Rows
from prefixtree.pictures import Pictures
from prefixtree.planning.costs import BorrowCost
from prefixtree.planning.micro_batch import MicroBatch, own_of, packed_of
from prefixtree.recompute.forward import GroupShare, Recompute, recomputed_forward
from prefixtree.scoring.edges import (
    DeviceEdges,
    ScoredEdges,
    SequenceScores,
    edges_on_device,
    find_edges,
    scores_of,
)
from prefixtree.scoring.in_groups import part_of_rank, scores_of_rank, whole_forest
from prefixtree.scoring.in_steps import check_arguments, dividing, rows_in_steps
from prefixtree.scoring.lm_head import logit_rule, scoring_lm_head
from prefixtree.scoring.part_runs import PartCall
from prefixtree.scoring.refusals import GroupMode, check_group_mode

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@with_hints
def sequence_logprobs(
    model: nn.Module,
    packed: PackedForest | MicroBatch,
    temperature: float | Sequence[Any] = 1.0,
    loss_mask: Sequence[Any] | None = None,
    *,
    pictures: Pictures | None = None,
    return_entropy: bool = False,
    return_statistics: Sequence[str] = (),
    measure: Measure | None = None,
    output_router_logits: bool | None = None,
    chunk_size: int | None = None,
    recompute: Recompute = None,
    group: ProcessGroup | None = None,
    group_mode: GroupMode = "parts",
    max_tokens: int | None = None,
    borrow_cost: BorrowCost | None = None,
) -> SequenceScores:
    """Scores every sequence of a packed forest; the model runs once, over the distinct tokens.

    The keywords down to `output_router_logits` say what is scored; those from `chunk_size` on say
    how the model runs, and change no result.

    Log-probabilities and entropies are differentiable. The gradients are those of the replicated
    batch, up to rounding.

    With `group`, the ranks of a process group divide the tokens of one forest (context
    parallelism). Every rank passes the same arguments and gets all scores. The gradients of the
    parameters, averaged over the ranks of the group as DDP and FSDP do, are those of the mean of
    the ranks' losses. A rank's gradients alone mean nothing. Every rank must run the backward.

    With `max_tokens`, a larger forest is computed in steps, each of which borrows the keys and
    values above it from earlier ones; the backward runs them again, last to first. Any loss works.
    Its backward adds the gradients to the parameters' `.grad`. `torch.autograd.grad` and
    `backward(inputs=)` find none; a warning says so when scores are let go without a backward.

    Args:
        model: a causal language model of transformers with attn_implementation="prefixtree",
            wrapped (DDP, FSDP, PEFT) or not.
        packed: the packed forest, on the model's device. Where it has routes, the model's routers
            take them in the place of their own choice. Or a MicroBatch: it is moved to the model's
            device, and `temperature` and `loss_mask`, where they have an entry per sequence, are
            those of all sequences that were planned, of which it takes its own.
        temperature: the divisor of the logits, above 0: one number, or per sequence one number or
            an array [n] (entry t for the logits that token t was drawn from; entries of tokens that
            are not scored are ignored). Copies of an edge with one temperature are scored once.
            Default: 1.0.
        loss_mask: one mask per sequence, [n], 1 where a token is scored and 0 elsewhere; entry 0
            has no predictor and is ignored. Default: every token is scored.
        pictures: the images and videos of a batch that the forest's sequences belong to; the forest
            is then one of `pictures.sequences`, or of some of them. Each distinct picture is
            encoded once, in a group by one of the ranks, in steps once per step that has tokens of
            it. Ranks of DDP, FSDP2 and groups either all pass pictures or none does. Default: text
            alone.
        return_entropy: whether to compute entropies too. Default: False.
        return_statistics: which statistics of the distributions to compute too, without gradients:
            "mean_logits", the mean over the vocabulary of the logits divided by the temperature
            (-inf where one is);
            "is_top1", 1 where the token has the largest logit (the first of equal ones);
            "log_sum_sq_probs", log sum p^2. Default: none.
        measure: a function of a chunk's logits [r, V] (float32, divided by the temperature) and its
            `MeasuredEdges` that returns [r, C], for divergences to a teacher and other losses
            beyond log p: `scores.measured`. Its gradient reaches the logits. It must treat each row
            alone, and is called again in the backward. Default: none.
        output_router_logits: whether to compute the load-balancing loss of a mixture of experts,
            `scores.aux_loss`. Default: what `config.output_router_logits` says.
        chunk_size: the number of edges whose logits are in memory at once. Default: with the
            Triton kernels, about 512 MiB of logits; otherwise about 2^26 / vocabulary edges
            (2^22 / vocabulary on a CPU).
        recompute: what layers compute again in the backward. "auto": as little as the free memory
            allows, planned anew for each forest (`plan_recomputation`), and alike on all ranks of a
            group. "all" (gradient checkpointing), "all_but_attention" (outputs of attention and of
            recurrences are kept) or "nothing": the same in all layers. Or a `RecomputePlan`.
            Default: None, as the model is set.
        group: the ranks that compute this forest together. Default: this process alone computes it.
        group_mode: what the ranks of a group exchange in every layer. "parts": the keys and values
            of the ancestors that a rank's tokens see. "heads" (Ulysses): each rank computes some
            heads of all tokens, so all queries, keys, values and outputs move; the ranks must
            divide the query heads. Default: "parts".
        max_tokens: what one step may hold, in own tokens; with `group` what a rank may hold of it,
            as the ranks divide each step. A borrowed token counts `borrow_cost.weight`. Ranks of
            DDP and FSDP take as many steps as the rank with most. Where the forests of all fit,
            each is computed in one forward. Default: the forest in one forward.
        borrow_cost: bytes of own and borrowed tokens, for max_tokens. Default: read from the model.

    Returns:
        SequenceScores: log-probabilities (entropies, statistics), one tensor per sequence.

    Raises:
        TypeError: anything but a PackedForest, a MicroBatch or Pictures, a temperature that is no
            number, or a measure that is no function.
        UnsupportedError: a model that does not run exactly on packed forests, or not on a group,
            with the reason; a measure whose values depend on other edges, on draws, or on tensors
            that require a gradient.
        RuntimeError: on the other ranks of a group, where one rank raises before the forward.
        ForestError: masks that do not match the sequences or hold anything but 0 and 1, or a forest
            without token ids; a path that fits no steps of max_tokens; a forest that was not made
            of pictures.sequences.
        ValueError: temperatures that do not match the sequences, are not finite and above 0, or
            require a gradient, which they do not get; a measure that does not return [r, C]; a
            chunk_size that is no integer >= 1; a
            statistic that is not known; an unknown `recompute`, or a plan for another model; routes
            of other numbers of layers or experts than the model has; ranks of a group with
            different forests or other arguments; an unknown group_mode, or heads that do not divide
            among the ranks; max_tokens below 1; a borrow_cost without
            max_tokens; pictures that were made for another model.
        torch.OutOfMemoryError: recompute="auto" and a forest that does not fit with every layer
            recomputed; nothing was computed.
    """
    given = packed
    packed = packed_of(given, "sequence_logprobs", lambda: device_of(find_causal_lm(model)))
    check_arguments(max_tokens, borrow_cost)
    if group is not None and num_ranks(group) == 1:
        group = None

    def check(packed: PackedForest = packed) -> tuple[Any, ScoredEdges]:
        check_group_mode(group_mode)
        # refuses, on all ranks of a group
        ScoreOptions(return_entropy, return_statistics, chunk_size, measure=measure)
        causal_lm = find_causal_lm(model)
        if pictures is not None:
            check_pictures(model, causal_lm, packed, pictures)
        divided = None if group is None else "the ranks of a group"
        check_model(model, causal_lm, packed, pictures, divided)
        check_routes(model, causal_lm, packed)
        # refuses a family without such a loss
        router_loss(causal_lm, packed, output_router_logits)
        return causal_lm, find_edges(packed, *own_of(given, temperature, loss_mask))

    placed: PlacedPictures | None = None
    if group is not None:
        options = {
            "return_entropy": return_entropy,
            "return_statistics": tuple(return_statistics),
            "a measure": measure is not None,
            "output_router_logits": output_router_logits,
            "recompute": recompute,
            "max_tokens": max_tokens,
            "borrow_cost": borrow_cost,
        }
        divide = dividing(model, max_tokens, borrow_cost, recompute, pictures)
        how = options, group_mode, divide, pictures
        causal_lm, local = part_of_rank(model, packed, group, check, scores_of_rank, *how)
    else:
        causal_lm, found = check()
        if pictures is not None:
            placed = PlacedPictures(model, causal_lm, packed, pictures)
            packed = placed.packed
        local = whole_forest(packed, found, causal_lm.config)
        if placed is not None:
            inputs = local.inputs | placed.inputs
            local = replace(local, inputs=inputs, of_steps=inputs)
    wanted = ScoreOptions(return_entropy, return_statistics, chunk_size, measure=measure)
    loss = router_loss(causal_lm, packed, output_router_logits)
    shown = local.shown, local.share
    forward = ModelForward(model, causal_lm, packed, wanted, loss, placed, *shown)
    rows = None
    if max_tokens is not None:
        of_parts = ScoresOfParts(forward, local.of_steps, local.edges.found)
        more = recompute, local.divided
        rows = rows_in_steps(model, causal_lm, of_parts, max_tokens, borrow_cost, *more)
    if rows is None:
        rows = forward(local.mask, local.inputs, local.edges, recompute)
    scores, *router_logits = local.gathered(rows)
    where = local.to_sequences, local.lengths
    found_scores = scores_of(scores, *where, wanted, local.order, local.edges.found)
    if loss is None:
        return found_scores
    aux_loss = loss.of(router_logits)
    return replace(found_scores, aux_loss=aux_loss, router_logits=tuple(router_logits))


class ModelForward:
    """Calls a model over a packed forest, or over a part of one, for the scores of its edges.

    Args:
        model, causal_lm, packed: as `sequence_logprobs` has them.
        options: what is computed of each edge; the rule of the model's family is added.
        loss: the load-balancing loss to compute. Default: none.
        placed: the pictures of the forest. Default: text alone, or a rank's part.
        shown, share: of a rank's part, as in `LocalPart`. Default: a forest that no ranks divide.
    """

    def __init__(
        self,
        model: nn.Module,
        causal_lm: Any,
        packed: PackedForest,
        options: ScoreOptions,
        loss: RouterLoss | None = None,
        placed: PlacedPictures | None = None,
        shown: EncodedPictures | None = None,
        share: GroupShare | None = None,
    ) -> None:
        prepare_states(causal_lm)
        warn_past_ddp(model)
        self.packed, self.loss, self.placed = packed, loss, placed
        self._model, self._causal_lm = model, causal_lm
        self._shown, self._share = shown, share
        self.options = replace(options, rule=logit_rule(causal_lm))

    def __call__(
        self,
        mask: TreeMask,
        inputs: dict[str, Any],
        edges: DeviceEdges,
        recompute: Recompute,
        own: np.ndarray | None = None,
    ) -> Rows:
        """One forward: the scores [u, columns], and the router logits [t, E] of each layer of
        experts where there is a loss.

        Args:
            mask: that of the tokens.
            inputs: keywords of the model.
            edges: what its lm_head scores.
            recompute: as in `sequence_logprobs`.
            own: int64 [t], the packed tokens that it computes, ascending. Default: all.
        """
        shown = self._shown if self.placed is None else self.placed.of(own)
        if shown is not None:
            inputs = inputs | shown.inputs
        model, causal_lm, loss, packed = self._model, self._causal_lm, self.loss, self.packed
        # a forward of its own, which other ranks run where this one does
        check_layers(model, causal_lm, packed.device)
        keywords = router_keywords(causal_lm.config, loss)
        held_bytes = 0 if loss is None else loss.held_bytes()
        count = len(edges.target)
        if self.options.measure is not None:
            held_bytes += measure_bytes(count, causal_lm.config.get_text_config().vocab_size)
        planned = recompute, held_bytes, shown, self._share
        with (
            recomputed_forward(model, causal_lm, packed, count, *planned),
            every_layer_attends(causal_lm, mask),
            replaying(causal_lm, packed),
            scoring_lm_head(causal_lm, edges, self.options) as handed,
        ):
            if loss is not None:
                loss.check()
            output = model(**inputs, **keywords, logits_to_keep=edges.predictors)
        # what a wrapper changed in place is its fault, not the model's
        scores = handed.returned(output)
        handed.check_treatment(causal_lm, self.options.rule)
        if loss is None:
            return (scores,)
        return scores, *loss.logits_of(output, inputs["input_ids"].shape[-1])


class ScoresOfParts:
    """The scores of the edges whose predictors a part owns: a `PartForward`.

    Args:
        forward: over the forest.
        inputs: keywords of a forward over all of it.
        edges: all that are scored.
    """

    def __init__(self, forward: ModelForward, inputs: dict[str, Any], edges: ScoredEdges) -> None:
        self.packed, self.options = forward.packed, forward.options
        self.loss, self.placed = forward.loss, forward.placed
        self.inputs, self.units = inputs, edges
        self._forward = forward

    def __call__(self, part: PartCall) -> Rows:
        edges = edges_on_device(self.packed, self.units, part.which, part.rows)
        return self._forward(part.mask, part.inputs, edges, part.recompute, part.own)
