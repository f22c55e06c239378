"""The divergence to a teacher, by torch's operations and by Triton's kernels, beside the textbook
in float64: values, gradients, infinities; red where a part is another."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from prefixtree.kernels.lm_head import eager, measures
from prefixtree.kernels.lm_head import kernels as fused
from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs, lm_head_logprobs
from prefixtree.kernels.lm_head.measures import Divergence
from tests.support.full import each_once, mostly
from tests.support.head_checks import columns_of
from tests.support.hooks import inner, limit, put
from tests.support.pairs import pairwise
from tests.support.triton_tiles import DEAD_LANES, DEVICE, DTYPES

pytestmark = DEAD_LANES

U, D, V = 13, 12, 41
BETAS = [0.0, 0.3, 0.5, 1.0]
# of the model and of the teacher
RULES = {
    "plain": (LogitRule(), LogitRule()),
    "the teacher caps": (LogitRule(1.7), LogitRule(0.8, 2.5)),
    "both cap": (LogitRule(1.7, 1.5), LogitRule(0.8, 2.5)),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    limit(monkeypatch, "logits in a measure", 8 * V)
    monkeypatch.setattr(fused, "BLOCK", 16)


@pytest.fixture
def by_kernels(monkeypatch):
    """Triton's, in forward and backward."""
    put(monkeypatch, "kernels of the head", lambda hidden: fused)


def textbook(z: torch.Tensor, y: torch.Tensor, beta: float) -> torch.Tensor:
    """[R, 1] of the model's and the teacher's logits, divided by the temperature."""
    p, q = z.log_softmax(-1), y.log_softmax(-1)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a.exp() * (a - b)).sum(-1, keepdim=True)

    if beta in (0, 1):
        return kl(p, q) if beta else kl(q, p)
    m = torch.stack([q + math.log(beta), p + math.log(1 - beta)]).logsumexp(0)
    return beta * kl(q, m) + (1 - beta) * kl(p, m)


