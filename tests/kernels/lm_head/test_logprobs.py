"""The chunked head against the textbook in float64: values, gradients, extremes, dtypes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prefixtree.kernels.lm_head import eager, logprobs
from prefixtree.kernels.lm_head import kernels as fused
from prefixtree.kernels.lm_head.eager import LogitRule, VocabularySlice
from prefixtree.kernels.lm_head.logprobs import (
    ScoreOptions,
    chunk_rows,
    linear_logprobs,
    lm_head_logprobs,
)
from tests.support.full import mostly
from tests.support.head_checks import columns_of, exact_columns
from tests.support.hooks import put
from tests.support.pairs import pairwise
from tests.support.triton_tiles import DEVICE, DTYPES

# numpy warns of dead lanes in the interpreter; what is stored is checked
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"
)

E, D, V = 13, 12, 41
_RULES = {
    "plain": LogitRule(),
    "softcap": LogitRule(softcap=2.5),
    "scale": LogitRule(scale=0.4),
    "both": LogitRule(scale=1.7, softcap=1.5),
}
# fused: Triton's kernels, natively where there is a GPU and else in its interpreter
_HEADS = ["linear", "callable", "fused"]


@dataclass
class Case:
    """Inputs of the head, and the weights of the loss sum(out * cotangent)."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    temperature: torch.Tensor
    cotangent: torch.Tensor


