"""`sequence_logprobs`: per-sequence log-probabilities of a packed forest, through a model.

The model, wrapped or not, is called once. Inside its forward the lm_head gets the hidden states of
the predictors, scores the edges in chunks and returns the scores in place of logits. They come back
as `output.logits`, after whatever the wrappers do to outputs. So data-parallel and sharding
wrappers see an ordinary forward, which uses its parameters and returns its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from prefixtree.errors import with_hints
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.kernels.lm_head.measures import Measure
from prefixtree.models.checks import check_vocabulary, find_causal_lm
from prefixtree.models.layers import device_of
from prefixtree.packing.layout import PackedForest
from prefixtree.planning.micro_batch import MicroBatch, own_of, packed_of
from prefixtree.scoring.edges import ScoredEdges, SequenceScores, find_edges, scores_of
from prefixtree.scoring.forward import AskedWings, ModelForward, ScoresOfParts
from prefixtree.scoring.local import LocalPart, whole_forest
from prefixtree.scoring.refusals import GroupMode, check_group_mode, check_steps
from prefixtree.scoring.sampling_masks import over_sets
from prefixtree.wings import load

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from prefixtree.images.images import Images
    from prefixtree.planning.costs import ImportCost
    from prefixtree.recompute.choose import Recompute


@with_hints
def sequence_logprobs(
    model: nn.Module,
    packed: PackedForest | MicroBatch,
    temperature: float | Sequence[Any] = 1.0,
    loss_mask: Sequence[Any] | None = None,
    *,
    images: Images | None = None,
    return_entropy: bool = False,
    return_statistics: Sequence[str] = (),
    measure: Measure | None = None,
    sampling_masks: Sequence[Any] | None = None,
    output_router_logits: bool | None = None,
    mtp: nn.Module | None = None,
    mtp_detach: bool = True,
    chunk_size: int | None = None,
    recompute: Recompute = None,
    group: ProcessGroup | None = None,
    group_mode: GroupMode = "parts",
    max_step_tokens: int | None = None,
    import_cost: ImportCost | None = None,
) -> SequenceScores:
    """Computes the log-probability of every token of every sequence; shared prefixes run once.

    The model is called once, over the distinct tokens of the forest. Log-probabilities and
    entropies are differentiable. Their gradients are those of the replicated batch, up to rounding.

    The keywords down to `mtp_detach` say what is scored. Those from `chunk_size` on say
    how the model runs, and change no result.

    With `group`, the ranks of a process group divide the tokens of one forest (context
    parallelism). Every rank passes the same arguments, gets all scores and must run the backward.
    Gradients are to be averaged over the ranks of the group, as DDP and FSDP do: they are then
    those of the mean of the ranks' losses. The gradients of one rank alone mean nothing.

    With `max_step_tokens`, a forest that is too large for one forward is computed in steps. A step
    imports the keys and values above it from earlier steps. The backward runs the steps again, last
    to first. Any loss works. The backward adds the gradients to the parameters' `.grad`;
    `torch.autograd.grad` and `backward(inputs=)` find none. A warning says so when scores are freed
    without a backward.

    Args:
        model: a causal language model of transformers with attn_implementation="prefixtree",
            wrapped (DDP, FSDP, PEFT) or not.
        packed: the packed forest, on the model's device. If it has routes, the model's routers use
            them instead of their own choice. Or a MicroBatch, which is moved to the model's device:
            a `temperature` or `loss_mask` with an entry per sequence is then that of all planned
            sequences, of which the micro-batch takes its own.
        temperature: the divisor of the logits, finite and above 0: one number, or per sequence one
            number or an array [n]. Entry t of an array divides the logits that token t was drawn
            from; entries of tokens that are not scored are ignored. Copies of an edge with one
            temperature are scored once. Default: 1.0.
        loss_mask: one mask [n] per sequence, 1 where a token is scored and 0 elsewhere. Entry 0 is
            ignored, as the first token has no predictor. Default: every token is scored.
        images: the images and videos of the batch. The forest must be of `images.sequences`, or of
            some of them. Each distinct image is encoded once: in a group by one of the ranks, in
            steps once per step that has tokens of it. Either all ranks of DDP, FSDP2 and groups
            pass images, or none does. Default: text alone.
        return_entropy: whether to compute entropies too. Default: False.
        return_statistics: names of statistics of the distributions to compute too, without
            gradients. "mean_logits": the mean over the vocabulary of the logits divided by the
            temperature (-inf if one logit is). "is_top1": 1 where the token has the largest logit
            (the first of equal ones). "log_sum_sq_probs": log sum p^2. Default: none.
        measure: a function of a chunk's logits [r, V] (float32, divided by the temperature) and its
            `MeasuredEdges` that returns [r, C], for divergences to a teacher and other losses
            beyond log p; it gives `scores.measured`. Its gradient reaches the logits. It must treat
            each row alone, and is called again in the backward. Default: none.
        sampling_masks: the tokens that the sampler kept (top-k, top-p, min-p). Log p and entropies
            are those over these tokens, after the temperature. One entry per sequence: a list of
            token ids per token; or a mapping or an object with `token_ids` (or `ids`) and `offsets`
            (vLLM's) or `counts` (prime-rl's); or None. An entry has a set per token, or one per
            token that `loss_mask` scores. An empty set is the whole vocabulary. Copies of an edge
            with other sets are scored apart. Statistics and `measure` are of the whole vocabulary.
            Default: the whole vocabulary.
        output_router_logits: whether to compute the load-balancing loss of a mixture of experts,
            `scores.aux_loss`. Default: `config.output_router_logits`.
        mtp: layers of multi-token prediction, transformers' `MtpModel` of this model, with adapters
            or without; they give `scores.mtp`. They run over the whole forest at once, in a group
            on every rank. No wrapper averages their gradients over ranks: that is the caller's to
            do. Default: none.
        mtp_detach: whether the model, its embeddings and lm_head included, gets no gradient through
            `mtp`. Default: True.
        chunk_size: the number of edges whose logits are in memory at once. Default: with the Triton
            kernels, about 512 MiB of logits; otherwise about 2^26 / vocabulary edges (2^22 /
            vocabulary on a CPU).
        recompute: what layers compute again in the backward. "all" (gradient checkpointing),
            "all_but_attention" (outputs of attention and of recurrences are kept) or "nothing": the
            same in all layers. "auto": as little as the free memory allows, planned anew for each
            forest (`plan_recomputation`), and alike on all ranks of a group. Or a `RecomputePlan`.
            Default: None, as the model is set.
        group: the process group whose ranks compute this forest together. Default: this process
            computes it alone.
        group_mode: what the ranks of a group exchange in every layer. "parts": the keys and values
            of the ancestors that a rank's tokens see. "ulysses" (DeepSpeed): queries, keys, values
            and outputs of all tokens, so that each rank attends with some heads over all tokens;
            the number of query heads must be divisible by the number of ranks. Default: "parts".
        max_step_tokens: the number of own tokens that one step may hold; with `group`, the number
            per rank, as the ranks divide each step. An imported token counts `import_cost.weight`.
            Ranks of DDP and FSDP take as many steps as the rank with most. Where the forests of all
            ranks fit, each is computed in one forward. Default: the forest in one forward.
        import_cost: the bytes of own and imported tokens, for max_step_tokens. Default: read from
            the model.

    Returns:
        SequenceScores: log-probabilities and what else was asked for, one tensor per sequence.

    Raises:
        TypeError: `packed` that is no PackedForest and no MicroBatch; `images` that are no Images;
            a temperature that is no number; a measure that is no function; `mtp` without an
            MtpModel.
        UnsupportedError: a model that does not run exactly on packed forests, or not on a group,
            with the reason; a measure whose values depend on other edges, on draws, or on tensors
            that require a gradient.
        RuntimeError: on the other ranks of a group, where one rank raises before the forward.
        ForestError: masks that do not match the sequences or hold anything but 0 and 1; a forest
            without token ids; a path that fits no steps of max_step_tokens; a forest that was not
            made of images.sequences; sampling masks of another length, or without the token that
            was sampled.
        ValueError: temperatures that do not match the sequences, are not finite and above 0, or
            require a gradient, which they do not get; a measure that does not return [r, C]; a
            chunk_size that is no integer >= 1; an unknown statistic; an unknown `recompute`, or a
            plan for another model; routes of other numbers of layers or experts than the model has;
            ranks of a group with different forests or other arguments; an unknown group_mode, or
            heads that do not divide among the ranks; max_step_tokens below 1; an import_cost
            without max_step_tokens; images that were made for another model.
        torch.OutOfMemoryError: recompute="auto" and a forest that does not fit with every layer
            recomputed; nothing was computed.
    """
    forest_or_batch = packed
    packed = packed_of(
        forest_or_batch, "sequence_logprobs", lambda: device_of(find_causal_lm(model))
    )
    check_steps(max_step_tokens, import_cost)
    if group is not None and load("groups").num_ranks(group) == 1:
        group = None
    of_heads = mtp, mtp_detach, chunk_size, recompute
    asked_wings = AskedWings(images, output_router_logits, *of_heads)

    def check(packed: PackedForest = packed) -> tuple[Any, ScoredEdges]:
        check_group_mode(group_mode)
        # refuses, on all ranks of a group
        ScoreOptions(return_entropy, return_statistics, chunk_size, measure=measure)
        causal_lm = find_causal_lm(model)
        asked_wings.check(
            model, causal_lm, packed, None if group is None else "the ranks of a group"
        )
        per_sequence = own_of(forest_or_batch, temperature, loss_mask, sampling_masks)
        found = find_edges(packed, *per_sequence)
        if found.sets is not None:
            check_vocabulary(causal_lm, found.sets.ids)
        return causal_lm, found

    dividing = None
    if max_step_tokens is not None:
        how = model, max_step_tokens, import_cost, recompute, images
        dividing = load("steps").Dividing(*how)
    local: LocalPart
    if group is not None:
        options = {
            "return_entropy": return_entropy,
            "return_statistics": tuple(return_statistics),
            "a measure": measure is not None,
            "output_router_logits": output_router_logits,
            "recompute": recompute,
            "max_step_tokens": max_step_tokens,
            "import_cost": import_cost,
        }
        groups = load("groups")
        divide = dividing and dividing.in_group
        given_to_ranks = groups.scores_of_rank, options, group_mode, divide, asked_wings
        causal_lm, local = groups.part_of_rank(model, packed, group, check, *given_to_ranks)
    else:
        causal_lm, scored_edges = check()
        packed, wings = asked_wings.open(model, causal_lm, packed, packed, scored_edges)
        local = whole_forest(packed, scored_edges, causal_lm, wings)
    score_options = ScoreOptions(return_entropy, return_statistics, chunk_size, measure=measure)
    score_options = over_sets(score_options, local.edges.found.sets, packed.device)
    forward = ModelForward(model, causal_lm, packed, score_options, local.wings, local.share)
    rows = None
    if dividing is not None:
        of_parts = ScoresOfParts(forward, local.of_steps, local.edges.found)
        steps = local.steps or partial(dividing.alone, causal_lm, packed)
        rows = load("steps").rows_in_steps(model, causal_lm, of_parts, recompute, steps)
    if rows is None:
        rows = forward(local.mask, local.inputs, local.edges, recompute)
    scored, *of_tokens = local.gathered(rows)
    where = local.to_sequences, local.lengths
    scores = scores_of(scored, *where, score_options, local.order, local.edges.found)
    for wing in local.wings.values():
        scores = wing.result(scores, tuple(of_tokens), packed)
    return scores
