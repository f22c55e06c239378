"""Products of one input in one launch, in compiled layers of decode steps: a side that is tried.

A step of few rows multiplies one input by several weights (query, key and value; gate and up), and
each product is a short kernel. `Joined` is a pass over inductor's graph that puts one operator in
their place. Its kernel reads every weight where it is, so nothing is copied.

Legend: M rows, K inputs, N outputs of a weight.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch._inductor.custom_graph_pass import CustomGraphPass

from prefixtree.kernels.operators import new_library, register

# most weights of a launch, and most rows that it serves: above, torch's products are faster
WEIGHTS, ROWS = 3, 256
# columns and inputs of a tile, warps and stages
COLUMNS, INPUTS, WARPS, STAGES = 32, 128, 4, 4
# the operator of a decode step's attention: a graph with it computes no gradient
_DECODES = "attend_to_cache"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


@triton.jit
def joined_kernel(
    X, W0, W1, W2, OUT0, OUT1, OUT2, rows, n0, n1, n2,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Computes one tile of X [M, K] times one of the weights [N, K]."""
    tile = tl.program_id(0)
    before_1 = tl.cdiv(n0, COLUMNS)
    before_2 = before_1 + tl.cdiv(n1, COLUMNS)
    w, out, n = W0, OUT0, n0
    if tile >= before_2:
        w, out, n = W2, OUT2, n2
        tile -= before_2
    elif tile >= before_1:
        w, out, n = W1, OUT1, n1
        tile -= before_1
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, INPUTS)
    alive, inside = row < rows, column < n
    x = X + row[:, None] * K + at[None, :]
    w += column[:, None].to(tl.int64) * K + at[None, :]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, K, INPUTS):
        left = at < K - first
        a = tl.load(x + first, mask=alive[:, None] & left[None, :], other=0.0)
        b = tl.load(w + first, mask=inside[:, None] & left[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    to = out + row[:, None] * n + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=alive[:, None] & inside[None, :])


def products(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Computes x [M, K] times each weight [N, K], in one launch where few rows are on a GPU."""
    is_served = (
        (x.is_cuda or not isinstance(joined_kernel, triton.JITFunction))
        and x.dtype in (torch.bfloat16, torch.float16)
        and 0 < len(x) <= ROWS
        and all(w.is_contiguous() and w.dtype == x.dtype for w in weights)
    )
    if not is_served:
        return [x @ w.t() for w in weights]
    x = x.contiguous()
    outs = [x.new_empty(len(x), len(w)) for w in weights]
    spare = WEIGHTS - len(weights)
    ins, outputs = [*weights, *weights[:1] * spare], [*outs, *outs[:1] * spare]
    sizes = [len(w) for w in weights] + [0] * spare
    of_rows = min(128, max(16, triton.next_power_of_2(len(x))))
    grid = sum(triton.cdiv(n, COLUMNS) for n in sizes), triton.cdiv(len(x), of_rows)
    tile = {"ROWS": of_rows, "COLUMNS": COLUMNS, "INPUTS": INPUTS}
    how = {"num_warps": WARPS, "num_stages": STAGES}
    joined_kernel[grid](x, *ins, *outputs, len(x), *sizes, K=x.shape[1], **tile, **how)
    return outs


_PRODUCTS = register(
    new_library("_joined_library"),
    "joined_products",
    "(Tensor x, Tensor[] weights) -> Tensor[]",
    products,
    lambda x, weights: [x.new_empty(x.shape[0], w.shape[0]) for w in weights],
)


class Joined(CustomGraphPass):
    """Replaces products of one input, in graphs of decode steps.

    Attributes:
        joined: the number of products that were replaced.
    """

    def __init__(self) -> None:
        self.joined = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        if not any(_DECODES in str(node.target) for node in graph.nodes):
            return
        by_input: dict[Any, list[torch.fx.Node]] = {}
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
            x, turned = node.args
            if _weight(turned) is not None:
                # each product has a view of its own
                of = x.args[0] if x.target in _VIEWS else x
                by_input.setdefault(of, []).append(node)
        for alike in by_input.values():
            for first in range(0, len(alike), WEIGHTS):
                self._join(graph, alike[first : first + WEIGHTS])

    def _join(self, graph: torch.fx.Graph, nodes: list[torch.fx.Node]) -> None:
        """Puts one operator in the place of products of one input."""
        if len(nodes) < 2:
            return
        with graph.inserting_before(nodes[0]):
            weights = [_weight(node.args[1]) for node in nodes]
            together = graph.call_function(_PRODUCTS, (nodes[0].args[0], weights))
            together.meta["val"] = [node.meta["val"] for node in nodes]
            for at, node in enumerate(nodes):
                one = graph.call_function(operator.getitem, (together, at))
                one.meta.update(node.meta)
                node.replace_all_uses_with(one)
        for node in nodes:
            graph.erase_node(node)
        self.joined += len(nodes)

    def uuid(self) -> bytes:
        """The key of this file, for inductor's caches."""
        return hashlib.sha256(Path(__file__).read_bytes()).digest()


def _weight(node: Any) -> torch.fx.Node | None:
    """A parameter whose transposed view a node is."""
    turned = torch.ops.aten.permute.default, torch.ops.aten.t.default
    if not isinstance(node, torch.fx.Node) or node.target not in turned:
        return None
    inner = node.args[0]
    return inner if isinstance(inner, torch.fx.Node) and inner.op == "placeholder" else None


def wrong_products(model: torch.nn.Module, rows: int) -> list[str]:
    """What is wrong with the products of a model's first linear layers, in bfloat16."""
    linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
    weights = [w.detach().bfloat16() for w in linear if w.shape[1] == linear[0].shape[1]][:WEIGHTS]
    x = torch.randn(rows, weights[0].shape[1], device=weights[0].device).bfloat16()
    pairs = zip(products(x, weights), weights, strict=True)
    errors = [
        (out.float() - x.float() @ w.float().t()).norm() / out.float().norm() for out, w in pairs
    ]
    return [f"joined products {error:.1e}" for error in errors if not error < 4e-3]
