"""Layers as AOTAutograd cuts them, on shapes: what compiled layers keep, and what they work with.

A compiled layer keeps less than its operators do: its graph of forward and backward is cut where
the fewest bytes cross, and elementwise operations become parts of the kernels around them. Here the
layer is traced and cut by the partitioner that inductor uses. Its forward then runs operator by
operator, because what it keeps is what counts. Its backward makes the gradients and, beside them,
as many bytes as inductor's buffers take at once.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_iter, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from prefixtree.models.along_tree import with_globals
from prefixtree.models.changes import changing
from prefixtree.packing.mask import TreeMask
from prefixtree.recompute.layers import KEPT, Mode

# of transformers, where a forward looks up what attends
_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"


@contextmanager
def partitioned(
    layers: Sequence[nn.Module], kinds: Sequence[Hashable], mode: Mode, fake: FakeTensorMode
) -> Iterator[None]:
    """While open, layers run as they are cut for a mode of recomputation.

    Args:
        layers: with fake parameters; transformers' own checkpointing must be off.
        kinds: of each layer; layers of one kind share their graphs.
        mode: of all layers.
        fake: the mode of their tensors.
    """
    cut: dict[Hashable, Callable[..., Any]] = {}
    with changing(layers[0]) as changes:
        for layer, kind in zip(layers, kinds, strict=True):
            changes.set(layer, forward=_cut_forward(layer, kind, mode, fake, cut))
        yield


class _Inside(nn.Module):
    """A function that reads a module's weights, as a module with them."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._run = module, run

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self._run(*tensors)


def _cut_forward(
    layer: nn.Module,
    kind: Hashable,
    mode: Mode,
    fake: FakeTensorMode,
    cut: dict[Hashable, Callable[..., Any]],
) -> Callable[..., Any]:
    own = layer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        (mask,) = {id(x): x for x in flat if isinstance(x, TreeMask)}.values()
        handle = fake.from_tensor(mask.handle)
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]

        def run(handle: torch.Tensor, *tensors: torch.Tensor) -> Any:
            # the operators' mask is an input, as in compiled layers
            of_graph = copy.copy(mask)
            of_graph.handle = handle
            rest = iter(tensors)
            leaves = [
                of_graph if x is mask else next(rest) if isinstance(x, torch.Tensor) else x
                for x in flat
            ]
            args, kwargs = tree_unflatten(leaves, spec)
            return own(*args, **kwargs)

        return _run_cut(cut, kind, mode, _Inside(layer, run), [handle, *tensors])

    return forward


def _run_cut(
    cut: dict[Hashable, Callable[..., Any]],
    kind: Hashable,
    mode: Mode,
    inside: _Inside,
    tensors: Sequence[torch.Tensor],
) -> Any:
    """Calls a function as it is cut for a mode; calls of one kind share their graphs, if their
    inputs have the same shapes and the same of them get gradients."""
    state = dict([*inside.named_parameters(), *inside.named_buffers()])
    given = *state.values(), *tensors

    def run(*given: torch.Tensor) -> Any:
        weights = dict(zip(state, given, strict=False))
        return torch.func.functional_call(inside, weights, given[len(state) :])

    # what gets no gradient is not kept: a frozen tower's first block has no such input
    inputs = kind, *((tuple(x.shape), x.requires_grad) for x in given)
    if inputs not in cut:
        function = aot_function(
            run,
            fw_compiler=lambda graph, inputs: make_boxed_func(graph),
            bw_compiler=lambda graph, inputs: _Backward(graph),
            partition_fn=lambda *joint, **how: _partition(mode, *joint, **how),
            decompositions=select_decomp_table(),
        )
        # tracing makes tensors that a run does not
        with _disable_current_modes():
            function(*given)
        cut[inputs] = function
    return cut[inputs](*given)


# ---- parts of a tower's blocks -------------------------------------------------------------------


class _Attends(Exception):
    """Ends a part's forward where it attends, with what attention is called with."""


