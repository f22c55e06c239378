"""Forward and backward of every feature, compiled for sm_90 by the calls that the backend makes.

How the cases were drawn. Machine code is made once of each head dim, of each mask function, of
softcap, sinks inside and around the kernel, dlse and float16, of each way to hold a group's heads
(apart, packed in groups that divide a tile's rows or do not), and of each pair of these that meets
in one kernel of block lists; of sequences, which are flash-attn-4's own, of each feature and way to
hold heads. A case with features stands for the same without: it has all of that code and more. No
forward spills with any of them, which the cases assert. What differs by no operation is traced.
"""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import cutlass
import cutlass.cute as cute
import pytest
import torch
from flash_attn.cute import cache_utils, flash_bwd_sm90, interface, tile_scheduler
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.lib.flash import order_of
from prefixtree import PrefixForest
from prefixtree.kernels.attention.flash import backwards, launch, mask_mods
from prefixtree.kernels.attention.flash.block_lists import (
    Chains,
    ForestLists,
    Lists,
    chains_of,
    lists_of,
)
from prefixtree.kernels.attention.protocol import AttentionCall
from tests.support.strategies import mask_of

CPU = torch.device("cpu")
FOREST = PrefixForest.from_parents([-1, 0, 0, 1], [700, 300, 1, 60])
# sixty documents, and a branch in one of them
DOCUMENTS = PrefixForest.from_parents([-1] * 60 + [0, 0], [128] * 62)
CHAINS = PrefixForest.from_parents([-1] * 3, [700, 300, 1])
ON_GRID = [(100, 228), (400, 784), (900, 1000)]
PLAIN: dict[str, Any] = {"heads": (32, 8), "dims": (128, 128)}
# for tests of where kernels are kept: its backward is traced in half the time
QUICK: dict[str, Any] = {"heads": (32, 8), "dims": (192, 192)}


def faked(made: Any) -> Any:
    """Arrays of the same shapes and strides, on a GPU that is not there."""
    if isinstance(made, torch.Tensor):
        return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="cuda")
    if isinstance(made, (Lists, ForestLists, Chains)):
        return type(made)(*(faked(getattr(made, field.name)) for field in fields(made)))
    return made


