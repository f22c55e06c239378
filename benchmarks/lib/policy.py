"""One side's policy update, and what it is made of: ranks, samples, micro-batches.

Sides of given micro-batches are those of `lib/replicated.py`; fa2, verl and packed split or plan a
mini-batch as the case `update` describes them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config

from benchmarks.lib import layers
from benchmarks.lib.layers import Batch, attention_in
from benchmarks.lib.precision import packed_in
from benchmarks.lib.replicated import attending, chains
from benchmarks.lib.verl import verl_micro_batches
from prefixtree import (
    PackedForest,
    PrefixForest,
    plan_micro_batches,
    plan_recomputation,
)
from prefixtree.packing.copies import move
from prefixtree.planning.costs import CostModel
from prefixtree.recompute.choose import gathered_bytes, memory_of
from prefixtree.recompute.plan import RecomputePlan, Work, scoring_bytes, waiting_bytes
from prefixtree.rollouts import expand_turns, read_rollouts
from prefixtree.scoring.logprobs import sequence_logprobs
from prefixtree.testing.attention import Attention, pieces

CLIP = 0.2
# of micro-batches, in tokens
BUDGET = 32768
# of `shape_of`
SHAPES = ("qwen3-0.6b", "qwen3-8b")


def config(is_tiny: bool) -> Qwen3Config:
    """Qwen3-0.6B's shape, or one that a CPU runs in no time."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 28,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
    }
    if is_tiny:
        sizes |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        sizes["vocab_size"] = 512
    return Qwen3Config(**sizes, tie_word_embeddings=True, attn_implementation="prefixtree")


def shape_of(options: argparse.Namespace) -> Any:
    """The model of --shape with as many layers as --layers says: all 28 of Qwen3-0.6B by default,
    8 of Qwen3-8B."""
    if options.shape == SHAPES[0]:
        out = config(options.is_tiny)
        if options.layers is not None:
            out.num_hidden_layers = options.layers
            out.layer_types = out.layer_types[: options.layers]
        return out
    return layers.config(options.layers or (2 if options.is_tiny else 8), options.is_tiny)


# ---- ranks ---------------------------------------------------------------------------------------