def cut_function(fake: FakeTensorMode, function: Any) -> Callable[..., Any]:
    """The forward of a part of a tower's block as it is cut, around attention as where compiled.

    Args:
        fake: the mode of the tensors.
        function: as `compile_blocks` has it compiled.

    Returns:
        A function with the same arguments.
    """
    cut: dict[Hashable, Callable[..., Any]] = {}
    calls: dict[Hashable, tuple[Any, dict[str, Any]]] = {}
    attends = _FUNCTIONS in inspect.unwrap(function).__code__.co_names

    def meaning(attention: Callable[[Any], Any]) -> Any:
        """The forward, in which another function attends."""

        def functions(before: Any) -> Any:
            return SimpleNamespace(get_interface=lambda *names: attention(before))

        return with_globals(function, {_FUNCTIONS: functions})

    def forward(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        is_input = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in flat]
        inputs = [x for x, given in zip(flat, is_input, strict=True) if given]
        inputs = [x if isinstance(x, FakeTensor) else fake.from_tensor(x) for x in inputs]
        # borders of pictures are numbers
        borders = [x for x in flat if isinstance(x, torch.Tensor) and not x.is_floating_point()]
        kind = str([x.tolist() for x in borders])

        def call(forward: Any, *inputs: torch.Tensor) -> Any:
            rest = iter(inputs)
            leaves = [next(rest) if given else x for x, given in zip(flat, is_input, strict=True)]
            args, kwargs = tree_unflatten(leaves, spec)
            return forward(part, *args, **kwargs)

        def run(name: str, function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
            return _run_cut(cut, (name, kind), "nothing", _Inside(part, function), inputs)

        if not attends:
            return run("whole", partial(call, function), *inputs)

        def before(*inputs: torch.Tensor) -> Any:
            def stops(functions: Any) -> Any:
                def attend(module: Any, *shown: torch.Tensor, **options: Any) -> Any:
                    calls[kind] = functions.get_interface(), options
                    raise _Attends(shown)

                return attend

            try:
                call(meaning(stops), *inputs)
            except _Attends as reached:
                return reached.args[0]
            raise TypeError("a tower's attention does not call transformers' function")

        shown = run("before", before, *inputs)
        attend, options = calls[kind]
        output = attend(part, *shown, **options)[0]

        def behind(output: torch.Tensor, *inputs: torch.Tensor) -> Any:
            return call(meaning(lambda _: lambda *_, **__: (output, None)), *inputs)

        return run("behind", behind, output, *inputs)

    return forward


def _partition(mode: Mode, joint: fx.GraphModule, inputs: Any, **how: Any) -> Any:
    if mode != "nothing":
        _mark_recomputed(joint, mode)
    return min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **how)


def _mark_recomputed(joint: fx.GraphModule, mode: Mode) -> None:
    """As a checkpoint in compiled code marks what belongs to the forward."""
    of_backward: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            if "tangents" in node.name:
                of_backward.add(node)
        elif any(x in of_backward for x in node.all_input_nodes):
            of_backward.add(node)
        elif node.op == "call_function":
            # what an operator with several results gives is an item of it
            made_by = node.args[0] if node.target is operator.getitem else node
            keeps = mode == "all_but_attention" and getattr(made_by, "target", None) in KEPT
            node.meta["recompute"] = (
                CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.MUST_RECOMPUTE
            )
            node.meta["ac_graph_id"] = 0


# ---- the backward of a graph ---------------------------------------------------------------------


class _Backward:
    """Stands for a compiled backward: its results, and its buffers."""

    # of AOTAutograd: arguments come in one list
    _boxed_call = True

    def __init__(self, graph: fx.GraphModule) -> None:
        self._nodes = list(graph.graph.nodes)
        (output,) = (node for node in self._nodes if node.op == "output")
        self._results = list(tree_iter(output.args))

    def __call__(self, saved: list[Any]) -> list[torch.Tensor | None]:
        inputs = [node for node in self._nodes if node.op == "placeholder"]
        buffers = _most_bytes(self._nodes, dict(zip(inputs, saved, strict=True)))
        results = [
            torch.empty_strided(
                x.meta["val"].shape,
                x.meta["val"].stride(),
                dtype=x.meta["val"].dtype,
                device=x.meta["val"].device,
            )
            if isinstance(x, fx.Node)
            else None
            for x in self._results
        ]
        rest = buffers - sum(x.nbytes for x in results if x is not None)
        # counted while it lives, which is no longer than this line
        torch.empty(max(0, rest), dtype=torch.uint8)
        return results


