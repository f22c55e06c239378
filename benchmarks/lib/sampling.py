"""Sampling by `TreeSampler`: its sides, the times of its steps, and the check before they count.

Sides, by name: "tree" (as it is), "tree-compiled" (the model's layers are compiled), "tree-eager"
(no step is captured in a CUDA graph), "rows" (captured, and every row reads all of its keys: the
same kernels without sharing) and "rows-compiled".
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from benchmarks.lib.decoding import NEVER
from prefixtree import PrefixForest, pack, sequence_logprobs
from prefixtree.kernels.decoding import work as decode_work
from prefixtree.models.compiled import compile_layers
from prefixtree.sampling import Draws, Samples, TreeSampler
from prefixtree.sampling.step import DecodeStep

SIDES = ("tree", "tree-compiled", "tree-eager", "rows", "rows-compiled")
# of the check, in float32
CHECKED_TOKENS, LIMIT = 12, 2e-4
# options of inductor to try out
INDUCTOR: dict[str, Any] = {}


def model_of(settings: Any, layers: int | None, dtype: str, device: str) -> Any:
    """A model of a configuration, which this changes: random weights, the same for every side.

    Args:
        layers: its first layers alone. Default: all.
    """
    torch.manual_seed(0)
    if layers is not None:
        settings.num_hidden_layers = layers
        settings.layer_types = settings.layer_types[:layers]
    # the family's module looks for kernels when it is imported, which a default device may disturb
    MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(settings, dtype=getattr(torch, dtype))
    # nothing stops early
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


class Clock:
    """Notes when the device has done something, without waiting for it."""

    def __init__(self, device: str) -> None:
        self.is_cuda = torch.device(device).type == "cuda"
        self.marks: list[Any] = []

    def mark(self) -> None:
        """Now, in the device's queue."""
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def ms(self) -> list[float]:
        """Milliseconds between marks."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.is_cuda:
            torch.cuda.synchronize()
            return [first.elapsed_time(second) for first, second in pairs]
        return [1e3 * (second - first) for first, second in pairs]


@contextmanager
def marked_steps(clock: Clock) -> Iterator[None]:
    """A mark behind the first draw of each batch, and one behind every step."""
    draw, run = DecodeStep.draw, DecodeStep.run

    def after(function: Any) -> Any:
        def marked(step: DecodeStep, *arguments: Any) -> None:
            function(step, *arguments)
            clock.mark()

        return marked

    with patch.object(DecodeStep, "draw", after(draw)), patch.object(DecodeStep, "run", after(run)):
        yield


@contextmanager
def sharing(side: str) -> Iterator[None]:
    """Work lists as a side has them."""
    if side.startswith("rows"):
        with patch.object(decode_work, "SHARE_FROM", NEVER):
            yield
    else:
        yield


def sampler_of(side: str, model: Any, max_keys: int, rows: int) -> TreeSampler:
    """A side's sampler."""
    if side.endswith("-compiled"):
        compile_layers(model, options=dict(INDUCTOR))
    return TreeSampler(model, max_keys, max_rows=rows, graphs=side != "tree-eager")


def sampled(
    side: str, sampler: TreeSampler, prompts: Sequence[Any], n: int, new: int, device: str
) -> tuple[float, list[float], Samples]:
    """n continuations of every prompt: seconds, milliseconds of the prefill and of each step, and
    the samples, which are no part of the time."""
    clock = Clock(device)
    if clock.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with sharing(side), marked_steps(clock):
        clock.mark()
        rows = sampler.start(PrefixForest.from_sequences(prompts))
        rows.branch(n)
        rows.generate(new, Draws(seed=1))
        if clock.is_cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds, clock.ms(), rows.samples()


def wrong(side: str, model: Any) -> list[str]:
    """The errors of a side with a model in float32: greedy tokens beside `generate`, and
    log-probabilities beside `sequence_logprobs`."""
    rng = np.random.default_rng(0)
    prompts = list(rng.integers(0, model.config.vocab_size, (2, 40)))
    ids = torch.from_numpy(np.stack(prompts)).to(model.device)
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    expected = other.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=CHECKED_TOKENS,
        do_sample=False,
    )
    red = []
    with sharing(side):
        sampler = sampler_of(side, model, 500, 8)
        greedy = sampler.sample(prompts, 2, CHECKED_TOKENS, Draws(temperature=0))
        drawn = sampler.sample(prompts, 4, CHECKED_TOKENS, Draws(seed=2))
    found = [s.tolist() for s in greedy.sequences]
    if found != [row for row in expected.tolist() for _ in range(2)]:
        red.append("greedy tokens")
    packed = pack(drawn.forest).to(model.device)
    # layers that are compiled for steps are checked against layers that are not
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        scores = sequence_logprobs(model, packed, loss_mask=drawn.loss_masks).logprobs
    pairs = zip(scores, drawn.logprobs, strict=True)
    error = max(float((new.cpu() - old).abs().max()) for new, old in pairs)
    if not error <= LIMIT:
        red.append(f"log-probabilities {error:.1e} > {LIMIT:.1e}")
    if side != "tree-eager" and model.device.type == "cuda":
        graphs = sampler._steps.graphs
        if graphs is None or not graphs.num_captured:
            red.append(f"no graph was captured ({graphs and graphs.reason})")
    return red
