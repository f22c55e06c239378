"""Compiled layers: every family, the same values and gradients, one graph for all forests."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prefixtree as pt
from prefixtree import PackedForest
from prefixtree.kernels.attention import operator
from prefixtree.models.compiled import compile_layers
from prefixtree.models.layers import layers_of
from prefixtree.recompute.layers import MODES
from tests.support import picture_cases
from tests.support.family_configs import FAMILIES, INDEXED
from tests.support.models import (
    EVERY_TIME,
    Objective,
    Run,
    assert_same,
    build,
    cases,
    errors,
    make_objective,
    mostly_full,
    pack_sequences,
    ragged_objective,
    ragged_packed,
    ragged_sequences,
    run_packed,
    tolerance,
)
from tests.support.variant_configs import CANNOT_CHECKPOINT

# its experts look at numbers, which a graph cannot; an indexer loops over paths
_IN_PARTS = {"longcat_flash", *INDEXED}
_COMPILED = [name for name in FAMILIES if name not in CANNOT_CHECKPOINT]
# sinks and windows, experts, and a recurrence
_TRACED_EVERY_TIME = {"gpt_oss", "qwen3_5"}
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
    "backend, model_type",
    [
        pytest.param(backend, *case.values, marks=case.marks)
        for backend, case in (
            *(("eager", c) for c in mostly_full(_COMPILED, _TRACED_EVERY_TIME)),
            # graphs of forward and backward, out of operators that families share, take three times
            # as long; their code is torch's
            *(("aot_eager", c) for c in mostly_full(sorted(EVERY_TIME), {"qwen3"})),
        )
    ],
)
def test_every_family(backend, model_type):
    model = build(model_type)
    want = run_packed(model, ragged_packed(), ragged_objective())
    compile_layers(model, backend=backend)
    assert_same(run_packed(model, ragged_packed(), ragged_objective()), want, tolerance(model_type))
    if model_type in _IN_PARTS:
        assert counters["graph_break"]
        return
    assert 0 < graphs() <= len(layers_of(model))
    assert not counters["graph_break"]
    for _ in over_forests(model, 1):
        pass


@pytest.mark.parametrize(
    ("model_type", "recompute"),
    [
        ("qwen3_vl", "all"),
        pytest.param("qwen3_vl", None, marks=pytest.mark.full),
        ("qwen2_5_vl", None),
        pytest.param("qwen3_5", "all_but_attention", marks=pytest.mark.full),
        pytest.param("gemma4", None, marks=pytest.mark.full),
    ],
)
def test_pictures(model_type, recompute):
    """The tower is not compiled; it runs as without."""
    model, made = picture_cases.build(model_type), picture_cases.batch(model_type)
    compile_layers(model, backend="aot_eager")
    run = picture_cases.run_packed(model, made, recompute=recompute)
    found = picture_cases.errors(run, picture_cases.reference(model_type))
    assert found.largest < (2e-4 if model_type == "qwen3_5" else 5e-5)
    assert 0 < graphs() <= 5 and not counters["graph_break"]


def over_forests(
    model: Any, count: int, recomputed: Sequence[str | None] = (None,)
) -> Iterator[tuple[Objective, PackedForest, Run]]:
    """Runs a compiled model over other forests, each in the next of the modes of recomputation;
    fails if one compiles anything, or if a graph broke.

    The modes are those that ran before, or "auto".
    """
    made = graphs()
    assert made and not counters["graph_break"]
    for seed in range(1, count + 1):
        objective = make_objective(ragged_sequences(seed)[: 12 - 5 * (seed % 2)], seed)
        packed = pack_sequences(objective.sequences).to(next(model.parameters()).device)
        mode = recomputed[seed % len(recomputed)]
        yield objective, packed, run_packed(model, packed, objective, recompute=mode)
        assert graphs() == made, f"forest {seed} compiled the layers anew"
        assert not counters["graph_break"]


# the families that are used most; their tiny configurations get heads that every GPU kernel serves
MOST_USED: dict[str, dict[str, int]] = {
    "qwen3": {"head_dim": 64},
    "qwen3_moe": {"head_dim": 64},
    "qwen3_5": {},
    "qwen2": {"head_dim": 64},
    "llama": {"head_dim": 64},
    "mistral": {"head_dim": 64},
    "gemma2": {"head_dim": 64},
    "gemma3_text": {"head_dim": 64},
    "phi3": {"head_dim": 64},
    "gpt_oss": {"head_dim": 64},
}


@pytest.mark.gpu
# of inductor, about a reduction of few values and about speed; the recurrence's kernels take larger
# heads
@pytest.mark.filterwarnings(r"ignore:\s*Online softmax:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:recurrent layers run through torch")
@pytest.mark.parametrize("model_type", cases(MOST_USED))
def test_the_most_used_families_on_a_gpu(model_type, monkeypatch):
    """Through inductor: float32 is exact, and bfloat16 runs the kernels that "auto" takes there."""
    model = build(model_type, **MOST_USED[model_type]).to("cuda")
    want = _on_cpu(run_packed(model, ragged_packed().to("cuda"), ragged_objective()))
    compile_layers(model)
    got = _on_cpu(run_packed(model, ragged_packed().to("cuda"), ragged_objective()))
    assert_same(got, want, 20 * tolerance(model_type))
    taken: set[str] = set()
    choose = operator.choose

    def noted(name: str, call: Any) -> Any:
        chosen = choose(name, call)
        if call.q.dtype == torch.bfloat16:
            taken.add(chosen.backend.name)
        return chosen

    monkeypatch.setattr(operator, "choose", noted)
    compiled_as_eager(model_type, "cuda")
    assert taken and taken <= {"triton", "flash"}


def compiled_as_eager(model_type: str, device: str, **options: Any) -> None:
    """Ten forests through compiled layers in bfloat16, half with recompute="auto": the worst
    value and gradient of all err by at most three times as much as those of eager layers. One
    forest tells little: in families whose tiny models amplify rounding, its worst value is chance.
    """
    plain = build(model_type, **MOST_USED[model_type]).to(device, torch.bfloat16)
    exact, model = copy.deepcopy(plain).float(), copy.deepcopy(plain)
    compile_layers(model, **options)
    run_packed(model, ragged_packed().to(device), ragged_objective())
    found, allowed = [], []
    for objective, packed, run in over_forests(model, 10, ("auto", None)):
        want = _on_cpu(run_packed(exact, packed, objective))
        allowed.append(errors(_on_cpu(run_packed(plain, packed, objective)), want))
        found.append(errors(_on_cpu(run), want))
    for name, rounding in (("logprob", 0.01), ("entropy", 0.01), ("gradient", 0.02)):
        worst, most = (max(getattr(e, name) for e in of) for of in (found, allowed))
        assert worst <= 3 * most + rounding, (name, found, allowed)


def _on_cpu(run: Run) -> Run:
    values = ([x.cpu() for x in some] for some in (run.logprobs, run.entropy))
    return Run(*values, {name: x.float().cpu() for name, x in run.gradients.items()})


@pytest.mark.full
@pytest.mark.parametrize(
    "sharded, modes",
    [("not", MODES), ("before", ("all", "nothing")), ("after", ("nothing", "all"))],
)
def test_modes_of_recomputation_and_sharding(sharded, modes):
    """A mode is a graph of its own in compiled layers, and is kept; FSDP2 may come at any time,
    which is seen with two modes."""
    model = build("llama", num_hidden_layers=1)
    want = run_packed(model, ragged_packed(), ragged_objective())
    model.zero_grad()
    # beside FSDP2 it is Dynamo that has to see what changed
    backend = "aot_eager" if sharded == "not" else "eager"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parts = [*layers_of(model), model] if sharded != "not" else []
        if sharded == "after":
            compile_layers(model, backend=backend)
        for part in parts:
            fully_shard(part, mesh=mesh)
        if sharded != "after":
            compile_layers(model, backend=backend)
        made = []
        for mode in (*modes, *modes):
            run = run_packed(model, ragged_packed(), ragged_objective(), recompute=mode)
            whole = {
                n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in run.gradients.items()
            }
            assert_same(Run(run.logprobs, run.entropy, whole), want)
            made.append(graphs())
        every = list(range(1, len(modes) + 1))
        assert made == every + [len(modes)] * len(modes) and not counters["graph_break"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("limit, wanted", [(8, 64), (100, 100)])
def test_graphs_of_all_modes_are_kept(limit, wanted):
    with torch._dynamo.config.patch(recompile_limit=limit):
        compile_layers(build("qwen3"))
        assert torch._dynamo.config.recompile_limit == wanted


def test_the_dense_backend_is_not_counted_in_compiled_layers():
    model, packed = build("qwen3"), ragged_packed().with_options(backend="reference")
    want = run_packed(model, packed, ragged_objective())
    compile_layers(model, backend="eager")
    assert_same(run_packed(model, packed, ragged_objective()), want, tolerance("qwen3"))


def test_a_model_that_cannot_be_compiled_by_layers():
    with pytest.raises(TypeError, match="model must be a torch module"):
        compile_layers("model")
    with pytest.raises(pt.UnsupportedError, match="does not checkpoint"):
        compile_layers(build(next(iter(CANNOT_CHECKPOINT))))
