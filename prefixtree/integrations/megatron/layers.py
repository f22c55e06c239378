"""`tree_spec`: a layer spec whose self-attention follows packed forests, Megatron's latent
attention (MLA) too.

Latent attention makes its rotary table itself, applies row i to token i, and with packed parameters
squeezes the batch away for code that reads cu_seqlens. So its queries and keys are made without
them, from a table with a row per packed token, and only its core attention sees the forest. Legend:
T packed tokens, H query heads, Hk kv heads, D head dim, or rotary dimension, P positions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.utils import is_layer_window_attention

from prefixtree.errors import UnsupportedError
from prefixtree.integrations.megatron.context_parallel import ForestParams
from prefixtree.integrations.megatron.routers import ForestRouter
from prefixtree.integrations.megatron.states import SERVED

# ---- latent attention ----------------------------------------------------------------------------

if TYPE_CHECKING:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention as _Attention
else:
    _Attention = object


class ForestLatentAttention(_Attention):
    """A base before MLASelfAttention: the rotary positions of a forest are its depths."""

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Makes q, k [T, 1, H, qk + D], v [T, 1, H, v] and compressed ones of hidden [T, 1, d]."""
        make = super().get_query_key_value_tensors
        if not isinstance(packed_seq_params, ForestParams):
            inputs = (key_value_states, position_ids, packed_seq_params)
            return make(hidden_states, *inputs, *args, **kwargs)
        # found before the submodule, whose place it takes for this call
        self.__dict__["rotary_pos_emb"] = _AtDepths(self.rotary_pos_emb, packed_seq_params)
        try:
            return make(hidden_states, key_value_states, position_ids, None, *args, **kwargs)
        finally:
            del self.__dict__["rotary_pos_emb"]


class _AtDepths:
    """Megatron's rotary embedding of latent attention, with a row per packed token."""

    def __init__(self, rotary: Any, params: ForestParams) -> None:
        self._rotary, self._params = rotary, params

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        return int(self._params.max_seqlen_q)

    def __call__(self, length: int, packed_seq: bool = False) -> Any:
        """Makes the table [T, 1, 1, D]; with YaRN also its factor."""
        # the whole table, as for packed sequences: context parallelism would cut it
        return self._params.latent_rows(lambda: self._rotary(length, packed_seq=True))


def is_served_latent(module: Any) -> bool:
    """Whether a class is Megatron's latent attention, and attends as that does."""
    return (
        isinstance(module, type)
        and issubclass(module, MLASelfAttention)
        and all(
            getattr(module, name) is getattr(MLASelfAttention, name)
            for name in ("forward", "get_query_key_value_tensors", "_qkv_down_projection")
        )
    )


# ---- specs, and attention of keys and values -----------------------------------------------------


class ForestSelfAttention:
    """A base before Megatron's self-attention: the rotary positions of a forest are its depths."""

    def forward(self, hidden_states: Any, attention_mask: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(a, ForestParams) for a in args):
            raise UnsupportedError("packed_seq_params came by position, expected by keyword")
        params = kwargs.get("packed_seq_params")
        if isinstance(params, ForestParams):
            if any(a is not None for a in args):
                raise UnsupportedError(
                    "self-attention got positional arguments beside a packed forest, expected "
                    "keywords"
                )
            kwargs["rotary_pos_emb"] = params.at_depths(kwargs.get("rotary_pos_emb"))
        return super().forward(hidden_states, attention_mask, *args, **kwargs)  # type: ignore[misc]


