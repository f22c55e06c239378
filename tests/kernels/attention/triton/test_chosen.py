"""Triton attends to the keys that queries chose: in its interpreter on a CPU, natively on a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from prefixtree import PrefixForest, TreeMask, UnsupportedError, tree_attention
from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.kernels.attention.triton import chosen, launch
from prefixtree.packing.block_tables import TileShape
from tests.conftest import Poison
from tests.support.attention_checks import (
    Case,
    assert_as_promised,
    assert_numerics,
    ours,
    run,
)
from tests.support.choices import random_choice
from tests.support.full import mostly
from tests.support.pairs import pairwise
from tests.support.strategies import mask_of, random_forest
from tests.support.triton_tiles import DEVICE, DTYPES, TILES, use

# numpy warns where dead lanes overflow in the interpreter; what is stored is checked
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

# a path of 97 tokens, four words; nodes that begin inside a word and inside a tile; two trees
FOREST = PrefixForest.from_parents([-1, 0, 0, 2, 2, 4, -1, 6], [45, 14, 5, 31, 1, 16, 6, 9])
# full tiles whose keys reach into the last word of the choice; runs of several tiles of many tokens
LAST_WORD = PrefixForest.from_parents([-1, -1], [109, 108])
# query and kv heads, head dims of k and v; MLA's differ
HEADS = [((4, 2), (16, 16)), ((2, 2), (24, 16)), ((8, 1), (8, 24)), ((7, 1), (16, 8))]
FEATURES = {
    "plain": {},
    "window": {"window": 13},
    "all": {"window": 40, "softcap": 3.0, "sinks": True, "dlse": True, "scale": 0.4},
}


def _mask(forest: PrefixForest = FOREST, **options: object) -> TreeMask:
    return mask_of(forest).to(DEVICE).with_options(backend="triton", **options)


def _check(forest: PrefixForest, mask: TreeMask, case: Case, seed: int = 0) -> None:
    bits, visible = random_choice(mask, seed)
    case = case.to(DEVICE)
    if case.q.dtype != torch.float32:
        assert_numerics(forest, mask, case, ours(mask, chosen=bits), visible)
        return
    # served in the interpreter alone, where rounding is no matter
    want = run(case, ours(mask, backend="reference", chosen=bits), torch.float64)
    for name, value in run(case, ours(mask, chosen=bits)).items():
        if value.numel():
            limit = 2e-5 * max(1.0, float(want[name].abs().max()))
            assert float((value - want[name]).abs().max()) <= limit, name


@pytest.mark.parametrize(
    "heads, dims, dtype",
    # in both where a tile does not hold all heads of a group
    # the others are heads of forests below
    mostly(
        [(*x, dtype) for i, x in enumerate(HEADS) for dtype in DTYPES[0 if i == 3 else 1 :]],
        [(*HEADS[3], DTYPES[0])],
    ),
)
def test_numerics(
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, "descriptors")
    mask = _mask()
    _check(FOREST, mask, Case.random(mask, heads, dims, dtype))


# nothing, and a window alone, where what the tables hold differs
_FEW = itertools.product(["pointers", "descriptors", "tiles of their own"], ["plain", "window"])


@pytest.mark.parametrize(
    "tiles, feature",
    [
        *mostly(itertools.product(TILES, ["all"]), [(tiles, "all") for tiles in [*TILES][::4]]),
        *mostly(_FEW, [("pointers", "plain"), ("tiles of their own", "window")]),
    ],
)
def test_tiles_and_features(tiles: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tiles)
    # all tiles in either order, and every feature
    mask = _mask(deterministic=(list(TILES).index(tiles) % 2 == 0) == (feature == "plain"))
    _check(FOREST, mask, Case.random(mask, (2, 1), (24, 16), DTYPES[1], **FEATURES[feature]))


@pytest.mark.parametrize("seed", mostly(range(6), [2]) if DEVICE == "cpu" else range(60))
def test_any_forest(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    use(monkeypatch, sorted(TILES)[seed % len(TILES)])
    forest = random_forest(rng, 10, int(rng.choice([2, 12, 40])))
    mask = _mask(forest)
    if seed % 3 == 2 and mask.num_tokens > 2:
        middle = mask.num_tokens // 2
        mask = mask.for_queries([(middle // 2, middle), (middle + 1, mask.num_tokens)])
        mask = mask.with_options(backend="triton")
    heads, dims = HEADS[seed % len(HEADS)]
    _check(forest, mask, Case.random(mask, heads, dims, DTYPES[1], seed), seed)


def test_the_tiles_of_the_table() -> None:
    """Tiles of 64 and 128 keys hold several words each."""
    forest = PrefixForest.from_parents([-1, 0, 0, 1], [150, 21, 9, 70])
    mask = _mask(forest)
    _check(forest, mask, Case.random(mask, (2, 2), (192, 128), DTYPES[0]))


@pytest.mark.parametrize(
    "size, window, is_part, forest",
    pairwise([(16, 16), (32, 32), (8, 64), (64, 8)], [0, 40], [False, True], [FOREST, LAST_WORD]),
)
def test_the_bits_of_tiles_are_the_choice(
    forest: PrefixForest, size: tuple[int, int], window: int, is_part: bool
) -> None:
    """By query and by key; what a tile's flag says, too."""
    tokens, keys = size
    mask = _mask(forest)
    mask = mask.for_queries([(3, 40), (60, mask.num_tokens)]) if is_part else mask
    bits, seen = random_choice(mask, 4)
    position = mask.host.on(mask.device)["position_ids"]
    if window:
        rows = position[mask.host.on(mask.device)["query_tokens"].long()] if is_part else position
        seen = seen & (rows[:, None] - position < window)
    x = torch.zeros(len(bits), 1, 8, device=DEVICE)
    call = AttentionCall(x, x, x, None, mask.host, 1.0, window, chosen=bits)
    shape = TileShape(tokens, keys, forest is FOREST, 2, masked=True)
    tables = mask.host.tables(shape, window, mask.device)

    def of(by_key: bool) -> tuple[torch.Tensor, list[int]]:
        found, beside = chosen.lay_out(call, position, tables, size, by_key)
        lanes, side = size if by_key else size[::-1]
        flat = found.view(len(tables.partial_tiles), -1, side).cpu()
        unpacked = [(flat >> i) & 1 for i in range(min(32, lanes))]
        return torch.stack(unpacked, 2).flatten(1, 2) > 0, beside.tolist()

    by_query, starts = of(by_key=False)
    by_key, first_pairs = of(by_key=True)
    pairs = {}
    for k_tile in range(len(tables.k_tiles)):
        for at in range(*tables.k_ptr[k_tile : k_tile + 2].tolist()):
            first, _, _, end = tables.k_runs[at].tolist()
            pairs |= {(i, k_tile): first_pairs[at] + i - first for i in range(first, end)}
    assert sorted(pairs.values()) == list(range(len(by_key)))
    got, num_dense = torch.zeros_like(seen).cpu(), 0
    for q_tile, (_, row, length) in enumerate(tables.q_tiles.tolist()):
        for i in range(*tables.partial_ptr[q_tile : q_tile + 2].tolist()):
            k_tile, begin = tables.partial_tiles[i].tolist()
            # dead lanes: of queries dQ and the forward write none, so that these need no zeros
            tile = by_key[pairs[q_tile, k_tile]]
            count = int(tables.k_tiles[k_tile, 1])
            assert not tile[length:].any() and not tile[:, count:].any()
            assert torch.equal(by_query[i].T[:length, :count], tile[:length, :count])
            got[row : row + length, begin : begin + count] |= tile[:length, :count]
            is_dense = count == keys and bool(tile[:length].all())
            assert starts[i] == (-1 - begin if is_dense else begin)
            num_dense += is_dense
    assert torch.equal(got, seen.cpu())
    assert num_dense or is_part or size != (16, 16)


