"""Metrics of packing: tokens saved, what could still be shared, and the model FLOPs
utilisation (MFU) of useful FLOPs.

verl's `mfu` counts every replicated token as if it had been computed: on packed batches it is
what an unpacked run would have needed for this speed, and may exceed 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from verl.utils.flops_counter import FlopsCounter

from prefixtree.packing.host_mask import visible_pairs
from prefixtree.planning.micro_batch import MicroBatch
from prefixtree.sharing.near_misses import tokens_to_win


@dataclass
class Work:
    """The work of one rank in one call, summed over its micro-batches.

    Attributes:
        replicated: tokens of all sequences. packed: distinct ones, padding left out.
        squares: sum over packed tokens of 2 x position + 1; n^2 for a lone sequence of n tokens.
        to_win: tokens that run again behind forks that the policy did not sample; None where
            nobody looked.
    """

    replicated: int = 0
    packed: int = 0
    squares: int = 0
    to_win: int | None = None

    def plus(self, other: Work) -> Work:
        """The work of both."""
        return Work(
            self.replicated + other.replicated,
            self.packed + other.packed,
            self.squares + other.squares,
            None if other.to_win is None else (self.to_win or 0) + other.to_win,
        )

    @classmethod
    def of(
        cls, batches: Iterable[MicroBatch], sampled: Sequence[torch.Tensor] | None = None
    ) -> Work:
        """The work of micro-batches.

        Args:
            sampled: bool [n] per sequence of the batch, true where the policy sampled the token.
                Default: nobody looks for what runs again.
        """
        work = cls(to_win=None if sampled is None else 0)
        parts = [(batch.forest, batch.sequence_indices.tolist()) for batch in batches]
        if (trunks := getattr(batches, "trunks", None)) is not None:
            # all of them compute a token once
            parts = [(trunks.forest, list(range(trunks.forest.num_sequences)))]
        for forest, sequences in parts:
            position, length = forest.node_position.astype(np.int64), forest.node_length
            work.replicated += forest.num_replicated_tokens
            work.packed += forest.num_tokens
            # 1 + 3 + .. + (2 n - 1) = n^2, where a token sees position + 1 keys
            work.squares += 2 * visible_pairs(position, length, None) - forest.num_tokens
            if sampled is not None:
                masks = [sampled[i].numpy() for i in sequences]
                work.to_win = (work.to_win or 0) + tokens_to_win(forest, masks)
        return work


def warn_if_nothing_is_shared(work: Work) -> None:
    """Warns of a mini-batch that packing did not make smaller, on the first rank."""
    if dist.get_rank() == 0 and work.replicated < 1.005 * work.packed:
        warnings.warn(
            f"the first mini-batch shared nothing: rank 0 had {work.replicated} tokens, of which "
            f"{work.packed} are distinct, so packing saves nothing. Keep the samples of a prompt "
            "on one rank (trainer.v1.trainer_mode=prefixtree_sync) and in one mini-batch "
            "(actor.shuffle=False), or look at `prefixtree report` for what differs between them",
            stacklevel=2,
        )


def work_metrics(
    work: Work, counter: FlopsCounter, seconds: float, forward_only: bool
) -> dict[str, list[float]]:
    """verl's metrics of one call on one rank: lists of one number, which verl averages.

    Args:
        work: what was computed. counter: verl's, for the model.
        seconds: how long it took. forward_only: without a backward, a third of the FLOPs.
    """
    metrics = {
        "prefixtree/replicated_over_packed": [work.replicated / work.packed],
        "prefixtree/packed_tokens_per_second": [work.packed / seconds],
        "prefixtree/tokens_computed": [float(work.packed)],
        "prefixtree/tokens_saved": [float(work.replicated - work.packed)],
    }
    if work.to_win is not None:
        metrics["prefixtree/tokens_to_win"] = [float(work.to_win)]
    formula = _formula(counter)
    if formula is not None:
        a, b, promised = formula
        flops = a * work.packed + b * work.squares
        mfu = flops / seconds / promised
        metrics["prefixtree/mfu"] = [mfu / 3 if forward_only else mfu]
    return metrics


def _formula(counter: FlopsCounter) -> tuple[float, float, float] | None:
    """verl's estimate of TFLOPs, a x tokens + b x sum of n^2 for most models, and the device's
    promise: (a, b, TFLOP/s). None where the estimate is another (sliding windows) or there is none.
    """

    def flops(length: int) -> float:
        return counter.estimate_flops([length], 1.0)[0]

    one, many, length = flops(1), flops(4096), 4096
    b = (many - length * one) / (length * (length - 1))
    a = one - b
    if one == 0 or not np.isclose(flops(2 * length), 2 * length * a + (2 * length) ** 2 * b):
        return None
    return a, b, counter.estimate_flops([1], 1.0)[1]
