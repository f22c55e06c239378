"""The three-way tolerance of docs/design.md: ours and same-dtype eager, both against float64.

Eager is written out here separately, so that a wrong reference backend cannot hide behind itself.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from prefixtree import PrefixForest, TreeMask, tree_attention
from prefixtree.kernels.attention import operator
from prefixtree.testing.compare import errors, pooled_nodes


@dataclass
class Case:
    """Inputs of one call of `tree_attention`, in the dtype under test."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    options: dict[str, float] = field(default_factory=dict)

    @classmethod
    def random(
        cls,
        mask: TreeMask,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (16, 16),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        sinks: bool = False,
        dlse: bool = False,
        spread: float = 1.0,
        sink_level: float = 0.0,
        **options: float,
    ) -> Case:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        (h, hk), (d, dv), tq, t = heads, dims, mask.num_queries, mask.num_tokens
        return cls(
            (draw(tq, h, d) * spread).to(dtype),
            draw(t, hk, d).to(dtype),
            draw(t, hk, dv).to(dtype),
            draw(tq, h, dv).to(dtype),
            draw(h, tq).to(torch.promote_types(dtype, torch.float32)) if dlse else None,
            (draw(h) + sink_level).to(dtype) if sinks else None,
            options,
        )

    def to(self, device: torch.device | str) -> Case:
        """The same inputs elsewhere."""
        return Case(
            *(
                x.to(device) if x is not None else None
                for x in (self.q, self.k, self.v, self.dout, self.dlse, self.sinks)
            ),
            options=self.options,
        )

    def heads_of(self, name: str) -> int:
        """Columns to judge a result by: heads, kv heads for dk and dv."""
        return self.k.shape[1] if name in ("dk", "dv") else self.q.shape[1]


Results = dict[str, torch.Tensor]
Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def run(case: Case, attend: Attention, dtype: torch.dtype | None = None) -> Results:
    """out, lse and all gradients of `attend(q, k, v, sinks, **options) -> out, lse`, on the CPU."""
    names = ["q", "k", "v"] + (["sinks"] if case.sinks is not None else [])
    inputs = {n: getattr(case, n).detach().clone() for n in names}
    if dtype is not None:
        inputs = {n: x.to(dtype) for n, x in inputs.items()}
    for x in inputs.values():
        x.requires_grad_()
    sinks = inputs.get("sinks")
    out, lse = attend(inputs["q"], inputs["k"], inputs["v"], sinks, **case.options)
    outputs, grads = [out], [case.dout.to(out.dtype)]
    if case.dlse is not None:
        outputs, grads = [out, lse], [*grads, case.dlse.to(lse.dtype)]
    gradients = torch.autograd.grad(outputs, list(inputs.values()), grads)
    got = {"out": out.detach(), "lse": lse.detach().t()}
    got |= {f"d{n}": g for n, g in zip(names, gradients, strict=True)}
    return {name: value.cpu() for name, value in got.items()}


class AsPromised(TorchDispatchMode):
    """Holds every call of the operator and of its backward to what their fakes say of it.

    Compiled code is generated for the sizes, strides and dtypes of the fakes: inductor refuses
    results of other strides, or reads the wrong numbers where its checks are off.
    """

    OPERATORS = (operator.TREE_ATTENTION, operator.TREE_ATTENTION_BACKWARD)

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        got = function(*args, **(kwargs or {}))
        if function in self.OPERATORS:
            self.calls += 1
            with FakeTensorMode():
                want = function(*tree_map_only(torch.Tensor, _like, args))
            assert len(tree_leaves(got)) == len(tree_leaves(want))
            for number, (a, b) in enumerate(zip(tree_leaves(got), tree_leaves(want), strict=True)):
                found, promised = ((x.shape, x.stride(), x.dtype, x.device) for x in (a, b))
                assert found == promised, f"{function}, result {number}: {found}, not {promised}"
        return got


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


def assert_as_promised(case: Case, mask: TreeMask, **fixed: object) -> None:
    """Forward and backward give what the fakes say, in whatever strides the inputs come."""

    def laid_out(x: torch.Tensor | None, order: tuple[int, ...]) -> torch.Tensor | None:
        if x is None or x.ndim != len(order):
            return x
        back = sorted(range(len(order)), key=order.__getitem__)
        return x.permute(order).contiguous().permute(back)

    for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 1, 0)):
        names = ("q", "k", "v", "sinks")
        q, k, v, sinks = (laid_out(getattr(case, name), order) for name in names)
        inputs = [x.detach().requires_grad_() for x in (q, k, v, sinks) if x is not None]
        dout = laid_out(case.dout, order)
        with AsPromised() as promised:
            out, lse = ours(mask, **fixed)(*inputs, *[None] * (4 - len(inputs)), **case.options)
            outputs, grads = [out], [dout]
            if case.dlse is not None:
                outputs, grads = [out, lse], [dout, laid_out(case.dlse, (1, 0))]
            torch.autograd.grad(outputs, inputs, grads)
        assert promised.calls == 2


