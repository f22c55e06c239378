"""Where the time of a model's forward and backward goes, by kind of work.

Every kernel of a profile (on a CPU: every operator) belongs to the operators that launched it, and
these to the modules they stand in: norms, routers and experts are marked while a profile runs. In
a backward the autograd node says by its number which operator of the forward it belongs to. In
compiled layers modules are not marked, so what is neither a product nor attention is "other".
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd import DeviceType

# the first kind one of whose words stands in the name of a kernel or of an operator around it
_WORDS = {
    "attention": (
        "prefixtree::tree_attention",
        "prefixtree::tree_delta_rule",
        "flash_attn",
        "FlashAttn",
        "_flash_attention",
        "scaled_dot_product",
    ),
    "head": ("_LinearLogprobs",),
    "grouped products": ("grouped_mm", "GroupedMm", "GroupProblemShape", "prefixtree::experts_"),
    "dense products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "nvjet", "gemm"),
}
# then, of what is left, the first of these
_INDEXING = ("aten::sort", "aten::topk", "aten::histc", "aten::cumsum", "aten::index")
_PERMUTATION = "router and permutation"
_SCOPES = {"Norm": "norms", "Router": _PERMUTATION, "Experts": "experts, elementwise"}
KINDS = (*_WORDS, _PERMUTATION, "experts, elementwise", "norms", "other")
_MARK = "kind: "


@contextmanager
def marked(model: nn.Module) -> Iterator[None]:
    """While open, norms, routers and experts of a model stand in a profile by their kind; those of
    compiled layers do not."""
    handles: list[Any] = []
    compiled = {
        inner
        for module in model.modules()
        if module._compiled_call_impl is not None
        for inner in module.modules()
    }
    for module in model.modules():
        name = type(module).__name__
        kind = next((kind for word, kind in _SCOPES.items() if name.endswith(word)), None)
        if kind is None or module in compiled:
            continue
        open_ones: list[Any] = []

        def enter(*_: Any, kind: str = kind, open_ones: list[Any] = open_ones) -> None:
            open_ones.append(torch.profiler.record_function(f"{_MARK}{kind}"))
            open_ones[-1].__enter__()

        def leave(*_: Any, open_ones: list[Any] = open_ones) -> None:
            open_ones.pop().__exit__(None, None, None)

        handles += [
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def ms_by_kind(seen: Any) -> dict[str, float]:
    """Milliseconds by kind of a finished `torch.profiler.profile`: of the GPU's kernels, or of the
    CPU's operators where no kernel ran."""
    events = seen.events()
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not _is_range(e)]
    scopes = scopes_of(events)
    out: dict[str, float] = defaultdict(float)
    linked = 0.0
    for event in events:
        if event.device_type != DeviceType.CPU:
            continue
        if not kernels:
            out[_kind(event, "", scopes)] += event.self_cpu_time_total / 1e3
            continue
        for kernel in event.kernels:
            out[_kind(event, kernel.name, scopes)] += kernel.duration / 1e3
            linked += kernel.duration
    # launched by what is no operator
    out["other"] += max(0.0, sum(e.time_range.elapsed_us() for e in kernels) - linked) / 1e3
    return {kind: out[kind] for kind in KINDS if out[kind]}


def scopes_of(events: Iterable[Any]) -> dict[tuple[int, int], str]:
    """The kind of the module that operators of the forward stand in, by their thread and the number
    that their autograd nodes have too."""
    out = {}
    for event in events:
        if event.device_type == DeviceType.CPU and event.sequence_nr >= 0 and not _is_node(event):
            scope = _scope(event, {})
            if scope is not None:
                out[event.thread, event.sequence_nr] = scope
    return out


def _is_range(event: Any) -> bool:
    """Whether a device event is a marked range and no kernel."""
    return bool(getattr(event, "is_user_annotation", False)) or event.name.startswith(_MARK)


def _is_node(event: Any) -> bool:
    return bool(event.name.startswith("autograd::engine"))


def _around(event: Any) -> Iterator[Any]:
    while event is not None:
        yield event
        event = event.cpu_parent


def _scope(event: Any, scopes: Mapping[tuple[int, int], str]) -> str | None:
    """The kind of the module that an operator stands in, or the forward of its autograd node."""
    for outer in _around(event):
        if outer.name.startswith(_MARK):
            return str(outer.name.removeprefix(_MARK))
        if _is_node(outer):
            return scopes.get((outer.fwd_thread, outer.sequence_nr))
    return None


def _kind(event: Any, kernel: str, scopes: Mapping[tuple[int, int], str]) -> str:
    names = [kernel, *(outer.name for outer in _around(event))]
    for kind, words in _WORDS.items():
        if any(word in name for name in names for word in words):
            return kind
    if any(name.startswith(_INDEXING) or "IndexBackward" in name for name in names):
        return _PERMUTATION
    return _scope(event, scopes) or "other"