def in_order(patch: pytest.MonkeyPatch, heads_first: bool) -> None:
    patch.setattr(launch, "heads_first", lambda lists, heads, processors: heads_first)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whatever asks for the device, or for its memory."""
    monkeypatch.setattr(launch.runtime, "current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch.runtime, "processors", lambda device: 132)
    monkeypatch.setattr(
        launch,
        "lists_of",
        lambda host, tiles, window, device: faked(lists_of(host, tiles, window, CPU)),
    )
    monkeypatch.setattr(launch, "chains_of", lambda host, device: faked(chains_of(host, CPU)))
    monkeypatch.setattr(mask_mods, "address", lambda array: cutlass.Int64(0))


# of each kernel that was compiled, by the object, what ptxas said
SAID: list[tuple[Any, str]] = []
TRACE = cute.compile.to_precompiled_mlir


def noting(make: Any) -> Any:
    """`make`, noting it. A collection of garbage while one of 30,000 operations is made takes a
    fifth of the time."""

    def noted(*given: Any, **options: Any) -> Any:
        gc.disable()
        try:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                made = make(*given, **options)
        finally:
            gc.enable()
        SAID.append((made, said.getvalue()))
        return made

    return noted


@pytest.fixture(scope="module", autouse=True)
def what_is_said() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cute, "compile", noting(cute.compile))
        yield


def words_of(**case: Any) -> list[str]:
    """What ptxas said of each kernel of a call, whichever test compiled it."""
    asked = []
    look_up = cache_utils.JITCache.__contains__

    def noted(self: Any, key: Any) -> bool:
        asked.append((self, key))
        return look_up(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_utils.JITCache, "__contains__", noted)
        compile_both(**case)
    kernels = [cache[key] for cache, key in asked]
    assert kernels
    return [next(said for made, said in SAID if made is kernel) for kernel in kernels]


def spilled(said: list[str]) -> list[int]:
    """Bytes that each kernel spills."""
    return [int(n) for words in said for n in re.findall(r"(\d+) bytes spill stores", words)]


def compile_both(
    heads: tuple[int, int],
    dims: tuple[int, int],
    forest: PrefixForest = FOREST,
    dtype: torch.dtype = torch.bfloat16,
    sinks: bool = False,
    dlse: bool = False,
    with_forward: bool = True,
    with_backward: bool = True,
    queries: list[tuple[int, int]] | None = None,
    **options: Any,
) -> None:
    """Forward and backward, the latter in the order of the rule; of all queries or of some."""
    mask = mask_of(forest)
    host = (mask if queries is None else mask.for_queries(queries)).host
    # kept with the mask, for `no_gpu` to fake
    if chains_of(host, CPU) is None:
        for tiles in (launch.tiles_for(*dims), launch.dense_tiles_for(*dims)):
            if tiles is not None:
                lists_of(host, tiles, options.get("window", 0), CPU)
    with FakeTensorMode():

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        keys, tokens = host.num_tokens, host.num_queries
        q, k = empty(tokens, heads[0], dims[0]), empty(keys, heads[1], dims[0])
        v = empty(keys, heads[1], dims[1])
        sink = empty(heads[0]) if sinks else None
        call = AttentionCall(q, k, v, sink, host, **({"scale": 0.1} | options))
        assert launch.refused_features(call) is None
        out = empty(tokens, heads[0], dims[1])
        lse = torch.empty(heads[0], tokens, device="cuda")
        if with_forward:
            out, lse = launch.forward(call)
        assert out.shape == (tokens, heads[0], dims[1]) and lse.shape == (heads[0], tokens)
        if not with_backward:
            return
        dlse_ = torch.empty_like(lse) if dlse else None
        *grads, dsinks = launch.backward(call, torch.empty_like(out), dlse_, out, lse)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
        assert dsinks is None if sink is None else dsinks.shape == sink.shape


def name_of(case: Any) -> str:
    if isinstance(case, bool):
        return "heads first" if case else "tiles first"
    return " ".join(f"{k}={v}" for k, v in case.items() if k != "forest")


CASES = [
    # a group that is packed and does not divide a tile's rows
    {"heads": (14, 2), "dims": (128, 128), "sinks": True, "dlse": True, "window": 200}
    | {"softcap": 20.0, "dtype": torch.float16},
    # rows of q in tiles of neighbours; plain below
    {"heads": (4, 4), "dims": (64, 64), "queries": ON_GRID, "window": 200}
    | {"softcap": 20.0, "sinks": True},
    {"heads": (8, 1), "dims": (96, 96), "softcap": 20.0},
    {"heads": (4, 4), "dims": (192, 128)},
    # groups of 6 are not packed at these head dims: packed, the forward spills 480 bytes a thread
    # at 192, and at 256 4,068, where it ran at a sixth of its rate
    {"heads": (12, 2), "dims": (192, 192)},
    {"heads": (24, 4), "dims": (256, 256), "window": 200, "softcap": 20.0, "sinks": True},
]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_it_compiles(monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    """Nothing spills but the backward with window and softcap, up to head dim 128."""
    in_order(monkeypatch, heads_first=False)
    forward, *backward = spilled(words_of(**case))
    assert forward == 0
    assert not any(backward) or ("window" in case and case["dims"][0] <= 128)


@pytest.mark.usefixtures("traced")
def test_a_single_tile_is_traced() -> None:
    compile_both(**QUICK, forest=PrefixForest.from_parents([-1, 0, 0], [50, 30, 20]))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "case", [CASES[0], {"heads": (4, 4), "dims": (192, 128), "queries": ON_GRID}], ids=name_of
)
def test_the_other_order_is_traced(
    monkeypatch: pytest.MonkeyPatch,
    kept: tuple[dict[Any, Any], dict[Any, Any]],
    case: dict[str, Any],
) -> None:
    """It differs in where a block of threads is, which no head dim decides; with packed heads and
    without, of all rows and of some. Compiled below."""
    in_order(monkeypatch, heads_first=True)
    compile_both(**case, with_forward=False)
    assert [len(cache) for cache in kept] == [0, 1]


@pytest.mark.parametrize(
    "case",
    [
        PLAIN | {"dlse": True},
        {"heads": (24, 4), "dims": (256, 256), "window": 200, "softcap": 20.0, "sinks": True},
    ],
    ids=name_of,
)
def test_sequences_compile(case: dict[str, Any]) -> None:
    assert spilled(words_of(**case, forest=CHAINS))[0] == 0


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "case",
    [
        # in groups of one (which v of 128 beside 192 wants) or more
        *(
            {"heads": (4, 4) if dims[0] in (64, 192) else (8, 2), "dims": dims}
            for dims in launch.SERVED
            if dims != (128, 128)
        ),
        # a single tile, and more sequences than flash-attn-4 looks up one by one
        PLAIN | {"forest": PrefixForest.from_parents([-1], [50])},
        PLAIN | {"forest": PrefixForest.from_parents([-1] * 300, [70] * 300)},
    ],
    ids=name_of,
)
def test_sequences_are_traced(case: dict[str, Any]) -> None:
    """flash-attn-4's own kernels, with the arguments that the backend gives them; the forwards are
    compiled below."""
    compile_both(**{"forest": CHAINS, **case})


@pytest.mark.usefixtures("traced")
def test_a_new_forest_of_sequences_compiles_nothing(
    no_forward: dict[Any, Any], kept: tuple[dict[Any, Any], dict[Any, Any]]
) -> None:
    for lengths in ([700, 300, 1], [129], [400] * 20, [5000, 17]):
        for window in (0, 30, 50):
            forest = PrefixForest.from_parents([-1] * len(lengths), lengths)
            compile_both(**PLAIN, forest=forest, window=window)
    assert len(no_forward) == 2
    assert [len(cache) for cache in kept] == [2, 0]


@pytest.mark.parametrize(("d", "group"), [(64, 1), (64, 4), (96, 6), (192, 4)])
def test_the_forward_of_sequences_does_not_spill(d: int, group: int) -> None:
    """Heads alone, and packed in groups that divide a tile's 128 rows or do not. Tiles are others
    than those of block lists at 64 and 96, and one for both; apart from their groups, above."""
    said = words_of(heads=(2 * group, 2), dims=(d, d), forest=CHAINS, with_backward=False)
    assert spilled(said) == [0], said


@pytest.mark.parametrize(
    ("heads_first", "queries"),
    [(False, None), (True, None), (False, ON_GRID)],
    ids=["tiles first", "heads first", "rows of q"],
)
def test_the_plain_kernels_do_not_spill(
    monkeypatch: pytest.MonkeyPatch,
    heads_first: bool,
    queries: list[tuple[int, int]] | None,
) -> None:
    """By ptxas' own words; with flash-attn-4's wrapped indices the backward does."""
    in_order(monkeypatch, heads_first)
    said = words_of(**PLAIN, queries=queries)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", "".join(said))]
    print(f"registers {registers}")
    # the forward and the backward; what prepares dout, and converts dq, dk and dv
    assert spilled(said) == [0] * 6 and registers.count(168) == 2, said


# ---- the two orders of the backward --------------------------------------------------------------


def emptied(patch: pytest.MonkeyPatch, call: Any) -> dict[Any, Any]:
    """A cache without kernels, for a test; others find theirs again."""
    patch.setattr(call.compile_cache, "cache", {})
    return call.compile_cache.cache


@pytest.fixture
def no_forward(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """The compiled forwards, none at the start."""
    return emptied(monkeypatch, interface._flash_attn_fwd)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The compiled kernels of either order (tiles first, heads first), none at the start."""
    orders = (interface._flash_attn_bwd, backwards.heads_first)
    return tuple(emptied(monkeypatch, call) for call in orders)


