"""The replicated batch as a trainer without sharing computes it, for whole layers and models.

A model with attn_implementation="prefixtree" is given a forest of chains, one per sequence, and
inside `attending` its attention is another's: FA2 or flash-attn-4 over variable lengths. So both
sides share everything else, the chunked head included, and no copy of the model is needed.

Sides, by name: "packed" (the forest), "own" (the replicated batch through our backend, from
which the bound is made), "fa2" (`prefixtree.testing.attention.replicated_attention`), "fa4".
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AttentionInterface

from prefixtree import PrefixForest, pack, tree_attention
from prefixtree.kernels.attention import operator
from prefixtree.kernels.attention.protocol import AttentionCall
from prefixtree.models.attention import prefixtree_attention
from prefixtree.packing.visible import visible_pairs
from prefixtree.scoring import forward as scoring
from prefixtree.states import protocol
from prefixtree.testing.attention import PIECE, Attention, pieces, replicated_attention

PEERS = ("fa2", "fa4", "own")
# of models with recurrent layers
HYBRID_PEERS = ("fla", "own")


def missing(name: str, device: str) -> str | None:
    """Why a side cannot run here."""
    if name == "fa4" and (device == "cpu" or not _has("flash_attn.cute")):
        return "flash-attn-4 is not installed, or there is no GPU"
    if name == "fla" and (device == "cpu" or not _has("fla")):
        return "fla-core is not installed, or there is no GPU"
    if name == "flex" and device == "cpu":
        return "FlexAttention has no backward on a CPU"
    if name == "grouper" and not _has("prefix_grouper"):
        return "prefix-grouper is not installed"
    return None


def skip_missing(options: argparse.Namespace, others: Collection[str] = ()) -> None:
    """Sides that cannot run here, and `others`, go from those asked for to those skipped."""
    gone = [s for s in options.sides if s in others or missing(s, options.device)]
    options.skipped += gone
    options.sides = [side for side in options.sides if side not in gone]


def _has(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def chains(forest: PrefixForest) -> PrefixForest:
    """The replicated batch: every sequence a separate tree, in input order."""
    lengths = forest.sequence_lengths
    tokens = None
    if forest.tokens is not None:
        tokens = forest.tokens[copies(forest).numpy()]
    return PrefixForest.from_parents([-1] * len(lengths), lengths, tokens, order="input")


def copies(forest: PrefixForest) -> torch.Tensor:
    """int64 [R], the packed token of every replicated one, sequence after sequence."""
    return torch.cat(pack(forest).unpack(torch.arange(forest.num_tokens)))


def pairs(forest: PrefixForest) -> int:
    """The number of visible (query, key) pairs per head."""
    return visible_pairs(
        forest.node_position.astype(np.int64), forest.node_length.astype(np.int64), None
    )


def replicated_pairs(forest: PrefixForest) -> int:
    """Those of the replicated batch."""
    lengths = forest.sequence_lengths.astype(np.int64)
    return visible_pairs(np.zeros_like(lengths), lengths, None)


def peer(
    name: str,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    backend: str = "auto",
) -> Attention:
    """Causal attention of sequences that stand one after the other, by the side's name."""
    if name == "fa2":
        return replicated_attention(lengths, device, dtype)[1]
    if name == "fa4":
        return _fa4(lengths, device)
    if name != "own":
        raise ValueError(f"side {name!r}: expected one of {', '.join(PEERS)}")
    mask = pack(PrefixForest.from_parents([-1] * len(lengths), lengths, order="input")).mask
    mask = mask.to(device)
    return lambda q, k, v: tree_attention(q, k, v, mask, backend=backend)


def out_of(result: Any) -> torch.Tensor:
    """Of flash-attn-4's functions, some versions of which return the lse as well."""
    return result[0] if isinstance(result, tuple) else result


def _fa4(lengths: Sequence[int], device: torch.device) -> Attention:
    from flash_attn.cute.interface import flash_attn_varlen_func

    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    more = dict(zip(names, (ends, ends, longest, longest), strict=True))

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return out_of(flash_attn_varlen_func(q, k, v, **more, causal=True))

    return run


