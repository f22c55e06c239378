"""Indexers, which choose the keys that a query attends to, on packed forests.

An attention layer of such a model (DeepSeek V3.2, GLM-5 and others) asks its indexer for the best
k keys of each query. That of MiniMax M3 asks for the best blocks of keys, by groups of heads. Along
the tree, these are the best of the query's path. `prepare` gives attentions and indexers a class
whose forward runs the family's code. The indexer's code runs once for a few neighbouring queries of
one path, and sees the keys of that path alone. On a GPU it may run for any neighbouring queries,
whose products with keys a Triton kernel computes. The choice goes to `tree_attention` as a bit per
position of the path (`kernels.chosen`), in the place of the family's indices. Nothing holds T x T
numbers.

An indexer runs without gradients, as in transformers, and so do its parameters. It runs again in a
checkpoint's second forward, over the same chunks, and chooses the same keys. If a rank or a step
computes a part of the forest, the indexer first gives the keys of the own tokens, which others
import.

Legend: T packed tokens, n queries of a chunk, K keys of their path, H index heads, W words of bits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.best_keys import best_bits, best_keys
from prefixtree.kernels.chosen import words
from prefixtree.kernels.operators import uncompiled
from prefixtree.kernels.runtime import installed
from prefixtree.models.along_tree import AlongTree, Members, along_tree, check_own_code
from prefixtree.models.family_table import (
    COMPRESSED_TYPES,
    INDEXED,
    INDEXED_BLOCKS,
    INDEXED_TYPES,
    layer_types_of,
)
from prefixtree.models.plain_batches import SHOWN_POSITIONS
from prefixtree.packing.host_mask import HostMask
from prefixtree.packing.mask import TreeMask, check_mask
from prefixtree.parallel.attention import PartMask
from prefixtree.sparse.compressed import of_compressor
from prefixtree.sparse.latents import held_back, of_expansion
from prefixtree.sparse.masks import ForestMask, UnpreparedMask, not_handed_on, not_kept
from prefixtree.sparse.paths import CHUNK, QueryPath, keys_of_part

# scores of queries held at once if a kernel sums the heads: 64 MiB
_SCORES = 1 << 24
# the mark of attention layers, which holds transformers' name of their type
_LAYER_TYPE = "_prefixtree_layer_type"
# parts of an attention that choose keys, and the layer types in which these get no mask but the
# cache, by either name
_PARTS = ("indexer", "compressor")
_WITHOUT_MASK = COMPRESSED_TYPES | {INDEXED_BLOCKS}
_CACHES = ("past_key_values", "cache")
# arguments of the verified forwards, and names that they use
_KEYS_TAKE = (
    "hidden_states",
    "q_resid",
    "position_embeddings",
    "attention_mask",
    "position_ids",
    "cache",
)
_BLOCKS_TAKE = ("hidden_states", "position_embeddings", "cache", "position_ids")
_COMPRESSOR_TAKES = ("hidden_states", "q_residual", "position_ids", "cache", "layer_idx")
_USES = {
    _KEYS_TAKE: frozenset({"update_indexer", "topk", "indices"}),
    _BLOCKS_TAKE: frozenset({"update_index", "topk", "amax", "block_size"}),
    _COMPRESSOR_TAKES: frozenset({"kv_proj", "gate_proj", "position_bias", "kv_norm"}),
}
_SIZES = ("index_topk", "q_lora_rank", "topk_blocks", "block_size", "compress_rate")


def compresses_keys(config: Any) -> bool:
    """Whether a configuration has layers that attend to compressed keys."""
    return not COMPRESSED_TYPES.isdisjoint(layer_types_of(config))


def prepare_layers(transformer: Any, config: Any) -> None:
    """Gives attentions and indexers their forward along the tree; refuses those without a proof."""
    layers = [
        (name, module, part)
        for name, module in transformer.named_modules()
        for part in _PARTS
        if getattr(module, "is_causal", False) and hasattr(module, part)
    ]
    kinds = list(config.layer_types)
    if len(layers) != len(kinds):
        raise UnsupportedError(
            f"{len(layers)} of {len(kinds)} attentions in {config.model_type} can have an indexer, "
            "the others were replaced"
        )
    for (name, module, part), kind in zip(layers, kinds, strict=True):
        setattr(module, _LAYER_TYPE, kind)
        check_own_code(name, module, "indexers")
        if (chooses := getattr(module, part)) is not None:
            _check_indexer(f"{name}.{part}", chooses)
            if (inner := getattr(chooses, "indexer", None)) is not None:
                # the inner indexer's forward is not called
                _check_indexer(f"{name}.{part}.indexer", inner)
            _give_class(chooses, _MEMBERS[kind])
        _give_class(module, _of_attention)


def _give_class(module: nn.Module, members: Members) -> None:
    if not isinstance(module, AlongTree):
        kind: Any = type(module)
        module.__class__ = along_tree(kind, members)


def _check_indexer(name: str, indexer: Any) -> None:
    check_own_code(name, indexer, "indexers")
    if isinstance(indexer, AlongTree):
        return
    rank = getattr(getattr(indexer, "q_b_proj", None), "in_features", 1)
    if min(rank, *(getattr(indexer, key, 1) for key in _SIZES)) < 1:
        raise UnsupportedError(f"{name} chooses nothing: {', '.join(_SIZES)} must be at least 1")
    if hasattr(indexer, "block_size"):
        groups, heads = indexer.num_heads, indexer.config.num_key_value_heads
        if heads % groups:
            raise UnsupportedError(
                f"{name} chooses for {groups} groups of heads, which {heads} key heads do not "
                "make: set index_n_heads to num_key_value_heads"
            )
    forward = inspect.unwrap(type(indexer).forward)
    takes = tuple(inspect.signature(forward).parameters)[1:]
    uses = _USES.get(tuple("cache" if name in _CACHES else name for name in takes))
    if uses is not None and uses <= set(forward.__code__.co_names):
        return
    raise UnsupportedError(
        f"{name} ({type(indexer).__name__}) takes {', '.join(takes)}, as no verified indexer "
        "does: install transformers 5.23 or 5.24"
    )


# ---- forwards along the tree ---------------------------------------------------------------------


def _of_attention(original: Any) -> dict[str, Any]:
    """Makes an attention that hands its indexer the forest's mask, outside of compiled layers."""
    takes = inspect.signature(inspect.unwrap(original.forward)).parameters
    cache = next((name for name in _CACHES if name in takes), "")

    @uncompiled
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask, plain = kwargs.get("tree_mask"), kwargs.get("attention_mask")
        if kwargs.get("forest_cache") is not None:
            raise not_kept()
        if isinstance(mask, PartMask) and getattr(self, _LAYER_TYPE) in COMPRESSED_TYPES:
            raise not_handed_on()
        # unlike most families, these do not hand positions on to the attention function
        kwargs[SHOWN_POSITIONS] = kwargs.get("position_ids")
        if isinstance(plain, UnpreparedMask):
            kwargs["attention_mask"] = None
            if getattr(self, _LAYER_TYPE) in INDEXED_TYPES:
                kwargs["attention_mask"] = plain.causal() if mask is None else _forest_mask(mask)
            if getattr(self, _LAYER_TYPE) in _WITHOUT_MASK and mask is not None:
                if kwargs.get(cache) is not None:
                    raise ValueError("a packed forest has no key-value cache: pass use_cache=False")
                kwargs[cache] = kwargs["attention_mask"]
        elif getattr(self, _LAYER_TYPE) == INDEXED_BLOCKS and _pads_left(self, plain):
            raise UnsupportedError(
                f"batches of {self.config.model_type} padded at their left, whose blocks of keys "
                'begin where a row does, are not verified under "prefixtree": pad at the right, or '
                'use model.set_attn_implementation("eager") for them'
            )
        if getattr(self, _LAYER_TYPE) != INDEXED:
            return original.forward(self, *args, **kwargs)
        with held_back(self, mask):
            return original.forward(self, *args, **kwargs)

    return {"forward": functools.wraps(original.forward)(forward)} | of_expansion(original)


