"""The Triton kernels: in Triton's interpreter on a CPU, natively where there is a GPU.

Every feature, on cut and uncut tiles, against float64 by the bounds of attention_checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import prefixtree as pt
from prefixtree import PrefixForest, TreeMask, UnsupportedError, tree_attention
from prefixtree.kernels.attention import operator
from prefixtree.kernels.attention.choice import choose
from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.kernels.attention.triton import configs, launch
from tests.conftest import Poison
from tests.support.attention_checks import (
    Case,
    assert_as_promised,
    assert_numerics,
    assert_wide_gradients_are_narrow_ones_before_the_cast,
    ours,
    run,
)
from tests.support.full import mostly
from tests.support.strategies import (
    ancestors_or_self,
    forests,
    mask_of,
    query_ranges,
    random_forest,
)
from tests.support.triton_tiles import DEVICE, DTYPES, TILES, use

# numpy warns where dead lanes overflow in the interpreter; what is stored is checked
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

# a tile border inside nodes, short nodes, one-token nodes, two trees
FOREST = PrefixForest.from_parents([-1, 0, 0, 2, 2, 4, -1, 6], [25, 14, 5, 19, 1, 11, 6, 9])


def mask_for(forest: PrefixForest) -> TreeMask:
    return mask_of(forest).to(DEVICE).with_options(backend="triton")


def check(
    forest: PrefixForest, case: Case, mask: TreeMask | None = None, **options: object
) -> None:
    mask = mask or mask_for(forest)
    case = case.to(DEVICE)
    if case.q.dtype != torch.float32:
        assert_numerics(forest, mask, case, ours(mask, **options))
        return
    # served in the interpreter alone: here wrong shows at its clearest, rounding is no matter
    want = run(case, ours(mask, backend="reference"), torch.float64)
    for name, value in run(case, ours(mask, **options)).items():
        if value.numel():
            limit = 2e-5 * max(1.0, float(want[name].abs().max()))
            assert float((value - want[name]).abs().max()) <= limit, name


# ---- numerics ------------------------------------------------------------------------------------

FEATURES = {
    "plain": {},
    "window": {"window": 13},
    "softcap": {"softcap": 2.0},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "lse gradient": {"dlse": True},
    "sinks and lse gradient": {"sinks": True, "dlse": True},
    "sinks that take most": {"sinks": True, "dlse": True, "sink_level": 12.0},
    "large logits": {"spread": 12.0},
    "all": {"window": 21, "softcap": 3.0, "sinks": True, "dlse": True, "scale": 0.4},
}


def some(cases: Iterable[Sequence[Any]], seldom: Collection[Any] = ()) -> list[Any]:
    """All of them on a GPU; in the interpreter, where a case takes seconds, every other one, so
    that each value of an argument of two still occurs with each of the others, and half of these
    with --full alone, so that each value of the first occurs every time but those that others
    have in them."""
    if DEVICE != "cpu":
        return list(cases)
    kept = [case for i, case in enumerate(cases) if i.bit_count() % 2 == 0]
    return [
        pytest.param(*case, marks=[pytest.mark.full] * ((i + i // 2) % 2 or case[0] in seldom))
        for i, case in enumerate(kept)
    ]


_TILES_OF_FEATURES = itertools.product(FEATURES, DTYPES, ["pointers", "descriptors"])


@pytest.mark.parametrize(
    "feature, dtype, tiles",
    some(_TILES_OF_FEATURES, ("window", "softcap", "scale", "sinks", "lse gradient")),
)
def test_numerics_of_features(
    feature: str, dtype: torch.dtype, tiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tiles)
    case = Case.random(mask_for(FOREST), (2, 1), (16, 16), dtype, **FEATURES[feature])
    check(FOREST, case)


@pytest.mark.parametrize(
    "tiles, feature, deterministic",
    # the first two are those of features, the last two of pieces
    some(
        itertools.product(TILES, ["plain", "all"], [False, True]), [*[*TILES][:2], *[*TILES][-2:]]
    ),
)
def test_numerics_of_tiles(
    tiles: str, feature: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tiles)
    mask = mask_for(FOREST)
    case = Case.random(mask, (4, 1), (16, 16), DTYPES[0], **FEATURES[feature])
    check(FOREST, case, mask, deterministic=deterministic)


HEADS_AND_DIMS = [
    ((2, 2), (64, 64)),
    ((4, 1), (80, 80)),
    ((7, 1), (96, 96)),
    ((16, 2), (128, 128)),
    ((2, 1), (192, 192)),
    ((1, 1), (256, 256)),
    ((2, 2), (192, 128)),
    ((6, 1), (24, 40)),
    ((11, 1), (8, 8)),
]


@pytest.mark.parametrize(
    "sizes, tma", some(itertools.product(HEADS_AND_DIMS, [False, True]), [((16, 2), (128, 128))])
)
def test_numerics_of_heads(
    sizes: tuple[tuple[int, int], tuple[int, int]], tma: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiles of the frozen table."""
    heads, dims = sizes
    if not tma:
        chosen = configs.choose
        monkeypatch.setattr(configs, "choose", lambda *a: chosen(*a[:4], False, *a[5:]))
    forest = PrefixForest.from_parents([-1, 0, 0, 1], [50, 21, 9, 30])
    check(forest, Case.random(mask_for(forest), heads, dims, DTYPES[0]))


