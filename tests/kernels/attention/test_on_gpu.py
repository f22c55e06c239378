"""On a GPU: the kernels with the tiles they ship with, and what only hardware can show.

The small cases of every feature are in triton/test_small_tiles.py, which runs natively where there
is a GPU.
Selections: `-m gpu`; `-k sanitize` is short enough for compute-sanitizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch

import prefixtree as pt
from prefixtree import PrefixForest, TreeMask, tree_attention
from prefixtree.kernels.attention.choice import choose
from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.kernels.lm_head import eager as eager_head
from prefixtree.kernels.lm_head import kernels as fused
from prefixtree.kernels.lm_head import logprobs
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.logprobs import ScoreOptions
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.attention_checks import Case, assert_numerics, eager, ours, run
from tests.support.gpu_cases import (
    EXTRAS,
    FOREST,
    HALVES,
    OPTIONS,
    assert_sinks_of_one_head,
    cuda_mask,
    inputs_of,
    peak_bytes,
)
from tests.support.head_checks import exact_columns
from tests.support.hooks import inner
from tests.support.models import (
    assert_same,
    build,
    pack_sequences,
    ragged_objective,
    ragged_sequences,
    run_packed,
)
from tests.support.strategies import random_forest

pytestmark = pytest.mark.gpu


# ---- numerics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "heads, dims",
    [
        ((4, 4), (64, 64)),
        ((4, 1), (80, 80)),
        ((8, 1), (96, 96)),
        ((32, 8), (128, 128)),
        ((7, 1), (128, 128)),
        ((10, 2), (64, 64)),
        ((6, 1), (128, 128)),
        ((16, 1), (128, 128)),
        ((2, 1), (192, 192)),
        ((8, 2), (256, 256)),
        ((4, 4), (192, 128)),
        ((2, 2), (32, 16)),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_numerics(
    dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], deterministic: bool
) -> None:
    mask = cuda_mask(FOREST, deterministic=deterministic)
    case = Case.random(mask, heads, dims, dtype).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="triton"))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("extras", EXTRAS)
def test_numerics_of_features(dtype: torch.dtype, options: dict, extras: dict) -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (8, 2), (128, 128), dtype, **extras, **options).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="triton"))


@pytest.mark.parametrize("seed", range(20))
def test_numerics_of_ragged_forests(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, 40, int(rng.choice([3, 40, 200])))
    mask = cuda_mask(forest)
    if seed % 3 == 2:
        middle = mask.num_tokens // 2
        mask = mask.for_queries([(middle // 2, middle), (middle + 1, mask.num_tokens)])
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, seed).to("cuda")
    assert_numerics(forest, mask, case, ours(mask, backend="triton"))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("sink_level", [0.0, 8.0])
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_sinks_of_one_head(backend: str, sink_level: float, seed: int) -> None:
    """One number for all rows, whose terms may cancel; of thousands of rows."""
    assert_sinks_of_one_head(backend, sink_level, seed)


def test_numerics_of_real_looking_activations() -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (4, 2), (128, 128), torch.bfloat16)
    # activations of trained models: a few channels hundreds of times larger, tokens nearly alike
    case.k[..., 5] += 30
    case.q[..., 5] += 30
    case.k[10:30] = case.k[10]
    case.v[..., :3] *= 100
    assert_numerics(FOREST, mask, case.to("cuda"), ours(mask, backend="triton"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"window": 200, "softcap": 4.0}])
def test_the_sdpa_backend_here(dtype: torch.dtype, options: dict) -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (4, 2), (64, 64), dtype, sinks=True, dlse=True, **options).to("cuda")
    assert_numerics(FOREST, mask, case, ours(mask, backend="sdpa"))


def test_auto_is_triton_where_it_serves() -> None:
    mask = cuda_mask(FOREST)
    case = Case.random(mask, dtype=torch.bfloat16).to("cuda")
    call = AttentionCall(case.q, case.k, case.v, None, mask.host, 0.1)
    assert choose("auto", call).backend.name == "triton"
    wide = call._replace(q=case.q.float(), k=case.k.float(), v=case.v.float())
    assert choose("auto", wide).backend.name == "sdpa"


# ---- races, offsets, lifetimes -------------------------------------------------------------------


def test_a_thousand_repeats() -> None:
    """out, lse and dq never differ by a bit; dk and dv of cut tiles by the order of their sums,
    and not at all when deterministic."""
    mask = cuda_mask(FOREST)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, sinks=True, dlse=True).to("cuda")
    exact = run(case, ours(mask, backend="triton", deterministic=True))
    loose = run(case, ours(mask, backend="triton"))
    for repeat in range(500):
        for name, value in run(case, ours(mask, backend="triton", deterministic=True)).items():
            assert torch.equal(value, exact[name]), (name, repeat)
        for name, value in run(case, ours(mask, backend="triton")).items():
            if name in ("dk", "dv"):
                error = (value.float() - loose[name].float()).abs()
                # the last bit of bf16
                assert (error <= 2**-7 * loose[name].float().abs() + 1e-6).all(), (name, repeat)
            else:
                assert torch.equal(value, loose[name]), (name, repeat)


def test_offsets_beyond_int32() -> None:
    """The last of many documents, more than 2^31 elements into q, out, dout and dq."""
    length, documents = 128, 4300
    tokens = length * documents
    heads, dim = 32, 128
    assert tokens * heads * dim > 2**31
    forest = PrefixForest.from_parents([-1] * documents, [length] * documents, order="input")
    mask = cuda_mask(forest, backend="triton")
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(count: int) -> torch.Tensor:
        return torch.randn(
            tokens, count, dim, device="cuda", dtype=torch.bfloat16, generator=generator
        )

    q, k, v = (draw(count).requires_grad_() for count in (heads, 8, 8))
    dout = draw(heads)
    out = tree_attention(q, k, v, mask)
    got = [out, *torch.autograd.grad(out, (q, k, v), dout)]
    alone = PrefixForest.from_parents([-1], [length])
    for document in (0, documents // 2, documents - 1):
        rows = slice(document * length, (document + 1) * length)
        part = [x.detach()[rows].clone().requires_grad_() for x in (q, k, v)]
        want = tree_attention(*part, cuda_mask(alone, backend="triton"))
        wanted = [want, *torch.autograd.grad(want, part, dout[rows])]
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a[rows], b, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forest_moved_in_inference_mode_trains_later(dtype: torch.dtype) -> None:
    objective, model = ragged_objective(), build("gpt_oss").to("cuda", dtype)
    with torch.inference_mode():
        packed = pack_sequences(objective.sequences).to("cuda")
        sequence_logprobs(model, packed)
    want = run_packed(model, pack_sequences(objective.sequences).to("cuda"), objective)
    got = run_packed(model, packed, objective)
    # dk and dv are added up in any order
    assert_same(got, want, 1e-4 if dtype == torch.float32 else 5e-2)


def test_another_stream_and_lifetimes() -> None:
    mask = cuda_mask(FOREST, backend="triton")
    case = Case.random(mask, (8, 2), (64, 64), torch.bfloat16).to("cuda")
    want = run(case, ours(mask))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fresh = cuda_mask(FOREST, backend="triton", deterministic=True)
        got = run(case, ours(fresh))
    torch.cuda.current_stream().wait_stream(stream)
    for name in ("out", "lse", "dq"):
        assert torch.equal(got[name], want[name]), name


# ---- contracts -----------------------------------------------------------------------------------


def test_nothing_waits_for_the_gpu() -> None:
    masks = [cuda_mask(random_forest(np.random.default_rng(s), 20, 90)) for s in range(3)]
    cases = [Case.random(m, (8, 2), (128, 128), torch.bfloat16).to("cuda") for m in masks]

    def update(mask: TreeMask, case: Case) -> None:
        inputs = inputs_of(case)
        out = tree_attention(*inputs, mask, backend="triton")
        torch.autograd.grad(out, inputs, case.dout)

    update(masks[0], cases[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        # new forests too: their tables are built and sent on the way
        for mask, case in zip(masks, cases, strict=True):
            update(mask, case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_new_forest_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled = []

    def hook(**facts: object) -> None:
        compiled.append(facts)

    def update(seed: int, subset: bool) -> None:
        forest = random_forest(np.random.default_rng(seed), 30, 120)
        mask = cuda_mask(forest, backend="triton")
        if subset:
            mask = mask.for_queries([(0, mask.num_tokens // 2 + 1)]).with_options(backend="triton")
        case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, window=50).to("cuda")
        inputs = inputs_of(case)
        out = tree_attention(*inputs, mask, window=50)
        torch.autograd.grad(out, inputs, case.dout)

    for subset in (False, True):
        update(0, subset)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", hook)
    for seed, subset in itertools.product(range(1, 12), (False, True)):
        update(seed, subset)
    assert not compiled, [facts.get("repr") for facts in compiled]


@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_graph_replays_on_new_inputs(deterministic: bool) -> None:
    mask = cuda_mask(FOREST, backend="triton", deterministic=deterministic)
    case = Case.random(mask, (8, 2), (128, 128), torch.bfloat16).to("cuda")
    inputs = inputs_of(case)

    def update() -> list[torch.Tensor]:
        out = tree_attention(*inputs, mask)
        return [out, *torch.autograd.grad(out, inputs, case.dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = update()
    for seed in range(3):
        fresh = Case.random(mask, (8, 2), (128, 128), torch.bfloat16, seed + 5).to("cuda")
        with torch.no_grad():
            for x, y in zip(
                (*inputs, case.dout), (fresh.q, fresh.k, fresh.v, fresh.dout), strict=True
            ):
                x.copy_(y)
            for x in results:
                x.fill_(float("nan"))
        graph.replay()
        want = run(fresh, ours(mask))
        for name, value in zip(("out", "dq", "dk", "dv"), results, strict=True):
            torch.testing.assert_close(value.cpu(), want[name], atol=2e-2, rtol=2e-2)


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()

    def layer(q, k, v, mask):
        return tree_attention(q * 1.5, k, v, mask).float().sin().sum()

    compiled = torch.compile(layer, fullgraph=True)
    for seed in range(4):
        mask = cuda_mask(random_forest(np.random.default_rng(seed), 10, 60))
        case = Case.random(mask, (8, 2), (64, 64), torch.bfloat16).to("cuda")
        inputs = inputs_of(case)
        got = torch.autograd.grad(compiled(*inputs, mask), inputs)
        for a, b in zip(got, torch.autograd.grad(layer(*inputs, mask), inputs), strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_peak_memory_is_what_the_formula_says() -> None:
    """Inputs, out, lse, gradients, two float32 a row, and the accumulators of cut tiles."""
    forest = PrefixForest.from_parents([-1, *[0] * 64], [4096, *[1024] * 64])
    mask = cuda_mask(forest, backend="triton")
    tokens, heads, kv_heads, dim = mask.num_tokens, 32, 8, 128
    case = Case.random(mask, (heads, kv_heads), (dim, dim), torch.bfloat16).to("cuda")
    inputs = inputs_of(case)

    def update() -> list[torch.Tensor]:
        out = tree_attention(*inputs, mask)
        return [out, *torch.autograd.grad(out, inputs, case.dout)]

    peak = peak_bytes(update)
    tables = [t for t in mask.host._tables.values() if t.slots.is_cuda]
    accumulators = max(len(t.slots) * t.k_spans.shape[1] for t in tables) * kv_heads * 2 * dim * 4
    rows = heads * tokens
    formula = 2 * (2 * rows * dim + 2 * kv_heads * tokens * dim) + 3 * 4 * rows + accumulators
    assert peak <= 1.02 * formula + (1 << 22), (peak, formula)


@torch.no_grad()
def test_a_model_in_bfloat16_is_as_close_as_its_own_replicated_run() -> None:
    """Packed and replicated against the same weights in float32, on the CPU."""
    sequences = ragged_sequences(3)
    packed = pt.pack(PrefixForest.from_sequences(sequences))
    exact = build("qwen3")
    want = sequence_logprobs(exact, packed).logprobs
    model = build("qwen3").to("cuda", torch.bfloat16)
    got = sequence_logprobs(model, packed.to("cuda")).logprobs
    plain = build("qwen3", "eager").to("cuda", torch.bfloat16)
    ours_error, eager_error = [], []
    for sequence, a, b in zip(sequences, got, want, strict=True):
        ids = torch.tensor([list(sequence)], device="cuda")
        logits = plain(input_ids=ids, use_cache=False).logits[0, :-1].float()
        alone = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].cpu()
        ours_error.append((a.cpu() - b).abs())
        eager_error.append((alone - b).abs())
    ours_max, eager_max = (float(torch.cat(x).max()) for x in (ours_error, eager_error))
    assert ours_max <= 2 * eager_max + 1e-3, (ours_max, eager_max)


@pytest.mark.parametrize("vocabulary, rule", [(151_936, {}), (50_257, {"softcap": 30.0})])
def test_a_head_of_a_real_vocabulary(vocabulary: int, rule: dict) -> None:
    """Triton's kernels against torch's operations and float64, on the same bf16 logits."""
    g = torch.Generator("cuda").manual_seed(0)
    x = (torch.randn(64, vocabulary, generator=g, device="cuda") * 4).bfloat16()
    target = torch.randint(vocabulary, (64,), generator=g, device="cuda")
    temperature = torch.linspace(0.5, 1.5, 64, device="cuda").index_fill_(0, target[:9] % 64, 1.0)
    grad = torch.randn(64, 2, generator=g, device="cuda")
    assert inner("kernels of the head")(x) is fused
    want, dx = exact_columns(x, target, temperature, LogitRule(**rule), grad)
    error = {}
    for kernels in (eager_head, fused):
        out, into = torch.empty_like(grad), torch.empty_like(x)
        kernels.score(x.clone(), target, temperature, LogitRule(**rule), out)
        kernels.gradient(x, target, temperature, LogitRule(**rule), out, grad, into)
        gaps = [(a.double() - b).abs().max() for a, b in ((out, want), (into, dx))]
        error[kernels] = [float(gap) for gap in gaps]
    for ours_error, torch_error in zip(error[fused], error[eager_head], strict=True):
        assert ours_error <= 4 * torch_error + 1e-5, error


def test_a_head_holds_a_chunk_and_no_float32_copies() -> None:
    weight = torch.randn(151_936, 64, device="cuda").bfloat16().requires_grad_()
    hidden = torch.randn(4000, 64, device="cuda").bfloat16().requires_grad_()
    target = torch.randint(151_936, (4000,), device="cuda")

    def update() -> None:
        temperature = torch.ones((), device="cuda").expand(4000)
        out = logprobs.linear_logprobs(hidden, weight, None, target, temperature, ScoreOptions())
        torch.autograd.grad(out.sum(), (hidden, weight))

    peak = peak_bytes(update)
    # the logits of a chunk, the weight's gradient in float32 and the one returned
    formula = (1 << 29) + (4 + 2) * weight.numel()
    assert peak <= 1.02 * formula + (1 << 22), (peak, formula)


# ---- compute-sanitizer ---------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [5003, 8192])
def test_sanitize_head(vocabulary: int) -> None:
    """Chunks that end anywhere, rows of an odd width."""
    hidden, weight, target, temperature = (
        torch.randn(37, 64, device="cuda").bfloat16().requires_grad_(),
        torch.randn(vocabulary, 64, device="cuda").bfloat16().requires_grad_(),
        torch.randint(vocabulary, (37,), device="cuda"),
        torch.rand(37, device="cuda") + 0.5,
    )
    rest = (target, temperature, ScoreOptions(True, (), 5, LogitRule(softcap=20.0)))
    out = logprobs.linear_logprobs(hidden, weight, None, *rest)
    gradients = torch.autograd.grad(out.sum(), (hidden, weight))
    assert all(x.isfinite().all() for x in (out, *gradients))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("subset, deterministic", [(False, False), (True, True)])
@pytest.mark.parametrize("strided", [False, True])
def test_sanitize_forward_and_backward(
    dim: int, subset: bool, deterministic: bool, strided: bool
) -> None:
    """Short: every kernel once, through descriptors and (strided oddly) through pointers."""
    forest = PrefixForest.from_parents([-1, 0, 0, 1, 1], [150, 70, 31, 65, 9])
    mask = cuda_mask(forest)
    if subset:
        mask = mask.for_queries([(3, 100), (160, mask.num_tokens)])
    case = Case.random(mask, (4, 2), (dim, dim), torch.bfloat16, window=90, sinks=True, dlse=True)
    case = case.to("cuda")
    if strided:
        room = torch.zeros(
            case.k.shape[0], case.k[0].numel() + 3, dtype=torch.bfloat16, device="cuda"
        )
        room[:, :-3] = case.k.flatten(1)
        case.k = room[:, :-3].unflatten(1, case.k.shape[1:])
    got = run(case, ours(mask, backend="triton", deterministic=deterministic))
    position = mask.position_ids.long()
    rows = torch.as_tensor(mask.host.query_tokens, device="cuda").long()
    want = run(case, eager(mask.dense(), (position[rows], position)))
    for name, value in got.items():
        torch.testing.assert_close(value.float(), want[name].float(), atol=0.2, rtol=0.1)


def test_the_checker_rejects_a_wrong_mask_here() -> None:
    mask = cuda_mask(FOREST)
    causal = TreeMask(np.full(mask.num_tokens, mask.num_tokens, np.int32)).to("cuda")
    case = Case.random(mask, (4, 2), (64, 64), torch.bfloat16).to("cuda")
    attend: Callable = ours(causal, backend="triton")
    with pytest.raises(AssertionError, match=r"over the limit|mean error"):
        assert_numerics(FOREST, mask, case, attend)