@pytest.mark.parametrize("tiles", ["pointers", "tiles of their own"])
@pytest.mark.parametrize("scale", [0.3, 0.0])
def test_probe_reveals_exactly_the_choice(
    tiles: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tiles)
    mask = _mask()
    bits, visible = random_choice(mask, 1)
    q = torch.zeros(mask.num_tokens, 1, 16, dtype=DTYPES[0], device=DEVICE)
    # Dv = T: the output is the attention row itself
    values = torch.eye(mask.num_tokens, dtype=DTYPES[0], device=DEVICE)[:, None]
    out = tree_attention(q, torch.randn_like(q), values, mask, scale=scale, chosen=bits)
    seen = out[:, 0].cpu() > 0
    assert torch.equal(seen, visible.cpu())


@pytest.mark.parametrize("options", [{"scale": 1e-20}, {"scale": 1e20}, {"softcap": 1e-20}])
def test_a_scale_that_masked_scores_do_not_survive_is_refused(
    options: dict[str, float],
) -> None:
    mask = _mask()
    x = torch.randn(mask.num_tokens, 1, 16, dtype=DTYPES[0], device=DEVICE)
    with pytest.raises(UnsupportedError, match="must be about 1"):
        bits = random_choice(mask, 1)[0]
        tree_attention(x, x, x, mask, chosen=bits, backend="triton", **options)
    # without a choice nothing is multiplied
    assert tree_attention(x, x, x, mask, backend="triton", **options).isfinite().all()


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_choice_that_is_ignored_turns_red(
    direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward alone too: out is then right, and the gradients are not."""
    use(monkeypatch, "descriptors")
    mask = _mask()
    case = Case.random(mask, (2, 2), (24, 16), DTYPES[1])
    inner = getattr(launch, direction)
    monkeypatch.setattr(launch, direction, lambda call, *a: inner(call._replace(chosen=None), *a))
    with pytest.raises(AssertionError, match="out" if direction == "forward" else "dq"):
        _check(FOREST, mask, case)


def test_a_query_without_a_key_is_nan_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "descriptors")
    mask = _mask()
    bits, _ = random_choice(mask, 2)
    case = Case.random(mask, (2, 1), (16, 16), DTYPES[0]).to(DEVICE)
    before = tree_attention(case.q, case.k, case.v, mask, chosen=bits)
    bits[70] = 0
    after = tree_attention(case.q, case.k, case.v, mask, chosen=bits)
    assert after[70].isnan().all()
    others = torch.arange(mask.num_tokens, device=DEVICE) != 70
    assert torch.equal(before[others], after[others])


@pytest.mark.full
def test_deterministic_is_bitwise_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "descriptors")
    mask = _mask(deterministic=True)
    bits, _ = random_choice(mask)
    case = Case.random(mask, sinks=True, dlse=True, dtype=DTYPES[0]).to(DEVICE)
    want = run(case, ours(mask, chosen=bits))
    for _ in range(1 if DEVICE == "cpu" else 50):
        for name, value in run(case, ours(mask, chosen=bits)).items():
            assert torch.equal(value, want[name]), name


def test_no_unwritten_memory_is_read(poison: Poison, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "descriptors")
    for mask in (_mask(), _mask().for_queries([(3, 40), (60, 81)])):
        mask = mask.with_options(backend="triton")
        bits, _ = random_choice(mask)
        case = Case.random(mask, (2, 1), dtype=DTYPES[0], sinks=True, dlse=True).to(DEVICE)
        for name, value in run(case, ours(mask, chosen=bits)).items():
            assert torch.isfinite(value).all(), name
    assert poison.tensors > 0


@pytest.mark.full
def test_results_are_laid_out_as_compiled_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "descriptors")
    mask = _mask(PrefixForest.from_parents([-1, 0, 0], [9, 12, 5]))
    bits, _ = random_choice(mask)
    assert_as_promised(Case.random(mask, (4, 2), (8, 8), DTYPES[0]).to(DEVICE), mask, chosen=bits)
