"""Measures beside log-probabilities: values and gradients in float64, chunks, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import prefixtree as pt
from prefixtree.kernels.lm_head import kernels as fused
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs, lm_head_logprobs
from prefixtree.kernels.lm_head.measures import BoundMeasure, Measure, MeasuredEdges
from tests.support.hooks import limit, put
from tests.support.triton_tiles import DEVICE

# numpy warns of dead lanes in the interpreter; what is stored is checked
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"
)

U, D, V = 29, 12, 41


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks to a chunk, the last one not full."""
    limit(monkeypatch, "logits in a measure", 8 * V)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Hidden states, weight and bias; targets and temperatures."""
    g = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=g) for shape in ((U, D), (V, D), (V,))]
    target, temperature = torch.randint(V, (U,), generator=g), torch.rand(U, generator=g) + 0.5
    return [x.to(dtype).requires_grad_() for x in made], (target, temperature)


@pytest.fixture
def teacher() -> torch.Tensor:
    return torch.randn(U, V, generator=torch.Generator().manual_seed(1)).double()


def divergences(teacher: torch.Tensor) -> Measure:
    """Forward KL with the edge's temperature, the three largest log p, and log p of the token."""

    def measure(z: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        log_t = (teacher.to(z)[edges.edge] / edges.temperature.to(z)[:, None]).log_softmax(-1)
        log_s = z.log_softmax(-1)
        kl = (log_t.exp() * (log_t - log_s)).sum(-1, keepdim=True)
        return torch.cat([kl, log_s.topk(3).values, log_s.gather(1, edges.token[:, None])], -1)

    return measure


def textbook(measure: Measure, rule: LogitRule, given: Any, by: Any = 0) -> torch.Tensor:
    """[U, 2 + C]: log p, entropy, and the measure of all rows at once, in float64; the lm_head's
    output is off `by`."""
    (hidden, weight, bias), (target, temperature) = given
    x = rule.scale * (hidden @ weight.t() + bias + by)
    z = (rule.softcap * torch.tanh(x / rule.softcap) if rule.softcap else x) / temperature[:, None]
    log_p = z.log_softmax(-1)
    every = torch.arange(U)
    values = measure(z, MeasuredEdges(every, every, target, temperature))
    known = log_p.gather(1, target[:, None]), -(log_p.exp() * log_p).sum(-1, keepdim=True)
    return torch.cat([*known, values], -1)


def scored(
    measure: Measure,
    rule: LogitRule,
    given: Any,
    head: str = "linear",
    chunk: Any = 12,
    **more: Any,
) -> torch.Tensor:
    (hidden, weight, bias), rest = given
    options = ScoreOptions(True, ("is_top1",), chunk, rule, measure)
    if head == "callable":
        found = lm_head_logprobs(lambda h: F.linear(h, weight, bias), V, hidden, *rest, options)
    else:
        found = linear_logprobs(hidden, weight, bias, *rest, options, **more)
    return torch.cat([found[:, :2], found[:, 3:]], -1)


def gradients(out: torch.Tensor, given: Any) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
    return list(torch.autograd.grad((out * weights).sum(), given[0]))


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(1.7, 1.5)], ids=["plain", "softcap"])
def test_float64(rule, teacher):
    given, measure = inputs(torch.float64), divergences(teacher)
    expected = textbook(measure, rule, given)
    got = scored(measure, rule, given, accumulate=torch.float64)
    assert float((got - expected).detach().abs().max()) < 1e-13
    for a, b in zip(gradients(got, given), gradients(expected, given), strict=True):
        assert float((a - b).abs().max() / b.abs().max()) < 1e-13


