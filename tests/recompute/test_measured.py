"""What layers hold and work with, measured in a micro-batch and by a probe, against bytes that are
counted; and what "auto" makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import prefixtree as pt
from prefixtree.models.checks import find_causal_lm
from prefixtree.models.layers import layers_of
from prefixtree.recompute import choose
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.layers import MODES, Mode
from prefixtree.recompute.measured import MeasuredPlan
from prefixtree.recompute.memory import ModelMemory
from prefixtree.recompute.probes import twin
from tests.support.full import mostly
from tests.support.hooks import limit, wrap
from tests.support.models import adapted, build, gradients, pack_sequences, quantised

_CPU = torch.device("cpu")
_TOKENS = 700


def _packed(tokens: int = _TOKENS) -> pt.PackedForest:
    """A prompt and two branches."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 90, tokens // 2)
    return pack_sequences(
        [np.concatenate([shared, rng.integers(3, 90, tokens // 4)]) for _ in range(2)]
    )


def _frozen_below(model: Any) -> Any:
    model = adapted(model, "q_proj", "down_proj")
    for layer in layers_of(model.get_base_model())[:3]:
        layer.requires_grad_(False)
    return model


def _sharded(model: Any) -> Any:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": policy}
    for layer in layers_of(model):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def _compiled(model: Any) -> Any:
    torch._dynamo.reset()
    pt.compile_layers(model, backend="eager")
    return model


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of "auto"."""
    found: list[Any] = []

    def note(auto: Any, *given: Any) -> Any:
        found.append(auto(*given))
        return found[-1]

    wrap(monkeypatch, "plan of auto", note)
    # chunks of logits are as small as the models
    limit(monkeypatch, "logits of plans", 1 << 12)
    return found


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the bytes that are left for activations."""
    available = [1 << 40]
    wrap(monkeypatch, "bytes left for activations", lambda real, *_: available[0])
    return lambda left: available.__setitem__(0, left)


@pytest.fixture
def ranks() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def update(model: Any, packed: pt.PackedForest, recompute: Any = "auto") -> LiveBytes:
    """One of which few edges are scored, while bytes are counted."""
    masks = [np.arange(n) >= n - 4 for n in packed.forest.sequence_lengths]
    live = LiveBytes(x for p in model.parameters() for x in (p, p.grad) if x is not None)
    with live:
        scores = pt.sequence_logprobs(model, packed, loss_mask=masks, recompute=recompute)
        torch.cat(scores.logprobs).sum().backward()
        del scores
    return live


def known_of(model: Any) -> ModelMemory:
    memory = choose.learnt_so_far(find_causal_lm(model), _CPU).memory()
    assert memory is not None
    return memory


def _six(name: str) -> Any:
    return build(name, num_hidden_layers=6)


_MODELS: dict[str, tuple[Callable[[], Any], torch.dtype | None]] = {
    "dense": (partial(_six, "qwen3"), None),
    "dense, autocast": (partial(_six, "qwen3"), torch.bfloat16),
    "experts": (partial(_six, "qwen3_moe"), None),
    "states": (partial(build, "qwen3_5"), None),
    "compiled": (lambda: _compiled(_six("qwen3")), None),
    "adapters above": (lambda: _frozen_below(_six("qwen3")), None),
    "QLoRA": (lambda: adapted(quantised(_six("qwen3")), "q_proj"), None),
    "FSDP2": (lambda: _sharded(_six("qwen3")), None),
}


# PEFT asks transformers under the old name of the property
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", mostly(_MODELS, {"FSDP2"}))
@pytest.mark.usefixtures("ranks")
def test_an_update_takes_what_was_planned(case, plans, left):
    """After one micro-batch that was measured; and a probe tells the same as it does."""
    make, autocast = _MODELS[case]
    model, packed = make(), _packed()
    cast = partial(torch.autocast, "cpu", autocast) if autocast else nullcontext
    with cast():
        update(model, packed)
        assert isinstance(plans[-1], MeasuredPlan) and plans[-1].first
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        update(model, packed)
        # whatever one layer alone of a kind did not tell
        update(model, packed)
        most = plans[-1].peak_bytes
        for room in (most, 0.7 * most):
            left(round(room))
            live = update(model, packed)
            plan = plans[-1]
            print(f"{case}: {plan.modes} planned {plan.peak_bytes:,}, counted {live.most:,}")
            # a mode that nothing is known of counts as the most it may take
            slack = 1.25 if isinstance(plan, MeasuredPlan) else 1.08
            assert live.most <= plan.peak_bytes * (1.01 if case == "FSDP2" else 1)
            assert plan.peak_bytes < slack * live.most and plan.peak_bytes <= room + 1
        assert set(plan.modes) != {"nothing"}
        measured, other = known_of(model), make()
        probed = choose.memory_of(other, find_causal_lm(other), _CPU)
    for mode in MODES:
        for one, two in zip(measured.layers[mode], probed.layers[mode], strict=True):
            for part in ("held", "working"):
                at = [x[0] * _TOKENS + x[1] for x in (getattr(one, part), getattr(two, part))]
                assert at[0] == pytest.approx(at[1], rel=0.1, abs=20_000), (mode, part)


@pytest.mark.parametrize("model_type", mostly(["qwen3", "qwen3_5", "gemma3_text"], ["qwen3_5"]))
def test_the_same_bits_while_it_is_measured(model_type):
    """The first, which is measured, and those after it; hooks of measurements are gone."""
    packed, runs = _packed(200), {}
    for recompute in ("all", "auto"):
        model = build(model_type)
        before = [dict(vars(module)) for module in model.modules()]
        for _ in range(2):
            update(model, packed, recompute)
        runs[recompute] = gradients(model)
        hooks = "_forward_hooks", "_forward_pre_hooks", "_compiled_call_impl"
        for module, then in zip(model.modules(), before, strict=True):
            assert all(vars(module).get(name) == then.get(name) for name in hooks)
    assert runs["all"].keys() == runs["auto"].keys()
    assert all(torch.equal(runs["all"][name], found) for name, found in runs["auto"].items())


def test_little_memory_is_not_tried(plans, left):
    """A probe looks first, and forests that it sizes leave something free."""
    model = _six("qwen3")
    memory = 200 << 20
    tokens = pt.max_micro_batch_tokens(model, memory)
    learnt = choose.learnt_so_far(model, _CPU)
    need = known_of(model).peak
    assert learnt.tokens == 0 and 0.9 * memory < need(tokens, "all") < 0.93 * memory
    model, packed = _six("qwen3"), _packed(1200)
    left(choose.learnt_so_far(model, _CPU).needs_at_most(packed.num_tokens) - 1)
    update(model, packed)
    # it is planned, and measured all the same
    assert isinstance(plans[-1], MeasuredPlan) and not plans[-1].first
    learnt = choose.learnt_so_far(model, _CPU)
    assert learnt.knows(MODES) and learnt.tokens == packed.num_tokens
    assert pt.max_micro_batch_tokens(model, memory) > 1.05 * tokens


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_first_micro_batch_that_fails_is_measured_again(where, plans):
    model, packed = _six("qwen3"), _packed(200)

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    layer = layers_of(model)[2]
    register = layer.register_forward_hook if where == "forward" else None
    handle = register(fail) if register else layer.mlp.up_proj.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        update(model, packed)
    handle.remove()
    assert choose.learnt_so_far(model, _CPU).memory() is None
    for first in (True, False):
        update(model, packed)
        assert isinstance(plans[-1], MeasuredPlan) == first
    assert choose.learnt_so_far(model, _CPU).margin == 0


def test_a_peak_above_the_plan_is_noticed(plans, left, monkeypatch):
    """And an error in a forward says what was planned; later plans leave more."""
    model, packed = _six("qwen3"), _packed()
    update(model, packed)
    update(model, packed)
    learnt = choose.learnt_so_far(model, _CPU)
    assert learnt.margin == 0
    # layers begin to hold more than they did
    kept = []
    for layer in layers_of(model)[2:4]:
        layer.mlp.act_fn.register_forward_hook(lambda *given: kept.append(given[-1].detach() + 1))
    live, held = update(model, packed), [*kept]
    kept.clear()
    assert 0.5 * sum(x.nbytes for x in held) < learnt.margin <= live.most - plans[-1].peak_bytes
    planned, margin = plans[-1].peak_bytes, learnt.margin
    left(planned)
    update(model, packed)
    kept.clear()
    assert plans[-1].peak_bytes <= planned - margin and set(plans[-1].modes) != {"nothing"}

    learnt.margin = planned // 2
    update(model, packed)
    kept.clear()
    assert plans[-1].peak_bytes <= planned - planned // 2
    learnt.margin = margin

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    layers_of(model)[2].mlp.register_forward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError) as problem:
        update(model, packed)
    (note,) = problem.value.__notes__
    assert "planned" in note and "were taken; the next plan leaves" in note
    assert learnt.margin > margin


def test_a_backward_that_died_is_noticed_before_the_next_forward(plans):
    model, packed = _six("qwen3"), _packed()
    update(model, packed)
    update(model, packed)
    learnt = choose.learnt_so_far(model, _CPU)
    live = LiveBytes(x for p in model.parameters() for x in (p, p.grad) if x is not None)
    with live:
        scores = pt.sequence_logprobs(model, packed, recompute="auto")
        taken = torch.zeros(plans[-1].peak_bytes + 1000, dtype=torch.uint8)
        del scores
        held = live.bytes
        pt.sequence_logprobs(model, packed, recompute="auto")
    assert len(taken) < held
    assert learnt.margin >= 1000


def test_a_probe_leaves_no_trace():
    """No gradient, hook, buffer or generator tells that it ran."""
    model = build("qwen3")
    seen: list[str] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: seen.append("gradient"))
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("step"))
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append("forward"))
        module.register_full_backward_hook(lambda *_: seen.append("backward"))
    state, buffers = torch.get_rng_state(), [b.clone() for b in model.buffers()]
    model.lm_head.weight.grad = given = torch.ones_like(model.lm_head.weight)
    training = model.eval().training
    with torch.no_grad():
        assert pt.max_micro_batch_tokens(model, 1 << 34) > 0
    assert not seen and torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, buffers, model.buffers())) and model.training == training
    assert model.lm_head.weight.grad is given and given.eq(1).all()
    assert all(p.grad is None for p in model.parameters() if p is not model.lm_head.weight)


