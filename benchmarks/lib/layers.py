"""Random-weight layers and models of Qwen's sizes, FLOPs, and the check of every side.

Legend: T packed tokens, R replicated tokens, P prompt tokens, N responses.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from benchmarks.lib.precision import (
    REFERENCE,
    SHARE,
    distances,
    lowered,
    packed_in,
    padding_of,
    share,
    too_far,
)
from benchmarks.lib.replicated import WithFla, attending, chains, in_pieces
from prefixtree import PackedForest, PrefixForest, compile_layers
from prefixtree.planning.model_cost import ModelCost
from prefixtree.testing.attention import Attention
from prefixtree.testing.compare import (
    Run,
    gradient_differences,
    run_packed,
    run_replicated,
    worst_difference,
)
from prefixtree.testing.verify import random_objective

# R of the paper's tables
RESPONSES = (131, 2048)
# queries and keys times this: their scores spread as trained ones do, and attention shows in the
# output at any length
SHARPNESS = 1.5


# of these every fourth layer attends, the others are gated delta rules
HYBRIDS = ("qwen3.5-9b", "qwen3-next-80b-a3b")
# what `config` makes
SHAPES = ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", *HYBRIDS)


def config(
    layers: int, is_tiny: bool, vocabulary: int | None = None, shape: str = "qwen3-8b"
) -> Any:
    """The sizes of a model's layers, or some that a CPU runs in no time."""
    common: dict[str, Any] = {
        "num_hidden_layers": layers,
        "attn_implementation": "prefixtree",
        "tie_word_embeddings": False,
    }
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    if shape in ("qwen3-8b", "qwen3-32b"):
        hidden, intermediate, heads = (
            (4096, 12288, 32) if shape == "qwen3-8b" else (5120, 25600, 64)
        )
        sizes: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
            "max_position_embeddings": 1_048_576,
        }
        kind: Any = Qwen3Config
    elif shape == "qwen3-30b-a3b":
        sizes = {
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "vocab_size": 151_936,
            "max_position_embeddings": 262_144,
            # one product per weight for the tokens of all experts
            "experts_implementation": "grouped_mm",
        }
        small |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        kind = Qwen3MoeConfig
    else:
        _import_without_fla()
        # the defaults are the sizes of the model that each is named for
        is_next = shape == "qwen3-next-80b-a3b"
        kind = Qwen3NextConfig if is_next else Qwen3_5TextConfig
        sizes = {"vocab_size": kind().vocab_size}
        small |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        small |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        if is_next:
            small |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            small |= {"shared_expert_intermediate_size": 32}
    if is_tiny:
        sizes |= small
    if vocabulary is not None:
        sizes["vocab_size"] = min(vocabulary, sizes["vocab_size"])
    return kind(**sizes, **common)


def _import_without_fla() -> None:
    """Imports the hybrids of transformers with their readable functions, which the check wants.

    transformers takes fla's in their place if fla is there as it is imported; fla then tunes itself
    for minutes, in every dtype of the check.
    """
    hidden = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "fla"}
    sys.modules |= dict.fromkeys([*hidden, "fla"])  # type: ignore[arg-type]
    try:
        for name in ("qwen3_5", "qwen3_next"):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    finally:
        del sys.modules["fla"]
        sys.modules |= hidden