def _pads_left(attention: Any, mask: Any) -> bool:
    """Whether a batch's mask [B, 1, n, m] hides the first key from the last of several queries."""
    if not isinstance(mask, torch.Tensor) or mask.shape[2] == 1:
        return False
    if attention.config._attn_implementation != "prefixtree":
        return False
    first = mask[:, 0, -1, 0]
    return not bool((first if first.dtype == torch.bool else first == 0).all())


def _forest_mask(mask: TreeMask | PartMask) -> ForestMask:
    if isinstance(mask, PartMask):
        return ForestMask(mask.mask, mask)
    check_mask(mask, "tree_mask")
    if mask.query_tokens is not None:
        raise UnsupportedError(
            "an indexer takes the whole forest, not a mask of some queries: packed.mask"
        )
    return ForestMask(mask)


def _of_indexer(original: Any) -> dict[str, Any]:
    """Makes an indexer that chooses among the keys of each query's path."""

    @uncompiled
    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: Any,
        *cached: Any,
        **more: Any,
    ) -> torch.Tensor:
        """Chooses a forest's keys by hidden_states [1, T, C]: int32 [1, T, W], or [1, T, 0]."""
        tokens = (hidden_states, q_resid, *position_embeddings)
        if not isinstance(attention_mask, ForestMask):
            indices: torch.Tensor = original.forward(
                self, *tokens[:2], tokens[2:], attention_mask, *cached, **more
            )
            return indices
        mask = attention_mask.mask
        path = _Keys(mask, hidden_states)
        if attention_mask.deepest <= self.index_topk:
            return path.of_all()

        def ask(rows: slice, path: Any) -> None:
            hidden, resid, *rope = (x[:, rows] for x in tokens)
            original.forward(self, hidden, resid, tuple(rope), path, None, path)

        kernels = _kernels_for(mask, hidden_states, self.head_dim)
        keys: Any = path if kernels is None else Products(mask.host, kernels)
        sizes = (self.n_heads,) if kernels is None else (self.n_heads, self.head_dim)
        keys.exported = keys_of_part(self, attention_mask, self.n_heads * self.head_dim, ask)
        for rows in keys.spans(*sizes):
            ask(rows, keys)
        chosen: torch.Tensor = keys.bits[None]
        return chosen

    return {"forward": functools.wraps(original.forward)(forward)}


