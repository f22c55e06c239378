"""tree_attention: what it computes, on every feature and both backends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import prefixtree as pt
from prefixtree import (
    ForestError,
    PrefixForest,
    TreeMask,
    UnsupportedError,
    explain,
    tree_attention,
)
from prefixtree.kernels.attention import operator, sdpa
from prefixtree.kernels.attention.protocol import reach
from tests.conftest import Poison
from tests.support.attention_checks import Case, eager, ours, run
from tests.support.forest_examples import CATERPILLAR
from tests.support.pairs import pairwise
from tests.support.strategies import (
    ancestors_or_self,
    forests,
    mask_of,
    query_ranges,
    random_forest,
)


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float, what: str = "") -> None:
    assert a.shape == b.shape
    difference = (a.detach().double() - b.detach().double()).abs()
    worst = float(difference.max()) if a.numel() else 0.0
    assert worst <= tolerance, f"{what}: {worst:.2e} > {tolerance:.0e}"


# ---- the oracle and the backends against it ------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_reference_equals_every_sequence_alone_through_torch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 9, 9], [7], [1, 2, 3], [1, 2, 3, 8, *range(20)]]
    sequences += [rng.integers(0, 2, n).tolist() for n in (3, 9, 12)]
    packed = pt.pack(PrefixForest.from_sequences(sequences))
    case = Case.random(packed.mask, heads=(4, 2), dims=(8, 8), dtype=torch.float64, seed=seed)
    q, k, v = (x.requires_grad_() for x in (case.q, case.k, case.v))
    out = tree_attention(q, k, v, packed.mask, backend="reference")
    got = packed.unpack(out)
    # one weight a copy: a shared token's gradient has to be the sum over its copies
    weights = [torch.randn(*o.shape, dtype=torch.float64) for o in got]
    grads = torch.autograd.grad(got, (q, k, v), weights)
    alone = []
    for row in packed.unpack(torch.arange(packed.num_tokens)):
        parts = [x[row].transpose(0, 1)[None] for x in (q, k, v)]
        alone.append(
            F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)[0].transpose(
                0, 1
            )
        )
    for a, b in zip(got, alone, strict=True):
        assert_close(a, b, 1e-12)
    for a, b in zip(grads, torch.autograd.grad(alone, (q, k, v), weights), strict=True):
        assert_close(a, b, 1e-11)


_HEADS = [((4, 2), (8, 8)), ((3, 3), (8, 4)), ((6, 1), (4, 6))]
_FEATURES = [None, 1, 7, 10_000], [None, 5.0], [False, True], [False, True]


@pytest.mark.parametrize("sizes, window, softcap, sinks, dlse", pairwise(_HEADS, *_FEATURES))
def test_every_feature_agrees_between_backends(
    sizes: tuple[tuple[int, int], tuple[int, int]],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    dlse: bool,
) -> None:
    rng = np.random.default_rng(7)
    options = {"window": window, "softcap": softcap, "scale": 0.3}
    for trial in range(3):
        mask = mask_of(random_forest(rng, 12, 25))
        if trial == 2:
            middle = mask.num_tokens // 2
            mask = mask.for_queries(
                [(0, 1), (middle, min(middle + 9, mask.num_tokens))][middle == 0 :]
            )
        case = Case.random(mask, *sizes, torch.float64, trial, sinks, dlse, **options)
        want = run(case, ours(mask, backend="reference"))
        for name, value in run(case, ours(mask, backend="sdpa")).items():
            assert_close(value, want[name], 1e-11, name)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_are_not_above_zero(scale: float) -> None:
    """sdpa gave NaN: torch's flash kernel scales what it has masked."""
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, dtype=torch.float64, dlse=True, sinks=True, scale=scale)
    want = run(case, ours(mask, backend="reference"))
    for name, value in run(case, ours(mask, backend="sdpa")).items():
        assert_close(value, want[name], 1e-11, name)


