"""Cases of the language model's head, and the textbook in float64 that they are held against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from prefixtree.kernels.lm_head.eager import LogitRule
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs, lm_head_logprobs
from tests.support.head_checks import columns_of
from tests.support.triton_tiles import DEVICE

E, D, V = 13, 12, 41
RULES = {
    "plain": LogitRule(),
    "softcap": LogitRule(softcap=2.5),
    "scale": LogitRule(scale=0.4),
    "both": LogitRule(scale=1.7, softcap=1.5),
}
# fused: Triton's kernels, natively where there is a GPU and else in its interpreter
HEADS = ["linear", "callable", "fused"]


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
