"""How models run under `sequence_logprobs`: memory, hooks, wrappers, compilation, precision."""

from __future__ import annotations

import copy
import types
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import operations
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import prefixtree as pt
from prefixtree.models.layers import device_of
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.full import each_once, in_turn, mostly
from tests.support.models import (
    HIDDEN,
    VOCABULARY,
    AdaptedHead,
    Run,
    build,
    counted,
    enable_checkpointing,
    ragged_objective,
    ragged_packed,
    run_eager,
    run_packed,
    same_bits,
)
from tests.support.pairs import pairwise

# ---- memory and work -----------------------------------------------------------------------------


class _LogitRows(TorchDispatchMode):
    """Remembers the most rows of any tensor [..., V] but a weight, whatever makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[-1] == VOCABULARY:
                # [d, V] is the transposed weight
                rows = 0 if x.shape[0] == HIDDEN else x.numel() // VOCABULARY
                self.most = max(self.most, rows)
        return out


@pytest.mark.parametrize(
    ("head", "checkpointing"), mostly([("plain", True), ("adapter", False)], [("plain", True)])
)
def test_logits_are_never_more_than_a_chunk(head, checkpointing):
    model = build("gemma2", tie_word_embeddings=False)
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    with _LogitRows() as rows:
        run_packed(model, ragged_packed(), ragged_objective(), chunk_size=5)
    assert rows.most == 5
    with _LogitRows() as rows:  # and the recorder does see what an eager model makes
        run_eager(model)
    assert rows.most == max(map(len, ragged_objective().sequences))


@pytest.mark.parametrize("head", ["plain", "adapter"])
def test_no_logits_are_kept_for_the_backward(head):
    """They are made again there, chunk by chunk: chunks that all stay alive save nothing."""
    model = build("gemma2", tie_word_embeddings=False)
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    saved: list[tuple[int, ...]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        sequence_logprobs(model, ragged_packed(), return_entropy=True, chunk_size=5)
    assert len(saved) > 50
    # [d, V] is the transposed weight
    assert [s for s in saved if len(s) > 1 and s[-1] == VOCABULARY and s[0] != HIDDEN] == []


@pytest.mark.usefixtures("unprobed")
def test_the_packed_tokens_are_not_all_given_to_the_head():
    """Only the predictors' hidden states reach it."""
    model = build("qwen3")
    masks = [np.zeros(len(s)) for s in ragged_objective().sequences]
    masks[0][-3:] = 1
    seen = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape))
    sequence_logprobs(model, ragged_packed(), loss_mask=masks)
    handle.remove()
    assert seen == [(1, 3, HIDDEN)]


@pytest.mark.usefixtures("unprobed")
@pytest.mark.parametrize("head", ["plain", "adapter"])
def test_the_decoder_runs_once(head):
    model = build("qwen3")
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    with counted([model.model]) as decoder, counted(model.model.layers) as layers:
        run_packed(model, ragged_packed(), ragged_objective(), chunk_size=2)
        assert decoder() == 1 and layers() == len(model.model.layers)


@pytest.mark.usefixtures("unprobed")
def test_no_graph_is_kept_alive():
    """Neither the model nor its head holds on to a call's tensors."""
    model, outputs = build("qwen3"), []
    handle = model.model.layers[1].register_forward_hook(
        lambda module, args, output: outputs.append(weakref.ref(output))
    )
    scores = sequence_logprobs(model, ragged_packed())
    handle.remove()
    assert outputs[0]() is not None
    del scores
    assert outputs[0]() is None


# ---- the model is as it was ----------------------------------------------------------------------