@pytest.mark.parametrize(
    "tiles, dim, feature",
    mostly(
        [
            ("q and k in pieces", 48, "plain"),
            ("q and k in pieces", 40, "all"),
            ("q and k in pieces by pointers", 48, "plain"),
            ("q and k in pieces by pointers", 40, "all"),
        ],
        [("q and k in pieces", 48, "plain"), ("q and k in pieces by pointers", 40, "all")],
    ),
)
def test_numerics_of_pieces(
    tiles: str, dim: int, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of q and k; the last one is whole, or half of it is another head's or nothing."""
    use(monkeypatch, tiles)
    mask = mask_for(FOREST)
    case = Case.random(mask, (4, 2), (dim, 16), DTYPES[0], **FEATURES[feature])
    check(FOREST, case, mask)
    assert configs.choose((9, 0), dim, 16, 2, True).width(dim) == 16


@settings(max_examples=6 if DEVICE == "cpu" else 60)
@given(st.data())
def test_any_forest(data: st.DataObject) -> None:
    forest = data.draw(forests(max_nodes=12, max_length=20))
    mask = mask_for(forest)
    if data.draw(st.booleans()):
        mask = mask.for_queries(data.draw(query_ranges(mask.num_tokens)))
        mask = mask.with_options(backend="triton")
    window = data.draw(st.sampled_from([None, 1, 9]))
    sinks, dlse = data.draw(st.booleans()), data.draw(st.booleans())
    case = Case.random(mask, (4, 2), (8, 8), DTYPES[1], sinks=sinks, dlse=dlse, window=window)
    with pytest.MonkeyPatch.context() as patch:
        use(patch, data.draw(st.sampled_from(sorted(TILES))))
        check(forest, case, mask)


SHAPES = {
    "one token": ([-1], [1]),
    "one-token nodes": ([-1, *range(30)], [1] * 31),
    "a chain of one-child nodes": ([-1, *range(9)], [3, 1, 8, 2, 5, 1, 1, 7, 4, 2]),
    "100 leaves on a 3-token root": ([-1, *[0] * 100], [3, *[1] * 100]),
    "depth 50": ([-1, *[i // 2 * 2 for i in range(99)]], [2] * 100),
    "a tile and one": ([-1, 0, 0], [16, 17, 15]),
    "documents": ([-1] * 4, [16, 1, 33, 7]),
}


@pytest.mark.parametrize(
    "shape, tiles", some(itertools.product(SHAPES, ["pointers", "descriptors"]))
)
def test_shapes(shape: str, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tiles)
    forest = PrefixForest.from_parents(*SHAPES[shape])
    check(forest, Case.random(mask_for(forest), (2, 1), (8, 8), DTYPES[1], window=40))


@pytest.mark.parametrize(
    "tiles", mostly(["pointers", "descriptors", "one head a tile"], ["descriptors"])
)
def test_queries_in_parts_are_the_whole(tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that start and end anywhere: what lies behind a short tile is another run's."""
    use(monkeypatch, tiles)
    mask = mask_for(FOREST)
    case = Case.random(mask, (2, 1), (16, 16), DTYPES[1], sinks=True, dlse=True).to(DEVICE)
    whole = run(case, ours(mask))
    spans = list(itertools.pairwise([0, 1, 18, 40, 41, 70, mask.num_tokens]))
    total: dict[str, torch.Tensor] = {}
    tolerance = 1e-5 if DEVICE == "cpu" else 2e-2
    for half in (spans[::2], spans[1::2]):
        part = mask.for_queries(half).with_options(backend="triton")
        rows = part.query_tokens.long()
        piece = Case(case.q[rows], case.k, case.v, case.dout[rows], case.dlse[:, rows], case.sinks)
        got = run(piece, ours(part))
        for name in ("out", "lse", "dq"):
            torch.testing.assert_close(
                got[name], whole[name][rows.cpu()], atol=tolerance, rtol=tolerance
            )
        for name in ("dk", "dv", "dsinks"):
            total[name] = total.get(name, 0) + got[name]
    for name, value in total.items():
        torch.testing.assert_close(value, whole[name], atol=4 * tolerance, rtol=tolerance)


def test_no_tokens_and_no_queries() -> None:
    empty = TreeMask(np.empty(0, np.int32)).to(DEVICE)
    for mask in (empty, mask_for(FOREST).for_queries([])):
        case = Case.random(mask, sinks=True, dlse=True, dtype=DTYPES[0]).to(DEVICE)
        got = run(case, ours(mask, backend="triton"))
        assert got["out"].shape == (0, 4, 16)
        assert got["lse"].shape == (0, 4)
        for name in ("dk", "dv", "dsinks"):
            assert not got[name].any()


# ---- who sees whom -------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 11])
@pytest.mark.parametrize("tiles", ["pointers", "descriptors"])
def test_probe_reveals_exactly_the_path(
    tiles: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tiles)
    forest = PrefixForest.from_parents([-1, 0, 0, 1, 1, -1], [19, 17, 5, 14, 6, 8])
    mask = mask_for(forest)
    count = mask.num_tokens
    q = torch.zeros(count, 1, 16, dtype=DTYPES[0], device=DEVICE)
    # Dv = T: the output is the attention row itself
    values = torch.eye(count, dtype=DTYPES[0], device=DEVICE)[:, None]
    seen = tree_attention(q, torch.randn_like(q), values, mask, window=window)[:, 0].cpu() > 0
    want = torch.as_tensor(ancestors_or_self(forest))
    if window:
        position = mask.position_ids.long().cpu()
        want &= position[:, None] - position[None] < window
    assert torch.equal(seen, want)


@pytest.mark.parametrize("tiles", mostly(["pointers", "descriptors"], ["descriptors"]))
def test_tokens_off_the_path_leave_no_trace(tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tiles)
    mask = mask_for(FOREST)
    visible = torch.as_tensor(ancestors_or_self(FOREST))
    case = Case.random(mask, dtype=DTYPES[0], seed=1).to(DEVICE)
    before = tree_attention(case.q, case.k, case.v, mask)
    for token in (0, 30, 50, 80):
        k, v = case.k.clone(), case.v.clone()
        k[token] += 3
        v[token] -= 50
        same = (before == tree_attention(case.q, k, v, mask)).flatten(1).all(1).cpu()
        assert same[~visible[:, token]].all()
        assert not same[token]


def test_the_checker_rejects_a_wrong_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "descriptors")
    mask = mask_for(FOREST)
    causal = TreeMask(np.full(mask.num_tokens, mask.num_tokens, np.int32)).to(DEVICE)
    case = Case.random(mask, dtype=DTYPES[0]).to(DEVICE)
    with pytest.raises(AssertionError, match=r"over the limit|mean error"):
        assert_numerics(FOREST, mask, case, ours(causal, backend="triton"))


@pytest.mark.parametrize("tiles", mostly(["pointers", "descriptors"], ["descriptors"]))
def test_no_unwritten_memory_is_read(
    tiles: str, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tiles)
    masks = mask_for(FOREST), mask_for(FOREST).for_queries([(3, 40), (60, 81)])
    # every pair of tiles, mask and order
    for mask, deterministic in zip(masks, (tiles == "pointers", tiles != "pointers"), strict=True):
        case = Case.random(mask, (2, 1), dtype=DTYPES[0], sinks=True, dlse=True).to(DEVICE)
        got = run(case, ours(mask, backend="triton", deterministic=deterministic))
        for name, value in got.items():
            assert torch.isfinite(value).all(), name
    assert poison.tensors > 0


# ---- inputs --------------------------------------------------------------------------------------


def test_strides_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "descriptors")
    # two tiles: strides are the same in every tile
    mask = mask_for(PrefixForest.from_parents([-1, 0, 0], [9, 12, 5]))
    count = mask.num_tokens
    fused = torch.randn(count, 8 * 16, dtype=DTYPES[0], device=DEVICE)
    split = [x.unflatten(1, (-1, 16)) for x in fused.split([64, 32, 32], 1)]
    layouts = {
        "contiguous": [x.contiguous() for x in split],
        "a fused projection": split,
        "heads outside": [x.transpose(0, 1).contiguous().transpose(0, 1) for x in split],
        "head dim outside": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in split],
        "an odd address": [_shifted(x) for x in split],
        "an odd stride": [_padded_rows(x) for x in split],
    }
    expanded = torch.randn(count, 1, 1, dtype=DTYPES[0], device=DEVICE).expand(count, 4, 16)
    want: list[torch.Tensor] = []
    for name, inputs in layouts.items():
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        out = tree_attention(q, k, v, mask)
        dout = expanded if name != "contiguous" else expanded.contiguous()
        got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
        want = want or got
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


def _shifted(x: torch.Tensor) -> torch.Tensor:
    """The same values one element behind a 16-byte border."""
    room = x.new_empty(x.numel() + 1)
    room[1:] = x.reshape(-1)
    return room[1:].view(x.shape)


def _padded_rows(x: torch.Tensor) -> torch.Tensor:
    """The same values, a token three elements longer than its heads."""
    room = x.new_zeros(x.shape[0], x.shape[1] * x.shape[2] + 3)
    room[:, :-3] = x.flatten(1)
    return room[:, :-3].unflatten(1, x.shape[1:])


def test_inputs_whose_last_stride_is_1_are_read_in_place() -> None:
    host = mask_for(FOREST).host
    fused = torch.randn(host.num_tokens, 8 * 16, dtype=DTYPES[0], device=DEVICE)
    split = [x.unflatten(1, (-1, 16)) for x in fused.split([64, 32, 32], 1)]
    outside = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in split]
    for inputs, tma in (
        (split, True),
        (outside, False),
        ([_shifted(x) for x in split], False),
        ([_padded_rows(x) for x in split], False),
    ):
        problem = launch.Problem.of(AttentionCall(*inputs, None, host, 0.25))
        for given_, read in zip(inputs, (problem.q, problem.k, problem.v), strict=True):
            assert read is given_
        hopper = launch.runtime.capability(fused.device)[0] == 9
        assert problem.choice.tma == (tma and hopper)
    inner = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in split]
    problem = launch.Problem.of(AttentionCall(*inner, None, host, 0.25))
    assert problem.q.is_contiguous() and torch.equal(problem.q, split[0])