@given(st.data())
def test_sdpa_equals_the_path_definition_on_any_forest(data: st.DataObject) -> None:
    forest = data.draw(forests())
    whole = mask_of(forest)
    visible = torch.as_tensor(ancestors_or_self(forest))
    mask = whole
    if data.draw(st.booleans()):
        mask = whole.for_queries(data.draw(query_ranges(whole.num_tokens)))
        visible = visible[mask.query_tokens.long()]
    window = data.draw(st.sampled_from([None, 1, 3]))
    position = whole.position_ids.long()
    rows = position if mask.query_tokens is None else position[mask.query_tokens.long()]
    case = Case.random(mask, dtype=torch.float64, sinks=data.draw(st.booleans()), window=window)
    want = run(case, eager(visible, (rows, position)))
    for name, value in run(case, ours(mask, backend="sdpa")).items():
        assert_close(value, want[name], 1e-11, name)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = mask_of(CATERPILLAR)
    for options in ({"softcap": 2.0}, {"window": 9}, {"window": 30, "softcap": 3.0}):
        case = Case.random(mask, dtype=torch.float64, dlse=True, sinks=True, **options)
        want = run(case, ours(mask, backend="sdpa"))
        with monkeypatch.context() as patch:
            patch.setattr(sdpa, "_CHUNK", 700)
            got = run(case, ours(mask, backend="sdpa"))
        for name, value in got.items():
            assert_close(value, want[name], 1e-12, name)


def test_matrix_products_serve_where_the_flash_kernel_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert sdpa._flash_works(), "this torch's CPU flash kernel is not usable: sdpa runs slowly"
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, dtype=torch.float64, sinks=True)
    want = run(case, ours(mask))
    monkeypatch.setattr(sdpa, "_flash_works", lambda: False)
    for name, value in run(case, ours(mask)).items():
        assert_close(value, want[name], 1e-12, name)


# ---- who sees whom -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("window", [None, 1, 11])
def test_probe_reveals_exactly_the_path(backend: str, window: int | None) -> None:
    forest = PrefixForest.from_parents([-1, 0, 0, 1, 1, -1], [9, 7, 5, 4, 6, 8])
    mask = mask_of(forest)
    count = mask.num_tokens
    q, k = torch.zeros(count, 1, 8), torch.randn(count, 1, 8)
    values = torch.eye(count)[:, None]  # Dv = T: the output is the attention row itself
    seen = tree_attention(q, k, values, mask, window=window, backend=backend)[:, 0] > 0
    want = torch.as_tensor(ancestors_or_self(forest))
    if window:
        position = mask.position_ids.long()
        want &= position[:, None] - position[None] < window
    assert torch.equal(seen, want)


@pytest.mark.parametrize("options", [{}, {"window": 12}, {"softcap": 3.0}])
def test_tokens_off_the_path_leave_no_trace(options: dict) -> None:
    mask = mask_of(CATERPILLAR)
    visible = torch.as_tensor(ancestors_or_self(CATERPILLAR))
    case = Case.random(mask, seed=1)
    before = tree_attention(case.q, case.k, case.v, mask, **options)
    for token in (0, 45, 80, 130, 200):
        k, v = case.k.clone(), case.v.clone()
        k[token] += 3
        v[token] -= 50
        after = tree_attention(case.q, k, v, mask, **options)
        same = (before == after).flatten(1).all(1)
        assert same[~visible[:, token]].all()
        assert not same[token]


# ---- equivalences --------------------------------------------------------------------------------


def test_order_of_siblings_changes_nothing_for_the_sequences() -> None:
    parents, lengths = [-1, 0, 0, 1, 1, 2], [5, 4, 6, 3, 30, 2]
    tokens = np.arange(sum(lengths))
    results = []
    for order in ("heaviest", "input"):
        packed = pt.pack(PrefixForest.from_parents(parents, lengths, tokens, order=order))
        table = torch.randn(len(tokens), 3, 4, 8, generator=torch.Generator().manual_seed(0))
        q, k, v = table[packed.input_ids].unbind(1)
        results.append((packed.subtree_end, packed.unpack(tree_attention(q, k, v, packed.mask))))
    assert not torch.equal(results[0][0], results[1][0])
    for a, b in zip(results[0][1], results[1][1], strict=True):
        assert_close(a, b, 1e-6)


def test_splitting_a_node_changes_nothing() -> None:
    whole = PrefixForest.from_parents([-1, 0, 0], [10, 20, 9])
    split = PrefixForest.from_parents([-1, 0, 1, 1, 3], [4, 6, 20, 1, 8])
    assert np.array_equal(mask_of(whole).subtree_end, mask_of(split).subtree_end)


