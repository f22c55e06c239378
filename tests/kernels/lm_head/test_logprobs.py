"""The chunked head against the textbook in float64: values, gradients, dtypes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prefixtree.kernels.lm_head import eager, logprobs
from prefixtree.kernels.lm_head import kernels as fused
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.logprobs import (
    ScoreOptions,
    chunk_rows,
    linear_logprobs,
)
from tests.support.full import mostly
from tests.support.head_cases import (
    HEADS,
    RULES,
    Case,
    D,
    E,
    assert_close,
    gradients,
    make_case,
    oracle,
    run,
    scored,
)
from tests.support.head_checks import columns_of, exact_columns
from tests.support.hooks import put
from tests.support.pairs import pairwise
from tests.support.triton_tiles import DEAD_LANES, DEVICE, DTYPES

pytestmark = [pytest.mark.usefixtures("kernels"), DEAD_LANES]

_OPTIONS = HEADS, RULES, (False, True), (False, True), (1, 3, 1000, None)


@pytest.mark.parametrize("head, rule, with_bias, with_entropy, chunk", pairwise(*_OPTIONS))
def test_equals_the_textbook_in_float64(head, rule, with_bias, with_entropy, chunk):
    case = make_case(with_bias=with_bias)
    out, grads = run(case, head, RULES[rule], with_entropy, chunk)
    expected, expected_grads = oracle(case, RULES[rule], with_entropy)
    assert out.dtype == torch.float32 and out.shape == (E, 1 + with_entropy)
    assert_close(out, expected)
    for got, want in zip(grads, expected_grads, strict=True):
        assert got.dtype == torch.float32
        assert_close(got, want)


@pytest.mark.parametrize("rule", RULES)
def test_accumulates_in_float64_where_asked(rule, monkeypatch):
    # Triton's kernels, where there are any, compute in float32 alone
    put(monkeypatch, "kernels of the head", lambda hidden: fused)
    case = make_case()
    inputs = [x.detach().double().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    rest = (case.target, case.temperature, ScoreOptions(True, (), 3, RULES[rule]))
    out = linear_logprobs(*inputs, *rest, accumulate=torch.float64)
    expected, expected_grads = oracle(case, RULES[rule])
    assert out.dtype == torch.float64
    assert_close(out, expected, 1e-13)
    grads = torch.autograd.grad((out * case.cotangent).sum(), inputs)
    for got, want in zip(grads, expected_grads, strict=True):
        assert_close(got, want, 1e-13)


@pytest.mark.parametrize("head", mostly(HEADS, ["linear", "callable"]))
def test_the_chunk_changes_nothing_but_rounding(head):
    case = make_case()
    out, grads = run(case, head, LogitRule(softcap=3.0), chunk=None)
    for chunk in (1, 7, E - 1, E, E + 1):
        other, other_grads = run(case, head, LogitRule(softcap=3.0), chunk=chunk)
        for a, b in itertools.chain([(other, out)], zip(other_grads, grads, strict=True)):
            torch.testing.assert_close(a, b, atol=2e-6, rtol=2e-6)


def test_chunks_hold_about_2_to_the_26_logits_and_less_on_a_cpu():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert chunk_rows(151_936, cuda) == 2**26 // 151_936
    assert chunk_rows(151_936, cpu) == 2**22 // 151_936
    assert chunk_rows(2**27, cuda) == chunk_rows(2**27, cpu) == 1
    assert ScoreOptions(chunk_size=np.int64(12)) == ScoreOptions(chunk_size=12)


@pytest.mark.parametrize("chunk", [0, -1])
@pytest.mark.parametrize("head", HEADS)
def test_a_chunk_of_no_rows_is_refused(head, chunk):
    with pytest.raises(ValueError, match="chunk"):
        run(make_case(), head, LogitRule(), chunk=chunk)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_nothing_to_score(head, with_entropy):
    """Zero rows: a backward that gives zeros, so that every rank of a job takes part."""
    case = make_case(rows=0)
    out, grads = run(case, head, LogitRule(softcap=2.0), with_entropy)
    assert out.shape == (0, 1 + with_entropy) and out.dtype == torch.float32 and out.requires_grad
    for grad, like in zip(grads, (case.hidden, case.weight, case.bias), strict=True):
        assert grad.shape == like.shape and not grad.any()


_FROZEN = ["hidden", "weight", "bias", "hidden weight", "weight bias", "hidden bias"]


@pytest.mark.parametrize(
    "frozen, head",
    mostly(
        itertools.product(_FROZEN, HEADS),
        [("bias", "fused"), ("hidden weight", "fused"), *itertools.product(_FROZEN, HEADS[:2])],
    ),
)
def test_inputs_without_a_gradient(frozen, head):
    case = make_case()
    names = [n for n in ("hidden", "weight", "bias") if n not in frozen.split()]
    _, expected = oracle(case, LogitRule())
    expected = dict(zip(("hidden", "weight", "bias"), expected, strict=True))
    for name in frozen.split():
        getattr(case, name).requires_grad_(False)
    out = scored(case, head, LogitRule(), chunk=5)
    (out * case.cotangent).sum().backward()
    for name in ("hidden", "weight", "bias"):
        if name in names:
            assert_close(getattr(case, name).grad, expected[name])
        else:
            assert getattr(case, name).grad is None


@pytest.mark.parametrize("head", HEADS)
def test_under_no_grad(head):
    case = make_case()
    with torch.no_grad():
        out = scored(case, head, LogitRule(), chunk=5)
    assert not out.requires_grad
    assert_close(out, oracle(case, LogitRule())[0].detach())


@pytest.mark.parametrize("head", ["linear", "fused"])
def test_strided_inputs(head):
    """A transposed weight, a sliced hidden, an expanded temperature and an expanded gradient."""
    case = make_case(with_bias=False)
    wide = torch.full((E, 2 * D), float("nan"))
    wide[:, ::2] = case.hidden.detach()
    other = Case(
        wide[:, ::2].requires_grad_(),
        case.weight.detach().t().contiguous().t().requires_grad_(),
        None,
        torch.stack([case.target, case.target], 1)[:, 0],
        case.temperature[:1].expand(E),
        case.cotangent,
    )
    case.temperature = other.temperature.contiguous()
    expected, expected_grads = oracle(case, LogitRule())
    out, grads = run(other, head, LogitRule(), chunk=5)
    assert_close(out, expected)
    for got, want in zip(grads, expected_grads, strict=True):
        assert_close(got, want)
    summed = scored(other, head, LogitRule()).sum()
    ones = Case(case.hidden, case.weight, None, case.target, case.temperature, torch.ones(E, 2))
    for got, want in zip(
        torch.autograd.grad(summed, (other.hidden, other.weight)),
        oracle(ones, LogitRule())[1],
        strict=True,
    ):
        assert_close(got, want)


@pytest.mark.parametrize("head", ["linear", "fused"])
def test_allocated_memory_is_written(poison, head):
    case = make_case()
    out, grads = run(case, head, LogitRule(softcap=2.0), chunk=4)
    assert poison.tensors > 0
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)


# ---- half precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", HEADS)
def test_half_precision_gradients_come_back_in_their_own_dtype(head, dtype):
    case = make_case()
    half = Case(
        *(x.detach().to(dtype).requires_grad_() for x in (case.hidden, case.weight, case.bias)),
        case.target,
        case.temperature,
        case.cotangent,
    )
    out, grads = run(half, head, LogitRule(), chunk=4)
    assert out.dtype == torch.float32 and [g.dtype for g in grads] == [dtype] * 3
    # against the textbook on the rounded inputs; logits are rounded to the dtype, as eager's are
    expected, expected_grads = oracle(half, LogitRule())
    eps = torch.finfo(dtype).eps
    assert_close(out, expected, 4 * eps)
    for got, want in zip(grads, expected_grads, strict=True):
        assert_close(got, want, 4 * eps)


@pytest.mark.parametrize(
    "head, chunk",
    mostly(
        [
            *(("linear", chunk) for chunk in (1, 3, 8, 20, 21, 80)),
            # the rows of a chunk are all that the kernels know
            *(
                ("fused", chunk)
                for chunk in ((21, 80) if DEVICE == "cpu" else (1, 3, 8, 20, 21, 80))
            ),
        ],
        [*(("linear", chunk) for chunk in (1, 3, 8, 20, 21, 80)), ("fused", 21)],
    ),
)
def test_every_row_is_in_the_weights_gradient_once(chunk, head):
    """The last chunk has fewer: none lost, none twice."""
    torch.manual_seed(0)
    rows, vocabulary = 83, 11
    # a column a row: each row's gradient of the weight stands alone
    hidden = torch.eye(rows).bfloat16()
    case = Case(
        hidden.requires_grad_(),
        (torch.randn(vocabulary, rows) * 0.3).bfloat16().requires_grad_(),
        None,
        torch.randint(vocabulary, (rows,)),
        torch.ones(rows),
        torch.randn(rows, 2) + 0.5,
    )
    _, (_, want) = oracle(case, LogitRule())
    _, (_, got) = run(case, head, LogitRule(), chunk=chunk)
    assert_close(got, want, 2e-2)


def test_many_chunks_do_not_round_the_weights_gradient_again_and_again():
    """Summed in float32 over the chunks: no worse than one eager bf16 product, and far better than
    adding bf16 numbers chunk by chunk, as a checkpointed loop over an eager head would."""
    torch.manual_seed(0)
    rows, hidden_size, vocabulary = 2048, 16, 37
    hidden = torch.randn(rows, hidden_size).bfloat16()
    weight = (torch.randn(vocabulary, hidden_size) * 0.3).bfloat16()
    case = Case(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        None,
        torch.randint(vocabulary, (rows,)),
        torch.ones(rows),
        torch.randn(rows, 2) + 0.5,
    )
    _, (_, want) = oracle(case, LogitRule())

    def error(grad: torch.Tensor) -> float:
        return float((grad.double() - want).norm() / want.norm())

    _, (_, ours) = run(case, "linear", LogitRule(), chunk=8)
    naive = torch.zeros_like(weight)
    for part in torch.arange(rows).split(8):
        piece = Case(
            hidden.detach()[part].requires_grad_(),
            weight,
            None,
            case.target[part],
            case.temperature[part],
            case.cotangent[part],
        )
        out = columns_of(F.linear(piece.hidden, weight).float(), piece.target)
        naive += gradients(out, piece)[1]
    assert error(ours) < 1e-2
    assert error(ours) < 0.5 * error(naive)
    # not worse than eager's single product by more than rounding
    eager = gradients(columns_of(F.linear(case.hidden, case.weight).float(), case.target), case)[1]
    assert error(ours) <= 1.2 * error(eager) + 1e-4


def test_autocast_makes_logits_in_its_dtype_and_gradients_in_the_weights():
    case = make_case()
    with torch.autocast("cpu", torch.bfloat16):
        out, grads = run(case, "linear", LogitRule(), chunk=4)
        plain = F.linear(case.hidden, case.weight, case.bias).float()
        plain = (plain / case.temperature[:, None]).log_softmax(-1)
    assert out.dtype == torch.float32 and all(g.dtype == torch.float32 for g in grads)
    chosen = plain.gather(1, case.target[:, None])[:, 0]
    torch.testing.assert_close(out[:, 0], chosen, atol=1e-5, rtol=1e-5)
    expected, expected_grads = oracle(case, LogitRule())
    assert_close(out, expected, 2e-2)
    for got, want in zip(grads, expected_grads, strict=True):
        assert_close(got, want, 2e-2)


# ---- the fused kernels ---------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", mostly(RULES, ["plain", "both"]))
def test_the_kernels_are_as_exact_as_torchs_operations(rule, dtype, columns):
    """As near to float64 on the same logits, the gradient beside them and in their place."""
    rows, vocabulary = 6, 2 * fused.BLOCK + 77
    g = torch.Generator().manual_seed(2)
    x = (torch.randn(rows, vocabulary, generator=g) * 8).to(dtype)
    target = torch.tensor([0, vocabulary - 1, fused.BLOCK, fused.BLOCK - 1, 5, 2 * fused.BLOCK])
    temperature = torch.tensor([1.0, 0.7, 1.0, 3.0, 0.1, 1.0])
    grad = torch.randn(rows, columns, generator=g)
    want, dx = exact_columns(x, target, temperature, RULES[rule], grad)
    error = {}
    for kernels, device in ((eager, "cpu"), (fused, DEVICE)):
        given = [y.clone().to(device) for y in (x, target, temperature)]
        out = torch.full((rows, columns), float("nan"), device=device)
        into = torch.full((rows, vocabulary), float("nan"), dtype=torch.float32, device=device)
        kernels.score(given[0].clone(), *given[1:], RULES[rule], out)
        kernels.gradient(*given, RULES[rule], out, grad.to(device), into)
        kernels.gradient(*given, RULES[rule], out, grad.to(device), given[0])
        torch.testing.assert_close(given[0], into.to(dtype), rtol=0, atol=0)
        both = ((out.cpu(), want), (into.cpu(), dx))
        error[kernels] = [float((a - b).abs().max() / b.abs().max()) for a, b in both]
    for ours, torchs in zip(error[fused], error[eager], strict=True):
        # near the softcap both lose 1 - tanh^2 to the rounding of tanh
        assert ours <= (4 if RULES[rule].softcap else 2) * torchs + 1e-6, error


def test_who_scores(monkeypatch):
    """Torch's operations off the GPU and in a subclass; Triton's kernels where they compile."""
    probe = logprobs._compiled_for.__wrapped__
    assert logprobs._kernels_for(torch.zeros(2, 3)) is eager
    device = torch.device(DEVICE)
    assert probe(device) is fused
    monkeypatch.setattr(logprobs, "find_spec", lambda name: None)
    assert probe(device) is eager
    monkeypatch.undo()
    monkeypatch.setattr(logprobs.runtime, "capability", lambda device: (7, 5))
    assert probe(device) is eager
    monkeypatch.undo()
    monkeypatch.setattr(fused, "score", lambda *given: 1 // 0)
    with pytest.warns(UserWarning, match="Triton cannot compile here.*ZeroDivisionError"):
        assert probe(device) is eager


@pytest.mark.parametrize("in_one_call", [True, False])
def test_products_are_added_in_one_call_where_torch_can(in_one_call, monkeypatch):
    """Off a CPU, which is seen without a GPU on the meta device: elsewhere `out_dtype` raises."""
    called: list[torch.dtype] = []
    monkeypatch.setattr(logprobs, "_adds_in_float32", lambda *_: in_one_call)
    monkeypatch.setattr(torch, "addmm", lambda *_, out_dtype, out: called.append(out_dtype))
    total, a = torch.zeros(2, 2, device="meta"), torch.zeros(2, 2, device="meta").bfloat16()
    logprobs._add_product(total, a, a)
    assert called == [torch.float32] * in_one_call


def test_a_second_derivative_is_refused_rather_than_wrong():
    case = make_case()
    out = linear_logprobs(
        case.hidden, case.weight, case.bias, case.target, case.temperature, ScoreOptions()
    )
    factor = torch.ones(E, 1, requires_grad=True)
    (grad,) = torch.autograd.grad((out * factor).sum(), case.hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
