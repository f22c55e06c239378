"""What layers hold and work with, measured in a micro-batch and by a probe, against bytes that are
counted; and what "auto" makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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
from prefixtree.models.families import forward_inputs
from prefixtree.models.layers import layers_of
from prefixtree.recompute import forward
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.layers import MODES, Mode, recomputing
from prefixtree.recompute.measured import MeasuredPlan, Recorder
from prefixtree.recompute.memory import ModelMemory
from prefixtree.recompute.probes import memory_of_config, twin
from tests.support.full import mostly
from tests.support.hooks import limit, wrap
from tests.support.models import adapted, build, gradients, pack_sequences, quantised, same_bits

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
    memory = forward.learnt_so_far(find_causal_lm(model), _CPU).memory()
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
@pytest.mark.parametrize("case", mostly(_MODELS, set(_MODELS) - {"experts", "dense, autocast"}))
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
            slack = 1.35 if case == "FSDP2" else 1.08
            assert live.most / slack < plan.peak_bytes <= room + 1
            assert live.most < 1.35 * plan.peak_bytes
        assert set(plan.modes) != {"nothing"}
        measured, other = known_of(model), make()
        probed = forward.memory_of(other, find_causal_lm(other), _CPU)
    for mode in MODES:
        for one, two in zip(measured.layers[mode], probed.layers[mode], strict=True):
            for part in ("held", "working"):
                at = [x[0] * _TOKENS + x[1] for x in (getattr(one, part), getattr(two, part))]
                assert at[0] == pytest.approx(at[1], rel=0.1, abs=20_000), (mode, part)