def test_a_window_that_no_path_outgrows_is_none() -> None:
    """So that kernels without windows serve; one token less hides a key."""
    host = mask_of(CATERPILLAR).host
    assert [reach(host, host.deepest + more) for more in (-1, 0, 1)] == [host.deepest - 1, 0, 0]


def test_no_sharing_is_document_attention() -> None:
    lengths = [7, 1, 30, 12]
    forest = PrefixForest.from_parents([-1] * 4, lengths, order="input")
    mask = mask_of(forest)
    case = Case.random(mask, heads=(4, 4))
    out = tree_attention(case.q, case.k, case.v, mask)
    parts = [x.split(lengths) for x in (case.q, case.k, case.v)]
    for q, k, v, got in zip(*parts, out.split(lengths), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)
        assert_close(got, want, 1e-5)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"window": 15, "softcap": 5.0}])
def test_queries_in_parts_are_the_whole(backend: str, options: dict) -> None:
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, dtype=torch.float64, sinks=True, dlse=True, **options)
    whole = run(case, ours(mask, backend=backend))
    cuts = [0, 1, 37, 90, 91, 200, mask.num_tokens]
    spans = list(itertools.pairwise(cuts))
    total: dict[str, torch.Tensor] = {}
    for half in (spans[::2], spans[1::2]):
        part = mask.for_queries(half)
        rows = part.query_tokens.long()
        piece = Case(
            case.q[rows], case.k, case.v, case.dout[rows], case.dlse[:, rows], case.sinks, options
        )
        got = run(piece, ours(part, backend=backend))
        for name in ("out", "lse", "dq"):
            assert_close(got[name], whole[name][rows], 1e-12, name)
        for name in ("dk", "dv", "dsinks"):
            total[name] = total.get(name, 0) + got[name]
    for name, value in total.items():
        assert_close(value, whole[name], 1e-11, name)


def test_a_sink_takes_probability_and_leaves_lse_alone() -> None:
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, heads=(4, 2))
    out, lse = tree_attention(case.q, case.k, case.v, mask, return_lse=True)
    sinks = torch.tensor([-torch.inf, 0.0, 2.0, 50.0])
    got, got_lse = tree_attention(case.q, case.k, case.v, mask, sinks=sinks, return_lse=True)
    assert torch.equal(lse, got_lse)
    assert_close(got[:, 0], out[:, 0], 1e-6)
    share = torch.exp(lse) / (torch.exp(lse) + torch.exp(sinks[:, None]))
    assert_close(got, out * share.t()[..., None], 1e-5)
    assert got[:, 3].abs().max() < 1e-12


# ---- shapes --------------------------------------------------------------------------------------

