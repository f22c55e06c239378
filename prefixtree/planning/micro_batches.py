"""`plan_micro_batches`: puts each sequence into a micro-batch of a rank.

Sequences that share tokens should be computed together. A micro-batch is limited by the distinct
tokens that it holds. Every rank should have the same work in the same number of steps. The search
for such a plan is in `planning.assignment`. Legend: S sequences, N nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from prefixtree import loops
from prefixtree._forest_inputs import label_numbers
from prefixtree._numbers import integer, number
from prefixtree.errors import ForestError, with_hints
from prefixtree.forest import PrefixForest
from prefixtree.packing.arguments import at_least_one
from prefixtree.packing.layout import pack
from prefixtree.packing.per_sequence import flat_selection
from prefixtree.planning import assignment
from prefixtree.planning.costs import CostModel, ImportCost
from prefixtree.planning.micro_batch import (
    MicroBatch,
    PlanStats,
    ReuseStats,
    cut_out,
    micro_batch_of,
)
from prefixtree.planning.steps import plan_any_steps
from prefixtree.planning.token_weights import divisors, rollout_numbers, shares_of_draws
from prefixtree.planning.trunks import Trunks, joined, plan_trunks


class _RankMicroBatches(tuple[MicroBatch, ...]):
    """The micro-batches of one rank, step after step, and the trunks that they share, if any."""

    trunks: Trunks | None = None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"plan[rank] has no {name}: it is the micro-batches of a rank, one per step, and a "
            "plan's entries are its ranks; write `for batch in plan[rank]`"
        )


class MicroBatchPlan(Sequence[tuple[MicroBatch, ...]]):
    """The micro-batches of all ranks: `plan[rank][step]`. Made by `plan_micro_batches`.

    Every rank has the same number of steps. The same arguments give the same plan, so every rank
    may plan for itself and take its row. A rank's costliest micro-batch comes first. So an
    out-of-memory error shows in the first step, and ranks that synchronise in each step have
    similar work. An update on rank r, with or without empty steps:

        weights = plan.loss_weights("token-mean", masks)
        for batch in plan[r]:
            scores = sequence_logprobs(model, batch, loss_mask=masks)
            own = batch.take(weights), batch.take(advantages)
            terms = zip(*own, scores.logprobs, strict=True)
            sum(w * -(a * p).sum() for w, a, p in terms).backward()
        optimizer.step()

    With a plan made with `reuse`, also give `sequence_logprobs` max_step_tokens=plan.max_tokens.

    Attributes:
        forest: the PrefixForest over all sequences.
        max_tokens: the budget of a micro-batch, in distinct tokens; of a step with `reuse`.
        stats: PlanStats.
    """

    def __init__(
        self,
        forest: PrefixForest,
        max_tokens: int,
        ranks: tuple[tuple[MicroBatch, ...], ...],
        stats: PlanStats,
    ) -> None:
        self.forest = forest
        self.max_tokens = max_tokens
        self.stats = stats
        self._ranks = ranks

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return self._ranks[rank]
        rank = integer("rank", rank, wrong=TypeError)
        if not -len(self) <= rank < len(self):
            raise IndexError(
                f"rank {rank} of a plan for {len(self)} rank{'s' * (len(self) > 1)}: plan with "
                "num_ranks= the number of data-parallel ranks, on every one of them"
            )
        return self._ranks[rank]

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[tuple[MicroBatch, ...]]:
        return iter(self._ranks)

    @property
    def num_ranks(self) -> int:
        """The number of ranks, ranks without a sequence included."""
        return len(self._ranks)

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of every rank, empty ones included."""
        return len(self._ranks[0])

    @property
    def num_sequences(self) -> int:
        """S, the sequences of the whole mini-batch: the denominator of a mean over sequences."""
        return self.forest.num_sequences

    @with_hints
    def num_loss_tokens(self, loss_mask: Sequence[Any] | None = None) -> int:
        """Counts the scored tokens of the whole mini-batch: the denominator of a token mean.

        A shared token counts once per sequence that holds it.

        Args:
            loss_mask: one mask per sequence, [n], 1 where a token is scored and 0 elsewhere; entry
                0 has no predictor and does not count. Default: every token is scored, except the
                first token of each sequence.

        Returns:
            The number of scored tokens over all sequences.

        Raises:
            ForestError: masks that do not fit the sequences in number or length, or that hold
                anything but 0 and 1.
        """
        return int(self._scored(loss_mask).sum())

    @with_hints
    def loss_weights(
        self,
        normalization: str = "token-mean",
        loss_mask: Sequence[Any] | None = None,
        *,
        constant: float | None = None,
        rank_reduction: str = "mean",
    ) -> np.ndarray:
        """Computes the weights that make a loss the same, however the batch was cut.

        With l the per-token loss of sequence i and m its mask, every step's loss is the sum over
        its sequences of weights[i] * (l * m).sum(). Gradients accumulated over the steps (without
        dividing by their number) and reduced over the ranks are then those of the normalised loss
        of the whole mini-batch, with n_i scored tokens in sequence i:

            token-mean      sum of all losses / sum of n_i
            sequence-mean   mean over the sequences of (its losses / n_i); 0 where n_i is 0
            constant        mean over the sequences of (its losses / constant): Dr. GRPO's
                            (arXiv 2503.20783), with the greatest response length for example

        Args:
            normalization: "token-mean", "sequence-mean" or "constant". Default: "token-mean".
            loss_mask: as in `num_loss_tokens`.
            constant: the divisor, in tokens, above 0; for "constant" alone.
            rank_reduction: "mean" where gradients are averaged over the ranks (DDP and FSDP do),
                "sum" where they are added. Default: "mean".

        Returns:
            float64 [S], one weight per sequence, in input order.

        Raises:
            ForestError: masks as in `num_loss_tokens`.
            ValueError: unknown names, a constant missing or not above 0, nothing scored at all.
        """
        scale = self._scale(rank_reduction)
        if normalization == "constant":
            # divided by no number of tokens
            drawn = np.ones(self.num_sequences)
        else:
            drawn = self._of_sequences(self._scored(loss_mask))
        constant = None if constant is None else number("constant", constant, above=0)
        divisor = divisors(normalization, drawn, constant, None)
        return np.divide(scale, divisor, out=np.zeros(len(divisor)), where=divisor > 0)

    @with_hints
    def token_weights(
        self,
        normalization: str = "token-mean",
        loss_mask: Sequence[Any] | None = None,
        *,
        rollouts: Sequence[Hashable] | None = None,
        turns: Sequence[Any] | None = None,
        constant: float | None = None,
        rank_reduction: str = "mean",
    ) -> list[torch.Tensor]:
        """Computes weights per token by which each drawn token counts once, where rollouts fork.

        Where k sequences of one rollout hold a token, and it is scored in each, it was drawn once:
        its share in each is 1 / k. Two rollouts that drew the same token by chance drew it twice.
        Every step's loss is the sum over its sequences of `(weights[i][1:] * l).sum()`, with l as
        in `loss_weights`. So a draw learns from the mean of the advantages of its copies. With
        means by shares:

            token-mean      mean over the drawn tokens of the batch
            rollout-mean    mean over the rollouts of the mean over each one's drawn tokens: how a
                            rollout is cut into sequences does not matter
            session-mean    mean over the rollouts of the mean over each one's sequences of the mean
                            over each one's tokens
            sequence-mean   mean over the sequences of the mean over each one's tokens
            constant        mean over the sequences of (sum over each one's tokens / constant)

        A sequence or rollout in which nothing is scored counts as 0, as in `loss_weights`.

        Args:
            normalization: one of these. Default: "token-mean".
            loss_mask: as in `num_loss_tokens`.
            rollouts: S labels (integers >= 0, text or tuples), equal for the sequences of one
                rollout. Needed for rollout-mean and session-mean, and where `turns` are not given.
            turns: integers [n] per sequence, as `Samples.turns`: the number, in the batch, of the
                turn that drew each token, below 0 where none did. For rollouts of which two
                sequences may draw the same token by chance. Default: a token that sequences of a
                rollout share was drawn once.
            constant: as in `loss_weights`.
            rank_reduction: as in `loss_weights`.

        Returns:
            float64 [n] per sequence, on the CPU, in input order; 0 where nothing is scored.

        Raises:
            ForestError: masks as in `num_loss_tokens`; labels of another number, length or type, or
                negative; a scored token without a turn, or a turn on two paths.
            ValueError: as `loss_weights`; neither rollouts nor turns.
        """
        scale = self._scale(rank_reduction)
        if rollouts is None and turns is None:
            raise ValueError(
                "token_weights needs rollouts= or turns=, which tell what was drawn once; "
                "loss_weights counts every copy"
            )
        rollout = None if rollouts is None else rollout_numbers(rollouts, self.num_sequences)
        shares = shares_of_draws(self.forest, self._scored(loss_mask), rollout, turns)
        constant = None if constant is None else number("constant", constant, above=0)
        divisor = divisors(normalization, self._of_sequences(shares), constant, rollout)
        lengths = self.forest.sequence_lengths
        of_token = np.repeat(divisor, lengths)
        flat = np.divide(scale * shares, of_token, out=np.zeros(len(shares)), where=shares > 0)
        return list(torch.from_numpy(flat).split(lengths.tolist()))

    def _scale(self, rank_reduction: str) -> int:
        """The factor that undoes a mean over ranks."""
        if rank_reduction not in ("mean", "sum"):
            raise ValueError(f"rank_reduction must be 'mean' or 'sum', got {rank_reduction!r}")
        return self.num_ranks if rank_reduction == "mean" else 1

    def _scored(self, loss_mask: Sequence[Any] | None) -> np.ndarray:
        """1 for the scored tokens, 0 for the others, [R]."""
        lengths = self.forest.sequence_lengths
        if loss_mask is None:
            flat = np.ones(int(lengths.sum()), np.uint8)
        else:
            flat = flat_selection(loss_mask, lengths)
        # they have no predictor
        flat[np.cumsum(lengths) - lengths] = 0
        return flat

    def _of_sequences(self, values: np.ndarray) -> np.ndarray:
        """The sum of each sequence's values [R], float64 [S]."""
        lengths = self.forest.sequence_lengths
        return np.add.reduceat(values, np.cumsum(lengths) - lengths, dtype=np.float64)

    def __repr__(self) -> str:
        return (
            f"MicroBatchPlan({self.num_ranks} ranks x {self.num_micro_batches} steps, "
            f"{self.num_sequences} sequences, {self.stats.packed_tokens} tokens)"
        )