class ForestCoreAttention:
    """A base before Megatron's or TransformerEngine's core attention: queries see their paths."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        *args: Any,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        # Megatron's local class has no context parallelism and refuses to be made for it
        self._forests_alone = config.context_parallel_size > 1 and isinstance(
            self, DotProductAttention
        )
        own_config = config
        if self._forests_alone:
            own_config = copy.copy(config)
            own_config.context_parallel_size = 1
        super().__init__(own_config, layer_number, *args, softmax_scale=softmax_scale, **kwargs)  # type: ignore[call-arg]
        self._forest_scale = softmax_scale
        self._forest_window = _window(config, layer_number)
        # otherwise as the packed forest is set
        self._forest_deterministic = True if config.deterministic_mode else None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attends over this rank's T tokens: query [T, 1, H, D], key and value [T, 1, Hk, D].

        Returns [T, 1, H D], with the values' D where latent attention has two.
        """
        if not isinstance(packed_seq_params, ForestParams):
            if self._forests_alone:
                raise UnsupportedError(
                    "Megatron's DotProductAttention has no context parallelism but on forests; use "
                    "TransformerEngine's layer spec"
                )
            return super().forward(  # type: ignore[misc]
                *(query, key, value, attention_mask, *args),
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        if kwargs.get("attention_bias") is not None:
            raise UnsupportedError("packed forests have no attention_bias; leave it out")
        assert packed_seq_params.local is not None
        out = packed_seq_params.local.attend(
            self,
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            scale=self._forest_scale,
            window=self._forest_window,
            # zeros where the softmax is off by one, None where it is the usual one
            sinks=getattr(self, "softmax_offset", None),
            deterministic=self._forest_deterministic,
        )
        return out.flatten(1)[:, None]


def tree_spec(spec: Any) -> Any:
    """Copies a spec, so that self-attention, layers with a state and routers take packed forests.

    Parameters, their names in checkpoints, and the results of an ordinary batch stay the same.
    Layers that forests cannot pass are copied as they are: a model that has them is refused when it
    is used.

    Args:
        spec: a ModuleSpec of a layer or of a stack (`hybrid_stack_spec`), the submodules of a
            transformer block, or a function that returns one of them, as Megatron-Bridge's
            providers have it. From a function it makes a function.

    Raises:
        TypeError: anything else.
    """
    if isinstance(spec, ModuleSpec) or (is_dataclass(spec) and not isinstance(spec, type)):
        return _mapped(spec)
    if callable(spec) and not isinstance(spec, type):
        return _of_function(spec)
    raise TypeError(
        "tree_spec takes a layer spec, the submodules of a block or a function that makes one, got "
        f"{spec!r}; get_gpt_layer_local_spec() makes one"
    )


def _of_function(make: Callable[..., Any]) -> Callable[..., Any]:
    # providers read its signature to know what to give it
    @functools.wraps(make)
    def make_tree(*args: Any, **kwargs: Any) -> Any:
        return tree_spec(make(*args, **kwargs))

    return make_tree


def _mapped(node: Any) -> Any:
    """Copies a spec, or a part of one, with other classes for self-attention and routers."""
    if isinstance(node, ModuleSpec):
        module = get_module(node)
        front = _front_of(module)
        if front is not None:
            core = _with_forest_core(node.submodules.core_attention)
            submodules = replace(node.submodules, core_attention=core)
            return replace(node, module=_joined(front, module), submodules=submodules)
        if module in SERVED:
            return replace(node, module=_joined(SERVED[module], module))
        return replace(node, submodules=_mapped(node.submodules))
    if isinstance(node, list):
        return [_mapped(n) for n in node]
    if isinstance(node, functools.partial):
        # the name of layers of experts
        named = {name: _mapped(value) for name, value in node.keywords.items()}
        return functools.partial(node.func, *node.args, **named)
    if node is TopKRouter:
        return _joined(ForestRouter, node)
    if is_dataclass(node) and not isinstance(node, type):
        return replace(node, **{name: _mapped(value) for name, value in vars(node).items()})
    return node


def _front_of(module: Any) -> type | None:
    """The class that makes an attention follow forests; None if it is not served."""
    if is_served_attention(module):
        return ForestSelfAttention
    return ForestLatentAttention if is_served_latent(module) else None


def is_served_attention(module: Any) -> bool:
    """Whether a class is Megatron's self-attention, and attends as that does."""
    return (
        isinstance(module, type)
        and issubclass(module, SelfAttention)
        and getattr(module, "forward", None) is Attention.forward
    )


def _with_forest_core(core: Any) -> Any:
    if isinstance(core, ModuleSpec):
        return replace(core, module=_with_forest_core(get_module(core)))
    if isinstance(core, functools.partial):
        return functools.partial(_with_forest_core(core.func), *core.args, **core.keywords)
    if core is DotProductAttention or core is _transformer_engine_core():
        return _joined(ForestCoreAttention, core)
    # unchanged: a subclass may attend in another way, and check_model names it
    return core


def _transformer_engine_core() -> Any:
    from megatron.core.extensions import transformer_engine

    return transformer_engine.TEDotProductAttention if transformer_engine.HAVE_TE else None


@functools.cache
def _joined(first: type, base: type) -> type:
    """Makes a class of both; a spec that is mapped twice stays as it is."""
    if issubclass(base, first):
        return base
    # by the name of a module with parameters of its own, Megatron-Bridge finds how they are sharded
    has_none = first in (ForestSelfAttention, ForestCoreAttention)
    name = f"Forest{base.__name__}" if has_none else base.__name__
    return type(name, (first, base), {"__module__": __name__})


def _window(config: Any, layer_number: int) -> int | None:
    """The `window` of `tree_attention` for a layer: Megatron's leaves out the query's own key."""
    size, skipped = config.window_size, getattr(config, "window_attn_skip_freq", None)
    if not is_layer_window_attention(size, skipped, layer_number):
        return None
    before, behind = size
    if behind > 0:
        raise UnsupportedError(
            f"window_size={tuple(size)} lets tokens see later ones, expected (tokens before, 0)"
        )
    return None if before < 0 else before + 1