@pytest.fixture
def traced(
    monkeypatch: pytest.MonkeyPatch,
    no_forward: dict[Any, Any],
    kept: tuple[dict[Any, Any], dict[Any, Any]],
) -> None:
    """Kernels are traced and not compiled, which is more than half of the time, for a test of which
    kernels are made and where they are kept. They are kept for it alone."""
    monkeypatch.setattr(cute, "compile", noting(TRACE))
    for around in ("preprocess", "postprocess_convert", "dsink_reduce"):
        emptied(monkeypatch, getattr(interface, f"_bwd_{around}"))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("orders", [(False, True), (True, False)], ids=str)
def test_orders_are_kept_apart(
    monkeypatch: pytest.MonkeyPatch,
    kept: tuple[dict[Any, Any], dict[Any, Any]],
    orders: tuple[bool, bool],
) -> None:
    """Whichever is compiled first; by one key, which says nothing of the order."""
    turned: list[bool] = []
    create = backwards.HeadsFirst.create
    monkeypatch.setattr(
        backwards.HeadsFirst,
        "create",
        lambda *given, **more: turned.append(True) or create(*given),
    )
    for done, heads_first in enumerate(orders, 1):
        turned.clear()
        in_order(monkeypatch, heads_first)
        for _ in range(2):
            compile_both(**QUICK, with_forward=False)
            assert len(kept[heads_first]) == 1 and len(kept[not heads_first]) == done - 1
        # by each part of the kernel that asks where it is
        assert bool(turned) == heads_first
    assert kept[0].keys() == kept[1].keys()
    assert set(map(id, kept[0].values())).isdisjoint(map(id, kept[1].values()))
    assert flash_bwd_sm90.SingleTileScheduler is tile_scheduler.SingleTileScheduler
    assert interface.FlashAttentionBackwardSm90 is flash_bwd_sm90.FlashAttentionBackwardSm90


