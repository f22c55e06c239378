"""A vision encoder's forward in few calls, and in runs of images that the backward computes again.

A vision encoder that takes all images at once keeps the activations of all of them until the
backward. In runs it keeps pixels and features, and the activations of one run at a time.

transformers calls flash kernels once per block, with the borders of images (of windows, in
Qwen2.5-VL). It calls other attention once per image or window. Under "prefixtree" and "sdpa" a
block's attention gets borders too, and images of one size are a batch of torch's attention.

Legend: N distinct images of one modality (or those of one size), P patches of a run, L patches of
one image, F features, H heads, D values per patch, or per head.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from prefixtree.kernels.operators import uncompiled
from prefixtree.models.along_tree import with_globals
from prefixtree.models.changes import changing

#: Patches of images that a vision encoder takes at once: enough to keep a GPU busy, and about 28
#: GiB of activations in a vision encoder of 24 layers of width 1024.
RUN = 1 << 15

# ---- attention: a call per size of image ---------------------------------------------------------

# the question that a forward asks before it hands borders on, and their keyword
_ASKED, _BORDERS = "is_flash_attention_requested", "cu_seq_lens_q"
_MEANINGS: dict[str, Callable[[Any], Any]] = {
    _ASKED: lambda _: lambda *_, **__: True,
    # the original would wait for the GPU
    "get_max_seqlen": lambda _: lambda *_, **__: None,
    # a graph ends at this function, and not inside its lookup
    "ALL_ATTENTION_FUNCTIONS": lambda _: SimpleNamespace(get_interface=lambda *_: _attend),
}


@functools.cache
def with_borders(kind: Any) -> Any | None:
    """Makes an attention forward that hands on the borders of images; None if it hands on none."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None or _ASKED not in code.co_names:
        return None
    # keywords are one tuple, from Python 3.14 on a constant each
    names = (c if isinstance(c, tuple) else (c,) for c in code.co_consts)
    if not any(_BORDERS in some for some in names):
        return None
    return with_globals(kind.forward, {n: m for n, m in _MEANINGS.items() if n in code.co_names})


@uncompiled
def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Calls `image_attention` as a forward does, outside of graphs, as it looks at borders."""
    return image_attention(
        module, query, key, value, attention_mask, dropout, scaling, cu_seq_lens_q
    )


def image_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    borders: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Attends within each image, by torch's attention; q, k, v [1, H, P, D] give out [1, P, H, D].

    Args:
        borders: int [images + 1], where images begin and end. None: all patches are one image, or
            as the mask says.
    """
    attend = functools.partial(
        sdpa_attention_forward,
        module,
        attention_mask=attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=False,
    )
    if borders is None:
        return attend(query, key, value)[0], None
    sizes = borders.diff().tolist()
    if len(set(sizes)) == 1:
        # values are a view of their projection's output, which would be kept whole
        rows = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
        batch = (x.unflatten(0, (-1, sizes[0])).transpose(1, 2) for x in rows)
        return attend(*batch)[0].flatten(0, 1).unsqueeze(0), None
    of_size: dict[int, list[int]] = {}
    for number, size in enumerate(sizes):
        of_size.setdefault(size, []).append(number)
    by_image = [x.split(sizes, 2) for x in (query, key, value)]
    outputs: dict[int, torch.Tensor] = {}
    for numbers in of_size.values():
        batch = (torch.cat([x[n] for n in numbers]) for x in by_image)
        outputs |= zip(numbers, attend(*batch)[0].split(1), strict=True)
    return torch.cat([outputs[n] for n in range(len(sizes))], 1), None


# ---- runs of images ------------------------------------------------------------------------------

#: calls a function with tensors, as torch's checkpoint does
Around = Callable[..., Any]
#: first image, end
Run = tuple[int, int]

# attentions that take images of one size at once
_AT_ONCE = ("prefixtree", "sdpa")
# for compiled blocks: (a class of their parts) -> its compiled forward
_compiled: WeakKeyDictionary[nn.Module, Callable[[Any], Callable[..., Any]]] = WeakKeyDictionary()
# attributes of a vision encoder's output that the model reads
_FEATURES = ("pooler_output", "deepstack_features")


@dataclass(frozen=True)
class EncoderRuns:
    """The number of images that a vision encoder takes at once.

    Attributes:
        patches: the most of a run of several images; a larger image is a run. None: one run of all.
        around: calls each run. Default: nothing is recomputed.
        least: the least number of runs, as ranks that shard the vision encoder run it equally
            often. Blank runs before the images fill it up.
        kept: patches of the last images, whose runs `keeping` calls instead of `around`.
        least_kept: the least number of these runs, filled up by blank ones after the images.
    """

    patches: int | None
    around: Around | None = None
    least: int = 0
    kept: int = 0
    keeping: Around | None = None
    least_kept: int = 0


