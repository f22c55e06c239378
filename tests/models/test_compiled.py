"""Compiled layers: every family, the same values and gradients, one graph for all forests."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import prefixtree as pt
from prefixtree import PackedForest
from prefixtree.images import encoder
from prefixtree.images.vision import encoder_of
from prefixtree.kernels.attention import operator
from prefixtree.models.compiled import compile_layers
from prefixtree.models.layers import layers_of
from tests.support import alike, image_cases
from tests.support.family_configs import FAMILIES, INDEXED
from tests.support.full import mostly
from tests.support.models import (
    Objective,
    Run,
    assert_same,
    build,
    cases,
    enable_checkpointing,
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
# sinks and windows, experts, and a recurrence; plain attention is below, with modes
_OF_OPERATORS = ["gpt_oss", "qwen3_5"]
# every time in the matrix of tests/scoring/test_ways.py
_IN_WAYS = {"nemotron_h", "lfm2"}
_TRACED = [x for x in _COMPILED if x not in _IN_WAYS]
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
            *(("eager", c) for c in mostly_full(_TRACED, {"gpt_oss"})),
            # graphs of forward and backward, out of operators that families share, take three times
            # as long; their code is torch's, and each operator has an opcheck of its own
            *(
                ("aot_eager", pytest.param(*c.values, marks=[*c.marks, pytest.mark.full]))
                for c in cases(_OF_OPERATORS)
            ),
        )
    ],
)
def test_every_family(backend, model_type):
    if backend == "eager":
        every_time = {*_OF_OPERATORS, *_IN_WAYS}
        alike.skip_if_repeated(model_type, every_time)
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
    ("word", "other", "differs"),
    [
        ("residual + hidden_states", "residual + x2", False),
        ("residual + hidden_states", "residual @ hidden_states", True),
        ("-x2", "~x2", True),
        ("sliding_window=self", "window=self", True),
    ],
)
def test_families_that_repeat_others_are_left_out(word, other, differs, monkeypatch):
    """Until one operation of their code differs."""
    read = inspect.getsource

    def of_module(module: Any) -> str:
        text = read(module)
        if "ministral" not in module.__name__:
            return text
        assert word in text
        return text.replace(word, other)

    monkeypatch.setattr(inspect, "getsource", of_module)
    families = ("qwen2", "ministral", "olmo2")
    alike._codes.cache_clear()
    found = alike.needed.__wrapped__({"qwen2"}, families)
    assert found == {"qwen2", "olmo2"} | ({"ministral"} if differs else set())


def ends_at_attention() -> bool:
    """Whether graphs ended in the attention of a vision encoder alone."""
    return bool(counters["graph_break"]) and all("_attend" in x for x in counters["graph_break"])


@pytest.mark.parametrize(
    ("model_type", "recompute"),
    [
        ("qwen3_vl", "all"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                # the vision encoders of others are these, but for names; qwen2_5_vl's windows are
                # below
                ("glm4v", "auto"),
                ("gemma4", None),
            )
        ),
    ],
)
def test_images(model_type, recompute):
    """The vision encoder too, but Gemma 4's: parts of four kinds, whatever the number of images. Of
    forward and backward there are graphs in float64."""
    model, made = image_cases.build(model_type), image_cases.batch(model_type)
    compile_layers(model, backend="eager")
    run = image_cases.run_packed(model, made, recompute=recompute)
    found = image_cases.errors(run, image_cases.reference(model_type))
    assert found.largest < image_cases.tolerance(model_type)
    if model_type == "gemma4":
        assert 0 < graphs() <= 5 and not counters["graph_break"]
        return
    of_encoder = graphs() - len(set(map(type, layers_of(model))))
    assert ends_at_attention() and 4 <= of_encoder <= 6
    # transformers 5.5 computes with borders, and torch compiles anew for a size of 1
    image_cases.run_packed(model, image_cases.screenshots(1), recompute=recompute)
    made_graphs = graphs()
    for count in (2, 5, 1):
        image_cases.run_packed(model, image_cases.screenshots(count), recompute=recompute)
        assert graphs() == made_graphs, f"{count} images compiled anew"


@pytest.mark.full
def test_an_encoder_is_exact_in_float64():
    """Windows of several sizes, and images of two."""
    model = image_cases.build("qwen2_5_vl", dtype=torch.float64)
    made = image_cases.batch("qwen2_5_vl")
    want = image_cases.run_forward(model, made)
    compile_layers(model, backend="aot_eager")
    found = image_cases.errors(image_cases.run_forward(model, made), want)
    assert ends_at_attention() and found.largest < 1e-12


def test_a_compiled_encoder_without_gradient_is_seen(monkeypatch):
    """Its attention is between two graphs."""
    attend = encoder.image_attention
    monkeypatch.setattr(encoder, "image_attention", lambda *given: (_cut(attend(*given)[0]), None))
    model = image_cases.build("qwen3_vl")
    compile_layers(model, backend="eager")
    wrong = image_cases.errors(
        image_cases.run_packed(model, image_cases.batch("qwen3_vl")),
        image_cases.reference("qwen3_vl"),
    )
    assert wrong.logprob < 5e-5 and wrong.encoder > 0.1


def _cut(x: torch.Tensor) -> torch.Tensor:
    return x.detach() + 0 * x


@pytest.mark.full
def test_a_hook_inside_a_compiled_encoder_is_run():
    """Set on one block alone, after a graph was made of its kind."""

    def doubles(module, inputs, output):
        return 2 * output

    made, outcomes = image_cases.batch("qwen3_vl"), []
    for compiled in (False, True):
        model = image_cases.build("qwen3_vl")
        if compiled:
            compile_layers(model, backend="eager")
            image_cases.run_packed(model, made)
        encoder_of(model).blocks[1].attn.qkv.register_forward_hook(doubles)
        outcomes.append(image_cases.run_packed(model, made))
    assert image_cases.errors(outcomes[1], outcomes[0]).largest < 5e-5
    plain = image_cases.run_packed(image_cases.build("qwen3_vl"), made)
    assert image_cases.errors(outcomes[0], plain).logprob > 1e-3


@pytest.mark.parametrize("runs", mostly(["checkpointed by block", "eager"], ["eager"]))
def test_encoders_that_run_uncompiled(runs):
    """A graph would be made for every number of images."""
    model, made = image_cases.build("qwen3_vl"), image_cases.batch("qwen3_vl")
    if runs == "eager":
        names = {"": "prefixtree", "text_config": "prefixtree", "vision_config": "eager"}
        model.set_attn_implementation(names)
    else:
        enable_checkpointing(model, use_reentrant=False)
    compile_layers(model, backend="eager")
    # by recompute=None transformers' checkpoints are one per run
    recompute = "nothing" if runs == "checkpointed by block" else None
    run = image_cases.run_packed(model, made, recompute=recompute)
    found = image_cases.errors(run, image_cases.reference("qwen3_vl"))
    assert found.largest < 5e-5 and graphs() <= 3 and not counters["graph_break"]


@pytest.mark.full
def test_a_sharded_encoder():
    """A blank run for other ranks is one more size; what changed is for Dynamo to see."""
    model, made = image_cases.build("qwen3_vl"), image_cases.batch("qwen3_vl")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        compile_layers(model, backend="eager")
        for part in (*encoder_of(model).blocks, *layers_of(model), model):
            fully_shard(part, mesh=mesh)
        for _ in range(2):
            # behind a forward, parameters of the root are not those that are sharded
            model.zero_grad()
            run = image_cases.run_packed(model, made, recompute="all")
            whole = {n: g.full_tensor() for n, g in run.gradients.items()}
            run = image_cases.Run(run.logprobs, whole)
            found = image_cases.errors(run, image_cases.reference("qwen3_vl"))
            assert found.largest < 5e-5 and ends_at_attention()
            made_graphs = graphs()
        image_cases.run_packed(model, image_cases.screenshots(3), recompute="all")
        assert graphs() == made_graphs
    finally:
        dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_an_encoder():
    """The first block's input needs no gradient, those behind it do."""
    model, made = image_cases.build("qwen3_vl"), image_cases.batch("qwen3_vl")
    model = get_peft_model(model, LoraConfig(r=4, target_modules=r".*\.qkv|.*\.q_proj"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    want = image_cases.run_packed(model, made, recompute="all")
    compile_layers(model, backend="eager")
    run = image_cases.run_packed(model, made, recompute="all")
    assert any("visual" in name for name in run.gradients) and ends_at_attention()
    assert image_cases.distance(run.gradients, want.gradients) < 5e-5
    made_graphs = graphs()
    image_cases.run_packed(model, image_cases.screenshots(3), recompute="all")
    assert graphs() == made_graphs


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
    [
        ("not", ("all_but_attention", "all")),
        ("before", ("all", "nothing")),
        ("after", ("nothing", "all")),
    ],
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


@pytest.mark.full
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