def _kernels_for(mask: TreeMask, hidden: torch.Tensor, head_dim: int) -> Any:
    """Finds the module whose kernel computes scores, or None for the family's own products.

    Autocast rounds the family's products, and the kernel does not. Tensors without numbers, as
    memory is traced with, know only torch's operations.
    """
    if type(hidden) is not torch.Tensor:
        return None
    if mask.backend not in ("auto", "triton") or torch.is_autocast_enabled(hidden.device.type):
        return None
    if not (hidden.is_cuda or mask.backend == "triton") or not installed("triton"):
        return None
    from prefixtree.kernels import indexer_kernels

    return indexer_kernels if indexer_kernels.serves_scores(hidden, head_dim) else None


def _of_block_indexer(original: Any) -> dict[str, Any]:
    """Makes an indexer that chooses among the blocks of positions of each query's path."""

    @uncompiled
    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        cache: Any,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """Chooses a forest's keys by hidden_states [1, T, C]: int32 [1, H, T, W], or [1, T, 0]."""
        if not isinstance(cache, ForestMask):
            indices: torch.Tensor = original.forward(
                self, hidden_states, position_embeddings, cache, position_ids
            )
            return indices
        path = _Blocks(cache.mask, hidden_states, self.block_size)
        if cache.deepest <= self.topk_blocks * self.block_size:
            return path.of_all()

        def ask(rows: slice, path: Any, positions: torch.Tensor | None = None) -> None:
            rope = tuple(x[:, rows] for x in position_embeddings)
            original.forward(self, hidden_states[:, rows], rope, path, positions)

        path.exported = keys_of_part(self, cache, self.num_heads * self.head_dim, ask)
        for rows in path.spans(self.num_heads):
            with path:
                ask(rows, path, path.positions[None])
        return path.bits[None]

    return {"forward": functools.wraps(original.forward)(forward)}