def test_a_copy_shares_weights_that_train_and_keeps_ties():
    model = build("qwen3", tie_word_embeddings=True)
    copied = twin(model, lambda x: torch.nn.Parameter(x.detach()) if x.requires_grad else x.clone())
    assert copied.lm_head.weight is copied.model.embed_tokens.weight
    pairs = list(zip(model.named_parameters(), copied.named_parameters(), strict=True))
    assert all(a == b and x is not y for (a, x), (b, y) in pairs)
    assert all(x.data_ptr() == y.data_ptr() for (_, x), (_, y) in pairs)


def test_modes_that_tell_of_all_kinds():
    """The last layers of each kind, and one of a kind only where its plan leaves room."""
    model = build("qwen3_5")
    learnt = choose.learnt_so_far(model, _CPU)
    # the third attends, the others have states
    first = ("all", "all_but_attention", "all", "nothing")
    assert learnt.first_modes(compiled=False) == first
    assert learnt.first_modes(compiled=True) == ("all", "all", "all", "nothing")
    update(model, _packed(200))
    assert not learnt.knows(("nothing",)) and learnt.knows(("all",))
    plan: tuple[Mode, ...] = ("all",) * 4
    assert learnt.more_modes(plan, False, lambda _: True) == ("all", "all", "nothing", "all")
    assert learnt.more_modes(plan, False, lambda _: False) == plan
    assert learnt.more_modes(("nothing",) * 4, True, lambda _: True) == ("nothing",) * 4
    # nothing is taken for less than it is
    bounds = known_of(model)
    choose.memory_of(model, model, _CPU)
    assert learnt.knows(MODES)
    for mode in MODES:
        for most, one in zip(bounds.layers[mode], known_of(model).layers[mode], strict=True):
            for part in ("held", "working"):
                at_most, at = (getattr(x, part)[0] * 200 + getattr(x, part)[1] for x in (most, one))
                assert at_most >= 0.99 * at


