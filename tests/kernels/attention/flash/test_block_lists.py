"""The flash backend without a GPU: its block lists against the dense mask, and everything on the
host side run through an emulation of flash-attn-4 (flash_emulator.py) against float64.

The kernels themselves are compiled in fa4/ and run in test_on_gpu.py.
"""

from __future__ import annotations

import gc
import importlib
import math
import statistics
import time
import weakref
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prefixtree as pt
from prefixtree import PrefixForest, TreeMask, UnsupportedError, tree_attention
from prefixtree.kernels.attention.flash import block_lists, launch
from prefixtree.kernels.attention.flash.block_lists import ForestLists, Lists, Tiles, lists_of
from prefixtree.kernels.attention.protocol import AttentionCall
from tests.support import flash_emulator
from tests.support.attention_checks import (
    Case,
    assert_as_promised,
    assert_numerics,
    eager,
    ours,
    run,
)
from tests.support.flash_emulator import assert_exact
from tests.support.full import each_once, mostly
from tests.support.strategies import forests, mask_of, random_forest

CPU = torch.device("cpu")
TILES = Tiles(128, 128, 128)


def listed(of: Lists) -> dict[str, list[list[int]]]:
    """The lists as Python lists, row by row."""
    out = {}
    for kind in ("partial", "full"):
        count, index = getattr(of, f"{kind}_count"), getattr(of, f"{kind}_index")
        assert count.dtype == index.dtype == torch.int32
        rows = count.shape[2]
        assert count.shape == (1, 1, rows) and index.shape[:3] == (1, 1, rows)
        # as short as the longest list, and flash-attn-4 wants no empty array
        assert index.shape[3] == max(1, int(count.max()))
        out[kind] = [
            row[:n].tolist() for row, n in zip(index[0, 0], count[0, 0].tolist(), strict=True)
        ]
    return out


