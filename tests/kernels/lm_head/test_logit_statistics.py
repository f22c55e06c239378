"""Statistics beside log-probabilities: values in float64, and no part in gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from prefixtree.kernels.lm_head import kernels as fused
from prefixtree.kernels.lm_head.eager import LogitRule, check_statistics, write_statistics
from prefixtree.kernels.lm_head.logprobs import ScoreOptions, linear_logprobs, lm_head_logprobs
from tests.support.hooks import limit, put
from tests.support.pairs import pairwise
from tests.support.triton_tiles import DEAD_LANES, DEVICE

pytestmark = DEAD_LANES

E, D, V = 23, 12, 41
NAMES = ("mean_logits", "is_top1", "log_sum_sq_probs")


def textbook(x: torch.Tensor, target: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
    """Columns of logits / temperature in float64, row by row."""
    rows = []
    for z, wanted in zip(x.double().tolist(), target.tolist(), strict=True):
        p = torch.tensor(z, dtype=torch.float64).softmax(0)
        row = {
            "mean_logits": sum(z) / len(z),
            "is_top1": float(z.index(max(z)) == wanted),
            "log_sum_sq_probs": float(p.square().sum().log()),
        }
        rows.append([row[name] for name in names])
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), len(names))


@pytest.mark.parametrize(
    "asked, head, rule, with_entropy",
    pairwise(
        [(NAMES, None), (("is_top1",), 10), (NAMES[::-1], 10)],
        ["linear", "callable", "fused"],
        [LogitRule(), LogitRule(scale=1.7, softcap=1.5)],
        [False, True],
    ),
)
def test_they_stand_beside_the_scores(
    asked: tuple[tuple[str, ...], int | None],
    head: str,
    rule: LogitRule,
    with_entropy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The columns before them, and all gradients, are those of a call without statistics."""
    names, chunk = asked
    if head == "fused":
        put(monkeypatch, "kernels of the head", lambda hidden: fused)
        monkeypatch.setattr(fused, "BLOCK", 16)
    device = DEVICE if head == "fused" else "cpu"
    g = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, generator=g) for s in ((E, D), (V, D), (V,)))
    inputs = [x.to(device).requires_grad_() for x in (hidden, weight, bias)]
    temperature = (torch.rand(E, generator=g) + 0.5).to(device)
    x = F.linear(hidden.double(), weight.double(), bias.double()) * rule.scale
    if rule.softcap:
        x = rule.softcap * torch.tanh(x / rule.softcap)
    # every other token is the likeliest
    target = torch.randint(V, (E,), generator=g)
    target[::2] = x.argmax(-1)[::2]
    cotangent = torch.randn(E, 5, generator=g).to(device)

    def scored(*statistics: str) -> torch.Tensor:
        h, w, b = inputs
        options = ScoreOptions(with_entropy, statistics, chunk, rule)
        rest = (target.to(device), temperature, options)
        if head == "callable":
            return lm_head_logprobs(lambda h: F.linear(h, w, b), V, h, *rest)
        return linear_logprobs(h, w, b, *rest)

    plain, both = scored(), scored(*names)
    count = 2 if with_entropy else 1
    assert both.shape == (E, count + len(names)) and both.dtype == torch.float32
    assert torch.equal(both[:, :count], plain)
    wanted = textbook(x / temperature.cpu().double()[:, None], target, names)
    assert 0 < wanted[:, names.index("is_top1")].mean() < 1
    torch.testing.assert_close(both[:, count:].cpu().double(), wanted, rtol=1e-5, atol=1e-5)
    # a loss that weighs statistics too
    gradients = [
        torch.autograd.grad((out * cotangent[:, : out.shape[1]]).sum(), inputs)
        for out in (plain, both)
    ]
    for one, other in zip(*gradients, strict=True):
        assert one.abs().max() > 0 and torch.equal(one, other)


def test_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk larger than a block is read in several, and stays as it is."""
    x, target = torch.randn(10, V), torch.randint(V, (10,))
    before = x.clone()
    found = []
    for block in (1, 3 * V, 1 << 25):
        limit(monkeypatch, "logits in statistics", block)
        out = torch.full((10, 3), float("nan"))
        write_statistics(x, target, torch.ones(10), LogitRule(), NAMES, out)
        found.append(out)
    assert torch.equal(x, before)
    for out in found:
        torch.testing.assert_close(out.double(), textbook(x, target, NAMES), rtol=1e-5, atol=1e-5)


def test_the_first_of_equal_logits() -> None:
    out = torch.empty(2, 1)
    x = torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    write_statistics(x, torch.tensor([1, 2]), torch.ones(2), LogitRule(), ["is_top1"], out)
    assert out[:, 0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("head", ["linear", "callable"])
def test_no_rows(head: str) -> None:
    hidden, weight = torch.zeros(0, D), torch.randn(V, D)
    rest = (torch.zeros(0).long(), torch.ones(0), ScoreOptions(True, NAMES))
    if head == "linear":
        assert linear_logprobs(hidden, weight, None, *rest).shape == (0, 5)
    else:
        assert lm_head_logprobs(lambda h: h @ weight.t(), V, hidden, *rest).shape == (0, 5)


def test_names() -> None:
    assert check_statistics(["is_top1"]) == ("is_top1",)
    with pytest.raises(ValueError, match=r"among mean_logits, is_top1, .*; got 'top1', 'rank'"):
        check_statistics(["top1", "is_top1", "rank"])
    with pytest.raises(ValueError, match=r"a sequence of names .*; got 'is_top1'"):
        check_statistics("is_top1")


def test_logits_of_minus_infinity() -> None:
    x = torch.tensor([[1.0, -torch.inf, 0.5, -torch.inf]])
    out, rest = torch.zeros(1, 3), (torch.tensor([0]), torch.ones(1), LogitRule())
    write_statistics(x, *rest, NAMES, out)
    p = x.double().softmax(-1)
    assert out[0, 0] == -torch.inf and out[0, 1] == 1
    torch.testing.assert_close(out[0, 2].double(), p.square().sum().log())
