"""How much host time does a call of tree attention take?

    python -m benchmarks host --out OUT.json                     # triton, on a GPU
    python -m benchmarks host --device cpu                       # the operator alone

"operator" is a call with a stand-in for the backend that returns empty tensors: checks, choice of
the backend, dispatcher and autograd. "operator and triton", on a GPU, is a real call on a small
forest, timed until it returns. "bare autograd function" is the least that torch takes for as many
inputs and gradients. Medians in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.lib.environment import environment
from benchmarks.lib.runs import described, write
from benchmarks.lib.tables import Column, Parts, Table, machine, show
from prefixtree import PrefixForest, pack, tree_attention
from prefixtree.kernels.attention.choice import BACKENDS
from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.kernels.runtime import installed


def median_us(run: Callable[[], object], calls: int, batch: int = 20) -> float:
    """Median microseconds until `run` returns; the device catches up after every batch of calls,
    as a full queue would be timed otherwise."""
    times = []
    for call in range(calls + batch):
        if call % batch == 0 and torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    # the first batch warms up
    return statistics.median(times[batch:])


def _empty_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), lse


def _empty_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Bare(torch.autograd.Function):
    """As little as an autograd function can do."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*inputs)
        return _empty_forward(*inputs)[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        return _empty_backward(*ctx.saved_tensors)


@contextmanager
def without_backend() -> Iterator[None]:
    """Every backend returns empty tensors."""

    def forward(call: AttentionCall) -> Any:
        return _empty_forward(call.q, call.k, call.v)

    def backward(call: AttentionCall, *_: Any) -> Any:
        return *_empty_backward(call.q, call.k, call.v), None

    with ExitStack() as stack:
        for backend in BACKENDS:
            if backend.package is None or installed(backend.package):
                kernels = backend.kernels
                stack.enter_context(patch.multiple(kernels, forward=forward, backward=backward))
        yield


def measure(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor], calls: int) -> Any:
    """Microseconds of a call without gradients, with them, and of the backward."""
    out = attend(*inputs)
    dout = torch.randn_like(out)

    def without() -> torch.Tensor:
        with torch.no_grad():
            return attend(*inputs)

    backward = partial(torch.autograd.grad, out, inputs, dout, retain_graph=True)
    runs = {"no_grad": without, "forward": partial(attend, *inputs), "backward": backward}
    return {name: median_us(run, calls) for name, run in runs.items()}


def tables(data: dict[str, Any]) -> Parts:
    """Microseconds of each kind of call."""

    def of_call(what: str) -> Column:
        return Column(f"{what} us", lambda line: f"{line[1][what]:.1f}")

    yield machine(data["environment"])
    calls = ("no_grad", "forward", "backward")
    yield Table(
        [Column("call", lambda line: line[0]), *(of_call(what) for what in calls)],
        list(data["rows"].items()),
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options, checked."""
    parser = described(__doc__)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--calls", type=int, default=1000)
    add("--out", type=Path, help="JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints microseconds."""
    options = parse(arguments)
    device = torch.device(options.device)
    mask = pack(PrefixForest.from_parents([-1, 0, 0], [128, 64, 64])).mask.to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    inputs = [
        torch.randn(mask.num_tokens, heads, 128, device=device, dtype=dtype, requires_grad=True)
        for heads in (32, 8, 8)
    ]
    attend = partial(tree_attention, mask=mask)
    with without_backend():
        rows = {"operator": measure(attend, inputs, options.calls)}
    if device.type == "cuda":
        attend = partial(attend, backend="triton")
        rows["operator and triton"] = measure(attend, inputs, options.calls)
    rows["bare autograd function"] = measure(Bare.apply, inputs, options.calls)
    result = {"environment": environment() | {"device": options.device}, "rows": rows}
    show(tables(result))
    write(options.out, result)
    return 0
