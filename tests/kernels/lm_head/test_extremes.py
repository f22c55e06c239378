"""The chunked head on logits that are far apart, infinite or no numbers, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from prefixtree.kernels.lm_head import kernels as fused
from prefixtree.kernels.lm_head.eager import LogitRule, VocabularySlice
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs
from tests.support.full import mostly
from tests.support.head_cases import (
    HEADS,
    RULES,
    Case,
    E,
    V,
    assert_close,
    gradients,
    make_case,
    oracle,
    run,
)
from tests.support.head_checks import columns_of
from tests.support.triton_tiles import DEAD_LANES, DEVICE

pytestmark = [pytest.mark.usefixtures("kernels"), DEAD_LANES]


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
    for head in HEADS
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
@pytest.mark.parametrize("head", HEADS)
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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("head", [*HEADS, "sliced"])
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
    want, of_want = oracle(finite, RULES[rule])
    if head == "sliced":
        monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)
        given = masked.hidden, masked.weight, masked.bias, masked.target, masked.temperature
        slice_ = VocabularySlice(None, 0, V)
        out = linear_logprobs(*given, ScoreOptions(True, rule=RULES[rule]), slice_)
        found = gradients(out, masked)
    else:
        out, found = run(masked, head, RULES[rule])
    if not RULES[rule].softcap:
        assert out[2, 0] == -torch.inf
        out, want = out.clone(), want.clone()
        out[2, 0] = want[2, 0] = 0
    assert_close(out, want)
    for ours, exact in zip(found, of_want, strict=True):
        assert_close(ours, exact)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan, "all"])
@pytest.mark.parametrize("head", [*HEADS, "sliced"])
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
