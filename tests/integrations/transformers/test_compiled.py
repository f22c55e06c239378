"""Compiled layers: every family, the same values and gradients, one graph for all forests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prefixtree as pt
from prefixtree.integrations.compiled import compile_layers
from prefixtree.integrations.recompute.layers import MODES, layers_of
from tests.support.family_configs import CANNOT_CHECKPOINT, FAMILIES
from tests.support.models import (
    Run,
    assert_same,
    build,
    cases,
    make_objective,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    ragged_sequences,
    run_packed,
    tolerance,
)

# its experts look at numbers, which a graph cannot
_IN_PARTS = {"longcat_flash"}
# dynamo's own look at .grad of its inputs
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """No graph of another test, and none left."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "model_type", cases(name for name in FAMILIES if name not in CANNOT_CHECKPOINT)
)
def test_every_family(model_type):
    """Through AOTAutograd, which makes graphs of forward and backward; their code is torch's."""
    model = build(model_type)
    want = run_packed(model, ragged_packed(), ragged_objective())
    compile_layers(model, backend="aot_eager")
    assert_same(run_packed(model, ragged_packed(), ragged_objective()), want, tolerance(model_type))
    if model_type in _IN_PARTS:
        assert counters["graph_break"]
        return
    assert 0 < graphs() <= len(layers_of(model))
    assert not counters["graph_break"]
    first = graphs()
    other = make_objective(ragged_sequences(1)[:7], 1)
    run_packed(model, pack_sequences(other.sequences), other)
    assert graphs() == first, "another forest compiled the layers anew"


@pytest.mark.parametrize("sharded", ["not", "before", "after"])
def test_modes_of_recomputation_and_sharding(sharded):
    """A mode is a graph of its own in compiled layers, and is kept; FSDP2 may come at any time."""
    model = build("llama")
    want = run_packed(model, ragged_packed(), ragged_objective())
    model.zero_grad()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = [*layers_of(model), model] if sharded != "not" else []
        if sharded == "after":
            compile_layers(model, backend="aot_eager")
        for part in parts:
            fully_shard(part, mesh=mesh)
        if sharded != "after":
            compile_layers(model, backend="aot_eager")
        made = []
        for mode in (*MODES, *MODES):
            run = run_packed(model, ragged_packed(), ragged_objective(), recompute=mode)
            whole = {
                n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in run.gradients.items()
            }
            assert_same(Run(run.logprobs, run.entropy, whole), want)
            made.append(graphs())
        assert made == [1, 2, 3, 3, 3, 3] and not counters["graph_break"]
    finally:
        dist.destroy_process_group()


def test_a_model_that_cannot_be_compiled_by_layers():
    with pytest.raises(TypeError, match="model must be a torch module"):
        compile_layers("model")
    with pytest.raises(pt.UnsupportedError, match="does not checkpoint"):
        compile_layers(build(next(iter(CANNOT_CHECKPOINT))))