def cells(visible: torch.Tensor, tile_q: int, tile_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """bool [query tiles, key tiles]: some pair visible; every pair visible of a tile whose keys
    are complete."""
    rows, columns = -(-visible.shape[0] // tile_q), -(-visible.shape[1] // tile_k)
    some, every = torch.zeros(2, rows, columns, dtype=torch.bool)
    for i in range(rows):
        for j in range(columns):
            block = visible[i * tile_q : (i + 1) * tile_q, j * tile_k : (j + 1) * tile_k]
            some[i, j], every[i, j] = block.any(), block.all() and block.shape[1] == tile_k
    return some, every


def assert_lists(mask: TreeMask, made: ForestLists, tiles: Tiles, window: int) -> None:
    visible = mask.dense(window or None)
    for direction, tile_k in (("forward", tiles.forward_keys), ("backward", tiles.backward_keys)):
        rows = listed(getattr(made, direction))
        some, every = cells(visible, tiles.queries, tile_k)
        if direction == "backward":
            some, every = some.t(), every.t()
        assert len(rows["full"]) == len(some)
        for at, (partial, full) in enumerate(zip(rows["partial"], rows["full"], strict=True)):
            assert partial == sorted(set(partial)) and full == sorted(set(full)), (direction, at)
            assert not set(partial) & set(full), (direction, at)
            must = set(torch.nonzero(some[at]).flatten().tolist())
            may_be_full = set(torch.nonzero(every[at]).flatten().tolist())
            if direction == "backward":
                # keys behind the end are rows of dk and dv that are never stored, and flash-attn-4
                # leaves them out by itself
                last = len(some) - 1
                whole = visible[:, last * tile_k :]
                if at == last:
                    steps = range(0, len(visible), tiles.queries)
                    may_be_full = {
                        i for i, s in enumerate(steps) if whole[s : s + tiles.queries].all()
                    }
            if window:
                # only depths' least and greatest are looked at: a partial tile may be empty, and a
                # full one be listed as partial
                assert must <= set(partial) | set(full), (direction, at)
                assert set(full) <= may_be_full, (direction, at)
            else:
                if direction == "backward" and tiles.queries == tile_k:
                    # a last tile of one key and one query
                    may_be_full -= {at}
                assert set(partial) | set(full) == must, (direction, at)
                assert set(full) == may_be_full, (direction, at)


@given(
    forests(),
    st.builds(Tiles, st.integers(2, 5), st.integers(2, 5), st.integers(2, 5)),
    st.sampled_from([0, 0, 1, 2, 5]),
)
def test_lists_are_exact(forest: PrefixForest, tiles: Tiles, window: int) -> None:
    mask = mask_of(forest)
    assert_lists(mask, lists_of(mask.host, tiles, window, CPU), tiles, window)


@given(forests(), st.integers(2, 4), st.sampled_from([0, 3, 5, 8, 12]))
def test_lists_of_square_tiles_are_exact(forest: PrefixForest, tile: int, window: int) -> None:
    mask, tiles = mask_of(forest), Tiles(tile, tile, tile)
    assert_lists(mask, lists_of(mask.host, tiles, window, CPU), tiles, window)


@pytest.mark.parametrize(
    "window, dims", each_once([0, 200], [(128, 128), (192, 128), (192, 192), (256, 256)])
)
def test_lists_of_the_tiles_it_ships_with(dims: tuple[int, int], window: int) -> None:
    tiles = launch.tiles_for(*dims)
    for seed in range(2):
        mask = mask_of(random_forest(np.random.default_rng(seed), 30, 300))
        assert_lists(mask, lists_of(mask.host, tiles, window, CPU), tiles, window)


@given(forests(), st.sampled_from([0, 1, 3]))
def test_mask_arrays_say_the_mask(forest: PrefixForest, window: int) -> None:
    """The functions of a partial tile, on every pair and on the lanes behind the last token."""
    mask = mask_of(forest)
    made = lists_of(mask.host, Tiles(3, 4, 5), window, CPU)
    at = torch.arange(mask.num_tokens + 5)
    if window:
        assert made.positions is not None and made.reach is not None
        arrays = (made.spans, made.positions, made.reach)
        seen = flash_emulator.visible_in_window(at, at, *arrays)
    else:
        assert made.positions is made.reach is None
        seen = flash_emulator.visible(at, at, made.spans)
    tokens = mask.num_tokens
    assert torch.equal(seen[:tokens, :tokens], mask.dense(window or None))
    assert not seen[:, tokens:].any()


# ---- tiles of the backward at head dim 256 -------------------------------------------------------


def call_of(forest: PrefixForest, d: int, window: int = 0) -> AttentionCall:
    mask = mask_of(forest)
    x = torch.empty(mask.num_tokens, 1, d)
    return AttentionCall(x, x, x, None, mask.host, 0.1, window, 0.0, False)


PAIR = PrefixForest.from_parents([-1, 0, 0], [3072, 1536, 1536])


@pytest.mark.parametrize(
    "forest, window, keys, mean",
    [
        # (the mean: query tokens of a list over the tiles of 48 keys)
        # prompts of 512 and 2K with responses: 90 % of the key tiles are in responses
        (PrefixForest.from_parents([-1, *[0] * 64], [512, *[1024] * 64]), 0, 64, 1129),
        (PrefixForest.from_parents([-1, *[0] * 3], [2048] * 4), 0, 48, 2647),
        # one sequence sees half its length
        (PrefixForest.from_parents([-1], [2048]), 0, 64, 1095),
        (PrefixForest.from_parents([-1], [4096]), 0, 48, 2112),
        # a window cuts lists short
        (PAIR, 0, 48, 2768),
        (PAIR, 512, 64, 644),
    ],
)
def test_dense_tiles_where_lists_are_long(
    forest: PrefixForest, window: int, keys: int, mean: float
) -> None:
    """With the lists of one tiling, or of both where the first have not enough."""
    call = call_of(forest, 256, window)
    lists, tiles = launch.lists_and_tiles(call)
    assert tiles.backward_keys == keys
    assert lists.backward.full_count.shape[2] == -(-call.mask.num_tokens // keys)
    dense = launch.dense_tiles_for(256, 256)
    assert dense is not None
    assert lists_of(call.mask, dense, window, CPU).mean_list == pytest.approx(mean, abs=1)
    built = {kept for kept, *_ in block_lists._made[call.mask]}
    assert built == ({dense} if keys == 48 else {dense, launch.tiles_for(256, 256)})
    # once decided, always
    assert launch.lists_and_tiles(call)[0] is lists


def test_dense_tiles_are_those_of_head_dim_256_alone() -> None:
    forest = PrefixForest.from_parents([-1, 0, 0], [3000, 1500, 1500])
    for dims in launch.SERVED:
        assert (launch.dense_tiles_for(*dims) is None) == (dims != (256, 256))
    for d in (64, 128, 192):
        assert launch.lists_and_tiles(call_of(forest, d))[1] == launch.tiles_for(d, d)


@pytest.mark.parametrize(("part", "keys"), each_once([False, True], [48, 64]))
@pytest.mark.parametrize("processors", [1, 10_000])
def test_emulated_tilings(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch, processors: int, part: bool, keys: int
) -> None:
    monkeypatch.setattr(launch, "DENSE_TILES_FROM", 0 if keys == 48 else math.inf)
    monkeypatch.setattr(launch.runtime, "processors", lambda device: processors)
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0, 1, -1], [100, 30, 130, 90, 61]))
    whole = mask.position_ids.long()
    mask = mask.for_queries([(40, 77), (200, 390)]) if part else mask
    rows = mask.query_tokens.long() if part else slice(None)
    case = Case.random(mask, (2, 1), (256, 256), torch.float64, sinks=True, dlse=True)
    want = run(case, eager(mask.dense(), (whole[rows], whole)), torch.float64)
    got = run(case, ours(mask, backend="flash"))
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], atol=2e-5, rtol=2e-5)
    assert emulated.orders[-1] == ("tiles first" if processors == 1 else "heads first")
    made = [kept for kept, *_ in block_lists._made[mask.host]]
    assert {tiles.backward_keys for tiles in made} == {keys, 48}