SHAPES = {
    "one token": ([-1], [1]),
    "one-token nodes": ([-1, *range(30)], [1] * 31),
    "a chain of one-child nodes": ([-1, *range(9)], [3, 1, 8, 2, 5, 1, 1, 7, 4, 2]),
    "1,000 leaves on a 3-token root": ([-1, *[0] * 1000], [3, *[1] * 1000]),
    "depth 200": ([-1, *[i // 2 * 2 for i in range(399)]], [2] * 400),
    "a tile and one": ([-1, 0, 0], [128, 129, 127]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"window": 4, "softcap": 2.0}])
def test_shapes(shape: str, options: dict) -> None:
    parents, lengths = SHAPES[shape]
    mask = mask_of(PrefixForest.from_parents(parents, lengths))
    case = Case.random(mask, (2, 1), (8, 8), torch.float64, **options)
    want = run(case, ours(mask, backend="reference"))
    for name, value in run(case, ours(mask, backend="sdpa")).items():
        assert_close(value, want[name], 1e-11, name)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_no_tokens_and_no_queries(backend: str) -> None:
    empty = TreeMask(np.empty(0, np.int32))
    whole = mask_of(CATERPILLAR)
    for mask in (empty, whole.for_queries([])):
        case = Case.random(mask, sinks=True, dlse=True)
        got = run(case, ours(mask, backend=backend))
        assert got["out"].shape == (0, 4, 16)
        assert got["lse"].shape == (0, 4)
        for name in ("dk", "dv", "dsinks"):
            assert not got[name].any()


@pytest.mark.parametrize("options", [{}, {"window": 25}, {"softcap": 4.0}])
def test_no_unwritten_memory_is_read(poison: Poison, options: dict) -> None:
    mask = mask_of(CATERPILLAR).for_queries([(3, 60), (100, 190)])
    case = Case.random(mask, sinks=True, dlse=True, **options)
    got = run(case, ours(mask))
    assert poison.tensors > 0
    for name, value in got.items():
        assert torch.isfinite(value).all(), name


# ---- inputs --------------------------------------------------------------------------------------


def test_strides_are_free() -> None:
    mask = mask_of(CATERPILLAR)
    count, options = mask.num_tokens, {"softcap": 3.0}
    fused = torch.randn(count, 8 * 16, dtype=torch.float64)
    split = [x.unflatten(1, (-1, 16)) for x in fused.split([64, 32, 32], 1)]
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in split]
    inner = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in split]
    every_second = [torch.stack([x, x], -1).flatten(-2)[..., ::2] for x in split]
    dout = torch.randn(count, 1, 1, dtype=torch.float64).expand(count, 4, 16)
    for chosen in ({}, options):
        want = None
        for inputs in ([x.contiguous() for x in split], split, transposed, inner, every_second):
            case = Case(*inputs, dout if want else dout.contiguous(), options=chosen)
            q, k, v = (x.detach().requires_grad_() for x in inputs)
            out = tree_attention(q, k, v, mask, **chosen)
            got = [out, *torch.autograd.grad(out, (q, k, v), case.dout)]
            want = want or got
            for a, b in zip(got, want, strict=True):
                assert_close(a, b, 1e-12)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_results_are_contiguous(backend: str, dtype: torch.dtype) -> None:
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, dtype=dtype)
    out, lse = ours(mask, backend=backend)(case.q, case.k, case.v, None)
    assert out.is_contiguous() and lse.is_contiguous()


def _arguments(**changes: object) -> dict[str, object]:
    mask = mask_of(CATERPILLAR)
    count = mask.num_tokens
    base = {"q": torch.randn(count, 4, 8), "k": torch.randn(count, 2, 8)}
    return base | {"v": torch.randn(count, 2, 8), "mask": mask} | changes


N = mask_of(CATERPILLAR).num_tokens
BAD = [
    ({"mask": torch.ones(3)}, TypeError, "mask must be a TreeMask, got Tensor; pack makes one"),
    ({"mask": [[1, 2, 3], [1, 2]]}, TypeError, r"got list; pack makes one: .*from_sequences"),
    ({"mask": CATERPILLAR}, TypeError, r"got PrefixForest; pack makes one: .*pack\(.*\.mask"),
    ({"mask": pt.pack(CATERPILLAR)}, TypeError, r"got PackedForest; .*packed\.mask"),
    ({"q": torch.randn(1, N, 4, 8)}, ValueError, "q must be .* got 4 dimensions"),
    ({"q": torch.randn(N - 1, 4, 8)}, ValueError, f"q has {N - 1} rows, the mask has {N} queries"),
    ({"k": torch.randn(N - 1, 2, 8)}, ValueError, f"have {N - 1} and {N} rows, .* {N} tokens"),
    ({"v": torch.randn(N + 1, 2, 8)}, ValueError, f"have {N} and {N + 1} rows"),
    (
        {"k": torch.randn(N, 3, 8), "v": torch.randn(N, 3, 8)},
        ValueError,
        "multiple .* 4 query heads, 3",
    ),
    ({"q": torch.randn(N, 0, 8)}, ValueError, "at least 1 .* got 0 query heads"),
    ({"v": torch.randn(N, 4, 8)}, ValueError, "2 heads of k and 4 of v"),
    ({"k": torch.randn(N, 2, 6)}, ValueError, "differ in head dim: 8 and 6"),
    ({"v": torch.randn(N, 2, 0)}, ValueError, "at least 1, got 8 of q and k, 0 of v"),
    (
        {"q": torch.randn(N, 4, 0), "k": torch.randn(N, 2, 0)},
        ValueError,
        "at least 1, got 0 of q and k",
    ),
    ({"k": torch.randn(N, 2, 8).double()}, ValueError, "one floating-point dtype"),
    ({"q": torch.ones(N, 4, 8, dtype=torch.int64)}, ValueError, "one floating-point dtype"),
    ({"q": torch.empty(N, 4, 8, device="meta")}, ValueError, "q is on meta, the mask on cpu"),
    ({"window": 0}, ValueError, "window must be None or an integer >= 1 .* got 0"),
    ({"window": 2.5}, ValueError, "window must be .* got 2.5"),
    ({"softcap": -1.0}, ValueError, "softcap must be None or above 0 and finite, got -1"),
    ({"softcap": float("nan")}, ValueError, "softcap must be None or above 0 and finite, got nan"),
    ({"sinks": torch.zeros(3)}, ValueError, r"sinks must be floating point \[4\].* got \[3\]"),
    ({"sinks": torch.zeros(4, dtype=torch.int32)}, ValueError, "sinks must be floating point"),
    ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks are on meta, q is on cpu"),
    ({"backend": "flashy"}, UnsupportedError, "'flashy' does not exist .* reference, sdpa"),
]


