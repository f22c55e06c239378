"""`verify`: packed next to replicated on a model in memory, with hooks, adapters and patches."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from prefixtree._numbers import integers
from prefixtree.errors import ForestError, UnsupportedError, with_hints
from prefixtree.forest import PrefixForest
from prefixtree.models.checks import find_causal_lm
from prefixtree.models.family_table import layer_types_of
from prefixtree.models.prepared import prepare
from prefixtree.models.rows_alone import is_sharded
from prefixtree.packing.layout import pack
from prefixtree.testing.compare import Run, run_packed, run_replicated
from prefixtree.testing.judge import Limits, float32_limits, judge
from prefixtree.testing.models import EAGER_ALONE
from prefixtree.testing.reference import (
    EAGER_BY_ROWS,
    FaithfulSums,
    chooses_keys,
    float32_convolutions,
)
from prefixtree.testing.verify import random_objective


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`: a table when printed, and as a condition whether all is green.

    Attributes:
        checks: of log p, entropies, the gradient of each parameter and the whole gradient: `name`,
            `value` (the worst difference), `limit`, `passed`, `where` (the worst parameter), and
            `replicated` (how far the replicated run is off there, where it is not the reference).
        reference: the reference of both runs: "replicated", or the dtype of a copy of the model
            that ran every sequence alone.
        num_sequences, num_replicated_tokens, num_tokens: of the forest.
    """

    checks: tuple[Any, ...]
    reference: str
    num_sequences: int
    num_replicated_tokens: int
    num_tokens: int

    @property
    def passed(self) -> bool:
        """Whether the packed run equals the runs of every sequence alone, to rounding."""
        return all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        lines = [
            f"{self.num_sequences:,} sequences, {self.num_replicated_tokens:,} tokens, "
            f"{self.num_tokens:,} distinct; compared with {self.reference}",
            f"{'':<14} {'difference':>11} {'replicated':>11} {'limit':>9}",
        ]
        for check in self.checks:
            where = "" if check.where is None else f"  {check.where}"
            verdict = "ok" if check.passed else "DIFFERS"
            of_replicated = "" if check.replicated is None else f"{check.replicated:.2e}"
            lines.append(
                f"{check.name:<14} {check.value:>11.2e} {of_replicated:>11} {check.limit:>9.2e} "
                f"{verdict:<7}{where}"
            )
        return "\n".join([*lines, "PASS" if self.passed else "FAIL"])


@with_hints
def verify(
    model: nn.Module,
    sequences: Sequence[Any],
    loss_masks: Sequence[Any] | None = None,
    *,
    seed: int = 0,
) -> Verdict:
    """Runs sequences packed, and each alone with eager attention, on the model as it is: hooks,
    adapters, patches and replaced modules included.

        print(pt.verify(model, rollouts[:8]))

    Compared are every log-probability, every entropy and the gradient of every parameter that
    trains (of all where none does), alone and together, of a loss that weighs tokens at random. In
    float32 log p and entropy may differ by 1e-4, the gradient of a parameter by 1e-3 of its norm,
    the whole gradient by 2e-4 (all by 1e-3 where layers carry a state). Where they differ by more,
    or in a shorter dtype, a copy of the model runs in float64 (float32), and the packed run may be
    twice as far from it as the replicated run is, and by that limit (the dtype's epsilon) beyond.
    Gradients, random numbers and mode of the model are afterwards as before. Times are not
    measured.

    Args:
        model: a causal language model of transformers, whole on this process: wrapped by PEFT or
            DDP or not. It is prepared, as by `prepare`.
        sequences: token ids, [n] each.
        loss_masks: as in `sequence_logprobs`. Default: every token is scored.
        seed: of the weights of tokens.

    Raises:
        UnsupportedError: a model that does not run exactly on packed forests; one that is sharded,
            that chooses keys, or that cannot be copied in a longer dtype where that is needed; one
            with hooks on the gradients of its parameters, which might step.
        ForestError: sequences or masks that are not as `sequence_logprobs` takes them, or nothing
            that is scored.
    """
    while isinstance(model, DistributedDataParallel):
        model = model.module
    causal_lm = prepare(find_causal_lm(model))
    _check(model, causal_lm)
    forest = PrefixForest.from_sequences(sequences)
    # the forest checked the sequences
    tokens = [integers("sequence", s).astype(np.int64) for s in sequences]
    objective = random_objective(tokens, loss_masks, seed)
    if not any(scored.any() for scored in objective.scored):
        raise ForestError("no token is scored: give verify sequences of two tokens or more")

    def alone(model: nn.Module, causal_lm: Any) -> Run:
        with _eager(causal_lm), FaithfulSums():
            return run_replicated(model, tokens, objective)

    def in_(dtype: torch.dtype) -> Run:
        try:
            longer = copy.deepcopy(model).to(dtype)
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:
            raise UnsupportedError(
                f"verify needs a copy of the model in {dtype}, which shows what rounding does, and "
                f"{type(model).__name__} cannot be copied ({problem}): compare one in float32"
            ) from problem
        return alone(longer, find_causal_lm(longer))

    with _as_it_was(model), float32_convolutions():
        with FaithfulSums():
            packed = run_packed(model, pack(forest), objective, loss_masks)
        replicated = alone(model, causal_lm)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        short = dtypes & {torch.bfloat16, torch.float16}
        if short:
            limits = Limits.alike(max(torch.finfo(dtype).eps for dtype in short))
            exact, reference = in_(torch.float32), "float32"
        else:
            limits, exact, reference = float32_limits(causal_lm.config), replicated, "replicated"
        checks, longer = judge(packed, replicated, exact, limits, lambda: in_(torch.float64))
        reference = reference if longer is None else "float64"
    counts = forest.num_sequences, forest.num_replicated_tokens, forest.num_tokens
    return Verdict(tuple(checks), reference, *counts)


def _check(model: nn.Module, causal_lm: Any) -> None:
    if is_sharded(model):
        raise UnsupportedError(
            "verify runs as many forwards as there are sequences, on this process alone, and the "
            "parameters are sharded over ranks: verify the model before it is sharded"
        )
    if chooses_keys(causal_lm.config):
        raise UnsupportedError(
            "verify would compare other choices of keys: use the command prefixtree verify"
        )
    for name, p in model.named_parameters():
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                f"{name} has a hook that runs when its gradient is there, and may step: remove it "
                "while the model is verified"
            )


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Begins gradients at None without compiled code, and restores them and random numbers."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    trained = [p.requires_grad for p in parameters]
    device = parameters[0].device
    devices = [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            for p in parameters:
                p.grad = None
                if not any(trained) and p.is_floating_point():
                    p.requires_grad_(True)
            yield
        finally:
            for p, gradient, does_train in zip(parameters, gradients, trained, strict=True):
                p.grad = gradient
                p.requires_grad_(does_train)


@contextmanager
def _eager(causal_lm: Any) -> Iterator[None]:
    """Sets the family's eager attention, a few query rows at a time, while open."""
    kinds = layer_types_of(causal_lm.config.get_text_config())
    name = EAGER_BY_ROWS if EAGER_ALONE.isdisjoint(kinds) else "eager"
    configs = {id(c): c for m in causal_lm.modules() if (c := getattr(m, "config", None))}
    text = causal_lm.config.get_text_config()
    configs |= {id(c): c for c in (causal_lm.config, text)}
    before = [(c, c._attn_implementation) for c in configs.values()]
    try:
        # inner configs come last: a vision encoder keeps its attention
        for config, implementation in before:
            of_text = implementation == "prefixtree"
            config._attn_implementation = name if of_text else implementation
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