def _nbytes(node: fx.Node) -> int:
    return sum(x.nbytes for x in tree_iter(node.meta.get("val")) if isinstance(x, torch.Tensor))


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, OpOverload) and (target.is_view or target in _VIEWS)


def _is_fused(node: fx.Node) -> bool:
    """Whether inductor computes a value where it is read: it has a buffer only for readers that
    are kernels of their own."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        # an item of a tuple is part of what made it
        return node.op == "call_function"
    return _is_view(node) or torch.Tag.pointwise in target.tags


def _reads_fused(node: fx.Node) -> bool:
    """Whether a kernel may compute its inputs as it reads them: elementwise ones and sums."""
    target = node.target
    if not isinstance(target, OpOverload):
        return node.op == "call_function"
    return _is_fused(node) or target.overloadpacket in _SUMS


_aten = torch.ops.aten
_VIEWS = (_aten._unsafe_view.default, _aten.alias)
_SUMS = {_aten.sum, _aten.mean, _aten.amax, _aten.amin, _aten.var_mean, _aten.prod}


def _most_bytes(nodes: Sequence[fx.Node], given: dict[fx.Node, Any]) -> int:
    """The most bytes of buffers that a graph's run adds to what it was given, at once.

    What it was given is free after its last use, unless something else holds it: `given` says which
    of its inputs share a storage.
    """
    order = {node: i for i, node in enumerate(nodes)}
    roots: dict[fx.Node, set[fx.Node]] = {}
    last: dict[fx.Node, int] = {}
    made: list[tuple[int, fx.Node]] = []
    for node in nodes:
        if node.op == "placeholder":
            roots[node] = {node}
            continue
        read = set().union(*(roots.get(x, set()) for x in node.all_input_nodes))
        needs_buffer = node.op == "output" or not (
            _is_fused(node) and all(map(_reads_fused, node.users))
        )
        if node.op == "output" or (needs_buffer and not _aliases(node)):
            for root in read:
                last[root] = order[node]
        roots[node] = read
        if needs_buffer and node.op == "call_function" and not _aliases(node):
            roots[node] = {node}
            made.append((order[node], node))
    frees: dict[int, int] = {}
    for node in last:
        if node in given:
            continue
        frees[last[node]] = frees.get(last[node], 0) + _nbytes(node)
    for storage_end, size in _freed_inputs(given, last):
        frees[storage_end] = frees.get(storage_end, 0) + size
    at = dict(made)
    live = most = 0
    for i, node in enumerate(nodes):
        freed = frees.get(i, 0)
        if i not in at:
            live -= freed if node.op != "output" else 0
            continue
        size = _nbytes(at[i])
        if _is_fused(node):
            # in the place of an input that is not read again
            live += size - freed
            most = max(most, live)
        else:
            live += size
            most = max(most, live)
            live -= freed
    return most


def _aliases(node: fx.Node) -> bool:
    """Whether a node is another look at a buffer: a view, or an item of a tuple."""
    return node.op == "call_function" and (
        not isinstance(node.target, OpOverload) or _is_view(node)
    )


def _freed_inputs(given: dict[fx.Node, Any], last: dict[fx.Node, int]) -> Iterator[tuple[int, int]]:
    """Where the storage of what a layer kept is free again, and its bytes."""
    ends: dict[Any, int] = {}
    sizes: dict[Any, int] = {}
    for node, value in given.items():
        if not isinstance(value, torch.Tensor) or "tangents" in node.name:
            continue
        storage = value.untyped_storage()
        # weights, their transposes and the layer's input are held by others
        if node.name.startswith("primals"):
            sizes[storage] = 0
            continue
        ends[storage] = max(ends.get(storage, 0), last.get(node, 0))
        sizes.setdefault(storage, storage.nbytes())
    for storage, end in ends.items():
        yield end, sizes[storage]
