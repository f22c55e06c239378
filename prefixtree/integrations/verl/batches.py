"""verl's batches: split into micro-batches by distinct tokens, packed, and their results put back
into verl's jagged layout.

Legend: B sequences, n tokens of one, R tokens of all, T distinct tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.workers.engine.utils import postprocess_batch_func

from prefixtree.errors import ForestError
from prefixtree.forest import PrefixForest
from prefixtree.images.pictures import Pictures
from prefixtree.integrations.verl.balance import leaf_order
from prefixtree.planning.costs import BorrowCost
from prefixtree.planning.micro_batch import MicroBatch, micro_batch_of
from prefixtree.planning.micro_batches import batches_with_trunks, plan_micro_batches
from prefixtree.planning.trunks import Trunks, plan_trunks

#: Entries of a batch by `prefixtree_sync`: samples of a mini-batch over all ranks, and the token
#: limit of micro-batches in training.
MINI_BATCH, TRAINED_TOKENS = "prefixtree_mini_batch_size", "prefixtree_max_token_len_per_gpu"


def sequences_of(data: TensorDict) -> list[np.ndarray]:
    """Token ids of every sequence, int64 [n] each, on the host."""
    input_ids = data["input_ids"]
    values = input_ids.values().cpu().numpy()
    return np.split(values, input_ids.offsets()[1:-1].cpu().numpy())


def shown_of(data: TensorDict) -> list[dict[str, Any]]:
    """The entries of multi_modal_inputs that are not None, per sequence; empty for text alone."""
    rows = data.get("multi_modal_inputs", None)
    if rows is None:
        return [{}] * len(data)
    given = [row.data if isinstance(row, NonTensorData) else row for row in rows]
    return [{k: v for k, v in (row or {}).items() if v is not None} for row in given]


def count_tokens(data: TensorDict, group: Any) -> float:
    """The denominator of verl's losses: the scored tokens of the mini-batch, over all ranks."""
    count = data["loss_mask"].sum().to(get_device_id())
    dist.all_reduce(count, group=group)
    return count.item()


def mini_batches_of(data: TensorDict, ranks: int) -> list[tuple[int, TensorDict]]:
    """The mini-batches that a rank's batch will be trained in, each with its first row's number.

    Where each is scored by itself, as it will be trained, old log-probabilities and the reference's
    are those of the same forwards. `prefixtree_sync` tells their size; without it the batch is one.

    Args:
        data: a batch that is scored. ranks: those that divide a mini-batch.
    """
    size = tu.get_non_tensor_data(data=data, key=MINI_BATCH, default=None)
    each = len(data) if size is None else size // ranks
    if each < 1 or len(data) % each != 0:
        each = len(data)
    if each == len(data):
        return [(0, data)]
    rows = range(len(data))
    return [
        (at, tu.index_select_tensor_dict(data, list(rows[at : at + each])))
        for at in range(0, len(data), each)
    ]


def split(
    data: TensorDict,
    group: Any,
    ranks: int = 1,
    multiple: int = 1,
    pictures: Pictures | None = None,
    borrow_cost: BorrowCost | None = None,
    has_backward: bool = True,
    routes: Sequence[np.ndarray] | None = None,
) -> Sequence[MicroBatch]:
    """The micro-batches of a batch; as many on every rank of the group, a multiple of `multiple`.

    With a dynamic batch size a micro-batch holds at most `max_token_len_per_gpu` distinct tokens
    for each of the `ranks` that compute it together, with a fixed one `micro_batch_size_per_gpu`
    sequences. Either way sequences that share are brought together: every sequence is in one
    micro-batch, but not in the order given. With pictures, forests are of `pictures.sequences`.
    `routes` are those of `PrefixForest.from_sequences`. With a `borrow_cost` (and a dynamic batch
    size) they keep their trunks, for `kept_trunks`, where that computes less than cut trees on all
    ranks together; `has_backward` says what is counted.

    Raises:
        ValueError: a sequence longer than that on any rank, or fewer sequences on
            one than another needs micro-batches (all ranks raise); a number of sequences that the
            fixed size does not divide, or that makes another number of micro-batches.
    """
    sequences = sequences_of(data) if pictures is None else pictures.sequences
    forest = PrefixForest.from_sequences(sequences, routes=routes)
    if not tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
        size = data["micro_batch_size_per_gpu"]
        if len(sequences) % size != 0:
            raise ValueError(
                f"{len(sequences)} sequences on a rank do not divide into micro-batches of "
                f"micro_batch_size_per_gpu={size}; change it or set use_dynamic_bsz=True"
            )
        if len(sequences) // size % multiple != 0:
            raise ValueError(
                f"{len(sequences)} sequences on a rank make {len(sequences) // size} micro-batches "
                f"of micro_batch_size_per_gpu={size}, but virtual pipeline stages need a multiple "
                f"of {multiple}; change it or set use_dynamic_bsz=True"
            )
        order = leaf_order(forest)
        return [micro_batch_of(forest, order[i : i + size]) for i in range(0, len(order), size)]
    max_tokens = data["max_token_len_per_gpu"] * ranks
    (longest,) = largest([max(len(s) for s in sequences)], group)
    batches = None
    if longest <= max_tokens:
        batches = plan_micro_batches(forest, max_tokens, num_ranks=1)[0]
    if borrow_cost is not None:
        work = max_tokens, borrow_cost, has_backward
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
    # the greatest of -n is minus the fewest
    steps, minus_fewest = largest([len(batches), -len(sequences)], group)
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
    borrow_cost: BorrowCost,
    has_backward: bool,
) -> Sequence[MicroBatch] | None:
    """Micro-batches that keep their trunks, as many on every rank; None where trees are cut.

    Args:
        cut: the micro-batches that cut trees; None where a sequence of any rank does not fit.
    """
    repeated = 0
    if cut is not None:
        mine = sum(batch.num_tokens for batch in cut) - forest.num_tokens
        (repeated,) = total([mine], group)
        if repeated == 0:
            return None

    def planned(micro_batches: Sequence[np.ndarray] | None = None) -> Trunks | None:
        try:
            return plan_trunks(forest, max_tokens, borrow_cost, micro_batches)
        except ForestError:
            return None

    trunks = planned()
    more = 0 if trunks is None else trunks.extra_tokens(max_tokens, has_backward)
    failed, more = total([trunks is None, more], group)
    if failed or (cut is not None and more >= repeated):
        return None
    assert trunks is not None
    count, minus_fewest = largest([len(trunks.sequences), -forest.num_sequences], group)
    if count <= -minus_fewest and count > len(trunks.sequences):
        trunks = planned(halved(trunks.sequences, count, forest))
    (failed,) = total([trunks is None or len(trunks.sequences) < count], group)
    if failed or trunks is None:
        return None
    return batches_with_trunks(trunks)