@dataclasses.dataclass
class Case:
    """Inputs of both heads; logits of the teacher are its lm_head's output."""

    given: list[torch.Tensor]
    of_teacher: torch.Tensor
    target: torch.Tensor
    temperature: torch.Tensor
    rules: tuple[LogitRule, LogitRule]
    vocabulary: int | None = None

    @classmethod
    def of(cls, dtype: torch.dtype = torch.float32, rules: str = "plain") -> Case:
        g = torch.Generator().manual_seed(0)
        made = [torch.randn(*shape, generator=g) for shape in ((U, D), (V, D), (V,))]
        return cls(
            [x.to(dtype).requires_grad_() for x in made],
            (torch.randn(U, V, generator=g) * 2).to(dtype),
            torch.randint(V, (U,), generator=g),
            torch.rand(U, generator=g) + 0.5,
            RULES[rules],
        )

    def scored(self, beta: float, head: str = "linear", chunk: Any = 5, **more: Any) -> Any:
        """[U, 3] on the CPU: log p, entropy and divergence."""
        where = DEVICE if inner("kernels of the head")(self.of_teacher) is fused else "cpu"
        of_teacher = self.of_teacher.to(where)
        measure = Divergence(beta, lambda e: of_teacher[e.edge], self.rules[1], self.vocabulary)
        options = ScoreOptions(True, (), chunk, self.rules[0], measure)
        hidden, weight, bias = (x.to(where) for x in self.given)
        rest = self.target.to(where), self.temperature.to(where), options
        if head == "callable":
            return lm_head_logprobs(lambda h: F.linear(h, weight, bias), V, hidden, *rest)
        return linear_logprobs(hidden, weight, bias, *rest, **more).cpu()

    def expected(self, beta: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Those columns and the gradients, in float64."""
        exact = [x.detach().double().requires_grad_() for x in self.given]
        z = self.rules[0].apply(F.linear(*exact)) / self.temperature[:, None]
        y = self.rules[1].apply(self.of_teacher.double()) / self.temperature[:, None]
        parts = z[:, : self.vocabulary], y[:, : self.vocabulary]
        out = torch.cat([columns_of(z, self.target), textbook(*parts, beta)], -1)
        return out.detach(), gradients(out, exact)


def gradients(out: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of a sum with a weight per edge and column."""
    weights = torch.linspace(-1, 1.5, out.numel()).view(out.shape).to(out)
    return list(torch.autograd.grad((out * weights).sum(), given))


def errors(case: Case, beta: float, **how: Any) -> tuple[float, float]:
    """Of values, and of gradients by their norm."""
    want, expected = case.expected(beta)
    got = case.scored(beta, **how)
    found = gradients(got, case.given)
    off = [float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    return float((got.detach().double() - want).abs().max()), max(off)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("beta", BETAS)
def test_float64(beta, rules):
    value, gradient = errors(
        Case.of(torch.float64, rules), beta, accumulate=torch.float64, chunk=12
    )
    assert value < 1e-13 and gradient < 1e-13


@pytest.mark.parametrize(
    "beta, head, rules", pairwise(BETAS, ["linear", "callable", "fused"], RULES)
)
def test_every_head(beta, head, rules, request):
    if head == "fused":
        request.getfixturevalue("by_kernels")
    value, gradient = errors(Case.of(rules=rules), beta, head=head)
    assert value < 1e-5 and gradient < 2e-6


def rows_of_torch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the rows that torch's operations see, not kernels."""
    rows: list[int] = []
    call = Divergence.__call__

    def counted(self: Any, logits: torch.Tensor, edges: Any) -> torch.Tensor:
        rows.append(len(logits))
        return call(self, logits, edges)

    monkeypatch.setattr(Divergence, "__call__", counted)
    return rows


@pytest.mark.parametrize("beta", mostly(BETAS, [0.0, 0.3]))
def test_who_is_fused(beta, by_kernels, monkeypatch):
    """Torch's operations see the probe's rows alone; all where sums are in float64."""
    rows = rows_of_torch(monkeypatch)
    case = Case.of()
    gradients(case.scored(beta), case.given)
    assert rows == [2]
    rows.clear()
    case.scored(beta, accumulate=torch.float64)
    assert rows == [2, 5, 5, 3]


def test_the_backward_may_have_no_kernels(by_kernels, monkeypatch):
    """As under compiled autograd: torch does it, by blocks that are none of the forward's."""
    case = Case.of()
    _, expected = case.expected(0.5)
    got = case.scored(0.5, chunk=12)
    put(monkeypatch, "kernels of the head", lambda hidden: eager)
    for found, want in zip(gradients(got, case.given), expected, strict=True):
        assert (found - want).norm() < 2e-6 * want.norm()


@pytest.mark.parametrize(
    ("beta", "kernels"),
    each_once(BETAS, [pytest.param(eager, id="torch"), pytest.param(fused, id="triton")]),
)
def test_no_gradient_of_a_part_that_stands_for_it(kernels, beta, monkeypatch):
    """Red: half the gradient, the teacher's rows shifted by one."""
    put(monkeypatch, "kernels of the head", lambda hidden: kernels)
    case, rows = Case.of(), Divergence.rows
    backward = measures.BoundMeasure.gradient

    def half(self: Any, edges: Any, value: Any, kept: Any = None, grad: Any = None) -> Any:
        return rows(self, edges, value, kept, None if grad is None else grad / 2)

    with monkeypatch.context() as changes:
        changes.setattr(Divergence, "rows", half)
        changes.setattr(measures.BoundMeasure, "gradient", lambda *given: backward(*given) / 2)
        value, gradient = errors(case, beta)
    assert value < 1e-5 and gradient > 5e-3
    want = case.expected(beta)[0]
    case.of_teacher = case.of_teacher.roll(1, 0)
    assert float((case.scored(beta).detach().double() - want).abs().max()) > 0.1


@pytest.mark.parametrize("beta", mostly(BETAS, [0.3]))
def test_a_teacher_that_changed_before_the_backward(beta, by_kernels):
    case = Case.of()
    out = case.scored(beta)
    case.of_teacher += 0.1 * torch.randn(U, V, generator=torch.Generator().manual_seed(3))
    with pytest.raises(RuntimeError, match="other values in the backward than in the forward"):
        gradients(out, case.given)


def test_another_vocabulary(by_kernels):
    case = Case.of()
    case.of_teacher = torch.randn(U, V + 3)
    with pytest.raises(ValueError, match=r"gives 44 .* the model 41: .*vocabulary=41"):
        case.scored(0.3)
    case.vocabulary = 43
    with pytest.raises(ValueError, match=r"gives 43 .* the model 41 of the first 43: they"):
        case.scored(0.3)


@pytest.mark.parametrize("head", ["linear", "callable", "fused"])
@pytest.mark.parametrize(
    ("of_teacher", "common"), [(V + 3, V), (V - 4, V - 4), (V, V - 6)], ids=lambda x: str(x - V)
)
def test_a_vocabulary_that_is_padded_otherwise(of_teacher, common, head, request, monkeypatch):
    """Log p stays that of the model's whole vocabulary. The kernels serve that of the model."""
    if head == "fused":
        request.getfixturevalue("by_kernels")
    rows = rows_of_torch(monkeypatch)
    case = Case.of(rules="both cap")
    case.of_teacher = torch.randn(U, of_teacher, generator=torch.Generator().manual_seed(1)) * 2
    case.vocabulary = common
    value, gradient = errors(case, 0.3, head=head)
    assert value < 1e-5 and gradient < 2e-6
    assert (rows == [2]) == (head == "fused" and common == V)


@pytest.mark.parametrize("kernels", [eager, fused], ids=["torch", "triton"])
def test_no_edges(kernels, monkeypatch):
    put(monkeypatch, "kernels of the head", lambda hidden: kernels)
    case = Case.of()
    case.given[0] = case.given[0].detach()[:0].requires_grad_()
    case.target, case.temperature = case.target[:0], case.temperature[:0]
    out = case.scored(0.5)
    assert out.shape == (0, 3)
    assert not any(g.any() for g in gradients(out, case.given))


# ---- rows of logits ------------------------------------------------------------------------------


def of_rows(
    kernels: Any, z: torch.Tensor, y: torch.Tensor, beta: float, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergences [R], and the gradient of their sum by the model's logits [R, V]."""
    measure = Divergence(beta, lambda edges: y[edges.edge], LogitRule())
    edges = measures.MeasuredEdges(
        *[torch.arange(len(z), device=z.device)] * 2,
        torch.zeros(len(z), dtype=torch.int64, device=z.device),
        torch.full((len(z),), temperature, device=z.device),
    )
    bound = measures.BoundMeasure(measure, edges, LogitRule(), torch.float32)
    rest = edges.token, edges.temperature, LogitRule()
    out, values = torch.empty(2, len(z), 1, device=z.device)
    bound.score(kernels, z.clone(), 0, (*rest, out), values)
    dz = z.clone()
    bound.gradients(kernels, dz, 0, (*rest, out, torch.zeros_like(out)), torch.ones_like(values))
    bound.check_repeated()
    return values.detach().cpu()[:, 0], dz.detach().cpu()


@pytest.mark.parametrize("kernels", [eager, fused], ids=["torch", "triton"])
@pytest.mark.parametrize("beta", BETAS)
def test_logits_of_minus_infinity(kernels, beta):
    """A padded vocabulary of both; tokens that only one of both rules out, where that is finite."""
    g = torch.Generator().manual_seed(4)
    z, y = torch.randn(4, 37, generator=g) * 3, torch.randn(4, 37, generator=g) * 3
    z[:, 35:] = y[:, 35:] = -torch.inf
    if beta:
        z[1, [2, 20]] = -torch.inf
    if beta < 1:
        y[2, [0, 17]] = -torch.inf
    exact = z.double().requires_grad_()
    # -1e3 has a probability of 0 in float64 too, and a gradient
    want = textbook(exact.clamp(min=-1e3), y.double().clamp(min=-1e3), beta)[:, 0]
    (gradient,) = torch.autograd.grad(want.sum(), exact)
    values, dz = of_rows(kernels, z.to(DEVICE), y.to(DEVICE), beta)
    torch.testing.assert_close(values.double(), want.detach(), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(dz.double(), gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kernels", [eager, fused], ids=["torch", "triton"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_what_is_infinite_shows(kernels, beta):
    """A token that is possible for one of both alone: in its own row, and the gradient by the
    textbook where there is one."""
    z, y = torch.zeros(2, 20), torch.zeros(2, 20)
    (y if beta else z)[0, 3] = -torch.inf
    values, dz = of_rows(kernels, z.to(DEVICE), y.to(DEVICE), beta)
    assert values[0] == torch.inf and values[1] == 0 and (dz[1].abs() < 1e-7).all()
    if not beta:
        torch.testing.assert_close(dz[0], z[0].softmax(-1) - 1 / 20)


@pytest.mark.parametrize("kernels", [eager, fused], ids=["torch", "triton"])
@pytest.mark.parametrize("beta", BETAS)
def test_a_teacher_that_is_the_model(kernels, beta):
    z = torch.randn(3, 50, generator=torch.Generator().manual_seed(5)) * 4
    z[0, 7] = -torch.inf
    values, dz = of_rows(kernels, z.to(DEVICE), z.to(DEVICE), beta, 0.6)
    exact = DEVICE == "cpu" if kernels is fused else beta in (0, 1)
    limit = 0 if exact else 1e-6
    assert values.abs().max() <= limit and dz.abs().max() <= limit


@pytest.mark.parametrize(("beta", "dtype"), each_once(BETAS, DTYPES))
def test_the_kernels_are_as_exact_as_torchs_operations(beta, dtype):
    """Far apart and near each other; large logits; as near to float64 on the same logits."""
    g = torch.Generator().manual_seed(6)
    z = torch.randn(6, 2 * fused.BLOCK + 7, generator=g) * torch.tensor([[1.0, 8, 30, 1e3, 1, 8]]).T
    y = torch.randn(z.shape, generator=g) * torch.tensor([[1.0, 8, 30, 1e3, 0, 0]]).T
    y[4:] = z[4:] + 1e-2 * torch.randn(2, z.shape[1], generator=g)
    z, y = z.to(dtype), y.to(dtype)
    exact = z.double().requires_grad_()
    want = textbook(exact, y.double(), beta)[:, 0]
    (gradient,) = torch.autograd.grad(want.sum(), exact)
    error = {}
    for kernels, device in ((eager, "cpu"), (fused, DEVICE)):
        values, dz = of_rows(kernels, z.to(device), y.to(device), beta)
        error[kernels] = [
            (values.double() - want.detach()).abs(),
            (dz.double() - gradient).abs().amax(-1),
        ]
    for ours, torchs in zip(error[fused], error[eager], strict=True):
        assert (ours <= 2 * torchs + 1e-6 * (1 + want.detach().abs())).all(), error
