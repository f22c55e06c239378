"""`share_dropout`: LoRA's dropout with one mask per distinct token of a forest.

A mask is a hash of (seed, module, path, feature). So it is the same in a recomputation, in a step,
in a kept trunk, on a rank and in another micro-batch. Keys of paths reach each
layer as a keyword, inside of its checkpoint; the layer's class keeps them for the dropouts in it.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from prefixtree._numbers import integer
from prefixtree.errors import Refusal, UnsupportedError, refuse
from prefixtree.kernels.splitmix import GAMMA, mix, wrapped
from prefixtree.models.along_tree import along_tree
from prefixtree.models.checks import has_deepspeed_hooks, runs_deepspeed, transformer_of
from prefixtree.models.families import KEYS, SEED
from prefixtree.models.layers import layers_of
from prefixtree.models.rows_alone import is_sharded

# an attribute of the classes of layers that keep keys
_MARK = "_prefixtree_keeps_keys"
_Model = TypeVar("_Model", bound=nn.Module)
# values of a hash: 16 bits decide on a feature
_VALUES = 2**16
# hashes that are in memory at once, in some 32 bytes each
_AT_ONCE = 2**22


def share_dropout(model: _Model, seed: int) -> _Model:
    """Has LoRA's dropout draw one mask per distinct token of a forest, in place.

    The mask of a token is a function of the seed, the module, the token ids of its path, and the
    feature. So every sequence alone has LoRA's dropout; sequences share the masks of what they
    share. Recomputation, steps, kept trunks, groups and micro-batches change no bit of a mask, and
    a second forward gives the same log-probabilities. Before each optimizer step's first forward,
    call it again with another seed.

    Dropouts other than those of linear LoRA and AdaLoRA layers stay refused. Batches that are no
    forests get torch's dropout.

    Args:
        model: a model of transformers with adapters of PEFT, before it is sharded; wrapped or not.
        seed: any integer. Drops are drawn in steps of 2^-16 of a probability.

    Returns:
        The same model.

    Raises:
        TypeError: not a module, or a seed that is no integer.
        UnsupportedError: a sharded model whose dropouts are not shared yet.
    """
    transformer = transformer_of(model)
    seed = integer("seed", seed, wrong=TypeError)
    layers = layers_of(transformer)
    found, fresh = list(_dropouts_in(layers)), [x for x in layers if not hasattr(x, _MARK)]
    if found or fresh:
        refuse(SHARED, model)
    count = sum(isinstance(m, SharedDropout) for m in transformer.modules())
    for number, (lora, name) in enumerate(found, count):
        plain, like = lora.lora_dropout[name], next(lora.parameters())
        shared = SharedDropout(plain.p, number, like).train(plain.training)
        lora.lora_dropout[name] = shared
    for layer in fresh:
        kind: Any = type(layer)
        layer.__class__ = along_tree(kind, _keeping_keys)
    setattr(transformer, SEED, seed)
    return model


def _is_wrapped(model: nn.Module) -> bool:
    """Whether a model is sharded, and not only partitioned by ZeRO-3 while it was loaded."""
    # whose hooks come later, when the engine is made
    has_parts = runs_deepspeed(model) and not has_deepspeed_hooks(transformer_of(model))
    return is_sharded(model) and not has_parts


#: Refusals of a model whose dropouts would be shared.
SHARED = (
    Refusal(
        "share_dropout",
        _is_wrapped,
        "share_dropout, which changes classes of layers, is not verified in a sharded model: call "
        "it before fully_shard and the like",
    ),
)


def _dropouts_in(layers: list[nn.Module]) -> Iterator[tuple[Any, str]]:
    """Yields the linear LoRA layers that have a dropout, with its adapter's name."""
    # one that stands in two layers would draw one mask for both
    uses = Counter(module for layer in layers for module in layer.modules())
    for module, count in uses.items():
        base, dropouts = (getattr(module, name, None) for name in ("base_layer", "lora_dropout"))
        is_linear = isinstance(base, nn.Linear) or type(base).__name__ == "Conv1D"
        if count > 1 or not is_linear or not isinstance(dropouts, nn.ModuleDict):
            continue
        for name, dropout in dropouts.items():
            if type(dropout) is nn.Dropout:
                yield module, name


class _Running(threading.local):
    """Whether this thread runs a layer, its keys int64 [T], and the dropouts that used them."""

    in_layer: bool = False
    keys: torch.Tensor | None = None
    used: tuple[nn.Module, ...] = ()


now = _Running()


def _keeping_keys(original: Any) -> dict[str, Any]:
    """Makes the forward of a decoder layer that keeps the keys of its tokens."""

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        keys = kwargs.pop(KEYS, None)
        # all keywords of forests begin so, TRL's too
        if keys is None and self.training and any(name.startswith("tree_") for name in kwargs):
            raise UnsupportedError(
                "the model shares dropout, whose masks a bare call of it over a forest does not "
                "have: score with sequence_logprobs, or call model.eval()"
            )
        before = now.in_layer, now.keys, now.used
        now.in_layer, now.keys, now.used = True, keys, ()
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            now.in_layer, now.keys, now.used = before

    return {"forward": forward, _MARK: True}


class SharedDropout(nn.Module):
    """A dropout whose masks the keys of tokens decide; torch's where there are no keys."""

    salt: torch.Tensor

    def __init__(self, p: float, number: int, like: torch.Tensor) -> None:
        super().__init__()
        self.p = p
        # a tensor, as compiled code would specialise on a number: one graph per layer
        salt = torch.tensor(wrapped((number + 1) * GAMMA), device=like.device)
        self.register_buffer("salt", salt, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drops features of x [..., F], which has a row per key."""
        dropped = round(self.p * _VALUES)
        if not self.training or not dropped:
            return x
        if not now.in_layer:
            raise UnsupportedError(
                "a part of a layer is computed again apart from it, which shared dropout does not "
                "follow: checkpoint whole layers, as recompute= does"
            )
        if (keys := now.keys) is None:
            return functional.dropout(x, self.p)
        rows = x.shape[:-1].numel()
        if rows != len(keys) or self in now.used:
            raise UnsupportedError(
                f"a LoRA layer with shared dropout gets {rows} rows in a layer of {len(keys)} "
                "tokens, or a second time: its masks are not verified there; leave this module out "
                "of target_modules, or set lora_dropout=0"
            )
        now.used = (*now.used, self)
        kept = _kept(keys + self.salt, x.shape[-1], dropped).view(x.shape)
        return x.masked_fill(~kept, 0) * (_VALUES / max(1, _VALUES - dropped))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _kept(keys: torch.Tensor, features: int, dropped: int) -> torch.Tensor:
    """Draws which features are kept, bool [T, F]; of all values, `dropped` drop one."""
    # the last ones may be unused
    hashes = -(-features * 16 // 64)
    steps = torch.arange(1, hashes + 1, device=keys.device) * GAMMA
    parts = [
        mix(some[:, None] + steps).view(torch.int16) > dropped - 1 - _VALUES // 2
        for some in mix(keys).split(max(1, _AT_ONCE // hashes))
    ]
    return torch.cat(parts)[:, :features]
