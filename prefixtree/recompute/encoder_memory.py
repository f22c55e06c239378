"""The memory of a vision encoder: a copy of it encodes one blank image and then two (`probes`)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from prefixtree.errors import UnsupportedError
from prefixtree.images.encoder import (
    compile_blocks,
    features_in,
    has_compiled_blocks,
    image_attention,
    in_few_calls,
)
from prefixtree.images.encodings import blank_image
from prefixtree.images.vision import encoder_of, grid_keyword_of
from prefixtree.models.families import ENCODES
from prefixtree.recompute.counted import LiveBytes
from prefixtree.recompute.layers import IN_ENCODERS, checkpoint_of_encoder, keeping_in_encoder
from prefixtree.recompute.memory import EncoderMemory
from prefixtree.recompute.probes import drop_gradients, standing_for, twin, untouched
from prefixtree.recompute.recorder import AllocatedBytes

# placeholders per side of the image
_SIDE = 8


_known: weakref.WeakKeyDictionary[Any, dict[Hashable, EncoderMemory]] = weakref.WeakKeyDictionary()


def encoder_memory(
    causal_lm: Any, device: torch.device, dtype: torch.dtype, autocast: torch.dtype | None
) -> EncoderMemory:
    """Measures a model's vision encoder, weights gathered in `dtype`; an unchanged one once."""
    encoder, vision = encoder_of(causal_lm), causal_lm.config.vision_config
    if vision._attn_implementation == "eager":
        raise UnsupportedError(
            "recompute='auto' does not know the memory of eager attention in a vision encoder, "
            "which grows with the square of an image: give it sdpa (attn_implementation "
            '{"": "prefixtree", "text_config": "prefixtree", "vision_config": "sdpa"}), or give '
            "recompute as a mode"
        )
    trains = tuple(p.requires_grad for p in encoder.parameters())
    compiled = has_compiled_blocks(encoder)
    state = device, dtype, autocast, trains, compiled, vision._attn_implementation
    of_encoder = _known.setdefault(encoder, {})
    if state not in of_encoder:
        with untouched(device):
            copied = twin(encoder, standing_for(device, dtype))
            if compiled and device.type == "cuda":
                compile_blocks(copied, dynamic=True, fullgraph=False)
            of_encoder[state] = _measured(causal_lm.config, copied, device, dtype)
    return of_encoder[state]


def _measured(config: Any, encoder: Any, device: torch.device, dtype: torch.dtype) -> EncoderMemory:
    encodes = config.vision_config._attn_implementation == "prefixtree"
    encoder.train()
    encoder.forward = in_few_calls(encoder)
    trained = [p for p in encoder.parameters() if p.requires_grad]
    drop_gradients(encoder)
    pixels, grids = blank_image(config, _SIDE)
    keyword = grid_keyword_of(config)
    patches = pixels[..., 0].numel()
    around = checkpoint_of_encoder(encoder, "all")
    assert around is not None
    held, again = [], []
    counted = Products(patches)
    # the first run also counts memory that libraries and graphs need once
    for count in (1, 1, 2) if device.type == "cuda" else (1, 2):
        shown = torch.cat([pixels] * count).to(device, dtype)
        keywords: dict[str, Any] = {keyword: torch.cat([grids] * count).to(device)}
        keywords |= {ENCODES: image_attention} if encodes else {}

        def run(shown: torch.Tensor, keywords: dict[str, Any] = keywords) -> dict[str, Any]:
            return features_in(encoder(shown, **keywords))

        if not counted.products:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"), counted:
                run(shown)
        held.append(
            _run(partial(keeping_in_encoder(encoder), run), encoder, shown, goes_back=False)
        )
        again.append(_run(partial(around, run), encoder, shown))
    few = again[-2]
    per_patch, fixed = _line([x.most for x in again[-2:]], patches)
    return EncoderMemory(
        per_patch,
        fixed,
        few.features // few.rows,
        dtype,
        sum(p.nbytes for p in trained),
        _line([x.held for x in held[-2:]], patches) if trained else (0.0, 0.0),
        counted.products / patches,
        counted.pairs / patches**2,
        may_keep=bool(trained),
    )


def _line(values: list[int], patches: int) -> tuple[float, float]:
    """Fits bytes per patch and fixed bytes to the sizes of one image and of two."""
    few, many = values
    slope = (many - few) / patches
    return slope, max(0.0, few - slope * patches)


class _Bytes(NamedTuple):
    """Bytes of a run: peak and bytes held to the backward, both without features, and features."""

    most: int
    held: int
    features: int
    # the number of features
    rows: int


def _run(
    run: Callable[[torch.Tensor], dict[str, Any]],
    encoder: Any,
    shown: torch.Tensor,
    goes_back: bool = True,
) -> _Bytes:
    counts = LiveBytes([shown, *encoder.parameters(), *encoder.buffers()])
    meter: Any = AllocatedBytes(shown.device) if shown.is_cuda else counts
    with nullcontext() if shown.is_cuda else counts:
        start = meter.bytes
        meter.restart()
        output = run(shown)
        features = [x for x in tree_iter(output) if isinstance(x, torch.Tensor)]
        del output
        size = sum(x.nbytes for x in features)
        peak, held = meter.restart() - size, meter.bytes - size
        # features of blocks below the first that trains have no gradient
        reached = [x for x in features if x.requires_grad]
        if goes_back and reached:
            gradients = [torch.ones_like(x) for x in reached]
            meter.restart()
            trained = [p for p in encoder.parameters() if p.requires_grad]
            torch.autograd.backward(reached, gradients, inputs=trained)
            peak = max(peak, meter.restart() - 2 * size)
    return _Bytes(peak - start, held - start, size, len(features[0]))


class Products(TorchDispatchMode):
    """Counts the multiply-adds of a forward over one image."""

    # `products` grow with its patches, attention within windows among them, `pairs` with its pairs
    # of patches

    def __init__(self, patches: int) -> None:
        super().__init__()
        self._patches = patches
        self.products = self.pairs = 0.0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in IN_ENCODERS:
            query, key = args[:2]
            pairs = 2.0 * query.numel() * key.shape[-2]
            if key.shape[-2] == self._patches:
                self.pairs += pairs
            else:
                self.products += pairs
        elif func in _PRODUCTS:
            # a bias precedes the factors
            left, right = args[-2:]
            self.products += float(left.numel() * right.shape[-1])
        return result


_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)