def in_pieces(
    name: str, lengths: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Attention:
    """`peer` for any number of tokens: FA2's offsets end at a few hundred thousand."""
    parts = [[lengths[i] for i in piece] for piece in pieces(lengths, PIECE)]
    if len(parts) == 1 or name == "own":
        return peer(name, lengths, device, dtype)
    runs = [peer(name, part, device, dtype) for part in parts]
    totals = [sum(part) for part in parts]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        split = zip(runs, q.split(totals), k.split(totals), v.split(totals), strict=True)
        return torch.cat([one(*rows) for one, *rows in split])

    return run


@dataclass(frozen=True)
class WithFla:
    """Attention of sequences that stand one after the other, and their recurrences by fla.

    Attributes:
        attention: of q, k and v [tokens, heads, head dim].
        ends: int32 [sequences + 1], fla's `cu_seqlens`.
    """

    attention: Attention
    ends: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> WithFla:
        """With FA2's attention."""
        ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        return cls(in_pieces("fa2", lengths, device, dtype), ends)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.attention(q, k, v)

    def conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Any, mask: Any, activation: str | None
    ) -> torch.Tensor:
        """In the place of `tree_conv`."""
        from fla.modules.causal_conv1d import causal_conv1d

        more = {"activation": activation, "cu_seqlens": self.ends}
        out: torch.Tensor = causal_conv1d(x[None], weight, bias, **more)[0][0]
        return out

    def delta_rule(self, *inputs: Any, qk_l2norm: bool) -> torch.Tensor:
        """In the place of `tree_delta_rule`, whose sixth argument is the mask."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        out: torch.Tensor = chunk_gated_delta_rule(
            *(x[None] for x in inputs[:5]),
            use_qk_l2norm_in_kernel=qk_l2norm,
            cu_seqlens=self.ends,
        )[0][0]
        return out


class _Now:
    """The attention that `attending` puts in the place of ours."""

    attend: Attention | None = None


_now = _Now()


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    # compiled code looks here again in every call, and at the tensors that the function holds
    assert _now.attend is not None
    out = _now.attend(*(x[0].transpose(0, 1) for x in (query, key, value)))
    return out[None], None


@contextmanager
def attending(attend: Attention | None) -> Iterator[None]:
    """While open, models with attn_implementation="prefixtree" attend by this function of q, k and
    v [tokens, heads, head dim], whatever their tree mask; None leaves them as they are. Keep it
    open for the backward: checkpointed layers attend again there. With `WithFla` recurrent layers
    call fla's functions as well.

    Layers that were compiled with another attention keep it: call `torch._dynamo.reset` between
    sides.
    """
    if attend is None:
        yield
        return
    AttentionInterface.register("prefixtree", _attention)
    _now.attend = attend
    try:
        with ExitStack() as patches:
            # which finds that no layer follows the tree
            nothing = patch.object(scoring, "every_layer_attends", lambda *_: nullcontext())
            patches.enter_context(nothing)
            # whose probe has other tokens than the attention was made for
            patches.enter_context(patch.object(scoring, "check_layers", lambda *_: None))
            if isinstance(attend, WithFla):
                patches.enter_context(patch.object(protocol, "tree_conv", attend.conv))
                patches.enter_context(patch.object(protocol, "tree_delta_rule", attend.delta_rule))
            yield
    finally:
        _now.attend = None
        AttentionInterface.register("prefixtree", prefixtree_attention)


@contextmanager
def noted_backends() -> Iterator[set[str]]:
    """Gives a set that gets the names of the backends by which `tree_attention` computes, in
    compiled layers too."""
    names: set[str] = set()
    choose = operator.choose

    def noted(name: str, call: AttentionCall) -> Any:
        chosen = choose(name, call)
        names.add(chosen.backend.name)
        return chosen

    with patch.object(operator, "choose", noted):
        yield names