def _hooks(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """Every hook and every attribute of every module."""
    return {
        name: (
            dict(module._forward_hooks),
            dict(module._forward_pre_hooks),
            dict(module._backward_hooks),
            vars(module).get("forward"),
            set(vars(module)),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("head_has_its_own_forward", [False, True])
@pytest.mark.parametrize("broken", [None, "layer", "head", "backward"])
def test_nothing_stays_behind(broken, head_has_its_own_forward):
    model = build("qwen3")
    if head_has_its_own_forward:
        model.lm_head.forward = types.MethodType(nn.Linear.forward, model.lm_head)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("broken on purpose")

    if broken == "layer":
        model.model.layers[1].mlp.forward = fail
    elif broken == "head":
        model.lm_head.register_forward_pre_hook(fail)
    before = _hooks(model)
    if broken in ("layer", "head"):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            sequence_logprobs(model, ragged_packed())
    else:
        scores = sequence_logprobs(model, ragged_packed())
        if broken == "backward":
            torch.cat(scores.logprobs).register_hook(fail)
            bad = torch.cat(scores.logprobs)
            bad.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                bad.sum().backward()
        else:
            torch.cat(scores.logprobs).sum().backward()
    assert _hooks(model) == before


def test_the_model_serves_ordinary_batches_afterwards():
    model = build("qwen3")
    ids = torch.from_numpy(ragged_objective().sequences[0])[None]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("prefixtree")
        sequence_logprobs(model, ragged_packed())
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(ids).logits, expected)
        assert model.eval().generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]


def test_save_and_load(tmp_path):
    model = build("gemma3_text")
    expected = sequence_logprobs(model, ragged_packed()).logprobs
    names = set(model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="prefixtree")
    assert set(loaded.state_dict()) == names
    got = sequence_logprobs(loaded.train(), ragged_packed()).logprobs
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation != "prefixtree"


# ---- wrappers ------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A module around the model that calls it, as trainers have them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class ForwardWrapper(Wrapper):
    """As PEFT does it: around the module's hooks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


@pytest.mark.parametrize(
    ("wrap", "model_type"),
    each_once([Wrapper, ForwardWrapper, lambda m: Wrapper(ForwardWrapper(m))], ["qwen3", "gemma2"]),
)
def test_a_module_around_the_model(wrap, model_type):
    model = build(model_type)
    expected = run_packed(model, ragged_packed(), ragged_objective())
    wrapper = wrap(model)
    run = run_packed(wrapper, ragged_packed(), ragged_objective())
    names = {name: name.replace("inner.", "") for name in run.gradients}
    got = Run(run.logprobs, run.entropy, {names[n]: g for n, g in run.gradients.items()})
    assert same_bits(got, expected)


@pytest.mark.usefixtures("unprobed")
def test_a_forward_that_was_wrapped_on_the_instance(monkeypatch):
    """As accelerate's `prepare` does for mixed precision: it must be called, and stay."""
    model = build("qwen3")
    expected = run_packed(model, ragged_packed(), ragged_objective())
    calls, convert = [], operations.convert_to_fp32

    def counted(output: Any) -> Any:
        calls.append(output)
        return convert(output)

    monkeypatch.setattr(operations, "convert_to_fp32", counted)
    wrapped = operations.convert_outputs_to_fp32(
        torch.autocast("cpu", enabled=False)(model.forward)
    )
    model.forward = forward = wrapped
    assert same_bits(run_packed(model, ragged_packed(), ragged_objective()), expected)
    assert len(calls) == 1 and model.forward is forward


@pytest.fixture(scope="module")
def process_group(tmp_path_factory):
    """A group of one process, gloo."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_computes_where_its_mesh_is_and_not_where_its_shards_wait(process_group):
    model = nn.Linear(4, 4, device="meta")
    assert device_of(model) == torch.device("meta")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert model.weight.device.type == "meta"
    assert device_of(model) == torch.device("cpu")


_DDP = {
    "plain": {},
    "find unused": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "bucket view": {"gradient_as_bucket_view": True},
}


# torch's DDP itself does not combine a search for unused parameters with reentrant checkpointing
_DDP_CASES = [
    (options, checkpointing)
    for options in _DDP
    for checkpointing in ("none", "reentrant", "non-reentrant")
    if (options, checkpointing) != ("find unused", "reentrant")
]


_DDP_QUICK = [("plain", "none"), ("find unused", "non-reentrant"), ("static graph", "reentrant")]


@pytest.mark.parametrize(
    ("case", "model_type"), mostly(in_turn(_DDP_CASES, ["qwen3", "gemma2"]), _DDP_QUICK)
)
@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel(case, model_type):
    """Every gradient goes through the reduction, which here triples it: one that went around it
    would be right on a single process and wrong, without an error, on two."""
    options, checkpointing = case
    model = build(model_type)
    expected = run_packed(model, ragged_packed(), ragged_objective())
    if checkpointing != "none":
        enable_checkpointing(model, checkpointing == "reentrant")
    wrapper = nn.parallel.DistributedDataParallel(model, **_DDP[options])

    def reduce(state, bucket):  # DDP looks at annotations, and takes no strings
        future = torch.futures.Future()
        future.set_result(bucket.buffer() * 3)
        return future

    wrapper.register_comm_hook(None, reduce)
    for _ in range(3):  # static graphs differ between the first step and later ones
        run = run_packed(wrapper, ragged_packed(), ragged_objective())
        for name, gradient in expected.gradients.items():
            got = run.gradients["module." + name]
            torch.testing.assert_close(got, 3 * gradient, rtol=1e-5, atol=1e-6, msg=name)
        assert all(torch.equal(a, b) for a, b in zip(run.logprobs, expected.logprobs, strict=True))


@pytest.mark.parametrize(
    ("head", "checkpointing"),
    mostly(
        [("in the root", False), ("sharded alone", True), ("adapter", False), ("adapter", True)],
        [("sharded alone", True), ("adapter", False)],
    ),
)
@pytest.mark.usefixtures("process_group")
# torch's, about its own hooks
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_fully_sharded_data_parallel(head, checkpointing):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def make() -> Any:
        model = build("qwen3")
        if head == "adapter":
            model.lm_head = AdaptedHead(model.lm_head)
        return model

    expected = run_packed(make(), ragged_packed(), ragged_objective())
    model = make()
    if checkpointing:
        enable_checkpointing(model, use_reentrant=False)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if head == "sharded alone":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        run = run_packed(model, ragged_packed(), ragged_objective())
        for name, gradient in expected.gradients.items():
            got = run.gradients[name].full_tensor()
            torch.testing.assert_close(got, gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("unit", ["head", "root"])
@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_a_sharded_unit_that_casts_its_output(unit):
    """Scores went through bfloat16 in the head's unit and came back as float32: off by 0.014."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    dtypes = {"head": torch.float32, "root": torch.float32, unit: torch.bfloat16}
    model = build("qwen3")
    for module, dtype in ((model.lm_head, dtypes["head"]), (model, dtypes["root"])):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=dtype))
    match = r"cast the log-probabilities to torch\.bfloat16.*output_dtype=torch\.float32"
    with pytest.raises(pt.UnsupportedError, match=match):
        sequence_logprobs(model, ragged_packed())


