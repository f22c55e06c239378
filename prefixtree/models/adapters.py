"""The PEFT adapters that run exactly on packed forests, and the refusal of the others.

A method is listed because a test compares its log-probabilities and the gradient of every adapter
parameter with each sequence alone (tests/models/test_peft.py). An adapter must compute every token
from that token alone and draw no noise, as a packed row holds many sequences.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from prefixtree.errors import UnsupportedError

#: `PeftType`s that are verified.
METHODS = (
    "ADALORA",
    "BOFT",
    "C3A",
    "DELORA",
    "FOURIERFT",
    "GRALORA",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "LORA",
    "MISS",
    "OFT",
    "RANDLORA",
    "ROAD",
    "SHIRA",
    "TRAINABLE_TOKENS",
    "VBLORA",
    "VERA",
    "WAVEFT",
)

#: Names with which PEFT's classes for the verified variants of LoRA begin; rsLoRA is no variant.
LORA_VARIANTS = ("BdLora", "Dora", "Kasa", "MiCA")

# dropouts that PEFT draws itself, with no dropout layer that `check_modules` would see
_DROPOUTS = ("boft_dropout", "module_dropout", "rank_dropout")


def check_adapters(model: nn.Module) -> None:
    """Refuses active adapters that draw noise or are not verified; skips inactive ones."""
    if not _has_adapters(model):
        return
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    # two adapted models inside one module may use one name
    configs: dict[int, tuple[str, Any]] = {}
    active: set[str] = set()
    training: set[str] = set()
    for module in model.modules():
        for attribute in ("peft_config", "_peft_config"):  # the second one of virtual tokens
            known = vars(module).get(attribute)
            if isinstance(known, dict):
                configs |= {id(config): (name, config) for name, config in known.items()}
        if isinstance(module, BaseTunerLayer) and not module.disable_adapters:
            active.update(module.active_adapters)
            if module.training:
                training.update(module.active_adapters)
            _check_variants(module)
        elif isinstance(module, PeftModel) and not module._adapters_disabled:
            # methods that add no layers: virtual tokens and routers over adapters
            active.update(module.active_adapters)
    for name, config in configs.values():
        if name in active:
            _check_method(name, config)
        if name in training:
            _check_dropouts(name, config)


def _has_adapters(model: nn.Module) -> bool:
    """Whether a module is PEFT's."""
    kinds = {type(module) for module in model.modules()} if "peft" in sys.modules else set()
    return any(c.__module__.startswith("peft.") for kind in kinds for c in kind.__mro__)


def _check_method(name: str, config: Any) -> None:
    method = getattr(config.peft_type, "value", config.peft_type)
    if method not in METHODS:
        raise UnsupportedError(
            f"PEFT method {method} of adapter {name!r} is not verified to run exactly on packed "
            f"forests; use LoRA, or one of {', '.join(METHODS)}"
        )


def _check_variants(layer: Any) -> None:
    for name, variant in getattr(layer, "lora_variant", {}).items():
        label = getattr(variant, "__name__", type(variant).__name__)
        if name in layer.active_adapters and not label.startswith(LORA_VARIANTS):
            raise UnsupportedError(
                f"adapter {name!r} is the LoRA variant {_setting_of(layer, label)}: it looks along "
                "the row, which holds many sequences, draws noise, or is not verified; use LoRA, "
                "rsLoRA or DoRA"
            )


def _setting_of(layer: Any, kind: str) -> str:
    """Names the settings of a LoraConfig that select a variant, and its class."""
    for settings, variant in getattr(layer, "lora_variants", {}).items():
        if getattr(variant, "__name__", None) == kind:
            return f"{' and '.join(settings)} ({kind})"
    return kind


def _check_dropouts(name: str, config: Any) -> None:
    for setting in _DROPOUTS:
        if value := getattr(config, setting, None):
            raise UnsupportedError(
                f"adapter {name!r} has {setting}={value}: a shared token would draw one mask where "
                "the replicated batch draws several; set it to 0 or call model.eval()"
            )