def at_least(batches: Sequence[MicroBatch], count: int, forest: PrefixForest) -> list[MicroBatch]:
    """The same sequences of a forest in at least `count` micro-batches, none empty.

    Not filled up with empty micro-batches, because verl takes as many values of every metric from
    all ranks.
    """
    if len(batches) >= count:
        return list(batches)
    members = halved([batch.sequence_indices for batch in batches], count, forest)
    return [micro_batch_of(forest, part) for part in members]


def halved(members: Sequence[np.ndarray], count: int, forest: PrefixForest) -> list[np.ndarray]:
    """Sets of sequences in at least `count` sets: those of most sequences are halved, between the
    sequences that share least."""
    found = list(members)
    while len(found) < count:
        at = max(range(len(found)), key=lambda i: len(found[i]))
        # in the order of the leaves, as `leaf_order`
        held = sorted(found[at].tolist(), key=forest.sequence_node.__getitem__)
        half = len(held) // 2
        found[at : at + 1] = [np.array(part, np.int64) for part in (held[:half], held[half:])]
    return found


def rows_of(data: TensorDict, batch: MicroBatch) -> TensorDict:
    """The rows of a batch that belong to a micro-batch, in its order."""
    return tu.index_select_tensor_dict(data, batch.sequence_indices.tolist())


def in_order(outputs: list[Any], indices: Sequence[np.ndarray]) -> Any:
    """The results of all micro-batches, of the rows with these numbers, in the order of the
    batch."""
    # says that the indices are to be undone, for a fixed batch size too
    data = tu.get_tensordict({}, {"use_dynamic_bsz": True})
    rows = [each.tolist() for each in indices]
    return postprocess_batch_func(output_lst=outputs, indices=rows, data=data)


def scored_tokens(data: TensorDict) -> list[torch.Tensor] | None:
    """Per sequence bool [n]: the response, the only part that verl reads log-probabilities of.

    None (score everything) where the batch does not say what is prompt, or the caller wants the
    model's outputs themselves.
    """
    prompts, responses = data.get("prompts", None), data.get("responses", None)
    if prompts is None or responses is None or not (prompts.is_nested and responses.is_nested):
        return None
    if tu.get_non_tensor_data(data=data, key="return_model_output", default=False):
        return None
    lengths = data["input_ids"].offsets().diff().cpu()
    prompt_lengths = prompts.offsets().diff().cpu()
    if not torch.equal(prompt_lengths + responses.offsets().diff().cpu(), lengths):
        return None
    return [
        torch.arange(n) >= p for n, p in zip(lengths.tolist(), prompt_lengths.tolist(), strict=True)
    ]


def shifted_to_jagged(per_sequence: list[torch.Tensor], like: Any) -> torch.Tensor:
    """Values of tokens 1 .. n - 1 -> verl's layout: each stands at the token before, jagged [B, n].

    The last entry of a sequence, which verl fills with a value nobody reads, is 0.

    Args:
        per_sequence: [n - 1] each, on the device of `like`. like: the jagged input_ids.
    """
    offsets = like.offsets()
    flat = torch.cat(per_sequence)
    has_next = torch.ones(int(offsets[-1]), dtype=torch.bool, device=flat.device)
    has_next[offsets[1:] - 1] = False
    full = flat.new_zeros(len(has_next)).masked_scatter(has_next, flat)
    return torch.nested.nested_tensor_from_jagged(full, offsets)


def to_jagged(per_sequence: list[torch.Tensor], like: Any) -> torch.Tensor:
    """Values of all tokens [n] each -> jagged [B, n]; `like` is the jagged input_ids."""
    return torch.nested.nested_tensor_from_jagged(torch.cat(per_sequence), like.offsets())


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