@pytest.fixture
def tiles() -> ModuleType:
    """tools/tiles.py. It imports transformers, which asks for flash-attn: before the emulator."""
    return importlib.import_module("tools.tiles")


def test_the_experiment_takes_its_tiles(tiles: ModuleType, emulated: ModuleType) -> None:
    """Its candidates run on a GPU alone."""
    host = mask_of(PrefixForest.from_parents([-1, 0, 0], [300, 90, 130]))
    before = dict(vars(launch))
    (wide,) = tiles.CANDIDATES[64]
    with tiles.using(wide):
        assert_exact(host, Case.random(host, (2, 1), (64, 64), torch.float64))
        # 3 x 5 tiles of 192 x 128, of which 2 are above the diagonal; 5 x 5 of 128 x 128
        assert sum(emulated.last["forward"]) < 12 < sum(emulated.last["backward"])
    for candidate, keys in zip(tiles.CANDIDATES[256], (48, 64), strict=True):
        with tiles.using(candidate):
            assert launch.lists_and_tiles(call_of(PAIR, 256))[1].backward_keys == keys
    assert vars(launch) == before


# ---- order of tiles in the backward --------------------------------------------------------------


# (forest, tail with 132 processors and 32 query heads)
HEADS_FIRST = [
    # one prompt, 64 responses of eight tiles
    (PrefixForest.from_parents([-1, *[0] * 64], [512, *[1024] * 64]), 516 * 132 / (4362 * 32)),
    # one prompt, 100 responses of a tile
    (PrefixForest.from_parents([-1, *[0] * 100], [128] * 101), 101 * 132 / (201 * 32)),
]
PROMPTS = np.concatenate([[-1, *[9 * prompt] * 8] for prompt in range(9)])
TILES_FIRST = [
    # documents of 32 tiles
    (PrefixForest.from_parents([-1] * 32, [4096] * 32), 32 * 132 / (32 * 528 * 32)),
    # one of 64 tiles
    (PrefixForest.from_parents([-1], [8192]), 64 * 132 / (2080 * 32)),
    # nine prompts with short responses
    (PrefixForest.from_parents(PROMPTS, [128] * 81), 9 * 132 / (9 * 17 * 32)),
]


@pytest.mark.parametrize("forest, tail", [*HEADS_FIRST, *TILES_FIRST])
def test_heads_go_first_where_one_list_is_long(forest: PrefixForest, tail: float) -> None:
    made = lists_of(mask_of(forest).host, TILES, 0, CPU)
    assert made.longest_list_share * 132 / 32 == pytest.approx(tail)
    assert launch.heads_first(made, 32, 132) == ((forest, tail) in HEADS_FIRST)