# ---- precision -----------------------------------------------------------------------------------


def _no_worse_than_eager(run: Run, eager: Run, reference: Run) -> None:
    """Mean errors against the float32 run of the same weights at most twice eager's own, plus a
    little: gradients by the norm over all parameters and of each large one."""

    def mean(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        return float((torch.cat(a).float() - torch.cat(b)).abs().mean())

    def distance(a: Run, names: Any) -> float:
        return (
            sum(
                float((a.gradients[n].float() - reference.gradients[n].float()).norm()) ** 2
                for n in names
            )
            ** 0.5
        )

    for kind in ("logprobs", "entropy"):
        ours, theirs = (mean(getattr(r, kind), getattr(reference, kind)) for r in (run, eager))
        assert torch.cat(getattr(run, kind)).isfinite().all()
        assert ours <= 2 * theirs + 1e-3, (kind, ours, theirs)
    names = reference.gradients.keys()
    assert run.gradients.keys() == eager.gradients.keys() == names
    total = sum(float(g.norm()) ** 2 for g in reference.gradients.values()) ** 0.5
    ours, theirs = distance(run, names) / total, distance(eager, names) / total
    assert ours <= 2 * theirs + 1e-3, (ours, theirs)
    for name in names:
        ours, theirs = distance(run, [name]) / total, distance(eager, [name]) / total
        assert ours <= 2 * theirs + 2e-3, (name, ours, theirs)


@pytest.mark.parametrize("model_type", mostly(["qwen3", "gemma2", "gpt_oss"], ["gpt_oss"]))
def test_bfloat16(model_type):
    model = build(model_type).bfloat16()
    run = run_packed(model, ragged_packed(), ragged_objective())
    assert {g.dtype for g in run.gradients.values()} == {torch.bfloat16}
    reference = run_eager(copy.deepcopy(model).float())
    _no_worse_than_eager(run, run_eager(model), reference)


@pytest.mark.parametrize(
    ("model_type", "head", "checkpointing"),
    mostly(
        pairwise(["qwen3", "gemma2", "deepseek_v3"], ["plain", "adapter"], [False, True]),
        [("qwen3", "plain", False), ("deepseek_v3", "adapter", True)],
    ),
)
def test_autocast(model_type, head, checkpointing):
    """float32 weights under bfloat16 autocast: rotary embeddings leave q and k in float32 and v in
    bfloat16, which eager and sdpa take."""
    model = build(model_type)
    if head == "adapter":
        model.lm_head = AdaptedHead(model.lm_head)
    reference = run_eager(model)
    with torch.autocast("cpu", torch.bfloat16):
        eager = run_eager(model)
        if checkpointing:
            enable_checkpointing(model, use_reentrant=False)
        run = run_packed(model, ragged_packed(), ragged_objective())
    assert {g.dtype for g in run.gradients.values()} == {torch.float32}
    _no_worse_than_eager(run, eager, reference)
