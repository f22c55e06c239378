"""An interrupt at any line of what changes a model leaves it as it was, and the next call works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import prefixtree as pt
from prefixtree.experts import routers
from prefixtree.images import vision as images
from prefixtree.kernels import operators
from prefixtree.models import changes
from prefixtree.models import checks as model_checks
from prefixtree.parallel.ledger import Ledger
from prefixtree.planning.costs import ImportCost
from prefixtree.recompute import layers
from prefixtree.sampling import TreeSampler
from prefixtree.sampling.forward import CachedForward
from prefixtree.scoring import forward as scoring
from prefixtree.scoring import lm_head as scoring_lm_head
from prefixtree.scoring import part_runs
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support import image_cases
from tests.support.interrupts import interrupted_at_each_line
from tests.support.models import build, pack_sequences
from tests.support.replay import drawn_routes

_SEQUENCES = [[1, 2, 3, 4], [1, 2, 5], [6, 7]]
_STEPS: dict[str, Any] = {"max_step_tokens": 4, "import_cost": ImportCost(token_bytes=1e9)}


@pytest.fixture
def lone_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that modules hold: classes, attributes, hooks, switches, parameters with versions."""

    def fact(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: fact(each) for key, each in value.items()}
        if isinstance(value, torch.Tensor):
            return id(value), value._version, value.requires_grad
        plain = value is None or isinstance(value, (bool, int, float, str))
        return value if plain else id(value)

    return {name: (type(m), fact(vars(m))) for name, m in model.named_modules()}


def check(
    model: nn.Module, run: Callable[[], Any], *functions: Callable[..., Any] | CodeType
) -> None:
    """`run` gives tensors."""
    expected = run()
    before, torchs = state_of(model), torchs_state()
    # every interrupted call is a next one, up to its place
    for count, place in enumerate(interrupted_at_each_line(run, functions)):
        assert state_of(model) == before, place
        assert torchs_state() == torchs, place
        assert not [lock for lock in changes._locks.values() if "unlocked" not in repr(lock)], place
        if count % 10 == 0:
            assert all(map(torch.equal, run(), expected)), place
    assert all(map(torch.equal, run(), expected))
    assert count > 5


def torchs_state() -> list[Any]:
    """torch's state of the thread."""
    mode, device = torch.is_inference_mode_enabled(), torch.get_default_device()
    return [torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), mode, device]


def tiny(model_type: str = "llama", **config: Any) -> tuple[Any, pt.PackedForest]:
    return build(model_type, num_hidden_layers=1, **config), pack_sequences(_SEQUENCES)


_CHANGES = [changes.changing, changes._lock_of, changes._put, changes._remove]
_CHANGES += [f for f in vars(changes.Changes).values() if callable(f) and f.__name__ != "keep"]
_CALLS = [model_checks.every_layer_attends, operators.counted_calls]


def test_scoring() -> None:
    model, packed = tiny()
    run = lambda: sequence_logprobs(model, packed, recompute="all").logprobs  # noqa: E731
    forward = scoring.ModelForward.__call__
    functions = [scoring_lm_head.scoring_lm_head, layers.recomputing, forward]
    check(model, run, *_CHANGES, *_CALLS, *functions)


def test_layers_in_layers_of_a_checkpoint() -> None:
    """Their switches are changed in the backward too."""
    model, packed = build("zamba2"), pack_sequences(_SEQUENCES)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        torch.cat(sequence_logprobs(model, packed, recompute="all").logprobs).sum().backward()
        return [model.lm_head.weight.grad]

    check(model, run, layers._as_one)


def test_steps() -> None:
    model, packed = tiny()

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        torch.cat(sequence_logprobs(model, packed, **_STEPS).logprobs).sum().backward()
        return [model.lm_head.weight.grad]

    check(model, run, part_runs.Wrapped.as_in_the_forward, Ledger.running)


def test_steps_of_ddp(lone_group: None) -> None:
    model, packed = tiny()
    wrapped = nn.parallel.DistributedDataParallel(model)
    run = lambda: sequence_logprobs(wrapped, packed, **_STEPS).logprobs  # noqa: E731
    check(wrapped, run, part_runs.Wrapped.as_in_the_forward)


def test_images() -> None:
    model, made = image_cases.build("qwen3_vl"), image_cases.batch("qwen3_vl")
    known = image_cases.images_of(model, made)
    packed = pack_sequences(known.sequences)
    run = lambda: sequence_logprobs(model, packed, images=known).logprobs  # noqa: E731
    check(model, run, images.EncodedImages.encoded)


def test_routes() -> None:
    """The hooks of a replay stay, and an interrupt while they are registered leaves none out."""
    sequences = [np.array(s) for s in _SEQUENCES]
    routes = drawn_routes(sequences, layers=1)
    packed = pt.pack(pt.PrefixForest.from_sequences(sequences, routes=routes))
    model, _ = tiny("qwen3_moe")
    run = lambda: sequence_logprobs(model, packed).logprobs  # noqa: E731
    check(model, run, routers.replaying, routers._Keep.__call__, routers._Choose.__call__)
    expected, state = run(), {name: value.clone() for name, value in model.state_dict().items()}

    def from_a_fresh_model() -> list[torch.Tensor]:
        nonlocal model
        model, _ = tiny("qwen3_moe")
        model.load_state_dict(state)
        return run()

    for place in interrupted_at_each_line(from_a_fresh_model, [routers._prepare]):
        assert all(map(torch.equal, run(), expected)), place


def test_sampling() -> None:
    model, _ = tiny()
    sampler = TreeSampler(model.eval(), max_keys=64)
    run = lambda: [torch.as_tensor(sampler.sample(_SEQUENCES, 2, 2).logprobs[0])]  # noqa: E731
    check(model, run, *_CALLS, CachedForward.prefill, CachedForward._eager, CachedForward._call)