def model_of(
    shape: Any, device: str, dtype: str, attention: str = "prefixtree", seed: int = 0
) -> Any:
    """A model of random weights; equal ones for an equal seed and dtype on one device."""
    torch.manual_seed(seed)
    # a small model with the usual 0.02 attends uniformly, where a wrong mask would hardly show
    shape.initializer_range = max(0.02, shape.hidden_size**-0.5)
    with torch.device(device):
        out = AutoModelForCausalLM.from_config(
            shape, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    sharpen(out)
    return out


def sharpen(module: torch.nn.Module) -> None:
    """Sets the norms of queries and keys to SHARPNESS."""
    for name, weight in module.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(weight, SHARPNESS)


def checkpointed(model: Any) -> Any:
    """In training mode, with every layer recomputed in the backward."""
    model.train()
    options = {"use_reentrant": False}
    # renamed in transformers 5.23, where the old name warns
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


# ---- batches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """The sequences of one forward.

    Attributes:
        sequences: token ids.
        masks: bool [n] per sequence, true where a token is scored.
        forest: of the sequences.
    """

    sequences: list[np.ndarray]
    masks: list[np.ndarray]
    forest: PrefixForest

    @classmethod
    def of(cls, sequences: list[np.ndarray], masks: list[np.ndarray]) -> Batch:
        """With their forest."""
        return cls(sequences, masks, PrefixForest.from_sequences(sequences))

    def packed(self, side: str, device: str, precision: str = "plain") -> PackedForest:
        """As the side's forest: the tree, or one chain per sequence."""
        forest = self.forest if side == "packed" else chains(self.forest)
        return packed_in(precision, forest).to(device)


def attention_of(
    side: str, forest: PrefixForest, device: str, dtype: str, precision: str = "plain"
) -> Attention | None:
    """The attention of a side, for `attending`; None where the tree mask is enough."""
    if side in ("packed", "own"):
        return None
    lengths = forest.sequence_lengths.tolist()
    if padding := padding_of(chains(forest), precision):
        # one more sequence, which nobody reads
        lengths.append(padding)
    if side == "fla":
        return WithFla.of(lengths, torch.device(device), getattr(torch, dtype))
    return in_pieces(side, lengths, torch.device(device), getattr(torch, dtype))


def attention_in(
    side: str, forest: PrefixForest, options: argparse.Namespace, layers_by: str
) -> tuple[Attention | None, str]:
    """The attention of a side, for `attending`, and the backend of its packed forest.

    In compiled layers flash-attn-4's kernels for sequences of variable lengths run by our operator,
    whose flash backend takes them for chains: its own function would break each layer's graph.
    """
    if side == "fa4" and layers_by == "compile":
        return None, "flash"
    precision = getattr(options, "precision", "plain")
    attend = attention_of(side, forest, options.device, options.dtype, precision)
    has_loop = options.device == "cpu" or options.dtype == "float32"
    if attend is not None and layers_by == "compile" and has_loop:
        # a sequence at a time: compiled, it would be a graph per list of lengths
        attend = torch.compiler.disable(attend)
    return attend, options.backend


def prompt_batch(prompt: int, responses: Sequence[int], vocabulary: int, seed: int = 0) -> Batch:
    """One prompt and its responses, which alone are scored."""
    rng = np.random.default_rng(seed)
    # responses differ in their first token, as far as there are tokens
    shared = rng.integers(0, vocabulary, prompt)
    first = rng.permutation(vocabulary)[: len(responses)]
    sequences, masks = [], []
    for i, length in enumerate(responses):
        own = rng.integers(0, vocabulary, length)
        own[0] = first[i % len(first)]
        sequences.append(np.concatenate([shared, own]))
        masks.append(np.arange(prompt + length) >= prompt)
    return Batch.of(sequences, masks)


def response_lengths(count: int, scale: float, seed: int = 0) -> list[int]:
    """R, uniform in 131 to 2,048; the first n of more are the same n."""
    rng = np.random.default_rng(seed)
    low, high = RESPONSES
    return np.maximum(1, rng.integers(low, high + 1, count) * scale).astype(int).tolist()


def faster_layers(model: Any, by: str) -> None:
    """Replaces norms, activations and rotary embeddings of a model, as trainers do.

    Args:
        by: transformers (nothing), compile (torch.compile of every decoder layer, for any number
            of tokens) or liger (the kernels of the package liger-kernel).
    """
    if by == "compile":
        compile_layers(model)
    elif by == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}
        apply_liger_kernel_to_qwen3(model=model, **losses)


# ---- FLOPs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flops:
    """Of one forward, by what they are spent on; see `prefixtree.planning.model_cost`."""

    linear: float
    attention: float
    head: float

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.linear + other.linear, self.attention + other.attention, self.head + other.head
        )

    def total(self, linear: float, attention: float, head: float) -> float:
        """With the number of forwards that each part counts as."""
        return linear * self.linear + attention * self.attention + head * self.head


# forward and backward, without what checkpointing or the head do again: useful work
UPDATE = (3.0, 3.5, 3.0)
# what the machine computes in one with every layer checkpointed and the head made twice
CHECKPOINTED = (4.0, 4.5, 4.0)
FORWARD = (1.0, 1.0, 1.0)


def flops(cost: ModelCost, tokens: int, pairs: int, scored: int) -> Flops:
    """One forward of so many tokens, visible pairs per head, and scored tokens."""
    per_pair = sum(layer.per_pair for layer in cost.layers)
    return Flops(
        2.0 * (cost.token_weights + cost.token_states) * tokens,
        2.0 * per_pair * pairs,
        2.0 * cost.lm_head_weights * scored,
    )


# ---- the check -----------------------------------------------------------------------------------


# a side may err so many times as much as eager attention in the same dtype: the sums are others
FACTOR = 3.0


