"""Indexers, which choose the keys that a query attends to, on packed forests.

An attention layer of such a model (DeepSeek V3.2, GLM-5 and others) asks its indexer for the best
k keys of each query. Along the tree, these are the best of the query's path. `prepare` gives
attentions and indexers a class whose forward runs the family's code: the indexer's once for a few
neighbouring queries of one path, which it shows the keys of that path alone; or, on a GPU, for any
neighbouring queries, whose products with keys a Triton kernel computes. What it chose goes to
`tree_attention` as a bit per position of the path (`kernels.chosen`), in the place of the family's
indices. Nothing holds T x T numbers.

An indexer runs without gradients, as in transformers, and so do its parameters. It runs again in a
checkpoint's second forward, over the same chunks, and chooses the same keys.

Legend: T packed tokens, n queries of a chunk, K keys of their path, H index heads, W words of bits.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from prefixtree.errors import UnsupportedError
from prefixtree.kernels.chosen import best_keys, to_bits, words
from prefixtree.kernels.packages import installed
from prefixtree.kernels.torch_library import uncompiled
from prefixtree.models.along_tree import AlongTree, Members, along_tree, check_own_code
from prefixtree.models.family_table import INDEXED
from prefixtree.models.plain_batches import SHOWN_POSITIONS
from prefixtree.packing.host_mask import HostMask
from prefixtree.packing.mask import TreeMask, check_mask
from prefixtree.parallel.attention import DividedMask

# scores of all index heads held at once: 128 MiB in float32
_CHUNK = 1 << 25
# scores of queries held at once where a kernel sums the heads: 64 MiB
_SCORES = 1 << 24
# how MiniMax M3 hands blocks of keys to its attention function, which is not served
BLOCKS = "block_indices"
# the mark of attention layers whose keys are chosen
_INDEXED = "_prefixtree_indexed"
# what the verified forwards take, and names that they use
_INDEXER_TAKES = (
    "hidden_states",
    "q_resid",
    "position_embeddings",
    "attention_mask",
    "position_ids",
)
_SIZES = ("index_topk", "q_lora_rank")
_CACHES = ("past_key_values", "cache")
_INDEXER_USES = frozenset({"update_indexer", "topk", "indices"})


class UnpreparedMask:
    """Stands for the attention mask of a batch without padding in a model with indexers.

    transformers asks for it before layers run, and does not know the tree. A prepared layer puts
    the forest's mask in its place, or an ordinary causal one; others cannot read it.
    """

    def __init__(self, length: int, config: Any, device: torch.device | None) -> None:
        self._length, self._config, self._device = length, config, device

    def __getitem__(self, index: Any) -> Any:
        raise unprepared(self._config)

    def causal(self) -> torch.Tensor:
        """bool [1, 1, n, n] of an ordinary batch."""
        shape = 1, 1, self._length, self._length
        return torch.ones(shape, dtype=torch.bool, device=self._device).tril()


class ForestMask:
    """A forest's mask where a layer hands its indexer the attention mask, and then the function."""

    def __init__(self, mask: TreeMask) -> None:
        self.mask = mask

    def __getitem__(self, index: Any) -> ForestMask:
        return self


def unprepared(config: Any) -> UnsupportedError:
    """The refusal of a layer that would choose keys in packed order, or attend to all of them."""
    return UnsupportedError(
        f"{config.model_type} chooses keys with an indexer: call prefixtree.prepare(model) once "
        "before model(...), or use sequence_logprobs"
    )


def not_kept() -> UnsupportedError:
    """The refusal of what hands the keys of a call to another call, or to another rank."""
    return UnsupportedError(
        "steps, ranks and samplers do not hand on an indexer's keys yet: score without group=, "
        "max_tokens= and kept_trunks, and sample with an engine"
    )


def has_indexers(config: Any) -> bool:
    """Whether a configuration has layers with indexers."""
    return INDEXED in (getattr(config, "layer_types", None) or ())


def prepare_indexers(transformer: Any, config: Any) -> None:
    """Gives attentions and indexers their forward along the tree.

    Raises:
        UnsupportedError: one that is not as the family's proof had it.
    """
    layers = [
        (name, module)
        for name, module in transformer.named_modules()
        if getattr(module, "is_causal", False) and hasattr(module, "indexer")
    ]
    kinds = list(config.layer_types)
    if len(layers) != len(kinds):
        raise UnsupportedError(
            f"{len(layers)} of {len(kinds)} attentions in {config.model_type} can have an indexer, "
            "the others were replaced"
        )
    for (name, module), kind in zip(layers, kinds, strict=True):
        setattr(module, _INDEXED, kind == INDEXED)
        check_own_code(name, module, "indexers")
        if module.indexer is not None:
            _check_indexer(f"{name}.indexer", module.indexer)
            _give_class(module.indexer, _of_indexer)
        _give_class(module, _of_attention)