#: one run, as the model calls its vision encoder
ALL_AT_ONCE = EncoderRuns(None)


@dataclass(frozen=True)
class EncoderShape:
    """The sizes of one call: patches of each of the N images, and F of all images."""

    patches: list[int]
    features: int

    def runs(self, most: int, kept: int = 0) -> tuple[list[Run], list[Run]]:
        """Cuts images into runs of at most `most` patches, or of one image.

        Returns the runs of the first images, then those of the last, which hold at most `kept`
        patches.
        """
        end = first = len(self.patches)
        while first > 0 and (kept := kept - self.patches[first - 1]) >= 0:
            first -= 1
        return self._between(0, first, most), self._between(first, end, most)

    def _between(self, first: int, end: int, most: int) -> list[Run]:
        runs: list[Run] = []
        patches = 0
        for i in range(first, end):
            if i > first and patches + self.patches[i] > most:
                runs.append((first, i))
                first, patches = i, 0
            patches += self.patches[i]
        return [*runs, (first, end)] if first < end else runs


def features_in(output: Any) -> dict[str, Any]:
    """Finds the features in a vision encoder's output, by attribute: tensors, or lists of them."""
    found = {name: getattr(output, name, None) for name in _FEATURES}
    if found["pooler_output"] is None:
        # Gemma 4's features come straight from the last layer
        found = {"last_hidden_state": getattr(output, "last_hidden_state", None)}
    return {name: values for name, values in found.items() if values is not None}


def compile_blocks(
    model: nn.Module, compiler: Callable[..., Any] = torch.compile, **options: Any
) -> None:
    """Compiles the parts of vision encoders' blocks, for calls of `in_few_calls`.

    A block is a module that holds an attention of `with_borders`. Graphs end at attention. All
    other calls run uncompiled, and so do blocks that are recomputed by themselves.
    """
    known: dict[Any, Callable[..., Any]] = {}

    def compiled(kind: Any) -> Callable[..., Any]:
        if kind not in known:
            known[kind] = compiler(with_borders(kind) or kind.forward, **options)
        return known[kind]

    for module in model.modules():
        kinds: list[Any] = [type(part) for part in module.children()]
        if any(map(with_borders, kinds)):
            _compiled[module] = compiled


def has_compiled_blocks(encoder: nn.Module) -> bool:
    """Whether `compile_blocks` compiled blocks of an encoder, and `in_few_calls` runs them."""
    blocks = [module for module in encoder.modules() if module in _compiled]
    own = all("forward" not in vars(block) for block in blocks)
    parts = [part for block in blocks for part in block.children()]
    return bool(parts) and own and _attends_at_once(encoder) and all(map(_runs_compiled, parts))


def _attends_at_once(encoder: nn.Module) -> bool:
    config = getattr(encoder, "config", None)
    return getattr(config, "_attn_implementation", None) in _AT_ONCE


def _runs_compiled(part: nn.Module) -> bool:
    """Whether a part of a compiled block runs its compiled forward."""
    # a graph belongs to a class: torch does not check whether this module has hooks inside
    return "forward" not in vars(part) and not _has_hooks_inside(part)


def in_few_calls(encoder: nn.Module) -> Callable[..., Any]:
    """Makes a vision encoder's forward with fewer and faster calls of torch, for backwards too.

    Convolutions with one place for their kernel are matrix products: cuDNN takes far longer in
    bfloat16, and rounds float32 to TF32. Images of one size are one call of `image_attention` under
    "prefixtree" and "sdpa", and blocks may be compiled. Weights and hooks are the modules' own.
    """
    forward = encoder.forward
    products: dict[nn.Module, Callable[..., Any]] = {}
    attending: dict[nn.Module, Callable[..., Any]] = {}
    in_blocks: dict[nn.Module, Callable[..., Any]] = {}
    for module in encoder.modules():
        kind: Any = type(module)
        if "forward" in vars(module):
            continue
        if _multiplies(module):
            products[module] = partial(_product, module)
        elif (at_once := with_borders(kind)) is not None:
            attending[module] = partial(at_once, module)
        if (compiled := _compiled.get(module)) is not None:
            for part in module.children():
                if _runs_compiled(part):
                    in_blocks[part] = partial(compiled(type(part)), part)
    attending |= in_blocks

    def ours(*args: Any, **kwargs: Any) -> Any:
        replaced = products
        # layers that are recomputed by themselves run their own forward in the backward
        if _attends_at_once(encoder) and not any(map(_recomputes, encoder.modules())):
            replaced = products | attending
        with changing(encoder) as changes:
            for module, of_module in replaced.items():
                changes.set(module, forward=of_module)
            return forward(*args, **kwargs)

    return ours


