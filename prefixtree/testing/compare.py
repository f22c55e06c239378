"""One forward and backward, replicated and packed, and how far apart the two are.

The replicated side uses nothing of prefixtree: every sequence runs alone through the model.

The bound is that of docs/design.md: our error next to eager's in the same dtype, both against
float64. Per (node x head) the worst error may be twice eager's, per head the mean error 1.2 times
eager's, each with some slack for what eager gets exactly.

Legend: R rows (query or key tokens), G groups of rows (nodes), H heads.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from prefixtree.forest import PrefixForest
from prefixtree.images.images import Images

# nodes with fewer tokens are judged together: the worst of three numbers says little
POOLED = 16


@dataclass(frozen=True)
class Errors:
    """The errors of one tensor, worst float64 [G, H] and mean float64 [H], next to their limits."""

    worst: torch.Tensor
    worst_limit: torch.Tensor
    mean: torch.Tensor
    mean_limit: torch.Tensor


def pooled_nodes(forest: PrefixForest) -> np.ndarray:
    """Numbers the group of every packed token, int64 [T]: its node; short nodes share number 0."""
    number = np.where(forest.node_length < POOLED, 0, 1 + np.arange(forest.num_nodes))
    return np.repeat(number, forest.node_length)


def errors(
    found: torch.Tensor,
    eager: torch.Tensor,
    exact: torch.Tensor,
    group: torch.Tensor,
    slack: torch.Tensor | float,
) -> Errors:
    """Measures the errors of `found`, and the limits that eager's errors set.

    The worst may be 2 x eager's worst + 2 x slack, the mean 1.2 x eager's mean + slack / 10.

    Args:
        found, eager, exact: [R, H] or [R, H, D], the last in float64.
        group: int64 [R], the group of each row; see `pooled_nodes`.
        slack: such as the dtype's epsilon x the greatest number of `exact`.
    """
    ours, base = ((x.double() - exact).abs().reshape(*exact.shape[:2], -1) for x in (found, eager))
    worst, allowed = (_max_by(x.amax(2), group) for x in (ours, base))
    return Errors(
        worst,
        2 * allowed + 2 * slack,
        ours.mean((0, 2)),
        1.2 * base.mean((0, 2)) + 0.1 * slack,
    )


def _max_by(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Greatest of values [R, H] per group -> [G, H]; 0 for a group without rows."""
    out = values.new_zeros(int(group.max()) + 1, values.shape[1])
    return out.scatter_reduce_(0, group[:, None].expand_as(values), values, "amax")


# logits turned into log-probabilities at a time. On a CPU 16 MiB of float32, which malloc reuses:
# larger blocks come fresh from the kernel for every operation, measured 4x slower
_CPU_CHUNK, _GPU_CHUNK = 2**22, 2**26
# below this share of the whole gradient's norm, a parameter's norm is rounding noise
_NOISE = 1e-6


@dataclass(frozen=True)
class Objective:
    """A loss that every scored token takes part in: sum of a * log p + b * entropy.

    Attributes:
        scored: bool [n - 1] per sequence: whether its tokens 1..n-1 are scored.
        logprob_weights, entropy_weights: float32 [n - 1] per sequence, a and b; 0 where not scored.
    """

    scored: list[torch.Tensor]
    logprob_weights: list[torch.Tensor]
    entropy_weights: list[torch.Tensor]

    def take(self, index: int) -> Objective:
        """Selects the loss of one sequence alone."""
        return Objective(*([values[index]] for values in vars(self).values()))

    def to(self, device: torch.device) -> Objective:
        """Copies the objective to a device."""
        return Objective(*([v.to(device) for v in values] for values in vars(self).values()))

    def value(self, logprobs: Sequence[torch.Tensor], entropy: Sequence[torch.Tensor]) -> float:
        """Computes the loss, summed in float64."""
        terms = zip(
            [*self.logprob_weights, *self.entropy_weights], [*logprobs, *entropy], strict=True
        )
        return float(sum((w.double() * v.double()).sum() for w, v in terms))