def assert_wide_gradients_are_narrow_ones_before_the_cast(
    case: Case, mask: TreeMask, backend: str
) -> None:
    """dk and dv in float32 (float64 for float64) round to those in the inputs' dtype; nothing else
    changes, and the fake knows."""
    options = case.options.get("scale", 0.3), case.options.get("window", 0)
    options += case.options.get("softcap", 0.0), mask.deterministic, backend
    got = {}
    for wide in (False, True):
        inputs = case.q, case.k, case.v, case.sinks
        out, lse = operator.TREE_ATTENTION(*inputs, mask.handle, *options, wide, False, None)
        given = case.dout, None, *inputs, out, lse, mask.handle, *options, wide, None
        # the reference differentiates itself, which it cannot below a mode
        with AsPromised() if backend != "reference" else nullcontext():
            got[wide] = operator.TREE_ATTENTION_BACKWARD(*given)
    for number, (narrow, wide) in enumerate(zip(got[False], got[True], strict=True)):
        if number in (1, 2):
            assert wide.dtype == torch.promote_types(case.k.dtype, torch.float32)
            if narrow.dtype != wide.dtype:
                assert not torch.equal(narrow.to(wide.dtype), wide)
        assert torch.equal(narrow, wide.to(narrow.dtype))


def eager(visible: torch.Tensor, positions: torch.Tensor | None = None) -> Attention:
    """Dense attention in the inputs' dtype, softmax in float32, gradients by autograd."""

    def attend(q, k, v, sinks, scale=None, window=None, softcap=None):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scale = q.shape[2] ** -0.5 if scale is None else scale
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = torch.einsum("qhd,khd->hqk", q, k).to(wide) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = visible
        if window is not None:
            query, key = positions
            seen = visible & (query[:, None] - key[None] < window)
        scores = scores.masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(-1)
        if sinks is not None:
            extra = sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)
            p = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
        else:
            p = scores.softmax(-1)
        return torch.einsum("hqk,khd->qhd", p.to(q.dtype), v), lse

    return attend


def ours(mask: TreeMask, **fixed: object) -> Attention:
    """`tree_attention` in the shape `run` calls."""

    def attend(q, k, v, sinks, **options):
        return tree_attention(q, k, v, mask, sinks=sinks, return_lse=True, **options, **fixed)

    return attend


def assert_numerics(
    forest: PrefixForest,
    mask: TreeMask,
    case: Case,
    attend: Attention,
    visible: torch.Tensor | None = None,
) -> None:
    """Per (node x head) the worst error is at most 2x eager's + 2 eps x max|reference|, and per
    head the mean error at most 1.2x eager's (+ eps / 10 x max|reference|, for what eager gets
    exactly); both against float64. visible: the pairs, bool [Tq, T], where not all of the mask."""
    rows = mask.host.query_tokens
    position = mask.position_ids.long()
    dense = eager(mask.dense() if visible is None else visible, (position[rows], position))
    reference = run(case, dense, torch.float64)
    # eager rounds its result to the dtype as we do; its gradients come rounded from autograd
    baseline, got = run(case, dense), run(case, attend)
    eps = torch.finfo(case.q.dtype).eps
    # tokens that pad the forest go with its short nodes
    node = pooled_nodes(forest)
    node = np.concatenate([node, np.zeros(mask.num_tokens - len(node), np.int64)])
    for name, want in reference.items():
        assert got[name].shape == want.shape, name
        assert torch.isfinite(got[name]).all(), f"{name} is not finite"
        if want.numel() == 0:
            continue
        if name == "dsinks":
            error, limit = (got[name].double() - want).abs(), _dsinks_limit(case, reference, eps)
            assert (error <= limit).all(), f"dsinks: {error.tolist()} > {limit.tolist()}"
            continue
        node_of_row = node[rows] if name in ("out", "lse", "dq") else node
        # a row's columns by head
        shape = (len(node_of_row), case.heads_of(name), -1)
        ours, base, exact = (x.reshape(shape) for x in (got[name], baseline[name], want))
        # beside what is zero but for the rounding of float32, as dq where a token sees itself alone
        slack = eps * float(want.abs().max()) + 2**-20
        found = errors(ours, base, exact, torch.from_numpy(node_of_row), slack)
        over = found.worst > found.worst_limit
        for at in over.nonzero().tolist()[:1]:
            worst, limit = (float(x[tuple(at)]) for x in (found.worst, found.worst_limit))
            raise AssertionError(
                f"{name}: {int(over.sum())} of {over.numel()} (node x head) over the limit, "
                f"first {at}: {worst:.2e} > {limit:.2e}"
            )
        if ours[:, 0].numel() < 256:
            continue  # a mean of a few numbers says nothing
        assert (found.mean <= found.mean_limit).all(), (
            f"{name}: mean error {found.mean.tolist()} per head, limits {found.mean_limit.tolist()}"
        )


def _dsinks_limit(case: Case, reference: Results, eps: float) -> torch.Tensor:
    """The limit of the error of dsinks [H], whatever its terms happen to add up to.

    It is minus the sum of share x dout x out over rows and columns, the share being the sink's of
    the softmax. Both signs are as frequent, so the sum may be anything down to 0, and an error
    relative to it says nothing. Every out is rounded to the dtype, and comes of probabilities that
    were: independent errors of eps / 2 at most, so their sum is judged by the root of the sum of
    the terms' squares. lse's gradient is not among the terms: lse leaves the sink out.
    """
    assert case.sinks is not None
    sink, lse = case.sinks.cpu().double(), reference["lse"]
    terms = torch.sigmoid(sink - lse)[..., None] * case.dout.cpu().double() * reference["out"]
    # of sums in float32 in whatever order, and of the result in the sinks' dtype
    rounding = 2**-20 * (1 + terms.abs().sum((0, 2))) + eps * reference["dsinks"].abs()
    return 2 * eps * terms.square().sum((0, 2)).sqrt() + rounding
