"""Images of a packed forest through a model: its inputs, and each distinct image encoded once.

The model's forward calls its vision encoder with the given pixels, and puts the features in the
place of the placeholders, in packed order. An image that two branches hold is placed twice. So the
model gets the pixels of the distinct images and the grids of the placements. A hook before the
vision encoder hands it the grids of the distinct images. A hook after it repeats the features per
placement. The vision encoder runs inside the model's forward, where wrappers gather its parameters,
and autograd sums its gradients. The hooks are removed after the forward.

Legend: T packed tokens, K placements, N distinct images that are placed, F features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from prefixtree.errors import UnsupportedError
from prefixtree.images.encoder import (
    ALL_AT_ONCE,
    RUN,
    EncoderRuns,
    EncoderShape,
    Run,
    image_attention,
    in_few_calls,
    in_runs,
)
from prefixtree.images.encodings import (
    ENCODERS,
    MODALITIES,
    UNEXPECTED,
    EncoderCalls,
    Encoding,
    blank,
    grids_of,
    pixels_of,
)
from prefixtree.images.images import Images
from prefixtree.images.inputs import Image, Modality
from prefixtree.images.placements import PathImages, place
from prefixtree.images.refusals import runs_in_lockstep
from prefixtree.models.changes import changing
from prefixtree.models.families import COUNTS_COPIES, ENCODES, ROUTES, family_of
from prefixtree.models.layers import decoder_of, most_of_all_ranks
from prefixtree.packing.layout import PackedForest
from prefixtree.planning.parts import Parts
from prefixtree.recompute.layers import (
    MODES,
    Mode,
    checkpoint_of_encoder,
    checkpoints_itself,
    keeping_in_encoder,
)
from prefixtree.wings import CallWing, ForwardWing

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# the names in all other families
_ENCODER = ("visual", "grid_thw")
# keywords of the text model, which outer forwards hand to vision encoders too
_OF_THE_TEXT = ("tree_mask", "num_items_in_batch", ROUTES, COUNTS_COPIES)


class PlacedImages(CallWing):
    """A packed forest with its images.

    Attributes:
        packed: the forest with the token ids that the model knows.
        inputs: keywords of the model's forward that differ from the packed forest's, without
            images.
        least_runs: the least number of runs per call of the vision encoder. 0: ranks that shard it
            agree in each forward.
    """

    least_runs: int = 0

    def __init__(self, model: nn.Module, causal_lm: Any, packed: PackedForest, images: Images):
        self.placements, paths = place(packed, images)
        self.images = images
        assert packed.input_ids is not None
        ids = images.with_placeholders(packed.input_ids.cpu().numpy())
        self.packed = packed.with_input_ids(torch.from_numpy(ids))
        self.inputs: dict[str, Any] = {}
        if family_of(causal_lm.config).position_rows > 1:
            self.inputs["position_ids"] = _position_ids(causal_lm.model, packed, images, paths)
        self.model, self._causal_lm = model, causal_lm
        self._calls = EncoderCalls(causal_lm.config, images, self.placements, packed.device)

    def forward(self, own: np.ndarray | None = None) -> EncodedImages:
        """The images of one forward's tokens. A cut image is encoded whole."""
        return self._encoded(self._shown(own), own is not None and self._only_images_train())

    def in_lockstep(self, owns: Iterable[np.ndarray], modes: Iterable[Any]) -> None:
        """Has all forwards run the vision encoder equally often, as every run is an exchange."""
        # a forward without images encodes a blank image
        runs = [
            _most_runs(self._shown(own), getattr(mode, "patches", RUN)) or 1
            for own, mode in zip(owns, modes, strict=True)
        ]
        most_here = [max(runs, default=1)]
        (self.least_runs,) = most_of_all_ranks(self.model, most_here, self.packed.device)

    def of_rank(self, parts: Parts, rank: int, group: ProcessGroup) -> CallWing:
        """Encodes each distinct image on one rank; all ranks run vision encoders equally often."""
        place = parts, rank, group
        encodings = (self._calls.of_rank(modality, *place) for modality in MODALITIES)
        return _OfRank(self._encoded([encoding for encoding in encodings if encoding is not None]))

    def facts(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"whether they are passed": True}
        for n in np.unique(self.placements.number).tolist():
            image = self.images.distinct[n]
            parts[f"the grid of image {n}"] = image.grid.tolist(), image.modality
            # a bare hash tells a reader nothing
            key: Any = image.key
            key = np.frombuffer(key, np.uint8) if isinstance(key, bytes) else key
            parts[f"the pixels of image {n}"] = key
        return parts

    def _shown(self, own: np.ndarray | None) -> list[Encoding]:
        """The calls, by modality, for images that packed tokens int64 [t] show; None: all."""
        is_own = np.full(self.packed.num_tokens, own is None)
        is_own[[] if own is None else own] = True
        found = (self._calls.of(modality, is_own) for modality in MODALITIES)
        return [encoding for encoding in found if encoding is not None]

    def _only_images_train(self) -> bool:
        """Whether hidden states below the first trained layer need gradients only for images."""
        embedding = self._causal_lm.get_input_embeddings()
        has_gradients = any(p.requires_grad for p in embedding.parameters())
        return torch.is_grad_enabled() and not has_gradients and images_train(self._causal_lm)

    def _encoded(self, found: list[Encoding], wants_one: bool = False) -> EncodedImages:
        if not found and (wants_one or runs_in_lockstep(self.model)):
            # ranks with images run the vision encoder, and wait for those without; and a part
            # without images may import from one with some, whose gradients must pass its layers
            found = [blank(self._causal_lm.config, self.packed.device)]
            return EncodedImages(self, self._causal_lm, found, is_blank=True)
        return EncodedImages(self, self._causal_lm, found)

    def read(self) -> dict[str, torch.Tensor]:
        return {
            f"the pixels of image {n}": self.images.distinct[n].pixels
            for n in np.unique(self.placements.number).tolist()
        }


