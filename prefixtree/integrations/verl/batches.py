"""verl's batches: read once, split into micro-batches by distinct tokens, and results put back into
verl's jagged layout. Legend: B sequences, n tokens of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.utils import postprocess_batch_func

from prefixtree.errors import UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.integrations.core.batch import Batch, on_host
from prefixtree.integrations.core.trunks import all_keep, planned
from prefixtree.integrations.verl.balance import leaf_order
from prefixtree.planning.costs import ImportCost
from prefixtree.planning.micro_batch import MicroBatch, micro_batch_of
from prefixtree.planning.micro_batches import batches_with_trunks, plan_micro_batches
from prefixtree.scoring.edges import SequenceScores
from prefixtree.scoring.sampling_masks import sets_of

#: The entry of a batch, and of an agent loop's extra_fields: per row, a set of kept token ids per
#: token of the response, as `sequence_logprobs` takes them, or None.
SAMPLING_MASKS = "sampling_masks"
#: Entries of a batch by `prefixtree_sync`: samples of a mini-batch over all ranks, and the token
#: limit of micro-batches in training.
MINI_BATCH, TRAINED_TOKENS = "prefixtree_mini_batch_size", "prefixtree_max_token_len_per_gpu"


def rows_of(data: TensorDict) -> Batch:
    """Reads the rows of a batch, by one copy from its device; the response is scored.

    Everything is scored where the batch does not say what is prompt, or the caller wants the
    model's outputs themselves.
    """
    ids = data["input_ids"]
    sides = [data.get("prompts", None), data.get("responses", None)]
    wants_outputs = tu.get_non_tensor_data(data=data, key="return_model_output", default=False)
    if wants_outputs or any(part is None or not part.is_nested for part in sides):
        sides = []
    values, offsets, *parts = on_host([ids.values(), *(x.offsets() for x in (ids, *sides))])
    masks = None
    if parts and np.array_equal(parts[0] + parts[1], offsets):
        lengths, prompts = np.diff(offsets), np.diff(parts[0])
        masks = [np.arange(n) >= p for n, p in zip(lengths, prompts, strict=True)]
    rows = Batch.jagged(np.split(values, offsets[1:-1]), masks, ids.device)
    sets = _entries(data, SAMPLING_MASKS)
    if all(of_row is None for of_row in sets):
        # verl's v1 trainers leave there what an agent loop adds
        sets = [(more or {}).get(SAMPLING_MASKS) for more in _entries(data, "extra_fields")]
    if any(of_row is not None for of_row in sets):
        # samples that verl pads a batch with hold the first one's
        pairs = zip(sets, _trained(data, rows), strict=True)
        rows.sampling_masks = [of_row if trained.any() else None for of_row, trained in pairs]
    return rows


def add_routes(data: TensorDict, rows: Batch, has_experts: Sequence[bool], mode: str) -> None:
    """Gives rows a batch's recorded experts, and masks that end where verl's losses do."""
    routed = data.get("routed_experts", None)
    if routed is None or not routed.is_nested:
        raise UnsupportedError(
            f"router_replay.mode={mode}: the batch has no jagged routed_experts, which "
            "compute_log_prob (R2) or the rollout engine (R3) records; for R3 set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        )
    values, ends = routed.values().cpu().numpy(), routed.offsets()[1:-1].cpu().numpy()
    if values.shape[1] == len(has_experts):
        # engines may name layers without experts too
        values = values[:, has_experts]
    rows.routes = np.split(values, ends)
    masks = rows.masks or [np.ones(len(tokens), bool) for tokens in rows.tokens]
    if rows.sampling_masks is not None:
        # before what is scored shrinks
        given = zip(rows.sampling_masks, masks, strict=True)
        sets = [sets_of(f"{SAMPLING_MASKS}[{i}]", *row) for i, row in enumerate(given)]
        rows.sampling_masks = [{"token_ids": ids, "counts": counts} for ids, counts in sets]
    # further on verl's rollouts have zeros in the place of experts
    last = [np.flatnonzero(trained).max(initial=0) for trained in _trained(data, rows)]
    rows.masks = [
        mask & (np.arange(len(mask)) <= end) for mask, end in zip(masks, last, strict=True)
    ]


def _trained(data: TensorDict, rows: Batch) -> list[np.ndarray]:
    """The tokens whose scores verl's losses read, bool [n] per row."""
    mask = data["response_mask"]
    if mask.is_nested:
        values, offsets = on_host((mask.values(), mask.offsets()))
        responses = np.split(values, offsets[1:-1])
    else:
        attention = data["attention_mask"][:, -mask.shape[1] :]
        padded, lengths = on_host((mask, attention.sum(1)))
        responses = [row[:n] for row, n in zip(padded, lengths, strict=True)]
    masks = [np.zeros(len(tokens), bool) for tokens in rows.tokens]
    for row, response in zip(masks, responses, strict=True):
        row[len(row) - len(response) :] = response != 0
    return masks


