"""Images in chat messages: read from files and data URLs, told apart by their pixels, measured in
the tokens that a model's image processor makes of them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prefixtree.errors import InputError, need_training
from prefixtree.hub import explain, first_line

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

# image n stands as this + n in the place of its placeholder: no embedding has so many rows, and
# ids stay below 2^31
FIRST_IMAGE = 2**30
_KINDS = ("image", "image_url")
# in the type or a field of a part: what templates write placeholders for
_MEDIA = ("image", "video", "audio")
_SHOWN = 60


@dataclass(frozen=True, eq=False)
class RolloutImage:
    """One distinct image of a file of rollouts.

    Attributes:
        number: counted from 0 in the order of first appearance; `FIRST_IMAGE` + number is its
            token id in `Rollouts.sequences`.
        name: its path, or the beginning of its data URL.
        height, width: in pixels, before the image processor resizes it.
        patches: what the vision encoder reads.
        tokens: placeholders that stand for it in a sequence.
    """

    number: int
    name: str
    height: int
    width: int
    patches: int
    tokens: int
    _processed: Callable[[], tuple[torch.Tensor, torch.Tensor]] = field(repr=False)

    def __str__(self) -> str:
        return f"[image {self.number}]"

    def processed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the image processor's output, at every call.

        Returns:
            pixel_values, float32 [patches, values of a patch], and image_grid_thw, int64 [3].

        Raises:
            InputError: the file is gone, or is another image by now.
        """
        pixels, grid = self._processed()
        if len(pixels) != self.patches:
            raise InputError(
                f"{self.name}: has {len(pixels)} patches now, it had {self.patches} when the "
                "rollouts were read"
            )
        return pixels, grid


@dataclass(frozen=True)
class ImageBatch:
    """Sequences and their images as a processor gives them to a model.

        batch = rollouts.image_batch()
        images = Images.from_batch(
            batch.sequences, batch.pixel_values, batch.image_grid_thw, model.config
        )

    Attributes:
        sequences: int64 [n] token ids, one array per sequence, with the model's placeholders.
        pixel_values: float32 [patches, values of a patch], one per image of a sequence, in their
            order; an image that stands several times is one tensor.
        image_grid_thw: int64 [images, 3], one row per entry of `pixel_values`.
        counts: the number of images, one per sequence.
        placeholder: the token id that stands for an image.
    """

    sequences: list[np.ndarray]
    pixel_values: list[torch.Tensor]
    image_grid_thw: torch.Tensor
    counts: list[int]
    placeholder: int

    def model_inputs(self, index: int) -> dict[str, torch.Tensor]:
        """Makes the inputs of a model for one sequence alone, as processors give them.

        Returns:
            int64 `input_ids` and int32 `mm_token_type_ids` [1, n], and for a sequence with images
                their `pixel_values` and `image_grid_thw`.
        """
        import torch

        first, count = sum(self.counts[:index]), self.counts[index]
        held = slice(first, first + count)
        ids = torch.from_numpy(self.sequences[index])[None]
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == self.placeholder).int()}
        if count:
            inputs["pixel_values"] = torch.cat(self.pixel_values[held])
            inputs["image_grid_thw"] = self.image_grid_thw[held]
        return inputs