class _Keys(QueryPath):
    """A stand-in for mask, cache and scores in an indexer's forward of queries of one path.

    The indexer hands it the chunk's keys and gets those of the path, adds it to its scores as a
    mask, and asks it for the best of them.
    """

    # this object is added to the scores, as masks of numbers are
    dtype = torch.float32
    shape: torch.Size
    _scores: torch.Tensor

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """Replaces the chunk's keys [1, n, D] by those of the path, [1, K, D]."""
        return self.of_path(keys[0])[None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Keys:
        """Takes scores [1, n, K] + path; torch asks no other method under its function modes."""
        scores, path = args
        if func not in (torch.Tensor.add, torch.Tensor.__add__) or not isinstance(path, cls):
            raise TypeError(f"an indexer adds its mask to its scores, and calls {func}")
        keys: _Keys = path
        keys._scores, keys.shape = scores[0], scores.shape
        return keys

    def topk(self, count: int, dim: int) -> Any:
        self.note_bits(best_bits(self._scores, count, self.positions, self.num_words))
        del self._scores
        return SimpleNamespace(indices=self.bits[self.rows])


class Products:
    """A stand-in for mask, cache, keys and scores in an indexer's forward of neighbouring queries.

    The indexer tells it its products with all keys, and a kernel computes them at the end. `bits`
    are int32 [T, W], the choices so far.
    """

    dtype = torch.float32
    exported: torch.Tensor | None = None
    bits: torch.Tensor
    shape: tuple[int, int, int]
    _q: torch.Tensor
    _weights: torch.Tensor
    _scale: Any

    def __init__(self, host: HostMask, kernels: Any) -> None:
        self._host, self._kernels, self._num_words = host, kernels, words(host.deepest)
        self._keys: torch.Tensor | None = None
        self._position = host.position[host.query_tokens]

    def spans(self, heads: int, head_dim: int) -> Iterator[slice]:
        """Cuts the queries into chunks; the object stands for the chunk that it gave last."""
        borders, start = self._kernels.tile_borders(self._host, heads), 0
        tokens = min(CHUNK // (heads * head_dim), _SCORES // self._host.deepest)
        tokens = max(tokens, self._kernels.tile_tokens(heads))
        while start < self._host.num_queries:
            # whole tiles
            stop = int(borders[np.searchsorted(borders, start + tokens, side="right") - 1])
            self._rows, start = slice(start, stop), stop
            width = int(self._position[self._rows].max()) + 1
            self.shape = 1, self._rows.stop - start, width
            self._told: list[str] = []
            self._scale = 1.0
            yield self._rows

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> Products:
        """Takes the chunk's keys, [1, n, D]."""
        if self._keys is None:
            shape = self._host.num_queries, self._num_words
            self.bits = keys.new_empty(shape, dtype=torch.int32)
            self._keys = self.exported
        if self._keys is None:
            self._keys = keys.new_empty(self._host.num_tokens, keys.shape[2])
        if self.exported is None:
            self._keys[self._rows] = keys[0]
        return self

    def transpose(self, *_: Any) -> Products:
        """Returns itself: k.transpose(-1, -2).float().unsqueeze(1), later squeeze(-2) + mask."""
        return self

    float = unsqueeze = squeeze = __add__ = transpose

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Products:
        """Notes relu(products) and the two products: of q with keys, of weights with heads."""
        products: Products = args[-1]
        name = func.__name__
        if name == "matmul":
            if products._told:
                products._weights = args[0]
            else:
                products._q = args[0]
        products._told.append(name)
        return products

    def __mul__(self, factor: Any) -> Products:
        self._told.append("mul")
        self._scale *= factor
        return self

    def topk(self, count: int, dim: int) -> Any:
        told = [name for name in self._told if name != "mul"]
        scaled = [i for i, name in enumerate(self._told) if name == "mul"]
        if told != ["matmul", "relu", "matmul"] or scaled not in ([], [1]):
            raise TypeError(f"an indexer multiplies, takes relu and sums; this one: {self._told}")
        assert self._keys is not None
        q, weights = self._q[0].to(self._keys.dtype), self._weights[0, :, 0]
        scores = self._kernels.index_scores(
            q, self._keys, weights, self._host, self._rows.start, self._scale
        )
        position = self._host.query_positions(scores.device)[self._rows]
        bits = best_bits(scores, count, position, self._num_words)
        self.bits[self._rows] = bits
        return SimpleNamespace(indices=bits)


class _Blocks(QueryPath, TorchFunctionMode):
    """A stand-in for the cache in the forward of an indexer of blocks, for queries of one path.

    The indexer hands it the chunk's keys and gets those of the path. Inside, as a mode of torch, it
    sees the scores of blocks [1, H, n, blocks] whose best are asked for: -inf where a query sees
    nothing of a block, inf where it has to see it.
    """

    def __init__(self, mask: TreeMask, hidden_states: torch.Tensor, size: int) -> None:
        super().__init__(mask, hidden_states)
        self._size = size

    @property
    def layers(self) -> _Blocks:
        """The cache of all layers."""
        return self

    def __getitem__(self, layer_idx: int) -> _Blocks:
        return self

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """Replaces the chunk's keys [1, 1, n, D] by those of the path, [1, 1, K, D]."""
        return self.of_path(keys[0, 0])[None, None]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            scores, count = args[0][0], args[1]
            heads, n, blocks = scores.shape
            # every block may be the best: scores say which blocks a query sees
            scores = scores.flatten(0, 1)
            anywhere = self.positions.new_full((len(scores),), blocks)
            best = best_keys(scores, count, anywhere) & (scores > -torch.inf)
            of_keys = best.view(heads, n, blocks).repeat_interleave(self._size, -1)
            self.note(of_keys[..., : self.length])
        return func(*args, **(kwargs or {}))


_MEMBERS = {
    INDEXED: _of_indexer,
    INDEXED_BLOCKS: _of_block_indexer,
    **dict.fromkeys(COMPRESSED_TYPES, of_compressor),
}