def shown_of(data: TensorDict) -> list[dict[str, Any]]:
    """The entries of multi_modal_inputs that are not None, per sequence; empty for text alone."""
    rows = _entries(data, "multi_modal_inputs")
    return [{k: v for k, v in (row or {}).items() if v is not None} for row in rows]


def _entries(data: TensorDict, name: str) -> list[Any]:
    """Lists an entry of a batch that is no tensor, per row; None where it holds nothing."""
    rows = data.get(name, None)
    rows = [None] * len(data) if rows is None else rows
    return [row.data if isinstance(row, NonTensorData) else row for row in rows]


def count_tokens(data: TensorDict, group: Any) -> float:
    """The denominator of verl's losses: the scored tokens of the mini-batch, over all ranks."""
    count = data["loss_mask"].sum().to(get_device_id())
    dist.all_reduce(count, group=group)
    return count.item()


def mini_batches_of(data: TensorDict, ranks: int) -> list[tuple[int, TensorDict]]:
    """Divides a rank's batch into the mini-batches it will be trained in, each with its first row.

    So old log-probabilities and the reference's come from the same forwards as in training.
    `prefixtree_sync` tells their size over all ranks; without it the batch is one.
    """
    size = tu.get_non_tensor_data(data=data, key=MINI_BATCH, default=None)
    rows_each = len(data) if size is None else size // ranks
    if rows_each < 1 or len(data) % rows_each != 0:
        rows_each = len(data)
    if rows_each == len(data):
        return [(0, data)]
    rows = range(len(data))
    return [
        (at, tu.index_select_tensor_dict(data, list(rows[at : at + rows_each])))
        for at in range(0, len(data), rows_each)
    ]


