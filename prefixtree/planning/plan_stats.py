"""`PlanStats`: what a plan of micro-batches computes, beside other ways to compute the batch."""

from __future__ import annotations

from dataclasses import dataclass

from prefixtree.planning.trunks import TrunkStats


@dataclass(frozen=True)
class ReuseStats:
    """The cost of steps in a plan whose trees are not cut, beside the plan that cuts them.

    Attributes:
        stepped: the micro-batches that hold more than `max_tokens` and are computed in steps.
        forwards: steps of those, and one per other micro-batch.
        borrowed_tokens: the most tokens that a step borrows.
        lent_bytes: the most bytes of lent keys and values that a micro-batch keeps from its
            forwards to its backwards, in all layers.
        second_forward: FLOPs of the forwards that the backward of steps repeats. `rank_costs` does
            not hold them.
        cut_tokens: tokens of the plan that cuts trees; None where a sequence is longer than
            `max_tokens`, so that there is no such plan.
        cut_cost: FLOPs of that plan; None likewise.
    """

    stepped: int
    forwards: int
    borrowed_tokens: int
    lent_bytes: int
    second_forward: float
    cut_tokens: int | None
    cut_cost: float | None


@dataclass(frozen=True)
class PlanStats:
    """The tokens and FLOPs of a plan, beside those of other ways to compute the batch.

    Dummies of empty steps are not counted.

    Attributes:
        packed_tokens: tokens that the plan computes, summed over its micro-batches.
        distinct_tokens: tokens of one forest over all sequences. No plan computes fewer.
        replicated_tokens: tokens of all sequences. A trainer without sharing computes these.
        micro_batches: the number of micro-batches that hold sequences.
        steps: micro-batches per rank, empty ones included.
        empty_steps: the number of dummies, over all ranks.
        rank_costs: FLOPs of each rank, by the cost model.
        lockstep_cost: FLOPs of the costliest micro-batch of each step, summed over the steps: the
            time of ranks that wait for each other in every step, as under FSDP.
        naive_tokens: distinct tokens of micro-batches filled in input order up to the budget in
            replicated tokens, as trainers do, if each were packed.
        naive_micro_batches: the number of those micro-batches.
        reuse: what steps cost, of a plan with `reuse`; None without.
        trunks: of a plan with `trunks`, sums and maxima over its ranks; None without.
    """

    packed_tokens: int
    distinct_tokens: int
    replicated_tokens: int
    micro_batches: int
    steps: int
    empty_steps: int
    rank_costs: tuple[float, ...]
    lockstep_cost: float
    naive_tokens: int
    naive_micro_batches: int
    reuse: ReuseStats | None = None
    trunks: TrunkStats | None = None

    @property
    def repeated_tokens(self) -> int:
        """Ancestor tokens computed again because their tree was cut: packed - distinct."""
        return self.packed_tokens - self.distinct_tokens

    @property
    def balance(self) -> float:
        """Cost of the heaviest rank divided by the mean cost per rank; 1.0 is even."""
        return max(self.rank_costs) * len(self.rank_costs) / sum(self.rank_costs)

    @property
    def lockstep_balance(self) -> float:
        """`lockstep_cost` divided by the mean cost per rank; 1.0 is even in every step."""
        return self.lockstep_cost * len(self.rank_costs) / sum(self.rank_costs)

    def __str__(self) -> str:
        packed = self.packed_tokens
        empty = f", {self.empty_steps} of them empty" if self.empty_steps else ""
        if idle := self.rank_costs.count(0):
            empty += f" ({idle} rank{'s have' if idle > 1 else ' has'} no sequence)"
        ranks = len(self.rank_costs)
        lines: tuple[str, ...] = (
            f"{packed:,} tokens in {self.micro_batches:,} micro-batches",
            f"  ranks       {ranks} x {self.steps} steps{empty}; heaviest rank "
            f"{self.balance:.3f} x the mean, {self.lockstep_balance:.3f} x step by step",
            f"  repeated    {self.repeated_tokens:,} ancestor tokens beyond the "
            f"{self.distinct_tokens:,} distinct ({packed / self.distinct_tokens - 1:.1%})",
            f"  replicated  {self.replicated_tokens:,} tokens "
            f"({self.replicated_tokens / packed:.2f} x)",
            f"  naive       {self.naive_tokens:,} tokens in {self.naive_micro_batches:,} "
            f"micro-batches ({self.naive_tokens / packed:.2f} x)",
        )
        if self.trunks is not None:
            lines = (*lines, f"  trunks      {self.trunks}")
        return "\n".join(lines if self.reuse is None else (*lines, self._reuse_line(self.reuse)))

    def _reuse_line(self, reuse: ReuseStats) -> str:
        work = sum(self.rank_costs)
        line = (
            f"  reuse       {reuse.stepped:,} micro-batches in steps, {reuse.forwards:,} forwards; "
            f"a step borrows at most {reuse.borrowed_tokens:,} tokens; "
            f"{reuse.lent_bytes / 2**30:,.2f} GiB of lent keys and values; a second forward is "
            f"{reuse.second_forward / work:.1%} of the work"
        )
        if reuse.cut_tokens is None or reuse.cut_cost is None:
            return f"{line}; a sequence is too long to cut trees instead"
        return (
            f"{line}; cut trees take {reuse.cut_tokens:,} tokens and {reuse.cut_cost / work:.2f} x "
            "the work"
        )