def test_more_tiles_than_a_grid_takes_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made = lists_of(mask_of(HEADS_FIRST[1][0]).host, TILES, 0, CPU)
    for most, first in ((101, True), (100, False)):
        monkeypatch.setattr(launch, "MOST_TILES", most)
        assert launch.heads_first(made, 32, 132) == first


@given(forests(), st.integers(2, 5), st.integers(2, 5), st.sampled_from([0, 3, 8]))
def test_lengths_are_of_the_lists(
    forest: PrefixForest, queries: int, keys: int, window: int
) -> None:
    made = lists_of(mask_of(forest).host, Tiles(queries, keys, keys), window, CPU)
    rows = listed(made.backward)
    visits = [len(a) + len(b) for a, b in zip(rows["partial"], rows["full"], strict=True)]
    assert made.longest_list_share == max(visits, default=0) / max(1, sum(visits))
    assert made.mean_list == queries * sum(visits) / max(1, len(visits))


# ---- size, time, lifetime ------------------------------------------------------------------------


def storage(index: torch.Tensor) -> int:
    return index.untyped_storage().nbytes()


def prompts(tokens: int) -> PrefixForest:
    """Prompts of 8K with 16 answers of 1K each, up to `tokens`."""
    groups = tokens // 24_576
    parents = np.concatenate([[-1, *[17 * g] * 16] for g in range(groups)])
    return PrefixForest.from_parents(parents, [8192 - 37, *[1024] * 16] * groups)