@dataclass(frozen=True)
class Run:
    """The results of one side, on the CPU, and their cost.

    Attributes:
        logprobs, entropy: float32 (float64 of a model in float64) [n - 1] per sequence, 0 where not
            scored.
        gradients: of every parameter by name; None for one the loss does not reach.
        seconds: of forward and backward.
        peak_bytes: most memory held above the memory held before; None if that is not known.
    """

    logprobs: list[torch.Tensor]
    entropy: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    loss: float
    seconds: float
    peak_bytes: int | None


def scored_tokens(
    sequences: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray] | None
) -> list[torch.Tensor]:
    """Marks the scored ones of tokens 1..n-1 of each sequence, bool [n - 1]."""
    if loss_masks is None:
        return [torch.ones(len(s) - 1, dtype=torch.bool) for s in sequences]
    return [torch.from_numpy(np.asarray(mask[1:], bool)) for mask in loss_masks]


def run_replicated(
    model: Any,
    sequences: Sequence[np.ndarray],
    objective: Objective,
    watch: Callable[[Sequence[np.ndarray]], Iterable[np.ndarray]] = iter,
    images: Images | None = None,
) -> Run:
    """Runs every sequence alone through the model, forward and backward; gradients add up.

    Args:
        model: with any attention but prefixtree's.
        sequences: token ids; with images, `images.sequences`.
        images: each sequence gets its own, copies included. Default: text alone.
    """
    parameter = next(model.parameters())
    device, dtype = parameter.device, torch.promote_types(parameter.dtype, torch.float32)
    chunk_size = _CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK
    on_device = objective.to(device)
    logprobs = [torch.zeros(len(s), dtype=dtype, device=device) for s in on_device.scored]
    entropy = [torch.zeros_like(values) for values in logprobs]
    model.zero_grad(set_to_none=True)
    with Meter(device) as meter:
        for i, tokens in enumerate(watch(sequences)):
            rows = on_device.scored[i].nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            inputs = _alone(tokens, i, images, device)
            ids = inputs["input_ids"][0]
            logits = model(**inputs, use_cache=False, logits_to_keep=rows).logits
            # [1, rows, V], as the model gave them: a gradient of logits[0] is copied once more
            gradient = torch.empty_like(logits)
            step = max(1, chunk_size // logits.shape[-1])
            for begin in range(0, len(rows), step):
                part = slice(begin, begin + step)
                places = rows[part]
                # backward to the logits a chunk at a time: of float32 copies of a whole long
                # sequence times a large vocabulary there would be several
                chunk = logits.detach()[0, part].to(dtype).requires_grad_()
                log_p = chunk.log_softmax(-1)
                chosen = log_p.gather(-1, ids[places + 1, None]).squeeze(-1)
                spread = -(log_p.exp() * log_p).sum(-1)
                weights = on_device.logprob_weights[i][places], on_device.entropy_weights[i][places]
                (weights[0].to(dtype) @ chosen + weights[1].to(dtype) @ spread).backward()
                gradient[0, part] = chunk.grad
                logprobs[i][places] = chosen.detach()
                entropy[i][places] = spread.detach()
            logits.backward(gradient)
        _synchronize(device)
    return _finish(model, logprobs, entropy, objective, meter)


def _alone(
    tokens: np.ndarray, index: int, images: Images | None, device: torch.device
) -> dict[str, Any]:
    """Collects the model's keywords of one sequence."""
    if images is None:
        return {"input_ids": torch.from_numpy(tokens)[None].to(device)}
    from prefixtree.images.vision import alone_inputs

    inputs = alone_inputs(images, tokens, images.of_sequences[index])
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def run_packed(
    model: Any,
    packed: Any,
    objective: Objective,
    loss_masks: Sequence[np.ndarray] | None,
    images: Images | None = None,
) -> Run:
    """Runs the packed forest, with its images, through the model once, forward and backward."""
    from prefixtree.scoring.logprobs import sequence_logprobs

    device = next(model.parameters()).device
    on_device = objective.to(device)
    model.zero_grad(set_to_none=True)
    with Meter(device) as meter:
        scores = sequence_logprobs(
            model,
            packed.to(device),
            loss_mask=loss_masks,
            return_entropy=True,
            images=images,
        )
        assert scores.entropy is not None
        values = torch.cat([*scores.logprobs, *scores.entropy])
        (values @ torch.cat([*on_device.logprob_weights, *on_device.entropy_weights])).backward()
        _synchronize(device)
    return _finish(model, scores.logprobs, scores.entropy, objective, meter)


def _finish(
    model: Any,
    logprobs: list[torch.Tensor],
    entropy: list[torch.Tensor],
    objective: Objective,
    meter: Meter,
) -> Run:
    logprobs, entropy = ([v.detach().cpu() for v in values] for values in (logprobs, entropy))
    gradients = {
        name: None if p.grad is None else p.grad.detach().cpu()
        for name, p in model.named_parameters()
    }
    model.zero_grad(set_to_none=True)
    loss = objective.value(logprobs, entropy)
    return Run(logprobs, entropy, gradients, loss, meter.seconds, meter.peak_bytes)


# ---- differences ---------------------------------------------------------------------------------


def worst_difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Finds the largest absolute difference; infinite if one is not finite or a length differs."""
    if [len(a) for a in found] != [len(b) for b in expected]:
        return math.inf
    difference = torch.cat([a.double() - b.double() for a, b in zip(found, expected, strict=True)])
    return _or_infinite(difference.abs().max()) if len(difference) else 0.0


def gradient_differences(
    found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]
) -> dict[str, float]:
    """Computes ||found - expected|| / ||expected|| per parameter; infinite if one is not finite.

    The whole gradient's norm divides instead where the expected gradient is rounding noise next to
    it. A whole gradient of zero compares nothing: infinite.
    """
    return whole_gradient_difference(found, expected)[1]


def whole_gradient_difference(
    found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]
) -> tuple[float, dict[str, float]]:
    """Computes the same of all parameters as one vector, and of each."""
    norms = {name: 0.0 if g is None else float(g.double().norm()) for name, g in expected.items()}
    norm = math.hypot(*norms.values())
    gaps, differences = [], {}
    for name, reference in expected.items():
        sides = [g.double() for g in (found[name], reference) if g is not None]
        if not sides:
            continue
        gaps.append((sides[0] - sides[1] if len(sides) == 2 else sides[0]).norm())
        scale = norms[name] if norms[name] >= _NOISE * norm else norm
        differences[name] = _or_infinite(gaps[-1] / scale)
    return _or_infinite(torch.stack(gaps).norm() / norm), differences


def _or_infinite(value: torch.Tensor) -> float:
    number = float(value)
    return number if math.isfinite(number) else math.inf


# ---- time and memory -----------------------------------------------------------------------------


class Meter:
    """Seconds and peak memory between enter and exit.

    On CUDA torch counts. Elsewhere, on Linux alone, a thread samples the resident memory, because
    its recorded maximum never goes down again between two runs.
    """

    seconds: float
    peak_bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._sampler: _Sampler | None = None

    def __enter__(self) -> Meter:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        elif self.device.type == "cpu" and sys.platform == "linux":
            self._sampler = _Sampler()
            self._sampler.start()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        elif self._sampler is not None:
            self.peak_bytes = self._sampler.finish()


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        # memory freed by an earlier run but kept by malloc would hide this run's need of it
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        self._done = threading.Event()
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._before = self._peak = self._resident()

    def run(self) -> None:
        while not self._done.wait(0.005):
            self._peak = max(self._peak, self._resident())

    def finish(self) -> int:
        self._done.set()
        self.join()
        return max(self._peak, self._resident()) - self._before

    def _resident(self) -> int:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * self._page


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