class _OfRank(CallWing):
    """The images of a rank of a group, which runs one forward."""

    def __init__(self, encoded: EncodedImages) -> None:
        self._encoded = encoded

    def forward(self, own: np.ndarray | None) -> EncodedImages:
        return self._encoded


def _most_runs(encodings: list[Encoding], patches: int) -> int:
    return max((len(encoding.shape.runs(patches)[0]) for encoding in encodings), default=0)


class EncodedImages(ForwardWing):
    """The images of one forward over a forest or a part of one; `placed` are the forest's."""

    def __init__(
        self,
        placed: PlacedImages,
        causal_lm: Any,
        encodings: list[Encoding],
        is_blank: bool = False,
    ) -> None:
        self._is_blank = is_blank
        self.placed, self.encoder = placed, encoder_of(causal_lm)
        self.inputs = {k: v for encoding in encodings for k, v in encoding.inputs().items()}
        self._causal_lm, self.encodings = causal_lm, encodings
        self._grid_keyword = grid_keyword_of(causal_lm.config)

    def num_runs(self, patches: int, kept: int) -> list[int]:
        """The most runs in one call of the vision encoder: of the first images, and of the last."""
        each = [self._divided(encoding, patches, kept)[1:] for encoding in self.encodings]
        return [max((len(runs[i]) for runs in each), default=0) for i in range(2)]

    def _divided(
        self, encoding: Encoding, patches: int, kept: int
    ) -> tuple[EncoderShape, list[Run], list[Run]]:
        """The sizes of a call and its runs; the calls after it use up `kept` first."""
        for other in reversed(self.encodings):
            if other is encoding:
                break
            kept -= sum(other.shape.patches)
        return encoding.shape, *encoding.shape.runs(patches, kept)

    def around(self, recompute: Any) -> AbstractContextManager[None]:
        """Runs the vision encoder, while open, as layers are recomputed."""
        patches: int | None = RUN
        mode: Mode = "all"
        kept = 0
        if recompute in MODES:
            mode = recompute
        elif recompute is not None:
            patches, kept = recompute.patches, recompute.kept or 0
        elif not checkpoints_itself(self.encoder):
            mode = "nothing"
        around = None
        if torch.is_grad_enabled():
            around = checkpoint_of_encoder(self.encoder, mode)
            if around is None:
                patches = None
        model, placed = self.placed.model, self.placed
        least = [placed.least_runs, 0]
        if least[0]:
            # ranks agreed on runs that are computed again
            kept = 0
        elif any(isinstance(module, FSDPModule) for module in model.modules()):
            # every run gathers the vision encoder's parameters, and recomputed runs do so
            # twice; other ranks may have no graph, and so runs
            runs = [0, 1] if patches is None else self.num_runs(patches, kept)
            least = most_of_all_ranks(model, runs, placed.packed.device)
            if patches is None:
                kept = sys.maxsize
        if patches is None and sum(least) > 1:
            patches = sys.maxsize
        keeping = None if around is None else keeping_in_encoder(self.encoder)
        return self.encoded(EncoderRuns(patches, around, least[0], kept, keeping, least[1]))

    @contextmanager
    def encoded(self, runs: EncoderRuns = ALL_AT_ONCE) -> Iterator[None]:
        """Has a forward, while open, encode each distinct image once, `runs` at a time.

        Raises UnsupportedError for a model that does not call its vision encoder as transformers'
        does.
        """
        left = list(self.encodings)
        current: list[Encoding] = []

        def before(encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not left or kwargs.get(self._grid_keyword) is None:
                raise UnsupportedError(f"{UNEXPECTED} more often, or with other keywords")
            encoding = left.pop(0)
            current.append(encoding)
            kwargs = {k: v for k, v in kwargs.items() if k not in _OF_THE_TEXT}
            vision = self._causal_lm.config.vision_config
            if vision._attn_implementation == "prefixtree":
                kwargs[ENCODES] = image_attention
            return args, kwargs | {self._grid_keyword: encoding.grids}

        def after(encoder: nn.Module, args: Any, output: Any) -> None:
            current.pop().repeat(output)

        with changing(self._causal_lm) as changes:
            changes.hook(self.encoder.register_forward_pre_hook, before, with_kwargs=True)
            changes.hook(self.encoder.register_forward_hook, after)
            base = self._causal_lm.model
            if self._is_blank and hasattr(base, "get_placeholder_mask"):
                masks = _of_no_image(base.get_placeholder_mask, self._causal_lm.config)
                changes.set(base, get_placeholder_mask=masks)
            forward = in_few_calls(self.encoder)
            if (patches := runs.patches) is not None:
                of_nothing = blank(self._causal_lm.config, self.placed.packed.device)
                forward = in_runs(
                    forward,
                    self._grid_keyword,
                    runs,
                    lambda: self._divided(current[-1], patches, runs.kept),
                    of_nothing.shown,
                )
            changes.set(self.encoder, forward=forward)
            yield
        if left:
            raise UnsupportedError(f"{UNEXPECTED} {len(left)} times less")


def _of_no_image(masks: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """A model's `get_placeholder_mask` for a forward whose placeholders of images are all text."""
    if config.model_type in ENCODERS:
        # Gemma 4 reads the masks for the embedding of text too
        return masks

    def of_others(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return masks(input_ids.masked_fill(input_ids == config.image_token_id, -1), *args, **kwargs)

    return of_others


def encoder_of(causal_lm: Any) -> nn.Module:
    """Finds the vision encoder of a transformers model that takes images."""
    attribute, _ = ENCODERS.get(causal_lm.config.model_type, _ENCODER)
    encoder: nn.Module = getattr(causal_lm.model, attribute)
    return encoder


def images_train(causal_lm: Any) -> bool:
    """Whether anything gets a gradient only by images: a vision encoder, or its projections."""
    if getattr(causal_lm.config, "vision_config", None) is None:
        return False
    parts = decoder_of(causal_lm), causal_lm.get_output_embeddings()
    of_text = {id(p) for part in parts if part is not None for p in part.parameters()}
    return any(p.requires_grad and id(p) not in of_text for p in causal_lm.parameters())


def grid_keyword_of(config: Any) -> str:
    """The keyword of a vision encoder's forward that says how large images are."""
    return ENCODERS.get(config.model_type, _ENCODER)[1]


# ---- positions -----------------------------------------------------------------------------------


def _position_ids(
    base: Any, packed: PackedForest, images: Images, paths: list[PathImages]
) -> torch.Tensor:
    """Makes positions int64 [4, 1, T]: in the text, for masks, and of the model's 3-D RoPE.

    The latter are the model's own for each sequence alone, so that copies of a token agree.
    """
    known: dict[int, torch.Tensor] = {}
    for path in paths:
        if id(path) not in known:
            known[id(path)] = positions_alone(base, images, path.tokens, path.numbers)
    three = packed.pack_values([known[id(path)] for path in paths])
    return torch.cat([packed.position_ids[None], three.t()])[:, None]


def positions_alone(
    base: Any, images: Images, tokens: np.ndarray, numbers: list[int]
) -> torch.Tensor:
    """Computes 3-D RoPE's positions, int64 [n, 3] on the CPU, of one sequence alone."""
    if not numbers:
        return torch.arange(len(tokens))[:, None].expand(-1, 3)
    inputs = _alone_inputs(images, tokens, numbers, grids_of)
    positions, _ = base.get_rope_index(**inputs)
    return torch.as_tensor(positions)[:, 0].t().contiguous()


def alone_inputs(images: Images, tokens: np.ndarray, numbers: list[int]) -> dict[str, Any]:
    """Makes transformers' inputs of one sequence alone, on the CPU, as its processor gives them.

    These are input_ids and mm_token_type_ids [1, n], and the pixels and grids of its images.

    Args:
        tokens: integers [n], one of `images.sequences`.
        numbers: the images it holds, in order; `images.of_sequences` has them.
    """

    def both(*shown: Any) -> dict[str, Any]:
        return pixels_of(*shown) | grids_of(*shown)

    return _alone_inputs(images, tokens, numbers, both)


def _alone_inputs(
    images: Images,
    tokens: np.ndarray,
    numbers: list[int],
    inputs_of: Callable[[Modality, str, list[Image]], dict[str, Any]],
) -> dict[str, Any]:
    ids = torch.from_numpy(images.with_placeholders(np.asarray(tokens, np.int64)))[None]
    types = torch.zeros_like(ids, dtype=torch.int32)
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": types}
    held = [images.distinct[n] for n in numbers]
    is_shown = torch.from_numpy(np.asarray(tokens) >= images.first_id)[None]
    for value, (modality, token) in enumerate(images.placeholders.items(), 1):
        types[(ids == token) & is_shown] = value
        if shown := [image for image in held if image.modality == modality]:
            inputs |= inputs_of(modality, images.model_type, shown)
    return inputs