def _has_hooks_inside(part: nn.Module) -> bool:
    return any(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        for module in part.modules()
        if module is not part
    )


def _recomputes(module: nn.Module) -> bool:
    return module.training and bool(getattr(module, "gradient_checkpointing", False))


def _multiplies(module: nn.Module) -> bool:
    """Whether a module is a plain convolution of patches that do not overlap."""
    if not isinstance(module, nn.Conv2d | nn.Conv3d):
        return False
    kind = nn.Conv2d if isinstance(module, nn.Conv2d) else nn.Conv3d
    return (
        type(module).forward is kind.forward
        # FSDP2's subclass counts too
        and type(module).__module__.startswith("torch.")
        and module.kernel_size == module.stride
        and set(module.padding) == {0}
        and set(module.dilation) == {1}
        and module.groups == 1
    )


def _product(module: Any, patches: torch.Tensor) -> torch.Tensor:
    """Convolves inputs as large as the kernel: [n, in, ...] -> [n, out, 1, ...]."""
    weight: torch.Tensor = module.weight
    if patches.shape[1:] != weight.shape[1:]:
        at_places: torch.Tensor = type(module).forward(module, patches)
        return at_places
    rows = nn.functional.linear(patches.flatten(1), weight.flatten(1), module.bias)
    return rows.reshape(*rows.shape, *[1] * (patches.ndim - 2))


def in_runs(
    forward: Callable[..., Any],
    grid_keyword: str,
    runs: EncoderRuns,
    divided: Callable[[], tuple[EncoderShape, list[Run], list[Run]]],
    blank: tuple[torch.Tensor, torch.Tensor],
) -> Callable[..., Any]:
    """Makes a vision encoder's forward that takes images in runs, and returns only features.

    Args:
        divided: gives the sizes of a call, and its `EncoderShape.runs`.
        blank: pixels and grids of an image that no token shows.
    """
    assert runs.patches is not None

    def called(around: Around | None, run: Callable[..., Any], *args: Any) -> Any:
        return run(*args) if around is None else around(run, *args)

    def in_turn(*args: Any, **kwargs: Any) -> Any:
        (pixels,) = args or [kwargs.pop("pixel_values")]
        grids = kwargs.pop(grid_keyword)
        kind: list[Any] = []

        def run(pixels: torch.Tensor, grids: torch.Tensor) -> dict[str, Any]:
            output = forward(pixels, **{grid_keyword: grids}, **kwargs)
            kind[:] = [type(output)]
            return features_in(output)

        shape, first, last = divided()
        # features of blanks get gradients of zeros, so that their backwards run too
        before, behind = max(0, runs.least - len(first)), max(0, runs.least_kept - len(last))
        of_nothing = blank[0].to(pixels), blank[1]

        def of(each: list[Run]) -> list[tuple[torch.Tensor, torch.Tensor]]:
            return [(_of_images(pixels, shape, *at), grids[slice(*at)]) for at in each]

        again = [*[of_nothing] * before, *of(first)]
        parts = [called(runs.around, run, *shown) for shown in again]
        kept = [*of(last), *[of_nothing] * behind]
        parts += [called(runs.keeping, run, *shown) for shown in kept]
        joined = {
            name: _joined([part[name] for part in parts], before, behind) for name in parts[0]
        }
        return kind[0](**joined)

    return in_turn


def _of_images(pixels: torch.Tensor, shape: EncoderShape, first: int, end: int) -> torch.Tensor:
    """Selects pixels of images out of [sum of patches, D], or [N, patches, D] for Gemma 4."""
    if pixels.ndim == 3:
        return pixels[first:end]
    start = sum(shape.patches[:first])
    return pixels[start : start + sum(shape.patches[first:end])]


def _joined(parts: list[Any], before: int, behind: int) -> Any:
    """Joins the features of runs, without those of the blank runs around them."""
    if isinstance(parts[0], (list, tuple)):
        return [_joined(list(each), before, behind) for each in zip(*parts, strict=True)]
    whole = torch.cat(parts)
    # a blank image has one feature
    return whole[before : len(whole) - behind]
