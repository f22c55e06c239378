"""`split_tokens`: divides the tokens of a packed forest among ranks.

The packed tokens are cut into chunks of equal length, several per rank, and dealt heaviest first
to the rank with the least work. So ranks have equal tokens and nearly equal work. More chunks even
out the work better, and make ranks import more. The number of chunks is the one with the least
predicted time. Legend: T packed tokens, n ranks, C chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from prefixtree import loops
from prefixtree._numbers import integers
from prefixtree.errors import ForestError
from prefixtree.packing.arguments import at_least_one, check_packed
from prefixtree.packing.layout import Edges, PackedForest
from prefixtree.planning.costs import CostModel, ImportCost, run_flops
from prefixtree.planning.parts import Parts, find_pieces, imported_rows

# tried numbers of chunks per rank
_CHUNKS = (1, 2, 4, 8, 16)
# tiles per rank below which tiles are halved, so that a tile more or less is little of a rank
_TILES = 16


@dataclass(frozen=True)
class SplitStats:
    """Balance and traffic of a division among ranks, one entry per rank in each tuple."""

    # tokens that the rank computes
    own_tokens: tuple[int, ...]
    # FLOPs of an update of these, by the cost model
    flops: tuple[float, ...]
    # predicted seconds to compute these
    seconds: tuple[float, ...]
    # rows that the rank imports, per layer and exchange
    received_rows: tuple[int, ...]
    # rows that the rank exports, once per importer, per layer and exchange
    sent_rows: tuple[int, ...]
    # bytes of an update that the rank receives as an importer, and sends back as gradients, in all
    # layers
    received_bytes: tuple[int, ...]
    # predicted seconds of all exchanges of an update
    exchange_seconds: float
    # predicted seconds of one rank with all tokens, over n times those of n ranks
    efficiency: float

    @property
    def token_balance(self) -> float:
        """Most own tokens of a rank over the mean; 1.0 is even."""
        return _balance(self.own_tokens)

    @property
    def work_balance(self) -> float:
        """Longest predicted computation of a rank over the mean; 1.0 is even."""
        return _balance(self.seconds)

    @property
    def received_share(self) -> float:
        """Most rows that a rank imports, over the rows that an all-gather would bring to it."""
        foreign = sum(self.own_tokens) - np.array(self.own_tokens)
        return float(max(np.array(self.received_rows) / np.maximum(1, foreign)))

    def __str__(self) -> str:
        ranks, tokens = len(self.own_tokens), sum(self.own_tokens)
        return (
            f"{tokens:,} tokens on {ranks} ranks: at most {max(self.own_tokens):,} tokens "
            f"({self.token_balance:.3f} of the mean), work {self.work_balance:.3f} of the mean; "
            f"a rank imports at most {max(self.received_rows):,} rows ({self.received_share:.1%} "
            f"of an all-gather), {max(self.received_bytes) / 2**20:,.1f} MiB per update; predicted "
            f"efficiency {self.efficiency:.3f}"
        )


class Split(Parts):
    """A packed forest divided among ranks. Made by `split_tokens`."""

    # the number of chunks that were dealt to each rank
    chunks_per_part: int
    # tokens; each chunk starts at a multiple of it
    tile: int
    _costs: tuple[CostModel, Edges | None, ImportCost]

    @cached_property
    def stats(self) -> SplitStats:
        """Balance and traffic."""
        cost_model, scored, import_cost = self._costs
        return split_stats(self, cost_model, scored, import_cost=import_cost)


def split_tokens(
    packed: PackedForest,
    num_parts: int,
    cost_model: CostModel | None = None,
    scored: Edges | None = None,
    *,
    import_cost: ImportCost | None = None,
    tile: int = 128,
    multiple: int = 1,
) -> Split:
    """Divides the packed tokens among the ranks of a group, with equal tokens and equal work.

    The result depends only on the arguments, so all ranks find the same one. Every part has at
    least one token.

    Args:
        num_parts: n, the ranks of the group.
        scored: the edges to score, from `packed.edges(loss_mask)`. A token pays for the lm_head
            once per edge that it predicts. Default: every token pays once.
        import_cost: bytes and rates, to predict times.
        tile: chunks start at multiples of so many tokens, so that no tile of queries is cut. It is
            halved while a rank has fewer than 16 tiles. Default: 128, the largest query tile.
        multiple: every part has a multiple of so many tokens, for ranks that cut it again.

    Raises:
        ForestError: fewer packed tokens than `multiple` per part, or no multiple of it; predictors
            that are no packed tokens; or a packed forest whose mask holds a subset of the queries.
        ValueError: `scored` with a cost model whose `linear` is below `import_cost.lm_head`.
    """
    check_packed(packed, "split_tokens")
    num_parts = at_least_one("num_parts", num_parts)
    tile, multiple = at_least_one("tile", tile), at_least_one("multiple", multiple)
    num_tokens = packed.num_tokens
    if multiple > 1 and (num_tokens % multiple or num_tokens < num_parts * multiple):
        raise ForestError(
            f"split_tokens cannot divide {num_tokens} packed tokens into {num_parts} parts of "
            f"multiples of {multiple}: pack(forest, pad_to_multiple_of={num_parts * multiple})"
        )
    if num_parts > num_tokens:
        raise ForestError(
            f"split_tokens cannot divide {num_tokens} packed tokens among {num_parts} parts; "
            "expected at least one token per part, so use fewer parts"
        )
    cost_model = CostModel() if cost_model is None else cost_model
    import_cost = ImportCost() if import_cost is None else import_cost
    costs = cost_model, import_cost, scored
    tile = -(-_tile_of(num_tokens, num_parts, tile) // multiple) * multiple
    each, start, owner = _dealt(packed, np.array([0, num_tokens]), num_parts, [tile], costs)
    split = Split.__new__(Split)
    split.chunks_per_part, split.tile = each, tile
    split._init(packed, start, owner, num_parts)
    split._costs = cost_model, scored, import_cost
    return split


def split_slots(
    packed: PackedForest,
    border: np.ndarray,
    ranks: int,
    cost_model: CostModel,
    scored: Edges | None = None,
    *,
    import_cost: ImportCost,
    tile: int = 128,
) -> Parts:
    """Divides each slot of a forest among ranks, as `split_tokens` does a whole forest.

    border is int64 [S + 1], ascending from 0 to T, with at least `ranks` tokens per slot. A rank's
    part is slot * n + rank; each has a token.
    """
    tiles = [_tile_of(count, ranks, tile) for count in np.diff(border).tolist()]
    costs = cost_model, import_cost, scored
    _, start, owner = _dealt(packed, border, ranks, tiles, costs)
    parts = Parts.__new__(Parts)
    parts._init(packed, start, owner, ranks * len(tiles))
    return parts


def _tile_of(num_tokens: int, num_parts: int, tile: int) -> int:
    while tile > 1 and num_tokens < num_parts * tile * _TILES:
        tile //= 2
    return tile


def _dealt(
    packed: PackedForest,
    border: np.ndarray,
    ranks: int,
    tiles: list[int],
    costs: tuple[CostModel, ImportCost, Edges | None],
) -> tuple[int, np.ndarray, np.ndarray]:
    """Deals the chunks of each slot to ranks; a slot is cut at multiples of its tile.

    Returns the number of chunks per rank, and int64 [Q] each: the first token of each run of one
    cell, and the cell.
    """
    cost_model, import_cost, scored = costs
    slots = [
        np.minimum(np.arange(first, stop + tile, tile), stop)
        for first, stop, tile in zip(border[:-1], border[1:], tiles, strict=True)
    ]
    grid = np.concatenate([*(slot[:-1] for slot in slots), border[-1:]])
    seconds = _work(packed, grid, cost_model, import_cost, scored)[1]
    of_slots = np.split(seconds, np.cumsum([len(slot) - 1 for slot in slots])[:-1])
    cells = ranks * len(slots)
    best, least = None, np.inf
    for per_rank in _CHUNKS if ranks > 1 else _CHUNKS[:1]:
        if best is not None and all(per_rank * ranks >= len(slot) for slot in slots):
            break
        starts, owners, predicted = [], [], 0.0
        for number, (slot, slot_seconds) in enumerate(zip(slots, of_slots, strict=True)):
            num_tiles = len(slot) - 1
            chunks = min(per_rank, num_tiles // ranks)
            count = chunks * ranks
            cut = num_tiles * np.arange(count + 1) // count
            before = np.concatenate([[0.0], np.cumsum(slot_seconds)])
            chunk, widths = np.diff(before[cut]), np.diff(cut)
            order = np.argsort(-chunk, kind="stable")
            rank = loops.parts.deal(chunk, order, widths > num_tiles // count, ranks, chunks)
            new = np.concatenate([[True], rank[1:] != rank[:-1]])
            starts.append(slot[cut[:-1]][new])
            owners.append(number * ranks + rank[new])
            predicted += np.bincount(rank, chunk, ranks).max()
        start, owner = np.concatenate(starts), np.concatenate(owners)
        ptr, pieces = find_pieces(packed, np.append(start, border[-1]), owner, cells)
        rows = imported_rows(np.repeat(np.arange(cells), np.diff(ptr)), pieces, cells)
        # a row of an earlier slot comes from the rank that holds it
        between = rows.reshape(len(slots), ranks, len(slots), ranks).sum(2)
        between[:, range(ranks), range(ranks)] = 0
        predicted += sum(import_cost.exchange_seconds(of_slot) for of_slot in between)
        if predicted < least:
            best, least = (per_rank, start, owner), predicted
    assert best is not None
    return best


def split_stats(
    parts: Parts,
    cost_model: CostModel | None = None,
    scored: Edges | None = None,
    *,
    import_cost: ImportCost | None = None,
) -> SplitStats:
    """Predicts balance and traffic of any division among ranks, with `split_tokens`'s arguments."""
    cost_model = CostModel() if cost_model is None else cost_model
    import_cost = ImportCost() if import_cost is None else import_cost
    runs, owner = parts.runs
    of_run = _work(parts.packed, runs, cost_model, import_cost, scored)
    flops, seconds = (np.bincount(owner, x, len(parts)) for x in of_run)
    exchange = import_cost.exchange_seconds(parts.imported)
    received = parts.imported.sum(1)
    together = float(seconds.max()) + exchange
    return SplitStats(
        own_tokens=tuple(parts.num_own_tokens.tolist()),
        flops=tuple(flops.tolist()),
        seconds=tuple(seconds.tolist()),
        received_rows=tuple(received.tolist()),
        sent_rows=tuple(parts.imported.sum(0).tolist()),
        received_bytes=tuple((received * import_cost.update_row_bytes).tolist()),
        exchange_seconds=exchange,
        efficiency=float(seconds.sum()) / (len(parts) * together) if together else 1.0,
    )


def _work(
    packed: PackedForest,
    border: np.ndarray,
    cost_model: CostModel,
    import_cost: ImportCost,
    scored: Edges | None,
) -> tuple[np.ndarray, np.ndarray]:
    """FLOPs and predicted seconds of the tokens between each two borders, float64 [B] each."""
    flops = run_flops(packed, border, cost_model)
    seconds = import_cost.compute_seconds(np.diff(border), flops, cost_model)
    if scored is None:
        return flops, seconds
    if import_cost.lm_head > cost_model.linear:
        raise ValueError(
            f"with scored=, linear must count the lm_head for every token: expected at least "
            f"import_cost.lm_head {import_cost.lm_head:.3g}, got {cost_model.linear:.3g}; give a "
            "import_cost of the same model, or leave scored out"
        )
    predictor = integers("scored.predictor", scored.predictor, packed.num_tokens, "packed tokens")
    edges = np.bincount(predictor, minlength=packed.num_tokens)
    unscored = np.diff(border) - np.add.reduceat(edges, border[:-1])
    less = import_cost.lm_head * unscored
    return flops - less, seconds - less / import_cost.linear_rate


def _balance(values: tuple[float, ...]) -> float:
    return max(values) * len(values) / sum(values) if any(values) else 1.0