@pytest.mark.parametrize("changes, error, message", BAD)
def test_bad_arguments_say_what_was_expected(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        tree_attention(**_arguments(**changes))


def test_options_travel_on_the_mask() -> None:
    arguments = _arguments()
    wrong = arguments["mask"].with_options(backend="flashy")
    with pytest.raises(UnsupportedError, match="flashy"):
        tree_attention(**(arguments | {"mask": wrong}))
    tree_attention(**(arguments | {"mask": wrong, "backend": "sdpa"}))


def test_options_go_by_keyword() -> None:
    """So that another release may add one anywhere."""
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask)
    inputs = (case.q, case.k, case.v)
    with pytest.raises(TypeError, match="positional arguments"):
        tree_attention(*inputs, mask, 0.5)
    with pytest.raises(TypeError, match="positional arguments"):
        explain(mask, *inputs, 0.5)


def test_a_calls_options_override_the_masks() -> None:
    """The defaults of a mask too: "auto" and False can be asked for."""
    arguments = _arguments()
    mask = arguments["mask"].with_options(backend="reference", deterministic=True)
    asked: list[tuple[object, object]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "_differentiable", lambda *a: asked.append(a[8:10]) or (a[0], a[0]))
        for given in (
            {"backend": "auto", "deterministic": False},
            {"backend": "auto"},
            {"deterministic": False, "backend": "sdpa"},
        ):
            tree_attention(**(arguments | {"mask": mask} | given))
    assert asked == [(False, "auto"), (True, "auto"), (False, "sdpa")]
    assert "'reference'" in explain(mask) and "'reference'" in explain(mask, backend=None)
    assert "'sdpa': q is on cpu" in explain(mask, backend="auto")


@pytest.mark.parametrize(
    "mask", [[[1, 2, 3], [1, 2]], CATERPILLAR, pt.pack(CATERPILLAR)], ids=["list", "forest", "pack"]
)
def test_a_mask_is_asked_for_by_name(mask: object) -> None:
    with pytest.raises(TypeError, match=r"mask must be a TreeMask, got .*packed\.mask"):
        explain(mask)
    if not isinstance(mask, pt.PackedForest):
        with pytest.raises(ForestError, match=r"subtree_end .*; pack\(.*from_sequences.*\.mask"):
            TreeMask(mask)


def test_deterministic_is_bitwise_repeatable() -> None:
    mask = mask_of(CATERPILLAR).with_options(deterministic=True)
    for options in ({}, {"window": 25, "softcap": 3.0}):
        case = Case.random(mask, sinks=True, dlse=True, dtype=torch.bfloat16, **options)
        want = run(case, ours(mask))
        for _ in range(20):
            for name, value in run(case, ours(mask)).items():
                assert torch.equal(value, want[name]), name


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"window": 9}])
def test_autocast_does_not_reach_into_the_operator(options: dict) -> None:
    """float32 stays float32, forward and backward, and a first call may well be under autocast."""
    mask = mask_of(CATERPILLAR)
    case = Case.random(mask, **options)
    want = run(case, ours(mask))
    sdpa._flash_works.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        got = run(case, ours(mask))
    for name, value in got.items():
        assert torch.equal(value, want[name]), name
