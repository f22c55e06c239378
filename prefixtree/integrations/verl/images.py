"""Vision checkpoints under verl: the images of its batches, and the model without verl's patches.

verl patches the classes of these models for its own attention, so that a tree would be ignored.
Packed engines are made without the patches. Legend: B sequences, n tokens of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from verl.workers.engine.fsdp import transformer_impl

from prefixtree.errors import UnsupportedError
from prefixtree.images.images import Images
from prefixtree.images.vision import encoder_of, positions_alone
from prefixtree.integrations.core.batch import Batch
from prefixtree.integrations.verl.batches import largest, shown_of
from prefixtree.models.changes import changing
from prefixtree.models.checks import transformer_of

_PIXELS, _GRIDS = "pixel_values", "image_grid_thw"
# entries that follow from tokens and grids
_LEFT_OUT = ("images_seqlens", "mm_token_type_ids")


def images_of(data: TensorDict, batch: Batch, config: Any, group: Any) -> Images | None:
    """The images of a batch; None where no rank of the group has any. All ranks call it."""
    rows = shown_of(data)
    known_names = {_PIXELS, _GRIDS, *_LEFT_OUT}
    if unknown := sorted({name for row in rows for name in row} - known_names):
        raise UnsupportedError(
            f"multi_modal_inputs has {', '.join(unknown)}: under verl only images with a grid "
            f"({_GRIDS}, of Qwen's processors) are verified"
        )
    with_images = [row for row in rows if _PIXELS in row]
    # copies of a row hold one tensor, whose images are then hashed once
    known = {id(row[_PIXELS]): _apart(row) for row in with_images}
    pixels = [image for row in with_images for image in known[id(row[_PIXELS])]]
    grids = torch.cat([row[_GRIDS] for row in with_images]) if with_images else None
    images = Images.from_batch(batch.tokens, pixels or None, grids, config)
    (shown,) = largest([len(images)], group)
    return images if shown else None


def _apart(row: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Separates the images of a sequence: [patches, values] each."""
    if _GRIDS not in row:
        raise ValueError(f"multi_modal_inputs has {_PIXELS} without {_GRIDS}: their sizes")
    counts = row[_GRIDS].prod(-1).tolist()
    if sum(counts) != len(row[_PIXELS]):
        raise ValueError(
            f"multi_modal_inputs of a sequence has {len(row[_PIXELS])} patches in {_PIXELS} and "
            f"{sum(counts)} by {_GRIDS} ({row[_GRIDS].tolist()})"
        )
    return row[_PIXELS].split(counts)


def check_positions(data: TensorDict, batch: Batch, module: nn.Module) -> None:
    """Refuses a batch whose positions are not those that the model computes for each sequence.

    They are jagged, [B, n] or [B, 4, n]: positions in the text, then those of 3-D RoPE.
    """
    transformer = transformer_of(module)
    values = data["position_ids"].values().cpu()
    if values.ndim == 1:
        # the model takes these positions for all rows
        values = values.expand(4, -1)
    images, sequences = batch.images, batch.tokens
    numbers: list[list[int]] = [[]] * len(sequences)
    if images is not None:
        sequences, numbers = images.sequences, images.of_sequences
    start = 0
    for i, (tokens, held) in enumerate(zip(sequences, numbers, strict=True)):
        count = torch.arange(len(tokens))
        expected = count[:, None].expand(-1, 3)
        if images is not None:
            expected = positions_alone(transformer.model, images, tokens, held)
        shown = values[:, start : start + len(tokens)]
        start += len(tokens)
        if not torch.equal(shown, torch.cat([count[None], expected.t()]).to(shown)):
            raise UnsupportedError(
                f"position_ids of sequence {i} are not those that "
                f"{transformer.config.model_type} computes for it: leave mm_processor_kwargs as "
                "the rollout had them, and positions as verl's agent loop computes them"
            )


def fill_gradients_of_encoder(module: nn.Module) -> None:
    """Gives the vision encoder gradients of zeros where it has none, in place.

    On text alone verl runs it over a blank image, so that weight decay shrinks its weights. Here it
    does not run, and they shrink too.
    """
    for parameter in encoder_of(transformer_of(module)).parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


# ---- verl's patches ------------------------------------------------------------------------------


@contextmanager
def without_patches() -> Iterator[None]:
    """Has verl make models, while open, without its patches of attention and fused heads."""
    with changing(transformer_impl) as changes:
        changes.set(transformer_impl, apply_monkey_patch=lambda model, **options: None)
        yield


def check_unpatched(module: nn.Module) -> None:
    """Refuses a model whose classes verl has patched for one of its own engines."""
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    for kind in (k for k in kinds if k.__module__.startswith("transformers.")):
        for name, value in vars(kind).items():
            origin = getattr(value, "__module__", None) or ""
            if callable(value) and origin.startswith("verl."):
                raise UnsupportedError(
                    f"{kind.__name__}.{name} is verl's ({origin}), which ignores the tree: it "
                    "patches classes as it makes an engine of its own for such a model. Run no "
                    "other engine of this model type in this process, or pack that one too"
                )
