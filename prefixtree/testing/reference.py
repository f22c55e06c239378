"""The runs of a comparison: eager attention in little memory, sums that do not drift, and indexers'
choices.

No attention here is prefixtree's: the family's eager function is called on a few query rows at a
time. A choice of the k best keys has no rounding error: two scores that nearly tie change places,
and all that follows differs by more than any dtype explains. So a run of single sequences takes the
keys that the packed run chose, and its own choice is compared by the scores.

Legend: B batch, n tokens of a sequence, H query heads, D head dim, T packed tokens, W words of
bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from prefixtree.kernels.chosen import from_bits
from prefixtree.models.family_table import INDEXED, layer_types_of
from prefixtree.models.plain_batches import family_eager
from prefixtree.packing.layout import PackedForest
from prefixtree.sparse.masks import of_chosen

EAGER_BY_ROWS = "eager_by_rows"
# attention scores held at once, without some six copies. On a CPU 64 MiB of float32: glibc takes
# blocks above 32 MiB from the kernel and gives them back. Smaller blocks lie in its heap, where the
# results that are kept between them leave holes: measured seven times the memory at 4,000 tokens
_CPU_SCORES, _GPU_SCORES = 2**24, 2**28


def eager_by_rows(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes transformers' attention function "eager_by_rows": eager without its H x n x n.

    A query row's attention depends on no other row's. So blocks of rows go through the family's
    eager function one after the other, and again in the backward.

    Args:
        query, key, value: [B, H, n, D], [B, Hk, n, D] and [B, Hk, n, Dv], which give [B, n, H, Dv].
        attention_mask: bool [B, 1, n, n], true where a query sees a key; None in a vision encoder
            without padding, where every query sees every key.
        indices: int [B, n, k], the keys that an indexer chose. Default: all.
    """
    if kwargs.get("block_indices") is not None:
        raise ValueError('blocks of keys are chosen by attn_implementation="eager" alone')
    eager = family_eager(module)
    if indices is not None:
        attention_mask = of_chosen(attention_mask, indices)
    if attention_mask is None:
        return eager(module, query, key, value, None, **kwargs)[0], None

    def block(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
    ) -> torch.Tensor:
        bias = torch.zeros_like(visible, dtype=q.dtype)
        bias.masked_fill_(~visible, torch.finfo(q.dtype).min)
        return eager(module, q, k, v, bias, **kwargs)[0]

    scores = _CPU_SCORES if query.device.type == "cpu" else _GPU_SCORES
    rows = max(1, scores // (query.shape[0] * query.shape[1] * key.shape[2]))
    if rows >= query.shape[2]:
        return block(query, key, value, attention_mask), None
    parts = zip(query.split(rows, 2), attention_mask.split(rows, 2), strict=True)
    outs = [
        checkpoint(block, q, key, value, visible, use_reentrant=False, preserve_rng_state=False)
        for q, visible in parts
    ]
    return torch.cat(outs, 1), None


def _by_rows_mask(*args: Any, **kwargs: Any) -> torch.Tensor:
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(EAGER_BY_ROWS, eager_by_rows)
AttentionMaskInterface.register(EAGER_BY_ROWS, _by_rows_mask)


class FaithfulSums(TorchFunctionMode):
    """Sums weights' gradients of embeddings and layer norms on a CPU in float32, while open.

    torch sums these in the dtype of the weights there. Over some 10,000 tokens in bfloat16 the
    gradient of an embedding is off by a tenth, that of a layer norm's bias by most of itself. The
    error grows with the tokens of one call, so a packed batch, one call, gets more of it. All other
    sums over tokens are in float32, as on GPUs. Forward results stay the same but for the last bit
    of a layer norm.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.embedding, F.layer_norm):
            return func(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        dtypes = {x.dtype for x in tensors if x.is_floating_point()}
        if len(dtypes) != 1 or not all(x.device.type == "cpu" for x in tensors):
            return func(*args, **kwargs)
        args = tuple(_in_float32(x) for x in args)
        return func(*args, **{k: _in_float32(x) for k, x in kwargs.items()}).to(dtypes.pop())


@contextmanager
def float32_convolutions() -> Iterator[None]:
    """Has cuDNN compute float32 convolutions in float32, not in TF32 as torch lets it, while open.

    A vision encoder's convolution of patches moves log-probabilities by more than a float32 run may
    be off.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32
    try:
        cudnn.allow_tf32 = False
        yield
    finally:
        cudnn.allow_tf32 = before


def _in_float32(x: Any) -> Any:
    is_half = isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16)
    return x.float() if is_half else x