def _give_class(module: nn.Module, members: Members) -> None:
    if not isinstance(module, AlongTree):
        kind: Any = type(module)
        module.__class__ = along_tree(kind, members)


def _check_indexer(name: str, indexer: Any) -> None:
    check_own_code(name, indexer, "indexers")
    if isinstance(indexer, AlongTree):
        return
    forward = inspect.unwrap(type(indexer).forward)
    takes = tuple(inspect.signature(forward).parameters)[1:]
    uses = set(forward.__code__.co_names)
    *first, last = takes or ("nothing",)
    as_verified = tuple(first) == _INDEXER_TAKES and last in _CACHES
    if min(getattr(indexer, key, 1) for key in _SIZES) < 1:
        raise UnsupportedError(f"{name} chooses nothing: {', '.join(_SIZES)} must be at least 1")
    if as_verified and uses >= _INDEXER_USES and hasattr(indexer, "n_heads"):
        return
    raise UnsupportedError(
        f"{name} ({type(indexer).__name__}) takes {', '.join(takes)}, as no verified indexer "
        "does: install transformers 5.23 or 5.24"
    )


# ---- forwards along the tree ---------------------------------------------------------------------


def _of_attention(original: Any) -> dict[str, Any]:
    """An attention that hands its indexer the forest's mask; it is left out of compiled layers,
    as an indexer loops over the forest's paths."""

    @uncompiled
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask, given = kwargs.get("tree_mask"), kwargs.get("attention_mask")
        if isinstance(mask, DividedMask) or kwargs.get("forest_cache") is not None:
            raise not_kept()
        # most families hand them on to the attention function, these do not
        kwargs[SHOWN_POSITIONS] = kwargs.get("position_ids")
        if isinstance(given, UnpreparedMask):
            kwargs["attention_mask"] = None
            if getattr(self, _INDEXED):
                kwargs["attention_mask"] = given.causal() if mask is None else _forest_mask(mask)
        return original.forward(self, *args, **kwargs)

    return {"forward": functools.wraps(original.forward)(forward)}


def _forest_mask(mask: TreeMask) -> ForestMask:
    check_mask(mask, "tree_mask")
    if mask.query_tokens is not None:
        raise UnsupportedError(
            "an indexer takes the whole forest, not a mask of some queries: packed.mask"
        )
    return ForestMask(mask)


def _of_indexer(original: Any) -> dict[str, Any]:
    """An indexer that chooses among the keys of each query's path."""

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
        """hidden_states [1, T, C] -> int32 [1, T, W], [1, T, 0] where all queries choose all keys;
        the family's indices of ordinary batches."""
        tokens = (hidden_states, q_resid, *position_embeddings)
        if not isinstance(attention_mask, ForestMask):
            indices: torch.Tensor = original.forward(
                self, *tokens[:2], tokens[2:], attention_mask, *cached, **more
            )
            return indices
        host = attention_mask.mask.host
        batch, rows = hidden_states.shape[:2]
        if batch != 1:
            raise ValueError(f"a packed forest is one row: expected batch size 1, got {batch}")
        if rows != host.num_tokens:
            raise ValueError(
                f"a packed forest has no key-value cache: pass use_cache=False ({rows} rows, the "
                f"mask has {host.num_tokens})"
            )
        if host.deepest <= self.index_topk:
            return torch.empty(1, rows, 0, dtype=torch.int32, device=hidden_states.device)
        kernels = _kernels_for(attention_mask.mask, hidden_states, self.head_dim)
        if kernels is None:
            keys: Any = _Path(host)
            spans = keys.spans(self.n_heads)
        else:
            keys = Products(host, kernels)
            spans = keys.spans(self.n_heads, self.head_dim)
        for rows in spans:
            hidden, resid, *rope = (x[:, rows] for x in tokens)
            original.forward(self, hidden, resid, tuple(rope), keys, None, keys)
        return keys.bits[None]

    return {"forward": functools.wraps(original.forward)(forward)}


def _kernels_for(mask: TreeMask, hidden: torch.Tensor, head_dim: int) -> Any:
    """The module whose kernel computes scores, or None: the family's own products.

    Autocast rounds what the family's products give, which the kernel does not. Tensors without
    numbers, as memory is traced with, know torch's operations alone.
    """
    if type(hidden) is not torch.Tensor:
        return None
    if mask.backend not in ("auto", "triton") or torch.is_autocast_enabled(hidden.device.type):
        return None
    if not (hidden.is_cuda or mask.backend == "triton") or not installed("triton"):
        return None
    from prefixtree.kernels import index_scores

    return index_scores if index_scores.serves(hidden, head_dim) else None