def test_more_tokens_are_measured_anew(plans):
    model = _six("qwen3")
    for tokens, measured in ((200, True), (300, False), (700, True), (700, False)):
        update(model, _packed(tokens))
        assert isinstance(plans[-1], MeasuredPlan) == measured


@pytest.mark.parametrize("way", mostly(["kept trunks", "steps"], ["kept trunks"]))
def test_the_first_part_tells_of_all(way, monkeypatch):
    """Of kept trunks and of steps; then plans are those of a probe."""
    limit(monkeypatch, "logits of plans", 1 << 12)
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 90, 200)
    sequences = [np.concatenate([shared, rng.integers(3, 90, 90)]) for _ in range(4)]
    seen: list[Any] = []

    def note(planned: Any, *given: Any, **options: Any) -> Any:
        seen.append(planned(*given, **options))
        return seen[-1]

    wrap(monkeypatch, "plan of parts", note)

    def run(model: Any) -> dict[str, torch.Tensor]:
        if way == "steps":
            packed = pack_sequences(sequences)
            scores = pt.sequence_logprobs(model, packed, recompute="auto", max_step_tokens=250)
            torch.cat(scores.logprobs).sum().backward()
            return gradients(model)
        plan = pt.plan_micro_batches(sequences, 300, trunks=True)
        with pt.kept_trunks(model, plan[0], recompute="auto") as scored:
            for _, scores in scored:
                torch.cat(scores.logprobs).sum().backward()
        return gradients(model)

    expected = run(build("qwen3"))
    probed = seen[-1]
    model = build("qwen3")
    for number in range(3):
        model.zero_grad()
        with LiveBytes(model.parameters()):
            found = run(model)
        first = seen[-1].of_part[0]
        if number == 0:
            assert isinstance(first, MeasuredPlan)
            # what steps hold was probed with every layer recomputed
            assert first.first == (way == "kept trunks")
        if number == 0 and first.first:
            assert {m for part in seen[-1].of_part[1:] for m in part.modes} == {"all"}
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert [p.modes for p in seen[-1].of_part] == [p.modes for p in probed.of_part]
    peaks = [p.peak_bytes for p in probed.of_part]
    assert [p.peak_bytes for p in seen[-1].of_part] == pytest.approx(peaks, rel=0.1)