def make_case(rows: int = E, with_bias: bool = True, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    return Case(
        hidden=randn(rows, D).requires_grad_(),
        weight=randn(V, D).requires_grad_(),
        bias=randn(V).requires_grad_() if with_bias else None,
        target=torch.randint(V, (rows,), generator=g),
        temperature=torch.rand(rows, generator=g) * 1.5 + 0.5,
        cotangent=randn(rows, 2),
    )


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """The kernels that a test of the fused head scores with, in its backward too."""
    params = getattr(request.node, "callspec", None)
    if params is not None and params.params.get("head") == "fused":
        put(monkeypatch, "kernels of the head", lambda hidden: fused)
        # several steps over a small vocabulary, the last one not full
        monkeypatch.setattr(fused, "BLOCK", 16)


def scored(case, head, rule, with_entropy=True, chunk=None):
    """out, on the CPU."""
    device = DEVICE if head == "fused" else "cpu"
    hidden, weight, bias, target, temperature = (
        None if x is None else x.to(device)
        for x in (case.hidden, case.weight, case.bias, case.target, case.temperature)
    )
    rest = (target, temperature, ScoreOptions(with_entropy, (), chunk, rule))
    if head == "callable":
        return lm_head_logprobs(lambda h: F.linear(h, weight, bias), V, hidden, *rest)
    return linear_logprobs(hidden, weight, bias, *rest).cpu()


def run(case, head, rule, with_entropy=True, chunk=None):
    """-> (out, gradients of hidden, weight and bias)."""
    out = scored(case, head, rule, with_entropy, chunk)
    return out, gradients(out, case)


def gradients(out, case):
    inputs = [x for x in (case.hidden, case.weight, case.bias) if x is not None]
    return torch.autograd.grad((out * case.cotangent[:, : out.shape[1]]).sum(), inputs)


def oracle(case, rule, with_entropy=True):
    """The textbook computation in float64, nothing shared with the code under test."""
    hidden, weight, bias = (
        None if x is None else x.detach().double().requires_grad_()
        for x in (case.hidden, case.weight, case.bias)
    )
    x = hidden @ weight.t() if bias is None else hidden @ weight.t() + bias
    x = x * rule.scale
    if rule.softcap:
        x = rule.softcap * torch.tanh(x / rule.softcap)
    z = x / case.temperature.double()[:, None]
    out = columns_of(z, case.target)[:, : 2 if with_entropy else 1]
    wanted = Case(hidden, weight, bias, case.target, case.temperature, case.cotangent.double())
    return out, gradients(out, wanted)


def assert_close(got, expected, tolerance=1e-5):
    """Within `tolerance` of the largest value of the reference."""
    assert got.shape == expected.shape and got.isfinite().all()
    if expected.numel():
        error = (got.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
        assert error <= tolerance, float(error)


_OPTIONS = _HEADS, _RULES, (False, True), (False, True), (1, 3, 1000, None)


@pytest.mark.parametrize("head, rule, with_bias, with_entropy, chunk", pairwise(*_OPTIONS))
def test_equals_the_textbook_in_float64(head, rule, with_bias, with_entropy, chunk):
    case = make_case(with_bias=with_bias)
    out, grads = run(case, head, _RULES[rule], with_entropy, chunk)
    expected, expected_grads = oracle(case, _RULES[rule], with_entropy)
    assert out.dtype == torch.float32 and out.shape == (E, 1 + with_entropy)
    assert_close(out, expected)
    for got, want in zip(grads, expected_grads, strict=True):
        assert got.dtype == torch.float32
        assert_close(got, want)


@pytest.mark.parametrize("rule", _RULES)
def test_accumulates_in_float64_where_asked(rule, monkeypatch):
    # Triton's kernels, where there are any, compute in float32 alone
    put(monkeypatch, "kernels of the head", lambda hidden: fused)
    case = make_case()
    inputs = [x.detach().double().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    rest = (case.target, case.temperature, ScoreOptions(True, (), 3, _RULES[rule]))
    out = linear_logprobs(*inputs, *rest, accumulate=torch.float64)
    expected, expected_grads = oracle(case, _RULES[rule])
    assert out.dtype == torch.float64
    assert_close(out, expected, 1e-13)
    grads = torch.autograd.grad((out * case.cotangent).sum(), inputs)
    for got, want in zip(grads, expected_grads, strict=True):
        assert_close(got, want, 1e-13)


@pytest.mark.parametrize("head", mostly(_HEADS, ["linear", "callable"]))
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
@pytest.mark.parametrize("head", _HEADS)
def test_a_chunk_of_no_rows_is_refused(head, chunk):
    with pytest.raises(ValueError, match="chunk"):
        run(make_case(), head, LogitRule(), chunk=chunk)


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("head", _HEADS)
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
        itertools.product(_FROZEN, _HEADS),
        [("bias", "fused"), ("hidden weight", "fused"), *itertools.product(_FROZEN, _HEADS[:2])],
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


@pytest.mark.parametrize("head", _HEADS)
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


# ---- extremes ------------------------------------------------------------------------------------


def exact_logits(logits: torch.Tensor, temperature: float) -> Case:
    """A case whose logits are these float32 numbers to the bit: row e of hidden picks column e."""
    rows = len(logits)
    g = torch.Generator().manual_seed(1)
    return Case(
        hidden=torch.eye(rows).requires_grad_(),
        weight=logits.t().contiguous().requires_grad_(),
        bias=None,
        target=torch.randint(logits.shape[1], (rows,), generator=g),
        temperature=torch.full((rows,), temperature),
        cotangent=torch.randn(rows, 2, generator=g),
    )


def _plain_float32(case: Case) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """An eager trainer's way: log_softmax of float32 logits."""
    z = F.linear(case.hidden, case.weight) / case.temperature[:, None]
    out = columns_of(z, case.target)
    return out, gradients(out, case)


# of quotients from the smallest to the largest that float32 has
_LARGE = [
    (head, magnitude, temperature)
    for head in _HEADS
    for magnitude in (1.0, 30.0, 100.0, 1e4)
    for temperature in (1e-30, 1e-2, 0.125, 1.0, 1e2)
    # in the interpreter each temperature with the largest and the smallest logits
    if head != "fused" or DEVICE != "cpu" or magnitude in (1.0, 1e4)
]


@pytest.mark.parametrize(
    "head, magnitude, temperature",
    mostly(
        _LARGE,
        [
            *(case for case in _LARGE if case[0] != "fused"),
            *(("fused", 1e4, 1e-30), ("fused", 1e4, 1.0), ("fused", 1.0, 1e2)),
        ],
    ),
)
def test_large_logits_lose_no_more_than_eager(head, magnitude, temperature):
    """Subtracting a log-sum-exp as large as the logits would lose their last bits: log p and the
    entropy, close to 0 where a logit dominates, must stay as exact as log_softmax makes them."""
    g = torch.Generator().manual_seed(0)
    case = exact_logits(torch.randn(E, V, generator=g) * magnitude, temperature)
    # half the targets are the likeliest token, whose log p is close to 0
    case.target[::2] = case.weight.detach().argmax(0)[::2]
    out, grads = run(case, head, LogitRule())
    eager, eager_grads = _plain_float32(case)
    # the reference starts from the same rounded quotients: no method can know better ones
    z = (case.weight.detach().t() / case.temperature[:, None]).double().requires_grad_()
    expected = columns_of(z, case.target)
    (dz,) = torch.autograd.grad((expected * case.cotangent.double()).sum(), z)
    dweight = (dz / case.temperature.double()[:, None]).t()
    out, eager, expected = out.detach(), eager.detach(), expected.detach()
    assert out.isfinite().all() and all(grad.isfinite().all() for grad in grads)
    assert out[:, 0].max() <= 0, "a probability above 1"
    for got, plain, want in (
        (out[:, 0], eager[:, 0], expected[:, 0]),
        (out[:, 1], eager[:, 1], expected[:, 1]),
        (grads[1], eager_grads[1], dweight),
    ):
        error = (got.double() - want).abs().max()
        allowed = 2 * (plain.double() - want).abs().max() + 1e-6 * want.abs().max() + 1e-7
        assert error <= allowed, (float(error), float(allowed))


@pytest.mark.parametrize("temperature", [1e-2, 1.0, 1e2])
@pytest.mark.parametrize("head", _HEADS)
def test_one_logit_far_above_and_one_far_below(head, temperature):
    logits = torch.zeros(4, V)
    logits[0, 3], logits[1, 3] = 1e4, -1e4
    logits[2] = 1e4  # all equal and large
    logits[3] = -1e4
    case = exact_logits(logits, temperature)
    case.target[:] = 3
    out, grads = run(case, head, LogitRule())
    gap = 1e4 / temperature
    uniform, log_v = -float(torch.tensor(V).log()), float(torch.tensor(V).log())
    rest = float(torch.tensor(V - 1).log())
    if gap > 1000:
        expected = torch.tensor([[0, 0], [-gap - rest, rest], [uniform, log_v], [uniform, log_v]])
    else:
        expected = oracle(case, LogitRule())[0].float()
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-5)
    assert all(grad.isfinite().all() for grad in grads)


# ---- half precision ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head", _HEADS)
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
@pytest.mark.parametrize("rule", mostly(_RULES, ["plain", "both"]))
def test_the_kernels_are_as_exact_as_torchs_operations(rule, dtype, columns):
    """As near to float64 on the same logits, the gradient beside them and in their place."""
    rows, vocabulary = 6, 2 * fused.BLOCK + 77
    g = torch.Generator().manual_seed(2)
    x = (torch.randn(rows, vocabulary, generator=g) * 8).to(dtype)
    target = torch.tensor([0, vocabulary - 1, fused.BLOCK, fused.BLOCK - 1, 5, 2 * fused.BLOCK])
    temperature = torch.tensor([1.0, 0.7, 1.0, 3.0, 0.1, 1.0])
    grad = torch.randn(rows, columns, generator=g)
    want, dx = exact_columns(x, target, temperature, _RULES[rule], grad)
    error = {}
    for kernels, device in ((eager, "cpu"), (fused, DEVICE)):
        given = [y.clone().to(device) for y in (x, target, temperature)]
        out = torch.full((rows, columns), float("nan"), device=device)
        into = torch.full((rows, vocabulary), float("nan"), dtype=torch.float32, device=device)
        kernels.score(given[0].clone(), *given[1:], _RULES[rule], out)
        kernels.gradient(*given, _RULES[rule], out, grad.to(device), into)
        kernels.gradient(*given, _RULES[rule], out, grad.to(device), given[0])
        torch.testing.assert_close(given[0], into.to(dtype), rtol=0, atol=0)
        both = ((out.cpu(), want), (into.cpu(), dx))
        error[kernels] = [float((a - b).abs().max() / b.abs().max()) for a, b in both]
    for ours, torchs in zip(error[fused], error[eager], strict=True):
        # near the softcap both lose 1 - tanh^2 to the rounding of tanh
        assert ours <= (4 if _RULES[rule].softcap else 2) * torchs + 1e-6, error


@pytest.mark.parametrize("rule", _RULES)
@pytest.mark.parametrize("head", [*_HEADS, "sliced"])
def test_logits_of_minus_infinity_have_no_part(head, rule, monkeypatch):
    """A padded vocabulary, one row's target among it: all as torch's own operations have it where
    0 times infinity is 0. Slices of ranks, too."""
    case = make_case()
    bias = case.bias.detach().clone()
    bias[35:] = -torch.inf
    masked = replace(case, bias=bias.requires_grad_(), target=case.target.clamp(max=34))
    masked.target[2] = 38
    # -1e6 has a probability of 0 in float64 too, and a gradient
    finite = replace(masked, bias=bias.detach().clamp(min=-1e6).requires_grad_())
    want, of_want = oracle(finite, _RULES[rule])
    if head == "sliced":
        monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
        given = masked.hidden, masked.weight, masked.bias, masked.target, masked.temperature
        slice_ = VocabularySlice(None, 0, V)
        out = linear_logprobs(*given, ScoreOptions(True, rule=_RULES[rule]), slice_)
        found = gradients(out, masked)
    else:
        out, found = run(masked, head, _RULES[rule])
    if not _RULES[rule].softcap:
        assert out[2, 0] == -torch.inf
        out, want = out.clone(), want.clone()
        out[2, 0] = want[2, 0] = 0
    assert_close(out, want)
    for ours, exact in zip(found, of_want, strict=True):
        assert_close(ours, exact)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, "all"])