class _Path:
    """Stands in for mask, cache and scores in an indexer's forward of queries of one path.

    The indexer hands it the chunk's keys and gets those of the path, adds it to its scores as a
    mask, and asks it for the best of them.

    Attributes:
        bits: int32 [T, W], what was chosen so far.
    """

    # it is added to the scores, as masks of numbers are
    dtype = torch.float32
    bits: torch.Tensor
    shape: torch.Size
    _scores: torch.Tensor

    def __init__(self, host: HostMask) -> None:
        self._host, self._num_words = host, words(host.deepest)
        self._keys: torch.Tensor | None = None

    def spans(self, heads: int) -> Iterator[slice]:
        """The packed tokens of each chunk, in an order in which a token comes behind its
        ancestors; it stands for the chunk that it gave last."""
        for start, length, runs in self._host.blocks():
            above, at = runs[:-1], 0
            depth = sum(end - begin for begin, end, _ in above)
            most = max(1, _CHUNK // (heads * (depth + length)))
            while at < length:
                last = min(at + most, length)
                self._rows = slice(start + at, start + last)
                self._runs = [*above, (start, start + last, True)]
                yield self._rows
                at = last

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> torch.Tensor:
        """[1, n, D], those of the chunk -> [1, K, D], those of the path, root first."""
        if self._keys is None:
            self._keys = keys.new_empty(self._host.num_tokens, keys.shape[2])
            shape = self._host.num_tokens, self._num_words
            self.bits = keys.new_empty(shape, dtype=torch.int32)
        self._keys[self._rows] = keys[0]
        parts = [self._keys[begin:end] for begin, end, _ in self._runs]
        return torch.cat(parts)[None] if len(parts) > 1 else parts[0][None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> _Path:
        """scores [1, n, K] + path; torch asks no other method under its function modes."""
        scores, path = args
        if func not in (torch.Tensor.add, torch.Tensor.__add__) or not isinstance(path, cls):
            raise TypeError(f"an indexer adds its mask to its scores, and calls {func}")
        found: _Path = path
        found._scores, found.shape = scores[0], scores.shape
        return found

    def topk(self, count: int, dim: int) -> Any:
        n, width = self._scores.shape
        position = torch.arange(width - n, width, device=self._scores.device)
        chosen = best_keys(self._scores, count, position)
        self.bits[self._rows] = to_bits(chosen, self._num_words)
        del self._scores
        return SimpleNamespace(indices=self.bits[self._rows])


class Products:
    """Stands in for mask, cache, keys and scores in an indexer's forward of neighbouring queries.

    What the indexer would do with all keys, a product per head, a ReLU and the weighted sum of
    heads, it is told, and a kernel computes at the end.

    Attributes:
        bits: int32 [T, W], what was chosen so far.
        shape: of the scores.
    """

    dtype = torch.float32
    bits: torch.Tensor
    shape: tuple[int, int, int]
    _q: torch.Tensor
    _weights: torch.Tensor
    _scale: Any

    def __init__(self, host: HostMask, kernels: Any) -> None:
        self._host, self._kernels, self._num_words = host, kernels, words(host.deepest)
        self._keys: torch.Tensor | None = None

    def spans(self, heads: int, head_dim: int) -> Iterator[slice]:
        """The packed tokens of each chunk; it stands for the chunk that it gave last."""
        total, whole = self._host.num_tokens, self._kernels.tile_tokens(heads)
        most = min(_CHUNK // (heads * head_dim), _SCORES // self._host.deepest)
        most = max(1, most // whole) * whole
        for start in range(0, total, most):
            self._rows = slice(start, min(start + most, total))
            width = int(self._host.position[self._rows].max()) + 1
            self.shape = 1, self._rows.stop - start, width
            self._told: list[str] = []
            self._scale = 1.0
            yield self._rows

    def update_indexer(self, keys: torch.Tensor, layer_idx: int) -> Products:
        """keys: [1, n, D], those of the chunk."""
        if self._keys is None:
            self._keys = keys.new_empty(self._host.num_tokens, keys.shape[2])
            shape = self._host.num_tokens, self._num_words
            self.bits = keys.new_empty(shape, dtype=torch.int32)
        self._keys[self._rows] = keys[0]
        return self

    def transpose(self, *_: Any) -> Products:
        """Nothing comes of k.transpose(-1, -2).float().unsqueeze(1), nor later of
        index_scores.squeeze(-2) + attention_mask."""
        return self

    float = unsqueeze = squeeze = __add__ = transpose

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Products:
        """relu(products), and the two products: of q with keys, of weights with heads."""
        found: Products = args[-1]
        name = func.__name__
        if name == "matmul":
            if found._told:
                found._weights = args[0]
            else:
                found._q = args[0]
        found._told.append(name)
        return found

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
        position = self._host.on(scores.device)["position_ids"][self._rows]
        bits = to_bits(best_keys(scores, count, position), self._num_words)
        self.bits[self._rows] = bits
        return SimpleNamespace(indices=bits)