def test_an_offset_that_int32_does_not_hold_is_copied() -> None:
    far = torch.empty_strided((4, 2, 8), (2**30, 8, 1), device="meta")
    assert launch._readable(far).is_contiguous()
    near = torch.empty_strided((4, 2, 8), (2**22, 8, 1), device="meta")
    assert launch._readable(near) is near


REFUSED = [
    ({"dtype": torch.float64}, r"float16 and bfloat16, and q is torch\.float64"),
    ({"dims": (512, 64)}, "head dims must be 1 to 256, and are 512 and 64"),
    ({"scale": -0.5}, r"scale must not be negative, and is -0\.5"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_refusals_say_why_and_auto_goes_elsewhere(changes: dict, message: str) -> None:
    mask = mask_for(FOREST)
    case = Case.random(mask, **({"dtype": DTYPES[0]} | changes)).to(DEVICE)
    with pytest.raises(UnsupportedError, match=f"backend 'triton': .*{message}.*use backend"):
        tree_attention(case.q, case.k, case.v, mask, **case.options)
    tree_attention(case.q, case.k, case.v, mask.with_options(backend="auto"), **case.options)


def test_a_cpu_is_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    mask = mask_of(FOREST)
    case = Case.random(mask, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="runs on GPUs, and q is on cpu"):
        tree_attention(case.q, case.k, case.v, mask, backend="triton")
    call = AttentionCall(case.q, case.k, case.v, None, mask.host, 1.0)
    assert choose("auto", call).backend.name == "sdpa"


# ---- contracts -----------------------------------------------------------------------------------


def test_deterministic_is_bitwise_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "descriptors")
    mask = mask_for(FOREST).with_options(deterministic=True)
    assert len(mask.tables(pt.TileShape(8, 16, True, 2)).slots) > 0
    case = Case.random(mask, (2, 1), sinks=True, dlse=True, dtype=DTYPES[0]).to(DEVICE)
    want = run(case, ours(mask))
    for _ in range(1 if DEVICE == "cpu" else 50):
        for name, value in run(case, ours(mask)).items():
            assert torch.equal(value, want[name]), name


@pytest.mark.parametrize(
    "tiles", mostly(["descriptors", "dK and dV apart", "nothing is cut"], ["descriptors"])
)
def test_wide_gradients_are_those_before_the_cast(
    tiles: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut and uncut key tiles, in the half precision that the interpreter computes right."""
    use(monkeypatch, tiles)
    mask = mask_for(FOREST).with_options(deterministic=True)
    for of_part in (mask, mask.for_queries([(3, 22), (40, 80)])):
        case = Case.random(of_part, (2, 1), (16, 16), torch.float16, **FEATURES["all"])
        assert_wide_gradients_are_narrow_ones_before_the_cast(case.to(DEVICE), of_part, "triton")


@pytest.mark.parametrize("sinks, dlse", mostly([(False, False), (True, True)], [(True, True)]))
def test_opcheck(sinks: bool, dlse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "descriptors")
    mask = mask_for(PrefixForest.from_parents([-1, 0, 0], [9, 12, 5]))
    case = Case.random(mask, (2, 1), (8, 8), DTYPES[1]).to(DEVICE)
    inputs = [x.requires_grad_() for x in (case.q, case.k, case.v)]
    sink = torch.randn(2, device=DEVICE, requires_grad=True) if sinks else None
    arguments = (*inputs, sink, mask.handle, 0.3, 0, 0.0, False, "triton", False, dlse, None)
    torch.library.opcheck(operator.TREE_ATTENTION, arguments)


@pytest.mark.parametrize("feature", mostly(["plain", "all"], ["all"]))
def test_results_are_laid_out_as_compiled_code_is_told(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "descriptors")
    mask = mask_for(PrefixForest.from_parents([-1, 0, 0], [9, 12, 5]))
    case = Case.random(mask, (2, 1), (8, 8), DTYPES[0], **FEATURES[feature]).to(DEVICE)
    assert_as_promised(case, mask)


def test_compiles_whole_and_once_for_all_forests(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.testing import CompileCounter

    use(monkeypatch, "pointers")
    torch._dynamo.reset()
    counter = CompileCounter()

    def layer(q, k, v, mask):
        return tree_attention(q, k, v, mask) * 2

    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    frames = []
    for seed in range(3):
        mask = mask_for(random_forest(np.random.default_rng(seed), 4, 12))
        case = Case.random(mask, (2, 1), (8, 8), DTYPES[1]).to(DEVICE)
        inputs = [x.requires_grad_() for x in (case.q, case.k, case.v)]
        out = compiled(*inputs, mask)
        torch.testing.assert_close(out, layer(*inputs, mask))
        out.sum().backward()
        frames.append(counter.frame_count)
    assert frames[-1] == frames[1] <= 2, frames


# ---- the frozen table ----------------------------------------------------------------------------

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "dims", [(16, 16), (64, 64), (128, 128), (256, 128), (64, 256), (256, 256)]
)
def test_the_table_answers_every_model(capability: tuple[int, int], dims: tuple[int, int]) -> None:
    for group, tma, cuda in itertools.product(
        (1, 2, 3, 5, 7, 8, 12, 71, 128), *[(False, True)] * 2
    ):
        choice = configs.choose(capability, *dims, group, tma, cuda)
        assert group % choice.heads == 0
        assert choice.tma == (tma and cuda and capability[0] == 9)
        for config in (*choice.forward, *choice.keys, *choice.queries):
            assert config.rows // choice.heads >= 1
            if choice.tma:
                assert config.rows % choice.heads == 0
                assert choice.heads & (choice.heads - 1) == 0


def test_head_dims_are_taken_in_pieces_where_that_saves_padding() -> None:
    hopper, ampere = (configs.choose((at, 0), 256, 128, 1, True) for at in (9, 8))
    dims = (24, 80, 96, 128, 160, 192, 200, 256)
    assert [hopper.width(d) for d in dims] == [32, 128, 128, 128, 64, 64, 256, 256]
    assert [ampere.width(d) for d in dims] == [configs.padded(d) for d in dims]


@pytest.mark.parametrize("pairs", [10**6, 3 * 10**8, 10**11])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
def test_long_runs_are_cut_into_pieces_that_fill_a_gpu(pairs: int, kv_heads: int) -> None:
    tiles = configs.piece_tiles(pairs, 1024, kv_heads, 132)
    assert tiles & (tiles - 1) == 0
    pieces_a_slot = pairs / 1024 * kv_heads / tiles / (2 * 132)
    assert pieces_a_slot <= 32
    assert pieces_a_slot >= 16 or tiles == 32


def test_float32_sums_stay_within_their_bound() -> None:
    """One long prompt under many responses: nearly all work is in cut tiles."""
    mask = mask_of(PrefixForest.from_parents([-1, *[0] * 200], [6000, *[300] * 200]))
    for processors in (4, 132):
        pairs = mask.host.visible_pairs(0)
        tiles = configs.piece_tiles(pairs, 16 * 64, 8, processors)
        tables = mask.tables(pt.TileShape(16, 64, True, tiles))
        # few multiprocessors are kept busy without cutting anything
        assert (len(tables.slots) > 0) == (processors == 132)
        assert tables.num_partials * 8 <= 64 * processors


def test_short_nodes_choose_their_own_tiles() -> None:
    long, short = configs.Config(128, 64, 8, 2), configs.Config(64, 64, 4, 2)
    choice = configs.KernelConfigs(False, 4, (long, short), (long, short), (long, short))
    documents = mask_of(PrefixForest.from_parents([-1, -1], [5000, 5000]))
    turns = mask_of(PrefixForest.from_parents([-1, *range(60)], [20] * 61))
    leaves = mask_of(PrefixForest.from_parents([-1, *[0] * 60], [200, *[20] * 60]))
    assert choice.of(documents.host, 0) == (long, long, long)
    # a chain of nodes is one path: nothing is partial but the diagonal
    assert turns.host.partial_share(configs.PROBE, 0) < 0.3
    assert choice.of(leaves.host, 0) == (short, short, short)


@pytest.mark.parametrize("of_keys, of_queries", [(128, 16), (16, 128)])
def test_rows_are_dead_behind_the_last_tile_of_either_kernel(of_keys, of_queries, monkeypatch):
    """A tile that starts at a head's last row reads as many rows as the larger tile has."""

    class NoKernel:
        def __getitem__(self, grid):
            return lambda *args, **options: None

    monkeypatch.setattr(launch, "prepare_kernel", NoKernel())
    problem = SimpleNamespace(
        group=1, choice=SimpleNamespace(heads=1), k=torch.empty(33, 2, 4), v=torch.empty(33, 2, 4)
    )
    out, lse = torch.empty(33, 2, 4), torch.empty(2, 33)
    keys, queries = (SimpleNamespace(rows=rows) for rows in (of_keys, of_queries))
    rows, rows_a_block, _ = launch._prepare(problem, out, None, None, out, lse, keys, queries)
    assert rows_a_block >= 33 + 128 and rows.shape[1] == 2 * rows_a_block