@pytest.mark.parametrize("head", [*_HEADS, "sliced"])
def test_what_torch_makes_no_number_of_shows(head, bad, monkeypatch):
    """A logit of infinity or NaN, and a row that has no token: NaN as of log_softmax."""
    case = make_case(3)
    bias = case.bias.detach().clone()
    bias[slice(None) if bad == "all" else 3] = -torch.inf if bad == "all" else bad
    given = replace(case, bias=bias.requires_grad_())
    if head == "sliced":
        monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
        inputs = given.hidden, given.weight, given.bias, given.target, given.temperature
        out = linear_logprobs(*inputs, ScoreOptions(True), VocabularySlice(None, 0, V))
        found = gradients(out, given)
    else:
        out, found = run(given, head, LogitRule())
    assert out.isnan().all() and all(x.isnan().any() for x in found)


@pytest.mark.parametrize("bad", ["logit", "target"])
def test_what_is_not_a_number_shows(bad):
    """A logit of NaN, and a target that is no token: NaN, in its own row alone."""
    x, target = torch.zeros(3, 5).to(DEVICE), torch.tensor([0, 1, 4]).to(DEVICE)
    if bad == "logit":
        x[1, 3] = torch.nan
    else:
        target[1] = 5
    out = torch.zeros(3, 2).to(DEVICE)
    fused.score(x, target, torch.ones(3).to(DEVICE), LogitRule(), out)
    assert out[1, 0].isnan() and out[[0, 2]].isfinite().all()


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