@pytest.mark.usefixtures("traced")
def test_in_two_threads_at_once(kept: tuple[dict[Any, Any], dict[Any, Any]]) -> None:
    """As autograd runs the backwards of two devices. flash-attn-4 alone raises."""
    start = threading.Barrier(2)

    def run(forest: PrefixForest) -> None:
        start.wait()
        compile_both(**QUICK, forest=forest, with_forward=False)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, [DOCUMENTS, FOREST]))
    assert [len(cache) for cache in kept] == [1, 1]


@pytest.mark.usefixtures("traced")
def test_what_fails_to_compile_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[dict[Any, Any], dict[Any, Any]]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(backwards.HeadsFirst, "create", lambda *given, **more: 1 / 0)
        with pytest.raises(Exception, match="division by zero"):
            compile_both(**QUICK, with_forward=False)
    for forest, counts in ((DOCUMENTS, [1, 0]), (FOREST, [1, 1])):
        compile_both(**QUICK, forest=forest, with_forward=False)
        assert [len(cache) for cache in kept] == counts


def test_a_turned_grid_holds_every_tile_of_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def launch(self, **how: Any) -> dict[str, Any]:
            return how

    tiles, heads, batches = 5, 3, 2
    launched = backwards.TurnedLaunch(Kernel()).launch(
        grid=(tiles, heads, batches), block=[1, 1, 1]
    )
    assert launched == {"grid": (heads, tiles, batches), "block": [1, 1, 1]}
    found = []
    # of the blocks in the order in which they start, the first number runs fastest
    for batch, y, x in itertools.product(*map(range, reversed(launched["grid"]))):
        monkeypatch.setattr(backwards.cute.arch, "block_idx", lambda at=(x, y, batch): at)
        work = backwards.HeadsFirst.create(None)
        assert type(work) is tile_scheduler.SingleTileScheduler
        found.append(work._blk_coord)
    assert found == [
        (tile, head, batch)
        for batch, tile, head in itertools.product(range(batches), range(tiles), range(heads))
    ]


@pytest.mark.usefixtures("traced")
def test_the_benchmark_takes_either_order(
    monkeypatch: pytest.MonkeyPatch, kept: tuple[dict[Any, Any], dict[Any, Any]]
) -> None:
    for variant, forest, counts in (
        ("heads first", DOCUMENTS, [0, 1]),
        ("tiles first", FOREST, [1, 1]),
    ):
        rule = launch.heads_first
        with order_of(variant):
            compile_both(**QUICK, forest=forest, with_forward=False)
        assert launch.heads_first is rule
        assert [len(cache) for cache in kept] == counts


# ---- head dim 256 in dense tiles -----------------------------------------------------------------


@pytest.mark.parametrize("heads_first", [False, True], ids=["tiles first", "heads first"])
def test_dense_tiles_compile_without_spilling(
    monkeypatch: pytest.MonkeyPatch,
    kept: tuple[dict[Any, Any], dict[Any, Any]],
    heads_first: bool,
) -> None:
    """Beside the kernels of the other tiles, and the one for two forests."""
    in_order(monkeypatch, heads_first)
    monkeypatch.setattr(launch, "DENSE_TILES_FROM", 0)
    for forest in (DOCUMENTS, FOREST):
        said = words_of(heads=(8, 2), dims=(256, 256), forest=forest)
        assert len(kept[heads_first]) == 1 and not kept[not heads_first]
    assert not any(spilled(said)), said
    (key,) = kept[heads_first]
    # tiles, number of threads; no packing, stages of q and dout; dk and dv turned
    assert key[8:10] == (64, 48) and key[12:17] == (2, 1, False, True, False)