def test_arrays_are_as_short_as_the_longest_list() -> None:
    mask = mask_of(prompts(1 << 20))
    made = lists_of(mask.host, TILES, 0, CPU)
    tiles = -(-mask.num_tokens // 128)
    assert tiles > 8000
    for direction in (made.forward, made.backward):
        for index in (direction.partial_index, direction.full_index):
            assert storage(index) < 4 * tiles * tiles / 30
    # one row of numbers for all key tiles, however long their lists are
    assert storage(made.backward.full_index) <= 4 * 2 * (tiles + 1)


def test_a_long_path_costs_the_forward_its_square_and_the_backward_nothing() -> None:
    mask = mask_of(PrefixForest.from_parents([-1], [64 * 128]))
    made = lists_of(mask.host, TILES, 0, CPU)
    assert storage(made.forward.full_index) == 4 * 64 * 63
    assert storage(made.backward.full_index) == 4 * (64 + 63 - 1)
    assert storage(made.forward.partial_index) == storage(made.backward.partial_index) == 4 * 64


def test_128k_tokens_take_milliseconds() -> None:
    host = mask_of(prompts(1 << 17)).host
    tables = host.tables(pt.TileShape(128, 128), 0, CPU)
    seconds = []
    for _ in range(7):
        start = time.process_time()
        rows = len(tables.q_split)
        spans = (*block_lists._forward_spans(tables), *block_lists._backward_spans(tables, True))
        for one in spans:
            block_lists._runs(rows, *one)
        seconds.append(time.process_time() - start)
    median = statistics.median(seconds)
    print(f"runs of {host.num_tokens} tokens: {1e3 * median:.2f} ms (below 1 on a quiet machine)")
    assert median < 0.01


def test_lists_are_made_once_and_go_with_the_mask() -> None:
    mask = mask_of(random_forest(np.random.default_rng(0), 10, 90))
    made = lists_of(mask.host, TILES, 0, CPU)
    assert lists_of(mask.to("cpu").host, TILES, 0, CPU) is made
    assert lists_of(mask.host, TILES, 7, CPU) is not made
    assert lists_of(mask.host, Tiles(128, 80, 64), 0, CPU) is not made
    host = weakref.ref(mask.host)
    assert host() in block_lists._made
    del mask
    gc.collect()
    assert host() is None


def test_too_many_entries_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(PrefixForest.from_parents([-1], [1024]))
    monkeypatch.setattr(block_lists, "MOST_ENTRIES", 8 * 7 - 1)
    with pytest.raises(UnsupportedError, match=r"8 x 7 entries.*backend='triton'"):
        lists_of(mask.host, TILES, 0, CPU)


# ---- attention -----------------------------------------------------------------------------------


OPTIONS = [{}, {"window": 150}, {"softcap": 3.0}, {"scale": 0.7}, {"window": 1, "softcap": 9.0}]
EXTRAS = [{}, {"sinks": True}, {"dlse": True}, {"sinks": True, "dlse": True}]


@pytest.mark.parametrize(
    ("options", "extras"), [*((x, EXTRAS[3]) for x in OPTIONS), *(({}, x) for x in EXTRAS[:3])]
)
def test_emulated_features(emulated: ModuleType, options: dict, extras: dict) -> None:
    mask = mask_of(random_forest(np.random.default_rng(3), 12, 120))
    assert mask.num_tokens > 400
    assert_exact(mask, Case.random(mask, (4, 2), (16, 8), torch.float64, **extras, **options))


@pytest.mark.parametrize(
    ("dims", "heads"),
    each_once([(8, 8), (192, 128), (192, 136), (200, 200)], [(1, 1), (3, 1), (4, 4), (6, 2)]),
)
def test_emulated_shapes(
    emulated: ModuleType, heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    mask = mask_of(random_forest(np.random.default_rng(5), 8, 120))
    assert_exact(mask, Case.random(mask, heads, dims, torch.float64))


@pytest.mark.parametrize("seed", mostly(range(12), [0, 11]))
def test_emulated_forests(emulated: ModuleType, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = mask_of(random_forest(rng, 30, int(rng.choice([3, 40, 150]))))
    assert_exact(mask, Case.random(mask, (2, 1), (8, 8), torch.float64, seed))


def test_the_emulation_visits_what_the_lists_say(emulated: ModuleType) -> None:
    """And nothing else: a dense emulation would pass every test above."""
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [256, 256, 256]))
    case = Case.random(mask, (1, 1), (8, 8), torch.float64)
    assert_exact(mask, case)
    # six tiles on the diagonal, one below it in each node, two of the prompt for each of the four
    assert emulated.last["forward"] == emulated.last["backward"] == (6, 3 + 8)


def test_the_call_is_in_the_order_of_the_rule(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.runtime, "processors", lambda device: 1)
    # two heads: tails of 3 / 5 / 2 and 3 / 13 / 2
    for parents, order in (([-1, 0, 0], "heads first"), ([-1] * 9 + [0, 0], "tiles first")):
        mask = mask_of(PrefixForest.from_parents(parents, [128] * len(parents)))
        assert_exact(mask, Case.random(mask, (2, 1), (8, 8), torch.float64))
        assert emulated.orders[-1] == order


def test_arguments_are_made_once_and_go_with_the_mask(emulated: ModuleType) -> None:
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [100, 30, 30]))
    case = Case.random(mask, (1, 1), (8, 8), torch.float64)
    made = lists_of(mask.host, TILES, 0, CPU)
    run(case, ours(mask, backend="flash"))
    given = launch._made[made]
    run(case, ours(mask, backend="flash"))
    assert launch._made[made] is given
    for arguments, lists in zip(given, (made.forward, made.backward), strict=True):
        assert arguments["block_sparse_tensors"].full_block_idx is lists.full_index
    kept = weakref.ref(made)
    del mask, case, made, given, arguments, lists
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("wrong", ["spans", "reach", "index", "count"])
def test_the_emulation_sees_a_wrong_list(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0, 1], [200, 150, 300, 90]))
    window = 140
    made = lists_of(mask.host, TILES, window, CPU)
    broken = {
        "spans": made.spans,
        "reach": made.reach,
        "index": made.forward.partial_index,
        "count": made.backward.partial_count,
    }[wrong]
    assert broken is not None
    if wrong == "count":
        broken[0, 0, 0] = 0
    elif wrong == "index":
        # the tile on the diagonal of the third query tile
        assert broken[0, 0, 2, made.forward.partial_count[0, 0, 2] - 1] == 2
        broken[0, 0, 2, made.forward.partial_count[0, 0, 2] - 1] = 3
    else:
        broken[100:] += 1
    with pytest.raises(AssertionError):
        assert_exact(mask, Case.random(mask, (1, 1), (8, 8), torch.float64, window=window))


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("sink", [-30.0, 0.0, 12.0, 60.0, 200.0])
def test_sinks_that_take_nothing_or_all(emulated: ModuleType, sink: float, dlse: bool) -> None:
    """Gradients hold where a sum over keys and sink has forgotten the keys."""
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [140, 40, 20]))
    case = Case.random(mask, (2, 1), (8, 8), torch.float64, sinks=True, dlse=dlse)
    assert case.sinks is not None
    case.sinks = case.sinks + sink
    position = mask.position_ids.long()
    want = run(case, eager(mask.dense(), (position, position)), torch.float64)
    got = run(case, ours(mask, backend="flash"))
    for name, value in got.items():
        torch.testing.assert_close(value.double(), want[name], atol=2e-5, rtol=2e-5, msg=name)