@pytest.mark.filterwarnings("ignore:FSDP is switching:UserWarning")
@pytest.mark.filterwarnings("ignore:The .NO_SHARD. sharding:FutureWarning")
@pytest.mark.usefixtures("ranks")
def test_what_cannot_be_measured_is_recomputed():
    """FSDP1 on a device without an allocator that counts; with one its layers are measured."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    model = build("qwen3")
    policy = ModuleWrapPolicy({type(layers_of(model)[0])})
    sharded = FullyShardedDataParallel(
        model, auto_wrap_policy=policy, use_orig_params=True, device_id=_CPU
    )
    packed = _packed(200)
    with pytest.raises(pt.UnsupportedError, match="cannot be probed"):
        pt.plan_recomputation(sharded, packed, 1 << 40)
    with pytest.warns(UserWarning, match="recomputes every layer: layers under FSDP1"):
        pt.sequence_logprobs(sharded, packed, recompute="auto")
    update(sharded, packed)
    assert pt.plan_recomputation(sharded, packed, 1 << 40).modes == ("nothing",) * 3


@pytest.mark.parametrize("other_knows", [True, False])
def test_ranks_that_know_nothing_run_the_same_modes(other_knows, monkeypatch):
    """Those that tell where no rank knows anything; where one does, every layer recomputes all."""
    # what the other rank says: its place among plans, whether it knows nothing, whether something
    other = torch.tensor([0, 0, not other_knows, other_knows])
    monkeypatch.setattr(
        dist, "all_reduce", lambda most, *_, **__: most.copy_(torch.maximum(most, other))
    )
    monkeypatch.setattr(choose, "agree", lambda group, device, own, *_: own()[0])
    first: tuple[Mode, ...] = ("all", "all_but_attention", "nothing")
    own = MeasuredPlan(first, 0, first=True)
    share = choose.GroupShare(None, None)
    plan = share.agreed(_CPU, lambda: own, lambda: first)
    assert plan.modes == (("all",) * 3 if other_knows else first)
    assert isinstance(plan, MeasuredPlan)
