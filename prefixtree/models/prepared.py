"""`prepare`: makes a model ready for forwards over packed forests.

Layers that do more than attend get a forward along the tree from their wing (`prefixtree.wings`).
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
    """Makes a model of transformers ready for forwards over packed forests, in place.

    It sets attn_implementation="prefixtree" if the model has another attention; a vision encoder
    keeps its own. Recurrent layers (Qwen3.5, Nemotron-H, Kimi Linear, LFM2 and others) get a class
    that runs the family's forward along the tree. Indexers, which choose the keys of a query
    (DeepSeek V3.2, GLM-5), get one too. `sequence_logprobs` prepares both kinds of layers by
    itself. A sequence classifier then refuses to give one row for a forest of several sequences.

    It checks what no single layer sees: the model type is verified, every layer runs this
    attention, and no dropout is active.

    The model still generates, and runs ordinary batches without gradients, as under "sdpa". A
    second call changes nothing. Copies and pickles of a prepared model are prepared;
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
    """A mark of prepared models: unpickling imports prefixtree, which registers the attention."""


def prepare_layers(transformer: Any) -> None:
    """Gives the layers of wings their forward along the tree; refuses unverified layers."""
    config = transformer.config.get_text_config()
    for name in wings_of(transformer, config):
        wing: OfLayers = load(name)
        wing.prepare_layers(transformer, config)
    if family_of(config).wings:
        for _, module in attention_modules(transformer):
            setattr(module, _MARK, True)


def prepare_attending(transformer: Any) -> None:
    """Prepares layers that only attend, of a family whose other layers may do more."""
    load("experts").prepare_layers(transformer, transformer.config)
    for _, module in attention_modules(transformer):
        setattr(module, _MARK, True)


def wings_of(transformer: nn.Module, config: Any) -> list[str]:
    """The wings whose layers a model has: those of its family, and those that its modules show."""
    kinds: set[Any] = {type(module) for module in transformer.modules()}
    names = dict.fromkeys(family_of(config).wings)
    if any(map(functions_of, kinds)):
        # a family without them refuses them
        names["states"] = None
    if any(hasattr(kind, "_apply_gate") for kind in kinds):
        # transformers' interface of experts
        names["experts"] = None
    return list(names)


def _chooses_keys(config: Any) -> Any:
    return family_of(config).has_indexers and {"model_type": config.model_type}


def _carries_states(config: Any) -> Any:
    return family_of(config).functions and {"model_type": config.model_type}


#: Refusals of a configuration whose wing layers do not know the tree yet: they would choose keys
#: or mix tokens by packed order.
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
    """Makes the refusal of a layer that would attend to keys which the tree did not choose."""
    return UnsupportedError(UNPREPARED[0].message.format(model_type=config.model_type))


def check_prepared(module: nn.Module) -> None:
    """Refuses an attention layer of a model whose layers do not know the tree yet."""
    config: Any = module.config
    if not getattr(module, _MARK, False) and family_of(config).wings:
        refuse(UNPREPARED, config)