@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("sink_level", [0.0, 8.0])
@pytest.mark.parametrize("seed", mostly(range(3), [0]))
def test_emulated_sinks_in_half_precision(
    emulated: ModuleType, seed: int, sink_level: float, dlse: bool
) -> None:
    forest = random_forest(np.random.default_rng(seed), 20, 60)
    mask = mask_of(forest)
    options = {"sinks": True, "dlse": dlse, "sink_level": sink_level}
    case = Case.random(mask, (2, 1), (64, 64), torch.bfloat16, seed, **options)
    assert_numerics(forest, mask, case, ours(mask, backend="flash"))


@pytest.mark.parametrize("extras", [{}, {"sinks": True, "dlse": True}])
def test_results_are_laid_out_as_compiled_code_is_told(emulated: ModuleType, extras: dict) -> None:
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [140, 40, 20]))
    case = Case.random(mask, (2, 1), (8, 8), torch.bfloat16, **extras)
    assert_as_promised(case, mask, backend="flash")


def test_no_tokens(emulated: ModuleType) -> None:
    mask = TreeMask(np.empty(0, np.int32))
    case = Case.random(mask, (2, 1), (8, 8), torch.float64, sinks=True)
    got = run(case, ours(mask, backend="flash"))
    assert got["dk"].shape == (0, 1, 8) and torch.equal(got["dsinks"], torch.zeros(2).double())


def test_strided_inputs_reach_the_kernel_as_they_are(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """flash-attn-4 copies what it cannot read; a transposed view it can."""
    interface = emulated.sys.modules["flash_attn.cute.interface"]
    seen: list[tuple[int, ...]] = []
    call = interface._flash_attn_fwd

    def spy(q: torch.Tensor, *args: object, **kwargs: object) -> None:
        seen.append(q.stride())
        call(q, *args, **kwargs)

    monkeypatch.setattr(interface, "_flash_attn_fwd", spy)
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [100, 30, 30]))
    q = torch.randn(4, 160, 8, dtype=torch.float64).transpose(0, 1)
    k = torch.randn(160, 2, 8, dtype=torch.float64)
    tree_attention(q, k, k, mask, backend="flash")
    assert seen[0][1:] == q.stride()


def test_expanded_gradients_are_copied(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel compiled for a gradient of strides 0, as a sum has, is used for any other."""
    seen: list[tuple[int, ...]] = []
    taken = launch._backward_call

    def spied(*how: bool) -> object:
        def call(*tensors: torch.Tensor, dlse: torch.Tensor, **kwargs: object) -> object:
            seen.extend(x.stride() for x in (*tensors, dlse))
            return taken(*how)(*tensors, dlse=dlse, **kwargs)

        return call

    monkeypatch.setattr(launch, "_backward_call", spied)
    mask = mask_of(PrefixForest.from_parents([-1, 0, 0], [100, 30, 30]))
    q = torch.randn(160, 4, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(160, 1, 8, dtype=torch.float64, requires_grad=True)
    v = k.detach()[:, :, :1].expand(160, 1, 8)
    gradients = []
    for backend in ("flash", "sdpa"):
        out, lse = tree_attention(q, k, v, mask, backend=backend, return_lse=True)
        gradients.append(torch.autograd.grad(out.sum() + lse.sum(), (q, k)))
    assert len(seen) == 7, seen
    assert not any(0 in strides for strides in seen), seen
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