class ImageReader:
    """Numbers the images of chat messages; two are one if their decoded pixels are equal.

    Args:
        path: the folder with the files of a tokenizer and an image processor, or its name in the
            cache of the Hugging Face hub. Nothing is downloaded.

    Attributes:
        images: the distinct ones so far, by number.
    """

    def __init__(self, path: str | Path) -> None:
        self.images: list[RolloutImage] = []
        self._path = path
        self._loaded: Any = None
        self._by_source: dict[tuple[str, str], RolloutImage] = {}
        self._by_file: dict[bytes, RolloutImage] = {}
        self._by_pixels: dict[bytes, RolloutImage] = {}

    def number(
        self, messages: list[dict[str, Any]], folder: Path
    ) -> tuple[list[dict[str, Any]], list[list[RolloutImage]]]:
        """Finds the images of some messages, whose paths are relative to `folder`.

        Returns the messages with every image part as {"type": "image", "image": "[image 3]"}, and
        the images, one list per message. Raises InputError for a part of another shape or an
        unreadable image.
        """
        need_training("reading images")
        named, images = [], []
        for i, message in enumerate(messages):
            held: list[RolloutImage] = []
            content = message.get("content")
            if isinstance(content, list):
                parts = []
                for j, part in enumerate(content):
                    where = f"messages[{i}].content[{j}]"
                    # parquet has every field in every part, and templates ask which are there
                    part = {name: value for name, value in part.items() if value is not None}
                    if _is_media(part):
                        held.append(self._image(_reference(part, where), where, folder))
                        part = {"type": "image", "image": str(held[-1])}
                    parts.append(part)
                message = {**message, "content": parts}
            named.append(message)
            images.append(held)
        return named, images

    def _image(self, reference: str, where: str, folder: Path) -> RolloutImage:
        # of a data URL, which is long, only the file's digest is kept
        is_data = reference.startswith("data:")
        source = (str(folder), reference)
        if not is_data and source in self._by_source:
            return self._by_source[source]
        name = reference if len(reference) <= _SHOWN else reference[:_SHOWN] + "…"
        if is_data:
            data = _of_data_url(reference, where)
            image = self._of_file(data, name, where, lambda: data)
        else:
            file = _local(reference, where, folder)
            image = self._of_file(_read(file, where), name, where, lambda: _read(file, name))
            self._by_source[source] = image
        return image

    def _of_file(
        self, data: bytes, name: str, where: str, read: Callable[[], bytes]
    ) -> RolloutImage:
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest not in self._by_file:
            # the same image may be saved twice, as screenshots with another date in the file
            image = _decoded(data, f"{where}: {name}")
            pixels = hashlib.blake2b(f"{image.size}".encode(), digest_size=16)
            pixels.update(image.tobytes())
            key = pixels.digest()
            if key not in self._by_pixels:
                self._by_pixels[key] = self._new(image, name, read)
            self._by_file[digest] = self._by_pixels[key]
        return self._by_file[digest]

    def _new(self, image: Image, name: str, read: Callable[[], bytes]) -> RolloutImage:
        processor = self._processor()
        try:
            patches = int(processor.get_number_of_image_patches(image.height, image.width, {}))
        except ValueError as problem:
            raise InputError(f"{name}: the image processor refuses it: {problem}") from None

        def processed() -> tuple[torch.Tensor, torch.Tensor]:
            features = processor(images=[_decoded(read(), name)], return_tensors="pt")
            return features["pixel_values"], features["image_grid_thw"][0]

        image = RolloutImage(
            number=len(self.images),
            name=name,
            height=image.height,
            width=image.width,
            patches=patches,
            tokens=patches // processor.merge_size**2,
            _processed=processed,
        )
        self.images.append(image)
        return image

    def _processor(self) -> Any:
        if self._loaded is None:
            from transformers import AutoImageProcessor

            try:
                # the one of torchvision where that is installed, else the one of Pillow
                self._loaded = AutoImageProcessor.from_pretrained(
                    str(self._path), local_files_only=True
                )
            except ImportError as problem:
                raise InputError(
                    f"{first_line(problem)}; pip install torchvision, or take transformers 5.23 or "
                    "newer, which reads images with Pillow alone"
                ) from None
            except Exception as problem:
                why = explain("--tokenizer", self._path, problem)
                if isinstance(problem, OSError) and Path(self._path).exists():
                    why = f"--tokenizer {self._path}: has no preprocessor_config.json"
                raise InputError(
                    f"{why}; the messages hold images, and the model's image processor, beside "
                    "its tokenizer, tells how many tokens an image is"
                ) from None
            names = getattr(self._loaded, "model_input_names", ())
            if "image_grid_thw" not in names or not hasattr(self._loaded, "merge_size"):
                raise InputError(
                    f"--tokenizer {self._path}: {type(self._loaded).__name__} gives no "
                    "image_grid_thw; images are read for the image processor of Qwen2.5-VL and "
                    "Qwen3-VL"
                )
        return self._loaded


def expand(
    token_ids: np.ndarray, placeholder: int, images: list[RolloutImage]
) -> tuple[np.ndarray, np.ndarray]:
    """Puts each image's tokens in the place of its one placeholder in token_ids, int64 [n].

    Returns int64 [m], the tokens of image k as `FIRST_IMAGE` + k, and int64 [n], for every token of
    `token_ids` where it ends in them. Raises InputError for other placeholders than images.
    """
    at = np.flatnonzero(token_ids == placeholder)
    if len(at) != len(images):
        raise InputError(
            f"the chat template writes {len(at)} placeholders for {len(images)} images; "
            "expected one each, and none in the text of the messages"
        )
    if (np.diff(at) == 1).any():
        raise InputError(
            "the chat template writes two images side by side; expected a token between them, "
            "as <|vision_end|>"
        )
    sizes, ids = np.ones(len(token_ids), np.int64), token_ids.copy()
    sizes[at] = [image.tokens for image in images]
    ids[at] = [FIRST_IMAGE + image.number for image in images]
    return np.repeat(ids, sizes), np.cumsum(sizes)


