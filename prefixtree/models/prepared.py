"""`prepare`: makes a model ready for forwards over packed forests.

Layers that do not only attend get a forward along the tree from their wing (`prefixtree.wings`).
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from prefixtree.errors import Refusal, UnsupportedError, refuse
from prefixtree.models.checks import attention_modules, refuse_pooled, set_attention, transformer_of
from prefixtree.models.families import check_config, check_modules, family_of
from prefixtree.models.family_table import functions_of
from prefixtree.wings import OfLayers, load

_MARK = "_prefixtree_prepared"
_HELD = "_prefixtree_registers"
_Model = TypeVar("_Model", bound=nn.Module)


def prepare(model: _Model) -> _Model:
    """Makes a model of transformers ready for forwards over packed forests, however it was loaded.

    It sets attn_implementation="prefixtree" where the model has another attention; a vision encoder
    keeps its own. Where layers carry a state (Qwen3.5, Nemotron-H, Kimi Linear, LFM2 and others),
    recurrent layers get a class of their own, which runs the family's forward along the tree.
    Indexers, which choose the keys of a query (DeepSeek V3.2, GLM-5), get one likewise;
    `sequence_logprobs` does that by itself. A sequence classifier refuses to give one row for a
    forest of several. It checks what no single layer sees: that the type is
    verified, that every layer runs this attention, and that no dropout is active.

    The model still generates, and runs ordinary batches without gradients: as under "sdpa".

    A second call changes nothing. Copies and pickles of a prepared model are prepared;
    `from_pretrained` gives a model that is not.

    Args:
        model: a model of transformers, wrapped (PEFT, DDP, FSDP2) or not.

    Returns:
        The same model.

    Raises:
        TypeError: not a module.
        UnsupportedError: a model that does not run exactly on packed forests, with the reason.
    """
    transformer = transformer_of(model)
    config = transformer.config
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        check_config(part, transformer.training)
    # the model may be called by itself from now on, whatever trains then
    check_modules(model, may_change=True)
    set_attention(transformer)
    setattr(transformer, _HELD, _Registers())
    attention_modules(transformer)
    prepare_layers(transformer)
    refuse_pooled(transformer)
    return model


class _Registers:
    """Held by prepared models: unpickling it imports prefixtree, which registers that."""


def prepare_layers(transformer: Any) -> None:
    """Gives the layers of wings their forward along the tree.

    Raises:
        UnsupportedError: a layer that is not as the family's proof had it.
    """
    config = transformer.config.get_text_config()
    for name in wings_of(transformer, config):
        wing: OfLayers = load(name)
        wing.prepare_layers(transformer, config)
    if family_of(config).wings:
        for _, module in attention_modules(transformer):
            setattr(module, _MARK, True)


def wings_of(transformer: nn.Module, config: Any) -> list[str]:
    """The wings whose layers a model has: those of its family, and those that its modules show.

    Args:
        config: of the model's text.
    """
    kinds: set[Any] = {type(module) for module in transformer.modules()}
    found = dict.fromkeys(family_of(config).wings)
    if any(map(functions_of, kinds)):
        # in a family without, they are refused
        found["states"] = None
    if any(hasattr(kind, "_apply_gate") for kind in kinds):
        # transformers' interface of experts
        found["experts"] = None
    return list(found)


def _chooses_keys(config: Any) -> Any:
    return family_of(config).has_indexers and {"model_type": config.model_type}


def _carries_states(config: Any) -> Any:
    return family_of(config).functions and {"model_type": config.model_type}


#: Of a configuration, where layers of a wing do not know the tree yet. They would choose keys, or
#: mix tokens, by packed order.
UNPREPARED = (
    Refusal(
        "indexers",
        _chooses_keys,
        "{model_type} chooses keys with an indexer: call prefixtree.prepare(model) once before "
        "model(...), or use sequence_logprobs",
    ),
    Refusal(
        "recurrent layers",
        _carries_states,
        "{model_type} has recurrent layers, which mix tokens by packed order until the model is "
        "prepared: call prefixtree.prepare(model) once before model(...), or use "
        "sequence_logprobs, which does it by itself",
    ),
)


def unprepared(config: Any) -> UnsupportedError:
    """The refusal of a layer that would attend to keys which the tree did not choose."""
    return UnsupportedError(UNPREPARED[0].message.format(model_type=config.model_type))


def check_prepared(module: nn.Module) -> None:
    """Refuses an attention layer of a model whose layers do not know the tree yet."""
    config: Any = module.config
    if not getattr(module, _MARK, False) and family_of(config).wings:
        refuse(UNPREPARED, config)
