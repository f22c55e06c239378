"""Layers of low precision: float8 training by torchao, and adapters over bf16 or 4-bit weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from prefixtree import PackedForest, PrefixForest, pack
from prefixtree.testing.compare import Run

# float8: products of tokens and weights with a scale per row; lora: adapters over weights as they
# are; qlora: adapters over weights in 4 bits
PRECISIONS = ("plain", "float8", "lora", "qlora")
# the model in float32 that a precision is compared with: the same weights, before rounding
REFERENCE = {"float8": "plain", "qlora": "lora"}
_PACKAGES = {"float8": ("torchao",), "lora": ("peft",), "qlora": ("peft", "bitsandbytes")}
RANK = 16
# float8 products sum over the tokens in a backward, by so many at a time
MULTIPLE = 16
# packed, log p and the gradient may be so many times as far from float32 as the stock forward in
# the same precision, each sequence alone
FARTHER = 1.5
SLACK = 1e-6
# by how much the share of float32's gradient may differ from the stock forward's
SHARE = 0.05
# with frozen weights, so many times as far from that forward as bf16 alone is from float32
BETWEEN = 3.0


def missing(precision: str) -> list[str]:
    """The packages that a precision needs and that are not installed."""
    return [name for name in _PACKAGES.get(precision, ()) if find_spec(name) is None]


def lowered(model: Any, precision: str) -> Any:
    """A model of random weights in a precision; its lm_head stays as it is."""
    if precision == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("rowwise")
        # a CPU rounds to float8 and multiplies in float32
        config = replace(config, emulate=model.device.type == "cpu")
        return convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name
        )
    if precision == "qlora":
        _quantise(model)
    return _adapted(model) if precision in ("lora", "qlora") else model


def _quantise(model: nn.Module) -> None:
    """Every linear layer but the lm_head by one of bitsandbytes: nf4, its scales quantised too."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is not nn.Linear or name == "lm_head":
                continue
            weight = linear.weight
            made = Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=weight.dtype,
                device="meta",
            )
            made.bias = linear.bias
            # quantised as it "moves" to the device
            rounded = Params4bit(weight.detach(), quant_type="nf4", module=made)
            made.weight = rounded.to(weight.device)
            setattr(parent, name, made)


def _adapted(model: Any) -> Any:
    """With adapters of random weights, in the dtype of the lm_head, on all linear layers."""
    import peft

    torch.manual_seed(0)
    dtype = model.get_output_embeddings().weight.dtype
    config = peft.LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules="all-linear", init_lora_weights=False
    )
    model = peft.get_peft_model(model, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    return model


def padding_of(forest: PrefixForest, precision: str) -> int:
    """How many tokens are appended so that float8 products can be made."""
    return -forest.num_tokens % MULTIPLE if precision == "float8" else 0


def packed_in(precision: str, forest: PrefixForest) -> PackedForest:
    """The packed forest, padded as the precision wants it."""
    return pack(forest, MULTIPLE if precision == "float8" else None)


def distances(run: Run, exact: Run) -> dict[str, float]:
    """How far a run is from another: log p, root mean square in nats; the whole gradient, by the
    norm of the other."""
    scored = torch.cat(exact.logprobs) != 0
    off = (torch.cat(run.logprobs) - torch.cat(exact.logprobs))[scored]
    total = gap = 0.0
    for found, want in _gradients(run, exact):
        total += float(want.square().sum())
        gap += float((found - want).square().sum())
    return {
        "logprobs": float(off.double().square().mean().sqrt()),
        "gradient": (gap / total) ** 0.5,
    }


def share(run: Run, exact: Run) -> float:
    """How much of another run's gradient a run's has, 1.0 for all: rounding, which goes in all
    directions, changes it little, a part that is left out or counted twice does."""
    both = total = 0.0
    for found, want in _gradients(run, exact):
        both += float((found * want).sum())
        total += float(want.square().sum())
    return both / total


def _gradients(run: Run, exact: Run) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of every parameter that has one: the run's and the other's, float64."""
    for name, want in exact.gradients.items():
        if want is not None:
            found = run.gradients[name]
            assert found is not None
            yield found.double(), want.double()


def too_far(far: dict[str, dict[str, float]], precision: str) -> list[str]:
    """What of `distances` is over its limit; NaN is. Both forwards have the same rounded weights,
    so a side is also near the stock forward, however far that is from float32.

    Args:
        far: of the one without the precision, "stock" and "side" from float32, "side to stock".
    """
    red = []
    plain, stock, side, between = far.values()
    for name in side:
        # float8 rounds tokens as well, and rounding differs where bf16 does
        near = stock[name] if precision == "float8" else BETWEEN * plain[name]
        for found, limit, what in (
            (side[name], FARTHER * stock[name], "float32"),
            (between[name], near, "the stock forward"),
        ):
            # in float32 alone nothing is rounded further
            if not found <= limit + SLACK:
                red.append(f"{name} is {found:.1e} from {what}, at most {limit:.1e}")
    return red