@with_hints
def plan_micro_batches(
    sequences: Iterable[Any] | PrefixForest,
    max_tokens: int,
    num_ranks: int = 1,
    groups: Sequence[Hashable] | None = None,
    min_micro_batches: int = 1,
    *,
    namespaces: Sequence[Hashable] | None = None,
    cost_model: CostModel | None = None,
    reuse: bool = False,
    trunks: bool = False,
    import_cost: ImportCost | None = None,
) -> MicroBatchPlan:
    """Plans micro-batches of at most `max_tokens` distinct tokens, and ranks of even cost.

    A tree that does not fit is cut, and the path above a cut is computed again on each side. With
    `reuse` the trees of a rank are not cut: a micro-batch may exceed `max_tokens`, and
    `sequence_logprobs(max_step_tokens=)` computes it in steps. Then a sequence may be longer, too.
    `stats.reuse` compares both.

    With `trunks` the paths above cuts are kept instead, for `kept_trunks`: a rank computes each of
    its distinct tokens once. A sequence may be longer than `max_tokens`, if what is kept fits.

    The plan is deterministic. It does not depend on the order of the input, except for ties
    between trees of different namespaces and between groups.

    Args:
        sequences: S sequences of token ids (lists, numpy arrays or torch tensors), or a forest.
        max_tokens: the most distinct tokens that a micro-batch may hold.
        num_ranks: the number of data-parallel ranks. Default: 1.
        groups: S hashable labels, None for a sequence without a group. The sequences of a group
            (in GRPO the rollouts of one prompt) are on one rank, and in one micro-batch where their
            distinct tokens fit (with `trunks`, only on one rank). Default: no groups.
        min_micro_batches: the least number of steps per rank; a rank's surplus steps are empty.
            Default: 1.
        namespaces: as in `PrefixForest.from_sequences`: sequences of different namespaces share
            nothing. Default: all sequences may share.
        cost_model: FLOPs per token and per visible pair, `CostModel.from_config(model.config)`.
            Default: those of a model like Qwen3-8B.
        reuse: whether trees larger than `max_tokens` stay whole and are computed in steps.
            Default: False.
        trunks: whether trunks are kept, for `kept_trunks`. Trunks and a micro-batch that are held
            at once fit `max_tokens` together. Default: False.
        import_cost: bytes of an imported token, for steps, and of a kept token, for trunks:
            `import_cost(model)`. Default: `ImportCost()`, the bytes of a model like Qwen3-8B with
            checkpointing.

    Returns:
        The plan: `plan[rank][step]` is a MicroBatch.

    Raises:
        ForestError: as `PrefixForest.from_sequences`; a sequence longer than `max_tokens` without
            `reuse` or `trunks`; with them, a path that fits no steps (`plan_steps`), or whose trunk
            does not fit; groups that differ in number from the sequences.
        ValueError: max_tokens, num_ranks or min_micro_batches below 1; namespaces with a forest;
            reuse together with trunks.
    """
    max_tokens, num_ranks, min_micro_batches = (
        at_least_one(name, value)
        for name, value in (
            ("max_tokens", max_tokens),
            ("num_ranks", num_ranks),
            ("min_micro_batches", min_micro_batches),
        )
    )
    if isinstance(sequences, PrefixForest):
        if namespaces is not None:
            raise ValueError(
                "give namespaces= with sequences; for a PrefixForest give them to from_sequences"
            )
        forest = sequences
    else:
        forest = PrefixForest.from_sequences(sequences, namespaces)
    lengths = forest.sequence_lengths
    if reuse and trunks:
        raise ValueError(
            "reuse computes a tree in steps, for any loss; trunks keeps what micro-batches share, "
            "for a loss that is a sum over them: give one of both"
        )
    for bad in [] if reuse or trunks else np.flatnonzero(lengths > max_tokens)[:1]:
        raise ForestError(
            f"sequences[{bad}] has {lengths[bad]} tokens, max_tokens is {max_tokens}; a sequence "
            f"is never cut: raise max_tokens to at least {lengths.max()}, or drop or shorten it, "
            "or compute it in steps (reuse=True)"
        )
    cost_model = cost_model or CostModel()
    tree = assignment.make_tree(forest, cost_model)
    group = np.full(len(lengths), -1)
    if groups is not None:
        group = label_numbers(groups, "groups", len(lengths), none_is_no_label=True)
    units = assignment.make_units(tree, group, max_tokens)
    whole_trees = reuse or trunks
    unit_rank, unit_bin = assignment.assign(tree, units, num_ranks, max_tokens, whole_trees)
    sequence_rank, sequence_bin = unit_rank[units.of_sequence], unit_bin[units.of_sequence]
    trunks_of: dict[int, Trunks] = {}
    if trunks:
        trunks_of, sequence_bin = _keep_trunks(forest, sequence_rank, max_tokens, import_cost)
        bins = assignment.make_sets(sequence_bin, tree.ends)
    else:
        bins = assignment.make_sets(unit_bin[units.of_pair], units.ends)

    # bins are numbered rank by rank
    num_bins = int(sequence_bin.max()) + 1
    bin_rank = np.zeros(num_bins, np.int64)
    bin_rank[sequence_bin] = sequence_rank
    tokens = loops.planning.union_weights(tree.parent, tree.length, *bins)
    costs = loops.planning.union_weights(tree.parent, tree.cost, *bins) * tree.unit_cost
    if trunks:
        costs = np.concatenate([trunks_of[rank].costs(cost_model) for rank in sorted(trunks_of)])
    by_bin = np.argsort(sequence_bin, kind="stable")
    members = np.split(by_bin, np.cumsum(np.bincount(sequence_bin, minlength=num_bins))[:-1])
    # trunks need their micro-batches in the planned order
    costliest_first = np.arange(num_bins) if trunks else np.lexsort((-costs, bin_rank))
    ranks: list[list[MicroBatch]] = [[] for _ in range(num_ranks)]
    for b in costliest_first.tolist():
        step_stats = None
        if reuse and tokens[b] > max_tokens:
            packed = pack(cut_out(forest, members[b]))
            step_stats = plan_any_steps(
                packed, max_tokens, cost_model, import_cost=import_cost
            ).stats
        batch = MicroBatch(forest, members[b], int(tokens[b]), float(costs[b]), step_stats)
        ranks[bin_rank[b]].append(batch)
    steps = max(min_micro_batches, *(len(rank) for rank in ranks))
    nothing = np.empty(0, np.int64)
    for rank in ranks:
        rank += [MicroBatch(forest, nothing, 0, 0.0) for _ in range(steps - len(rank))]

    naive_bin = loops.planning.fill_in_order(lengths, max_tokens)
    naive = loops.planning.union_weights(
        tree.parent, tree.length, *assignment.make_sets(naive_bin, tree.ends)
    )
    stats = PlanStats(
        packed_tokens=sum(t.forest.num_tokens for t in trunks_of.values()) or int(tokens.sum()),
        distinct_tokens=forest.num_tokens,
        replicated_tokens=int(lengths.sum()),
        micro_batches=num_bins,
        steps=steps,
        empty_steps=steps * num_ranks - num_bins,
        rank_costs=tuple(sum(batch.cost for batch in rank) for rank in ranks),
        lockstep_cost=sum(max(batch.cost for batch in step) for step in zip(*ranks, strict=True)),
        naive_tokens=int(naive.sum()),
        naive_micro_batches=len(naive),
    )
    if reuse:
        cut = None
        if lengths.max() <= max_tokens:
            _, unit_bin = assignment.assign(tree, units, num_ranks, max_tokens)
            bins = assignment.make_sets(unit_bin[units.of_pair], units.ends)
            cut = tuple(
                int(loops.planning.union_weights(tree.parent, weight, *bins).sum())
                for weight in (tree.length, tree.cost)
            )
        stats = replace(stats, reuse=_reuse_stats(ranks, cut, tree.unit_cost))
    of_ranks = tuple(map(_RankMicroBatches, ranks))
    if trunks:
        stats = replace(stats, trunks=joined([t.stats for t in trunks_of.values()]))
        for number, rank_trunks in trunks_of.items():
            of_ranks[number].trunks = rank_trunks
    return MicroBatchPlan(forest, max_tokens, of_ranks, stats)