class PackedChoices:
    """Keys that the indexers of a packed run choose. Made before the run, read after it.

    Attributes:
        bits: per indexer int32 [T, W] on the CPU; W is 0 where every query chose all keys.
        tokens: int64 [n] per sequence, its packed tokens.
    """

    def __init__(self, model: Any, packed: PackedForest) -> None:
        self.bits: list[torch.Tensor] = []
        indices = torch.arange(packed.num_tokens, device=packed.device)
        self.tokens = [tokens.cpu() for tokens in packed.unpack(indices)]
        for number, indexer in enumerate(_indexers_of(model)):
            self.bits.append(torch.empty(0))
            indexer.register_forward_hook(self._keeper(number))

    def _keeper(self, number: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, bits: torch.Tensor) -> None:
            # a checkpoint's second forward chooses the same
            self.bits[number] = bits[0].cpu()

        return keep

    def of_sequence(self, indexer: int, sequence: int) -> torch.Tensor:
        """The keys that each query of a sequence attends to, bool [n, n]."""
        tokens, bits = self.tokens[sequence], self.bits[indexer]
        n = len(tokens)
        if not bits.shape[1]:
            return torch.ones(n, n, dtype=torch.bool).tril()
        return from_bits(bits[tokens], 0, n)


class Replay:
    """Runs of single sequences whose indexers take the choices of a packed run.

    The model keeps the changes. `margins` tells how far the choices are from those of these runs.
    """

    def __init__(self, model: Any, packed: PackedChoices) -> None:
        self._packed, self._sequence, self.margins = packed, 0, Margins()
        for number, indexer in enumerate(_indexers_of(model)):
            indexer.forward = self._followed(number, indexer.forward)

    def watched(
        self, watch: Callable[[Sequence[Any]], Iterable[Any]]
    ) -> Callable[[Sequence[Any]], Iterator[Any]]:
        """Goes over the sequences as `watch` does, and knows which one runs."""

        def over(sequences: Sequence[Any]) -> Iterator[Any]:
            for i, sequence in enumerate(watch(sequences)):
                self._sequence = i
                yield sequence

        return over

    def _followed(self, number: int, original: Callable[..., torch.Tensor]) -> Any:
        def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
            with _Scores() as seen:
                indices: torch.Tensor = original(*args, **kwargs)
            at = number, self._sequence
            taken = self._packed.of_sequence(*at).to(indices.device)
            visible = torch.ones_like(taken).tril()
            chosen = torch.zeros_like(taken).scatter(-1, indices[0].long(), True) & visible
            self.margins.note(at, taken, chosen, seen.scores[0])
            # if a query sees fewer keys than it may choose, later keys fill up
            order = 2 * taken.int() + (~visible).int()
            return order.topk(indices.shape[-1], -1).indices[None].to(indices.dtype)

        return forward


class Margins:
    """The distance of choices from the best.

    A query's margin is the score of the best key that it left out, less that of the worst that it
    took, over its largest score: 0 if it took the best, whichever of equal ones. It is infinite if
    a query took another number of keys, or one that it does not see.
    """

    def __init__(self) -> None:
        # by (indexer, sequence), as a checkpoint's second forward notes these again
        self._of: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

    def note(
        self,
        at: tuple[int, int],
        taken: torch.Tensor,
        best: torch.Tensor,
        scores: torch.Tensor,
    ) -> None:
        """Adds a sequence of an indexer: taken and best bool [n, n], query by key, and scores."""
        visible = torch.ones_like(taken).tril()
        scores = scores.float()
        largest = scores.masked_fill(~visible, 0).abs().amax(-1)
        worst = scores.masked_fill(~taken, math.inf).amin(-1)
        left = scores.masked_fill(taken | ~visible, -math.inf).amax(-1)
        above = (left - worst).clamp_min(0)
        margin = torch.where(above == 0, 0.0, above / largest)
        wrong = (taken & ~visible).any(-1) | (taken.sum(-1) != best.sum(-1))
        margin = margin.masked_fill(wrong, math.inf)
        self._of[at] = int((taken != best).any(-1).sum()), margin.cpu()

    @property
    def count(self) -> int:
        """The number of queries, over all indexers and sequences."""
        return sum(len(margin) for _, margin in self._of.values())

    @property
    def differ(self) -> int:
        """The number of queries that took other keys than the best."""
        return sum(differ for differ, _ in self._of.values())

    @property
    def largest(self) -> float:
        """The margin of the worst query."""
        return float(torch.cat([margin for _, margin in self._of.values()]).max())


def chooses_keys(config: Any) -> bool:
    """Whether a model of this configuration has indexers that choose keys one by one."""
    return INDEXED in layer_types_of(config.get_text_config())


def _indexers_of(model: nn.Module) -> list[Any]:
    return [m for name, m in model.named_modules() if name.rpartition(".")[2] == "indexer"]


class _Scores(TorchFunctionMode):
    """Keeps the scores whose best were asked for, while open."""

    scores: torch.Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            self.scores = args[0]
        return func(*args, **(kwargs or {}))
