"""torch.compile: one graph for all forests, the same results."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend

import prefixtree as pt
from prefixtree.scoring.logprobs import sequence_logprobs
from tests.support.models import (
    Run,
    assert_same,
    build,
    make_objective,
    ragged_sequences,
    run_packed,
    run_replicated,
)

pytestmark = [
    # dynamo's own look at .grad of its inputs
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
]


@pytest.fixture(autouse=True)
def _no_traces_of_other_tests() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Counts compilations."""

    def __init__(self, name: str) -> None:
        self.compile = lookup_backend(name)
        self.graphs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.graphs += 1
        return self.compile(module, inputs)


def _runs(model: Any, reference: Any, backend: Backend, at_most: int) -> None:
    """Six forests of different lengths and shapes: right each, and after two (one length, then any
    length) nothing is compiled any more."""
    rng, lengths = np.random.default_rng(0), set()
    for i in range(6):
        sequences = ragged_sequences(i)[: int(rng.integers(2, 13))]
        objective = make_objective(sequences, seed=i)
        packed = pt.pack(pt.PrefixForest.from_sequences(sequences))
        lengths.add(packed.num_tokens)
        run = run_packed(model, packed, objective)
        names = {n: n.replace("_orig_mod.", "") for n in run.gradients}
        run = Run(run.logprobs, run.entropy, {names[n]: g for n, g in run.gradients.items()})
        assert_same(run, run_replicated(reference, objective))
        if i == 1:
            compiled = backend.graphs
            assert 1 <= compiled <= at_most
    assert backend.graphs == compiled
    assert len(lengths) > 4


# compile_layers, which shares graphs as below, is in tests/models/test_compiled.py, where windows,
# sinks and experts have no graph break either
@pytest.mark.full
def test_a_compiled_layer():
    model = build("qwen3", num_hidden_layers=1)
    backend = Backend("eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend)
    _runs(model, build("qwen3", "eager", num_hidden_layers=1), backend, at_most=8)


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="inductor needs a C++ compiler"
)
@pytest.mark.full
@pytest.mark.parametrize("model_type", ["gpt_oss", "gemma2"])
def test_layers_compiled_by_inductor(model_type):
    """With sinks and windows, with a softcap and windows. Inductor alone lays tensors
    out by what the operator promises; the queries, keys and values of a model are transposed. The
    first layer has the window. What is beside its attention, which is two thirds of the time, stays
    eager."""
    model, reference = (
        build(model_type, attention, num_hidden_layers=1) for attention in ("prefixtree", "eager")
    )
    for layer in model.model.layers:
        layer.self_attn.compile(fullgraph=True, dynamic=True)
    for seed in range(2):
        objective = make_objective(ragged_sequences(seed), seed)
        packed = pt.pack(pt.PrefixForest.from_sequences(objective.sequences))
        assert_same(run_packed(model, packed, objective), run_replicated(reference, objective))


def test_all_layers_of_a_kind_share_their_graphs(monkeypatch):
    """A graph per layer would be over dynamo's limit in any model of use: from there on layers run
    uncompiled, or raise. With and without gradients, as a trainer calls it."""
    # two kinds, each with and without gradients
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 4)
    model = build("gemma2", num_hidden_layers=5)
    backend = Backend("eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=backend, dynamic=True)
    for seed in range(2):
        packed = pt.pack(pt.PrefixForest.from_sequences(ragged_sequences(seed)))
        with torch.no_grad():
            sequence_logprobs(model, packed)
        scores = sequence_logprobs(model, packed)
        torch.cat(scores.logprobs).sum().backward()
    # of layers with a window and without, each with and without gradients
    assert backend.graphs == 4


@pytest.mark.full
def test_a_compiled_decoder():
    model = build("gemma2", num_hidden_layers=2)
    backend = Backend("eager")
    model.model.compile(fullgraph=True, backend=backend)
    _runs(model, build("gemma2", "eager", num_hidden_layers=2), backend, at_most=2)


@pytest.mark.full
def test_a_compiled_model():
    """The decoder is one graph; the scoring, which is another in every call, stays outside."""
    backend = Backend("eager")
    model = torch.compile(build("qwen3", num_hidden_layers=1), backend=backend)
    _runs(model, build("qwen3", "eager", num_hidden_layers=1), backend, at_most=2)