def batches_with_trunks(trunks: Trunks) -> _RankMicroBatches:
    """The micro-batches of trunks in the form of `plan[rank]`, for a rank that plans alone."""
    batches = _RankMicroBatches(micro_batch_of(trunks.forest, x) for x in trunks.sequences)
    batches.trunks = trunks
    return batches


def _keep_trunks(
    forest: PrefixForest,
    sequence_rank: np.ndarray,
    max_tokens: int,
    import_cost: ImportCost | None,
) -> tuple[dict[int, Trunks], np.ndarray]:
    """Plans the trunks of each rank with sequences, and each sequence's bin, rank by rank."""
    trunks_of, count = {}, 0
    sequence_bin = np.empty(len(sequence_rank), np.int64)
    for rank in np.unique(sequence_rank).tolist():
        members = np.flatnonzero(sequence_rank == rank)
        trunks_of[rank] = plan_trunks(cut_out(forest, members), max_tokens, import_cost)
        for micro_batch, sequences in enumerate(trunks_of[rank].sequences):
            sequence_bin[members[sequences]] = count + micro_batch
        count += len(trunks_of[rank].sequences)
    return trunks_of, sequence_bin


def _reuse_stats(
    ranks: list[list[MicroBatch]],
    cut: tuple[int, ...] | None,
    unit_cost: float,
) -> ReuseStats:
    batches = [batch for rank in ranks for batch in rank if not batch.is_empty]
    steps = [batch.steps for batch in batches if batch.steps is not None]
    return ReuseStats(
        stepped=len(steps),
        forwards=len(batches) - len(steps) + sum(len(s.own_tokens) for s in steps),
        imported_tokens=max((max(s.imported_tokens) for s in steps), default=0),
        exported_bytes=max((s.exported_bytes for s in steps), default=0),
        second_forward=sum(s.second_forward for s in steps),
        cut_tokens=cut[0] if cut else None,
        cut_cost=cut[1] * unit_cost if cut else None,
    )