def place(token_ids: np.ndarray, placeholder: int, images: list[RolloutImage]) -> np.ndarray:
    """Puts each image's number on its run of placeholders in token_ids, int64 [n].

    Returns int64 [n], the tokens of image k as `FIRST_IMAGE` + k. Raises InputError for other runs
    of placeholders than the images have.
    """
    is_image = np.concatenate([[False], token_ids == placeholder, [False]])
    begins, ends = np.flatnonzero(np.diff(is_image.astype(np.int8))).reshape(-1, 2).T
    lengths, expected = (ends - begins).tolist(), [image.tokens for image in images]
    if lengths != expected:
        k = next(
            (k for k, (a, b) in enumerate(zip(lengths, expected, strict=False)) if a != b), None
        )
        difference = (
            f"{len(lengths)} runs of placeholders (id {placeholder}) for {len(expected)} images"
            if k is None
            else f"{lengths[k]} placeholders (id {placeholder}) for image {k}, which is "
            f"{expected[k]} tokens"
        )
        raise InputError(f"the token ids have {difference} of the messages")
    placed = token_ids.copy()
    for begin, end, image in zip(begins, ends, images, strict=True):
        placed[begin:end] = FIRST_IMAGE + image.number
    return placed


def has_images(messages: Any) -> bool:
    """Whether a part of some message is an image, a video or a sound."""
    return isinstance(messages, list) and any(
        _is_media(part)
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def image_numbers(tokens: np.ndarray) -> list[int]:
    """The images of a sequence of `Rollouts.sequences`, in order."""
    begins = tokens >= FIRST_IMAGE
    begins[1:] &= tokens[1:] != tokens[:-1]
    return (tokens[begins] - FIRST_IMAGE).tolist()


# ---- one part of a message -----------------------------------------------------------------------


def _is_media(part: Any) -> bool:
    if not isinstance(part, dict):
        return False
    words = [str(part.get("type")), *(name for name, value in part.items() if value is not None)]
    return any(medium in word for word in words for medium in _MEDIA)


def _reference(part: dict[str, Any], where: str) -> str:
    kind = part.get("type", next((name for name in _KINDS if name in part), None))
    if kind not in _KINDS:
        raise InputError(
            f"{where} is of the type {kind!r}; of images, videos and sounds only image and "
            "image_url are read"
        )
    reference = part.get(kind)
    if kind == "image_url" and isinstance(reference, dict):
        reference = reference.get("url")
    if not isinstance(reference, str) or not reference:
        field = "image" if kind == "image" else "image_url.url"
        raise InputError(
            f"{where}.{field} must be a path or a data URL; images in a column beside the "
            "messages are not read"
        )
    return reference


def _local(reference: str, where: str, folder: Path) -> Path:
    if reference.startswith(("http://", "https://")):
        raise InputError(
            f"{where}: {reference[:_SHOWN]} is an address, and nothing is downloaded; save the "
            "image and give its path"
        )
    return folder / reference.removeprefix("file://")


def _read(file: Path, where: str) -> bytes:
    try:
        return file.read_bytes()
    except OSError as problem:
        raise InputError(f"{where}: {file} cannot be read: {problem.strerror or problem}") from None


def _of_data_url(url: str, where: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise InputError(f"{where}: expected a data URL as data:image/png;base64,..., got {head}")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as problem:
        raise InputError(f"{where}: the data URL is not valid base64: {problem}") from None


def _decoded(data: bytes, name: str) -> Image:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InputError(
            f"{name}: reading images needs Pillow; pip install 'prefixtree-attention[images]'"
        ) from None
    from transformers.image_utils import load_image

    try:
        # turned as its EXIF says, and RGB, as transformers' processors get it
        return load_image(Image.open(io.BytesIO(data)))
    except UnidentifiedImageError:
        raise InputError(f"{name}: is no image that Pillow can read") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
        raise InputError(f"{name}: is a damaged image: {first_line(problem)}") from None