def split(
    data: TensorDict,
    rows: Batch,
    group: Any,
    ranks: int = 1,
    multiple: int = 1,
    import_cost: ImportCost | None = None,
    has_backward: bool = True,
) -> Sequence[MicroBatch]:
    """Splits a batch into micro-batches, as many on every rank, a multiple of `multiple`.

    With a dynamic batch size a micro-batch holds at most `max_token_len_per_gpu` distinct tokens
    for each of the `ranks` that compute it together; with a fixed one, `micro_batch_size_per_gpu`
    sequences. Sequences that share are put together, so their order changes; each is in one
    micro-batch. With an `import_cost` (and a dynamic batch size) micro-batches keep trunks, for
    `kept_trunks`, where that computes less than cut trees on all ranks together; `has_backward`
    says whether backwards count.
    """
    forest, count = rows.forest, len(rows)
    if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        size = data["micro_batch_size_per_gpu"]
        if count % size != 0:
            raise ValueError(
                f"{count} sequences on a rank do not divide into micro-batches of "
                f"micro_batch_size_per_gpu={size}; change it or set use_dynamic_bsz=True"
            )
        if count // size % multiple != 0:
            raise ValueError(
                f"{count} sequences on a rank make {count // size} micro-batches "
                f"of micro_batch_size_per_gpu={size}, but virtual pipeline stages need a multiple "
                f"of {multiple}; change it or set use_dynamic_bsz=True"
            )
        order = leaf_order(forest)
        return [micro_batch_of(forest, order[i : i + size]) for i in range(0, count, size)]
    max_tokens = data["max_token_len_per_gpu"] * ranks
    (longest,) = largest([max(map(len, rows.tokens))], group)
    batches = None
    if longest <= max_tokens:
        batches = plan_micro_batches(forest, max_tokens, num_ranks=1)[0]
    if import_cost is not None:
        work = max_tokens, import_cost, has_backward
        if (kept := _with_trunks(forest, batches, group, *work)) is not None:
            return kept
    if batches is None:
        budget = f"max_token_len_per_gpu={max_tokens // ranks}"
        if ranks > 1:
            budget += f" x {ranks} ranks"
        raise ValueError(
            f"a sequence has {longest} tokens, more than {budget}; raise "
            "ppo_max_token_len_per_gpu and log_prob_max_token_len_per_gpu"
        )
    # the greatest of -n is minus the smallest n
    steps, minus_fewest = largest([len(batches), -count], group)
    steps = -(-steps // multiple) * multiple
    if steps > -minus_fewest:
        raise ValueError(
            f"one rank needs {steps} micro-batches, another has only {-minus_fewest} sequences to "
            "make them from; give every rank as many sequences, as verl's trainers do"
        )
    return at_least(batches, steps, forest)


def _with_trunks(
    forest: PrefixForest,
    cut: Sequence[MicroBatch] | None,
    group: Any,
    max_tokens: int,
    import_cost: ImportCost,
    has_backward: bool,
) -> Sequence[MicroBatch] | None:
    """Makes micro-batches that keep trunks, as many on every rank; None where trees are cut.

    `cut`: the micro-batches that cut trees; None where a sequence of any rank does not fit.
    """
    repeated = None
    if cut is not None:
        repeated = sum(batch.num_tokens for batch in cut) - forest.num_tokens
        if total([repeated], group) == [0]:
            return None
    trunks = planned(forest, max_tokens, import_cost)
    more = 0 if trunks is None else trunks.extra_tokens(max_tokens, has_backward)
    saved = None if repeated is None else repeated - more
    if not all_keep(trunks is not None, saved, partial(total, group=group)):
        return None
    assert trunks is not None
    count, minus_fewest = largest([len(trunks.sequences), -forest.num_sequences], group)
    if count <= -minus_fewest and count > len(trunks.sequences):
        parts = halved(trunks.sequences, count, forest)
        trunks = planned(forest, max_tokens, import_cost, parts)
    (failed,) = total([trunks is None or len(trunks.sequences) < count], group)
    return None if failed or trunks is None else batches_with_trunks(trunks)


def at_least(batches: Sequence[MicroBatch], count: int, forest: PrefixForest) -> list[MicroBatch]:
    """Divides the same sequences into at least `count` micro-batches, none empty.

    verl takes as many values of every metric from all ranks, so empty ones do not fill up the
    count.
    """
    if len(batches) >= count:
        return list(batches)
    members = halved([batch.sequence_indices for batch in batches], count, forest)
    return [micro_batch_of(forest, part) for part in members]


def halved(members: Sequence[np.ndarray], count: int, forest: PrefixForest) -> list[np.ndarray]:
    """Halves the largest sets of sequences, where neighbours share least, up to `count` sets."""
    sets = list(members)
    while len(sets) < count:
        largest_set = max(range(len(sets)), key=lambda i: len(sets[i]))
        # ordered by leaves, as in `leaf_order`
        held = sorted(sets[largest_set].tolist(), key=forest.sequence_node.__getitem__)
        half = len(held) // 2
        sets[largest_set : largest_set + 1] = [
            np.array(part, np.int64) for part in (held[:half], held[half:])
        ]
    return sets


def in_order(outputs: list[Any], indices: Sequence[np.ndarray]) -> Any:
    """Joins the results of micro-batches, and puts rows `indices` into the order of the batch."""
    # tells verl to undo the indices, for a fixed batch size too
    data = tu.get_tensordict({}, {"use_dynamic_bsz": True})
    rows = [each.tolist() for each in indices]
    return postprocess_batch_func(output_lst=outputs, indices=rows, data=data)


class MicroRows(NamedTuple):
    """The rows of a micro-batch in verl's layout, and on the host."""

    data: TensorDict
    rows: Batch

    def to(self, device: Any) -> MicroRows:
        """Copies the rows so that data and scores are on a device."""
        data = self.data.to(device)
        return MicroRows(data, replace(self.rows, device=data["input_ids"].device))


def micro_rows(data: TensorDict, rows: Batch, batch: MicroBatch) -> MicroRows:
    """Takes the rows of a batch that belong to a micro-batch, in its order."""
    which = batch.sequence_indices.tolist()
    return MicroRows(tu.index_select_tensor_dict(data, which), rows.take(which))


def score_options(data: TensorDict, rows: Batch) -> dict[str, Any]:
    """The options of scoring: which tokens, and how."""
    return {
        "temperature": tu.get(data, "temperature"),
        "loss_mask": rows.masks,
        "sampling_masks": rows.sampling_masks,
        "return_entropy": tu.get_non_tensor_data(data, "calculate_entropy", False),
    }


def scores_in_layout(
    scores: SequenceScores, micro: MicroRows, more: dict[str, list[torch.Tensor]] | None = None
) -> dict[str, torch.Tensor]:
    """Puts scores into verl's layout, jagged [B, n]: at the token before their own, the last 0."""
    found = {"log_probs": scores.logprobs, **(more or {})}
    if scores.entropy is not None:
        found["entropy"] = scores.entropy
    return {name: _nested(micro.rows.spread(x)[0], micro) for name, x in found.items()}


def values_in_layout(values: list[torch.Tensor], micro: MicroRows) -> dict[str, torch.Tensor]:
    """Puts a critic's values [n, 1] of all tokens into verl's layout, jagged [B, n]."""
    return {"values": _nested(torch.cat(values)[:, 0], micro)}


def _nested(values: torch.Tensor, micro: MicroRows) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, micro.data["input_ids"].offsets())


def largest(numbers: list[int], group: Any) -> list[int]:
    """The greatest of each number over the ranks of a group."""
    return _reduced(numbers, group, dist.ReduceOp.MAX)


def total(numbers: list[int], group: Any) -> list[int]:
    """The sum of each number over the ranks of a group."""
    return _reduced(numbers, group, dist.ReduceOp.SUM)


def _reduced(numbers: list[int], group: Any, op: Any) -> list[int]:
    tensor = torch.tensor(numbers, dtype=torch.int64, device=get_device_id())
    dist.all_reduce(tensor, op=op, group=group)
    return tensor.tolist()