class Ranks:
    """This process alone, or among those of torchrun."""

    def __init__(self, device: str, count: int = 1, rank: int = 0) -> None:
        self.device, self.count, self.rank = device, count, rank

    @classmethod
    def of_torchrun(cls, options: argparse.Namespace) -> Ranks:
        """Joins the others; on GPUs --device becomes this rank's."""
        kind = torch.device(options.device).type
        if kind == "cuda":
            options.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(options.device)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo", timeout=timedelta(minutes=4))
        return cls(options.device, dist.get_world_size(), dist.get_rank())

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        out = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.count > 1:
            dist.all_reduce(out, how)
        return out.tolist()

    def total(self, *values: float) -> list[float]:
        """Sums over the ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def most(self, *values: float) -> list[float]:
        """The greatest of the ranks; they wait for each other."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def agree(self, value: Any) -> Any:
        """The value of the first rank, so that all ranks go the same way."""
        box = [value]
        if self.count > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def joined(self, mine: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """All ranks' values by sequence, on the CPU."""
        every = self.every({i: value.cpu() for i, value in mine.items()})
        return {i: value for some in every for i, value in some.items()}

    def every(self, mine: Any) -> list[Any]:
        """What each rank has."""
        out = [mine] * self.count
        if self.count > 1:
            dist.all_gather_object(out, mine)
        return out


def sharded(model: Any, options: argparse.Namespace, ranks: Ranks) -> Any:
    """The model under FSDP2, in place: weights in float32, computed in what they were."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(getattr(torch, options.dtype), torch.float32)
    model.float()
    kind = torch.device(options.device).type
    more: dict[str, Any] = {"mesh": init_device_mesh(kind, (ranks.count,)), "mp_policy": policy}
    layers, unit = list(model.model.layers), getattr(options, "fsdp_unit", 1)
    # small layers: a unit of several waits less often for Python, and they fit as a whole
    kept = {"reshard_after_forward": False} if unit > 1 else {}
    for first in range(0, len(layers), unit):
        fully_shard(layers[first : first + unit], **more, **kept)
    # each gathered and reduced while layers run, and not at the ends of a step
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head.weight is not embedding.weight:
        fully_shard(embedding, **more)
        fully_shard(head, **more)
    fully_shard(model, **more)
    return model


# ---- samples -------------------------------------------------------------------------------------


def turn_samples(
    options: argparse.Namespace, vocabulary: int
) -> tuple[list[np.ndarray], list[np.ndarray], list[Any]]:
    """A sample per turn of the first --tasks of --rollouts, what is scored of each (bool), and its
    group."""
    turns = expand_turns(read_rollouts(options.rollouts).first_groups(options.tasks))
    # every nth token: what was shared still is
    step = max(1, round(1 / options.scale))
    assert turns.loss_masks is not None
    every = [
        (s[::step] % vocabulary, np.asarray(m[::step], bool), group)
        for s, m, group in zip(turns.sequences, turns.loss_masks, turns.groups, strict=True)
    ]
    # a turn may have lost all that is scored
    some = [(s, m, g) for s, m, g in every if m[1:].any()][: 12 if options.is_tiny else None]
    return [s for s, _, _ in some], [m for _, m, _ in some], [g for _, _, g in some]


def airline(options: argparse.Namespace) -> dict[str, list[Batch]]:
    """Micro-batches of one budget: of distinct tokens, or of copies in input order."""
    shape = layers.config(1, options.is_tiny, shape=options.shape)
    sequences, masks, _ = turn_samples(options, shape.vocab_size)
    budget = max(len(s) for s in sequences) * 2 if options.is_tiny else BUDGET

    def some(indices: Sequence[int]) -> Batch:
        return Batch.of([sequences[i] for i in indices], [masks[i] for i in indices])

    model = CostModel.from_config(shape, gradient_checkpointing=True)
    plan = plan_micro_batches(sequences, budget, cost_model=model)
    packed = [some(b.sequence_indices) for b in plan[0] if not b.is_empty]
    replicated = pieces([len(s) for s in sequences], budget)
    return {"packed": packed, "replicated": [some(indices) for indices in replicated]}


@dataclass(frozen=True)
class Samples:
    """A mini-batch, one entry per sequence.

    Attributes:
        sequences: token ids. masks: bool, what is scored. advantages: float32 [S].
        offsets: float32 [n - 1] each, by how much the check's old log-probabilities are off.
    """

    sequences: list[np.ndarray]
    masks: list[np.ndarray]
    advantages: np.ndarray
    offsets: list[np.ndarray]

    @classmethod
    def read(cls, options: argparse.Namespace, vocabulary: int) -> Samples:
        """`turn_samples` with random advantages."""
        sequences, masks, _ = turn_samples(options, vocabulary)
        rng = np.random.default_rng(0)
        return cls(
            sequences,
            masks,
            rng.normal(size=len(sequences)).astype(np.float32),
            [rng.choice([-1.0, 0.0, 1.0], len(s) - 1).astype(np.float32) for s in sequences],
        )

    def take(self, indices: np.ndarray) -> Samples:
        """Some of them."""
        some = indices.tolist()
        return Samples(
            [self.sequences[i] for i in some],
            [self.masks[i] for i in some],
            self.advantages[indices],
            [self.offsets[i] for i in some],
        )

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each."""
        return np.array([len(s) for s in self.sequences])

    @property
    def num_scored(self) -> int:
        """Scored tokens, copies counted."""
        return sum(int(m[1:].sum()) for m in self.masks)


def token_losses(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """GRPO's clipped objective, all [tokens]."""
    ratio = (new - old).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return -torch.minimum(ratio * advantage, clipped * advantage)


# ---- an update -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A micro-batch, ready for the model.

    Attributes:
        indices: of its samples; none where it is empty.
        packed: their forest, or chains; of an empty one a token that nothing is scored on.
        attend: for `attending`.
        masks: bool [n] per sequence.
        advantage, weight: float32 [sum of n - 1].
    """

    indices: list[int]
    packed: PackedForest
    attend: Attention | None
    masks: list[np.ndarray]
    advantage: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(
        cls,
        side: str,
        indices: list[int],
        forest: PrefixForest,
        masks: list[np.ndarray],
        weights: np.ndarray,
        advantages: np.ndarray,
        options: argparse.Namespace,
    ) -> Step:
        """As a side computes it: packed, or every sequence by itself through the side's attention.

        Args:
            weights, advantages: [S], of each sample in the loss; none of an empty step.
        """
        device = options.device
        each = zip(weights, advantages, masks[: len(weights)], strict=True)
        # [2, sum of n - 1]
        given = [np.stack([w * m[1:], a * m[1:]]) for w, a, m in each] or [np.zeros((2, 0))]
        weight, advantage = move(torch.from_numpy(np.concatenate(given, 1)).float(), device)
        whole = forest if side == "packed" else chains(forest)
        attend, backend = attention_in(
            side, forest, options, getattr(options, "layers_by", "transformers")
        )
        packed = packed_in(getattr(options, "precision", "plain"), whole).to(device)
        packed = packed.with_options(backend)
        return cls(indices, packed, attend, masks, advantage, weight)

    @property
    def num_tokens(self) -> int:
        """That the model computes for samples."""
        return self.packed.num_tokens if self.indices else 0


def cost_of(model: Any) -> CostModel:
    """The cost model by which micro-batches are planned."""
    return CostModel.from_config(model.config, gradient_checkpointing=True)


def deal(
    side: str,
    samples: Samples,
    max_tokens: int,
    ranks: Ranks,
    model: CostModel,
    with_empty: bool,
) -> tuple[list[tuple[np.ndarray, PrefixForest]], np.ndarray]:
    """This rank's micro-batches: samples and forest; and one weight per sample for the loss."""
    if side not in ("packed", "group"):
        rows = verl_micro_batches(samples.lengths, max_tokens, ranks.count)[ranks.rank]
        parts = [np.array(row, np.int64) for row in rows]
        # averaged over the ranks again
        weights = np.full(len(samples.masks), ranks.count / samples.num_scored)
        forests = [
            PrefixForest.from_sequences([samples.sequences[i] for i in part] or [np.zeros(1, int)])
            for part in parts
        ]
        return list(zip(parts, forests, strict=True)), weights
    if side == "group":
        # each rank computes its part of every forest
        limit, count, rank = max_tokens * ranks.count, 1, 0
    else:
        limit, count, rank = max_tokens, ranks.count, ranks.rank
    plan = plan_micro_batches(samples.sequences, limit, count, cost_model=model)
    if side == "packed" and with_empty and not plan.stats.empty_steps:
        steps = plan.num_micro_batches + 1
        plan = plan_micro_batches(
            plan.forest, limit, count, min_micro_batches=steps, cost_model=model
        )
    mine = [(batch.sequence_indices, batch.forest) for batch in plan[rank]]
    return mine, plan.loss_weights("token-mean", samples.masks)


class Update:
    """One side's policy update: its micro-batches made, ready for the model.

    Attributes:
        recompute: of `sequence_logprobs`, in the forwards that have a backward.
        group: of `sequence_logprobs`: the ranks that compute every forest together.
    """

    def __init__(self, model: Any, steps: Sequence[Step]) -> None:
        self.model, self.steps = model, list(steps)
        self.recompute: Any = None
        self.group: Any = None

    @classmethod
    def of_samples(
        cls,
        side: str,
        model: Any,
        samples: Samples,
        max_tokens: int,
        ranks: Ranks,
        options: argparse.Namespace,
        with_empty: bool = False,
        cost: CostModel | None = None,
    ) -> Update:
        """Of this rank's share of a mini-batch, split or planned as the side does it.

        cost: `cost_of` of the model, which a trainer makes once.
        """
        mine, weights = deal(side, samples, max_tokens, ranks, cost or cost_of(model), with_empty)
        name = "fa2" if side == "fa2" else "packed"
        steps = []
        for indices, forest in mine:
            some = samples.take(indices)
            masks = some.masks or [np.zeros(1, bool)]
            loss = (weights[indices], some.advantages)
            steps.append(Step.of(name, indices.tolist(), forest, masks, *loss, options))
        update = cls(model, steps)
        update.group = dist.group.WORLD if side == "group" else None
        return update

    @classmethod
    def of_batches(
        cls, side: str, model: Any, batches: Sequence[Batch], options: argparse.Namespace
    ) -> Update:
        """Of given micro-batches, with random advantages and the mean over all scored tokens."""
        scored = sum(int(m[1:].sum()) for b in batches for m in b.masks)
        steps, first = [], 0
        for batch in batches:
            count = len(batch.masks)
            indices = list(range(first, first + count))
            first += count
            weights = np.full(count, 1 / scored)
            advantages = np.random.default_rng(count).normal(size=count)
            loss = (weights, advantages)
            steps.append(Step.of(side, indices, batch.forest, batch.masks, *loss, options))
        return cls(model, steps)

    def predicted(self) -> tuple[int, RecomputePlan]:
        """Weights, gradients, and the most that is predicted for a micro-batch's activations, on
        this rank; what the layers recompute in that micro-batch."""
        # of a sharded parameter this rank's part
        weights = [getattr(p, "_local_tensor", p) for p in self.model.parameters()]
        held = 2 * sum(weight.nbytes for weight in weights) + gathered_bytes(self.model)
        memory = memory_of(self.model, self.model, weights[0].device)
        plans = []
        for step in self.steps:
            work = Work(step.packed.forest, sum(int(m[1:].sum()) for m in step.masks))
            modes = self.recompute or "all"
            if modes == "auto":
                modes = plan_recomputation(self.model, step.packed, scored=work.scored).modes
            else:
                modes = (modes,) * len(memory.layers["all"])
            scoring, waiting = scoring_bytes(memory, work), waiting_bytes(memory, work)
            peak = memory.peak(step.packed.num_tokens, modes, scoring, waiting)
            plans.append(RecomputePlan(modes, peak))
        worst = max(plans, key=lambda plan: plan.peak_bytes)
        return held + worst.peak_bytes, worst

    def _score(self, step: Step) -> list[torch.Tensor]:
        return sequence_logprobs(
            self.model,
            step.packed,
            loss_mask=step.masks,
            recompute=self.recompute,
            group=self.group,
        ).logprobs

    def old(self, step: Step) -> list[torch.Tensor]:
        """Log-probabilities without gradients."""
        with torch.no_grad(), attending(step.attend):
            return self._score(step)

    def learn(
        self, step: Step, old: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Forward and backward; -> log-probabilities and the loss, its share of the whole."""
        with attending(step.attend):
            new = self._score(step)
            each = token_losses(torch.cat(new), torch.cat(list(old)), step.advantage)
            loss = (each * step.weight).sum()
            loss.backward()
        return [row.detach() for row in new], loss.detach()

    def __call__(self) -> dict[int, torch.Tensor]:
        """Old log-probabilities, then the gradient; -> the former by sample."""
        olds = [self.old(step) for step in self.steps]
        for step, old in zip(self.steps, olds, strict=True):
            self.learn(step, old)
        return {
            i: row
            for step, old in zip(self.steps, olds, strict=True)
            for i, row in zip(step.indices, old, strict=bool(step.indices))
        }