def over_limit(
    found: dict[str, float], allowed: dict[str, float], dtype: str, float32_eps: int = 100
) -> dict[str, Any]:
    """Errors by name over FACTOR times eager's and the dtype's epsilon (`float32_eps` of them in
    float32, where order decides); the worst share, and the names above 1. NaN is red."""
    slack = torch.finfo(getattr(torch, dtype)).eps * (float32_eps if dtype == "float32" else 1)
    shares = {name: found[name] / (FACTOR * allowed[name] + slack) for name in found}
    worst = max(shares, key=lambda name: shares[name])
    red = [name for name, share in shares.items() if not share <= 1]
    return {"worst": worst, "error_over_limit": shares[worst], "red": red}


def check_sides(
    sides: Sequence[str], options: argparse.Namespace, layers_by: str = "transformers"
) -> dict[str, dict[str, Any]]:
    """Each side on a small batch of ragged responses against float32, before anything is timed.

    A few layers of full width with few tokens in the vocabulary: log-probabilities, entropies and
    every parameter's gradient, against eager attention of every sequence alone.

    Args:
        layers_by: `faster_layers` of the sides; the reference stays as transformers has it.

    Returns:
        `over_limit` by side. In a precision that is not plain, what eager attention in that
        precision errs is allowed, and `distances` are added: of the side, of the stock forward in
        the precision, of the one without it, and from side to stock forward.
    """
    # where layers differ, one of each kind
    name = getattr(options, "shape", SHAPES[0])
    shape = config(4 if name in HYBRIDS else 2, options.is_tiny, vocabulary=4096, shape=name)
    if hasattr(shape, "num_experts"):
        # the gradients of all of them, up to 512, would be compared for minutes
        shape.num_experts = min(32, shape.num_experts)
    precision = getattr(options, "precision", "plain")
    responses = [40, 1, 77, 130, 9]
    if precision == "float8":
        # alone, a sequence is not padded; the forest is
        responses = [42, 10, 74, 138, 26]
    batch = prompt_batch(150, responses, shape.vocab_size)
    objective = random_objective(batch.sequences, batch.masks, 0)
    build = partial(model_of, shape, options.device, options.dtype)
    reference = REFERENCE.get(precision, precision)
    eager = lowered(build("eager"), reference)
    base = run_replicated(eager, batch.sequences, objective)
    exact = run_replicated(eager.float(), batch.sequences, objective)
    del eager
    stock = base
    if reference != precision:
        stock = run_replicated(lowered(build("eager"), precision), batch.sequences, objective)
    allowed = _errors(stock, exact)
    model = lowered(build(), precision)
    faster_layers(model, layers_by)
    out = {}
    for side in sides:
        # layers that were compiled with one attention keep it
        torch._dynamo.reset()
        try:
            run = _small_run(side, model, batch, objective, options, layers_by)
        except Exception as problem:
            # a peer that cannot run is red, with the reason, and the others go on
            out[side] = {"red": [f"{type(problem).__name__}: {problem}"[:300]]}
            continue
        # exponentials of sums in layers with a state enlarge rounding, in eager runs too
        eps = 1000 if name in HYBRIDS else 100
        out[side] = over_limit(_errors(run, exact), allowed, options.dtype, eps)
        if precision != "plain":
            runs = {options.dtype: base, "stock": stock, "side": run}
            far = {name: distances(one, exact) for name, one in runs.items()}
            far["side to stock"] = distances(run, stock)
            out[side]["red"] += too_far(far, precision)
            shares = {"side": share(run, exact), "stock": share(stock, exact)}
            if not abs(shares["side"] - shares["stock"]) <= SHARE:
                out[side]["red"].append(f"shares of float32's gradient are {shares}")
            out[side]["distances"] = far
    # nothing of this model in what is measured after: its memory, the code compiled for its shapes
    del model
    gc.collect()
    torch._dynamo.reset()
    return out


def _errors(run: Run, exact: Run) -> dict[str, float]:
    return {
        "logprobs": worst_difference(run.logprobs, exact.logprobs),
        "entropy": worst_difference(run.entropy, exact.entropy),
        **gradient_differences(run.gradients, exact.gradients),
    }


def _small_run(
    side: str,
    model: Any,
    batch: Batch,
    objective: Any,
    options: argparse.Namespace,
    layers_by: str,
) -> Run:
    attend, backend = attention_in(side, batch.forest, options, layers_by)
    precision = getattr(options, "precision", "plain")
    packed = batch.packed(side, options.device, precision).with_options(backend)
    with attending(attend):
        return run_packed(model, packed, objective, batch.masks)
