"""`Draws`: the choice of each row's next token, by numbers that only a counter decides.

A token is the argmax over the vocabulary of logits / temperature + Gumbel noise, which is a draw
from the softmax. The noise of a token is a hash of (seed, row, position, token). So a row's draws
depend neither on the other rows of the batch, nor on their order, nor on when rows leave it.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from prefixtree._numbers import integer, number
from prefixtree.kernels.runtime import installed
from prefixtree.kernels.splitmix import FIRST, GAMMA, SECOND, mix, wrapped

_BRANCH = 0xD1B54A32D192ED03 - 2**64
# marks the end of a short path
_ENDED = -1
# the least temperature: logits of 1e10 divided by it stay within 1e30, as kernels take them
_COLDEST = 1e-20
# logits whose noise is in memory at once, in some 32 bytes each
_AT_ONCE = 2**25


@dataclass(frozen=True)
class Draws:
    """The way in which tokens are drawn.

    Log-probabilities are `log_softmax(logits / temperature)` over the full vocabulary, also with
    truncation (top_k, top_p, min_p). They are those that `sequence_logprobs` gives at this
    temperature.

    Attributes:
        temperature: the divisor of the logits, at least 1e-20. 0: the likeliest token, whose
            log-probability is then that at temperature 1. Default: 1.0.
        seed: any integer; the same one gives the same noise, so every training step needs another
            one. Default: 0.
        top_k: draws only from the k likeliest tokens. Default: from all.
        top_p: draws from the fewest likeliest tokens that hold this probability. Default: from all.
        min_p: draws from tokens with at least this share of the likeliest one's probability.
            Default: from all.
        return_sampling_mask: whether samples keep the token ids that truncation left
            (`Samples.sampling_masks`). Default: False.

    Raises:
        TypeError: seed is no integer.
        ValueError: a number out of its range.
    """

    temperature: float = 1.0
    seed: int = 0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    return_sampling_mask: bool = False

    def __post_init__(self) -> None:
        temperature = number("temperature", self.temperature, finite=False)
        if temperature and not _COLDEST <= temperature < math.inf:
            raise ValueError(
                f"temperature must be finite, and 0 (the likeliest token) or at least {_COLDEST}, "
                f"got {temperature}"
            )
        # numpy's numbers wrap around, or transformers does not take them
        read: dict[str, Any] = {
            "temperature": temperature,
            "seed": integer("seed", self.seed, wrong=TypeError),
        }
        if self.top_k is not None:
            read["top_k"] = integer("top_k", self.top_k, 1, or_none=True)
        for name in ("top_p", "min_p"):
            if (value := getattr(self, name)) is not None:
                read[name] = number(name, value, above=0, most=1, or_none=True)
        for name, value in read.items():
            object.__setattr__(self, name, value)

    @cached_property
    def warpers(self) -> list[Any]:
        """transformers' own truncations, in the order in which `generate` applies them."""
        from transformers.generation import logits_process as t

        warpers: list[Any] = []
        if self.top_k is not None:
            warpers.append(t.TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1:
            warpers.append(t.TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            warpers.append(t.MinPLogitsWarper(self.min_p))
        return warpers

    def choose(
        self, logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Draws one token per row. Nothing is read on the host.

        Args:
            logits: [B, V], any dtype; of the token before.
            keys: int64 [B], the rows' keys (`row_keys`).
            positions: int64 [B], the positions that the tokens will have.

        Returns:
            int64 [B] tokens, float32 [B] log-probabilities over the full vocabulary, and with
            truncation float32 [B], the log of the probability that was kept; otherwise None. The
            last is None, or the kept tokens if they are asked for, as `to_bits` packs them.
        """
        if not self.warpers and in_one_pass(logits):
            from prefixtree.kernels.decoding import draw

            state = mix(keys + positions * GAMMA)
            constants = GAMMA, FIRST, SECOND
            return *draw.draw(logits, state, self.temperature, constants), None, None
        rows = max(1, _AT_ONCE // logits.shape[-1])
        parts = zip(logits.split(rows), keys.split(rows), positions.split(rows), strict=True)
        tokens, logprobs, *more = zip(*(self._choose(*part) for part in parts), strict=True)
        kept, bits = (None if some[0] is None else torch.cat(some) for some in more)
        return torch.cat(tokens), torch.cat(logprobs), kept, bits

    def _choose(
        self, logits: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        scaled = logits.float() / (self.temperature or 1.0)
        logprobs = scaled.log_softmax(-1)
        kept = bits = None
        for warper in self.warpers:
            scaled = warper(None, scaled)
        if self.warpers:
            is_kept = scaled != -torch.inf
            kept = logprobs.masked_fill(~is_kept, -torch.inf).logsumexp(-1)
            bits = to_bits(is_kept) if self.return_sampling_mask else None
        if self.temperature:
            scaled = scaled + gumbel(keys, positions, scaled.shape[-1])
        tokens = scaled.argmax(-1)
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0], kept, bits


def to_bits(flags: torch.Tensor) -> torch.Tensor:
    """Packs bool [B, V] as uint8 [B, V / 8, rounded up], the first of eight in the lowest bit."""
    padded = torch.nn.functional.pad(flags.byte(), (0, -flags.shape[-1] % 8)).unflatten(-1, (-1, 8))
    place = torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (padded << place).sum(-1, dtype=torch.uint8)


def in_one_pass(logits: torch.Tensor) -> bool:
    """Whether a Triton kernel draws from these logits; in torch it is some 30 kernels."""
    return logits.is_cuda and logits.stride(-1) == 1 and installed("triton")


def row_keys(seed: int, paths: Iterable[Sequence[int]]) -> torch.Tensor:
    """Hashes the seed and each row's place in the tree of branchings, to int64 [B] on the CPU.

    The place is the sequence that the row continues, then its number at each branching above it.
    """
    paths = list(paths)
    depth = max(map(len, paths))
    numbers = torch.tensor([[*path, *[_ENDED] * (depth - len(path))] for path in paths])
    keys = mix(torch.full((len(paths),), wrapped(seed + GAMMA)))
    for column in numbers.unbind(1):
        # a step of its own, as numbers of positions and tokens would collide with these
        below = mix(keys + (column + 1) * _BRANCH + GAMMA)
        keys = torch.where(column == _ENDED, keys, below)
    return keys


def gumbel(keys: torch.Tensor, positions: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Makes Gumbel noise, float32 [B, V]; keys and positions are int64 [B]."""
    state = mix(keys + positions * GAMMA)[:, None]
    numbers = torch.arange(1, vocabulary + 1, device=keys.device) * GAMMA
    # 53 bits, of which float32 keeps 24; all of them count near 0, where large noise comes from
    uniform = (mix(state + numbers) >> 11).bitwise_and_(2**53 - 1).add_(1).float().mul_(2.0**-53)
    # a number rounded to 1 would give infinite noise, which no likely token outweighs
    uniform = uniform.clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