@pytest.mark.parametrize("chunk", [1, 12, None])
@pytest.mark.parametrize("head", ["linear", "callable", "fused"])
def test_every_head(head, chunk, teacher, monkeypatch):
    """The kernels of log p stand beside a measure: Triton's too."""
    if head == "fused":
        put(monkeypatch, "kernels of the head", lambda hidden: fused)
        monkeypatch.setattr(fused, "BLOCK", 16)
    rule = LogitRule(softcap=2.5)
    exact, given = inputs(torch.float64), inputs()
    expected = textbook(divergences(teacher), rule, exact)
    if head == "fused":
        teacher = teacher.to(DEVICE)
        moved = [x.to(DEVICE) for x in given[0]], tuple(x.to(DEVICE) for x in given[1])
        got = scored(divergences(teacher), rule, moved, chunk=chunk).cpu()
    else:
        got = scored(divergences(teacher), rule, given, head, chunk)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(gradients(got, given), gradients(expected, exact), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 1e-6


def test_the_gradient_that_is_left_out_turns_it_red(teacher, monkeypatch):
    monkeypatch.setattr(BoundMeasure, "gradient", lambda *_: None)
    given, measure = inputs(torch.float64), divergences(teacher)
    got = scored(measure, LogitRule(), given, accumulate=torch.float64)
    expected = textbook(measure, LogitRule(), given)
    assert float((got - expected).detach().abs().max()) < 1e-13
    for a, b in zip(gradients(got, given), gradients(expected, given), strict=True):
        assert float((a - b).norm() / b.norm()) > 0.3


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(autocast, teacher):
    """As far from float64 as log p: the lm_head's output is rounded, what follows is float32; the
    function runs without autocast in the forward and in the backward."""
    exact, given = inputs(torch.float64), inputs(torch.float32 if autocast else torch.bfloat16)
    rounded = [x.detach().bfloat16() for x in given[0]]
    exact = [x.double().requires_grad_() for x in rounded], exact[1]
    by = F.linear(*rounded).double() - F.linear(*exact[0]).detach()
    seen: list[torch.dtype] = []

    def measure(z: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        seen.append((z[:, :5] @ z[:, :5].t()).dtype)
        return divergences(teacher)(z, edges)

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = scored(measure, LogitRule(), given)
    expected = textbook(divergences(teacher), LogitRule(), exact, by)
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)
    found = gradients(got, given)
    for a, b in zip(found, gradients(expected, exact), strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-2
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_logits_are_in_the_dtype_of_the_values(dtype):
    seen: list[torch.dtype] = []

    def measure(z: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        seen.append(z.dtype)
        return _rows(z)

    gradients(scored(measure, LogitRule(), given := inputs(dtype)), given)
    assert set(seen) == {torch.float32}


def test_nothing_of_the_vocabularys_size_is_kept(teacher):
    """Neither between the passes, nor more than a chunk and its blocks at once."""
    given = inputs()
    kept: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda x: (kept.append(x.shape[-1] if x.ndim > 1 and len(x) == U else 0), x)[1], lambda x: x
    )
    rows: list[int] = []

    def measure(z: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        rows.append(len(z))
        return divergences(teacher)(z, edges)

    with hooks:
        out = scored(measure, LogitRule(), given)
    assert V not in kept and D in kept
    gradients(out, given)
    # probes; then chunks of 12 in blocks of 8, in both passes
    assert rows == [2, 2, 1] + [8, 4, 8, 4, 5] * 2


@pytest.mark.parametrize("head", ["linear", "callable"])
def test_values_that_are_a_view_of_the_logits_keep_nothing_of_them(head, monkeypatch):
    found: list[dict[int, torch.Tensor]] = []
    make = BoundMeasure.__init__

    def init(self: Any, *args: Any) -> None:
        make(self, *args)
        found.append(self._found)

    monkeypatch.setattr(BoundMeasure, "__init__", init)
    out = scored(lambda z, edges: z[:, :3], LogitRule(), inputs(), head)
    held = [values.untyped_storage().nbytes() for values in found[0].values()]
    assert out.requires_grad and sum(held) == U * 3 * 4


def test_no_edges(teacher):
    hidden, weight, bias = inputs()[0]
    rest = torch.zeros(0).long(), torch.ones(0), ScoreOptions(measure=divergences(teacher))
    for found in (
        linear_logprobs(hidden[:0], weight, bias, *rest),
        lm_head_logprobs(lambda h: F.linear(h, weight, bias), V, hidden[:0], *rest),
    ):
        assert found.shape == (0, 6)
        found.sum().backward()


@pytest.mark.parametrize("head", ["linear", "callable"])
def test_without_gradients(head, teacher):
    given = inputs()
    expected = scored(divergences(teacher), LogitRule(), given, head).detach()
    trained = teacher.clone().requires_grad_()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            # nobody asks for the teacher's gradient
            assert torch.equal(scored(divergences(trained), LogitRule(), given, head), expected)


# ---- what is refused -----------------------------------------------------------------------------

TRAINED = torch.ones(V, requires_grad=True)


def _counted() -> Measure:
    calls: list[int] = []

    def measure(z: torch.Tensor, edges: MeasuredEdges) -> torch.Tensor:
        calls.append(1)
        return z.logsumexp(-1, keepdim=True) * len(calls)

    return measure


def _rows(z: torch.Tensor) -> torch.Tensor:
    return z.logsumexp(-1, keepdim=True)


_GRADIENT, _OTHERS = (
    "uses a tensor of shape .* requires a gradient",
    "another value when other edges",
)
BAD: dict[str, tuple[Measure, type[Exception], str]] = {
    "a parameter": (lambda z, e: (z * TRAINED).sum(-1, True), pt.UnsupportedError, _GRADIENT),
    "made of a parameter": (
        lambda z, e: (z * (TRAINED * 2).exp()).sum(-1, True),
        pt.UnsupportedError,
        _GRADIENT,
    ),
    "only a parameter": (
        lambda z, e: TRAINED.sum().expand(len(z), 1),
        pt.UnsupportedError,
        _GRADIENT,
    ),
    "centred": (lambda z, e: _rows(z) - _rows(z).mean(), pt.UnsupportedError, _OTHERS),
    "a softmax over edges": (lambda z, e: _rows(z).softmax(0), pt.UnsupportedError, _OTHERS),
    "the row above": (lambda z, e: _rows(z.roll(1, 0)), pt.UnsupportedError, _OTHERS),
    "a share of the chunk": (lambda z, e: _rows(z) / len(z), pt.UnsupportedError, _OTHERS),
    "the place in the chunk": (
        lambda z, e: _rows(z) * torch.arange(len(z))[:, None],
        pt.UnsupportedError,
        _OTHERS,
    ),
    "a count of calls": (_counted(), pt.UnsupportedError, _OTHERS),
    "a draw": (lambda z, e: _rows(F.dropout(z, 0.01)), pt.UnsupportedError, "draws random numbers"),
    "a draw that is not used": (
        lambda z, e: _rows(z) + 0 * torch.rand(len(z), 1),
        pt.UnsupportedError,
        "draws random numbers",
    ),
    "one number": (
        lambda z, e: z.sum(),
        ValueError,
        r"must return .*\[r, C\].*got \[\] of torch.f",
    ),
    "a row": (lambda z, e: z.sum(-1), ValueError, r"add \[:, None\].*got \[2\] of"),
    "integers": (lambda z, e: z.argmax(-1, True), ValueError, "got .* of torch.int64"),
    "too few": (lambda z, e: _rows(z)[:1], ValueError, r"got \[1, 1\]"),
    "a tuple": (lambda z, e: (_rows(z), z), ValueError, "got a tuple"),
}


@pytest.mark.parametrize("head", ["linear", "callable"])
@pytest.mark.parametrize("name", BAD)
def test_refused(name, head):
    measure, error, message = BAD[name]
    with pytest.raises(error, match=message):
        scored(measure, LogitRule(), inputs(), head)


def test_no_function():
    with pytest.raises(TypeError, match=r"measure must be a function of logits .*got str"):
        ScoreOptions(measure="kl")  # type: ignore[arg-type]


@pytest.mark.parametrize("head", ["linear", "callable"])
def test_a_tensor_that_changed_before_the_backward(head, teacher):
    """A moving average that was updated in place, say: the gradient would be another loss's."""
    given = inputs()
    out = scored(divergences(teacher), LogitRule(), given, head)
    teacher += 0.1 * torch.randn(teacher.shape)
    with pytest.raises(RuntimeError, match="other values in the backward than in the forward"):
        gradients(out, given)


def test_a_part_of_the_vocabulary():
    (hidden, weight, bias), rest = inputs()
    options = ScoreOptions(measure=lambda z, e: _rows(z))
    with pytest.raises(pt.UnsupportedError, match="a measure needs whole rows of logits"):
        linear_logprobs(hidden, weight, bias, *rest, options, object())  # type: ignore[arg-type]
