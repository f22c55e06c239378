"""Pictures in chat messages: read from files and data URLs, told apart by their pixels, measured in
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

from prefixtree.errors import InputError
from prefixtree.hub import explain, first_line

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

# picture n stands as this + n in the place of its placeholder: no embedding has so many rows, and
# ids stay below 2^31
FIRST_PICTURE = 2**30
_KINDS = ("image", "image_url")
# in the type or a field of a part: what templates write placeholders for
_MEDIA = ("image", "video", "audio")
_SHOWN = 60


@dataclass(frozen=True, eq=False)
class RolloutPicture:
    """One distinct picture of a file of rollouts.

    Attributes:
        number: counted from 0 in the order of first appearance; `FIRST_PICTURE` + number is its
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
        return f"[picture {self.number}]"

    def processed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The image processor's output for it, computed at every call.

        Returns:
            pixel_values, float32 [patches, values of a patch], and image_grid_thw, int64 [3].

        Raises:
            InputError: the file is gone, or is another picture by now.
        """
        pixels, grid = self._processed()
        if len(pixels) != self.patches:
            raise InputError(
                f"{self.name}: has {len(pixels)} patches now, it had {self.patches} when the "
                "rollouts were read"
            )
        return pixels, grid


@dataclass(frozen=True)
class PictureBatch:
    """Sequences and their pictures as a processor gives them to a model.

        batch = rollouts.picture_batch()
        pictures = Pictures.from_batch(
            batch.sequences, batch.pixel_values, batch.image_grid_thw, model.config
        )

    Attributes:
        sequences: int64 [n] token ids, one array per sequence, with the model's placeholders.
        pixel_values: float32 [patches, values of a patch], one per picture of a sequence, in their
            order; a picture that stands several times is one tensor.
        image_grid_thw: int64 [images, 3], one row per entry of `pixel_values`.
        counts: the number of pictures, one per sequence.
        placeholder: the token id that stands for a picture.
    """

    sequences: list[np.ndarray]
    pixel_values: list[torch.Tensor]
    image_grid_thw: torch.Tensor
    counts: list[int]
    placeholder: int

    def model_inputs(self, index: int) -> dict[str, torch.Tensor]:
        """The inputs of a model for one sequence alone, as processors give them.

        Args:
            index: of the sequence.

        Returns:
            int64 `input_ids` and int32 `mm_token_type_ids` [1, n], and for a sequence with pictures
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


class PictureReader:
    """Numbers the pictures of chat messages.

    Two pictures are one if their decoded pixels are equal, wherever they stand. The image processor
    gives the number of tokens.

    Args:
        path: the folder with the files of a tokenizer and an image processor, or its name in the
            cache of the Hugging Face hub. Nothing is downloaded.

    Attributes:
        pictures: the distinct ones so far, by number.
    """

    def __init__(self, path: str | Path) -> None:
        self.pictures: list[RolloutPicture] = []
        self._path = path
        self._loaded: Any = None
        self._by_source: dict[tuple[str, str], RolloutPicture] = {}
        self._by_file: dict[bytes, RolloutPicture] = {}
        self._by_pixels: dict[bytes, RolloutPicture] = {}

    def number(
        self, messages: list[dict[str, Any]], folder: Path
    ) -> tuple[list[dict[str, Any]], list[list[RolloutPicture]]]:
        """Finds the pictures of some messages.

        Args:
            messages: chat messages; `content` is a string or a list of parts.
            folder: paths of pictures are relative to it.

        Returns:
            The messages with every picture part as {"type": "image", "image": "[picture 3]"}, and
            the pictures, one list per message.

        Raises:
            InputError: a part of another shape, or a picture that cannot be read.
        """
        named, pictures = [], []
        for i, message in enumerate(messages):
            found: list[RolloutPicture] = []
            content = message.get("content")
            if isinstance(content, list):
                parts = []
                for j, part in enumerate(content):
                    where = f"messages[{i}].content[{j}]"
                    # parquet has every field in every part, and templates ask which are there
                    part = {name: value for name, value in part.items() if value is not None}
                    if _is_media(part):
                        found.append(self._picture(_reference(part, where), where, folder))
                        part = {"type": "image", "image": str(found[-1])}
                    parts.append(part)
                message = {**message, "content": parts}
            named.append(message)
            pictures.append(found)
        return named, pictures

    def _picture(self, reference: str, where: str, folder: Path) -> RolloutPicture:
        # of a data URL, which is long, only the file's digest is kept
        is_data = reference.startswith("data:")
        source = (str(folder), reference)
        if not is_data and source in self._by_source:
            return self._by_source[source]
        name = reference if len(reference) <= _SHOWN else reference[:_SHOWN] + "…"
        if is_data:
            data = _of_data_url(reference, where)
            picture = self._of_file(data, name, where, lambda: data)
        else:
            file = _local(reference, where, folder)
            picture = self._of_file(_read(file, where), name, where, lambda: _read(file, name))
            self._by_source[source] = picture
        return picture

    def _of_file(
        self, data: bytes, name: str, where: str, read: Callable[[], bytes]
    ) -> RolloutPicture:
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest not in self._by_file:
            # the same picture may be saved twice, as screenshots with another date in the file
            image = _decoded(data, f"{where}: {name}")
            pixels = hashlib.blake2b(f"{image.size}".encode(), digest_size=16)
            pixels.update(image.tobytes())
            key = pixels.digest()
            if key not in self._by_pixels:
                self._by_pixels[key] = self._new(image, name, read)
            self._by_file[digest] = self._by_pixels[key]
        return self._by_file[digest]

    def _new(self, image: Image, name: str, read: Callable[[], bytes]) -> RolloutPicture:
        processor = self._processor()
        try:
            patches = int(processor.get_number_of_image_patches(image.height, image.width, {}))
        except ValueError as problem:
            raise InputError(f"{name}: the image processor refuses it: {problem}") from None

        def processed() -> tuple[torch.Tensor, torch.Tensor]:
            made = processor(images=[_decoded(read(), name)], return_tensors="pt")
            return made["pixel_values"], made["image_grid_thw"][0]

        picture = RolloutPicture(
            number=len(self.pictures),
            name=name,
            height=image.height,
            width=image.width,
            patches=patches,
            tokens=patches // processor.merge_size**2,
            _processed=processed,
        )
        self.pictures.append(picture)
        return picture

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
                    "newer, which reads pictures with Pillow alone"
                ) from None
            except Exception as problem:
                why = explain("--tokenizer", self._path, problem)
                if isinstance(problem, OSError) and Path(self._path).exists():
                    why = f"--tokenizer {self._path}: has no preprocessor_config.json"
                raise InputError(
                    f"{why}; the messages hold pictures, and the model's image processor, beside "
                    "its tokenizer, tells how many tokens a picture is"
                ) from None
            names = getattr(self._loaded, "model_input_names", ())
            if "image_grid_thw" not in names or not hasattr(self._loaded, "merge_size"):
                raise InputError(
                    f"--tokenizer {self._path}: {type(self._loaded).__name__} gives no "
                    "image_grid_thw; pictures are read for the image processor of Qwen2.5-VL and "
                    "Qwen3-VL"
                )
        return self._loaded


def expand(
    token_ids: np.ndarray, placeholder: int, pictures: list[RolloutPicture]
) -> tuple[np.ndarray, np.ndarray]:
    """Puts each picture's tokens in the place of its one placeholder.

    Args:
        token_ids: int64 [n], one placeholder per picture.
        placeholder: its token id.
        pictures: in order.

    Returns:
        int64 [m], the tokens of picture k as `FIRST_PICTURE` + k, and int64 [n], for every token of
        `token_ids` where it ends in them.

    Raises:
        InputError: another number of placeholders than of pictures, or two side by side.
    """
    at = np.flatnonzero(token_ids == placeholder)
    if len(at) != len(pictures):
        raise InputError(
            f"the chat template writes {len(at)} placeholders for {len(pictures)} pictures; "
            "expected one each, and none in the text of the messages"
        )
    if (np.diff(at) == 1).any():
        raise InputError(
            "the chat template writes two pictures side by side; expected a token between them, "
            "as <|vision_end|>"
        )
    sizes, ids = np.ones(len(token_ids), np.int64), token_ids.copy()
    sizes[at] = [picture.tokens for picture in pictures]
    ids[at] = [FIRST_PICTURE + picture.number for picture in pictures]
    return np.repeat(ids, sizes), np.cumsum(sizes)


def place(token_ids: np.ndarray, placeholder: int, pictures: list[RolloutPicture]) -> np.ndarray:
    """Puts each picture's number on the placeholders that stand for it.

    Args:
        token_ids: int64 [n], for every picture a run of placeholders as long as it has tokens.
        placeholder: their token id.
        pictures: in order.

    Returns:
        int64 [n], the tokens of picture k as `FIRST_PICTURE` + k.

    Raises:
        InputError: other runs of placeholders than the pictures have.
    """
    is_picture = np.concatenate([[False], token_ids == placeholder, [False]])
    begins, ends = np.flatnonzero(np.diff(is_picture.astype(np.int8))).reshape(-1, 2).T
    found, expected = (ends - begins).tolist(), [picture.tokens for picture in pictures]
    if found != expected:
        k = next((k for k, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), None)
        difference = (
            f"{len(found)} runs of placeholders (id {placeholder}) for {len(expected)} pictures"
            if k is None
            else f"{found[k]} placeholders (id {placeholder}) for picture {k}, which is "
            f"{expected[k]} tokens"
        )
        raise InputError(f"the token ids have {difference} of the messages")
    placed = token_ids.copy()
    for begin, end, picture in zip(begins, ends, pictures, strict=True):
        placed[begin:end] = FIRST_PICTURE + picture.number
    return placed


def has_pictures(messages: Any) -> bool:
    """Whether a part of some message is a picture, a video or a sound."""
    return isinstance(messages, list) and any(
        _is_media(part)
        for message in messages
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def picture_numbers(tokens: np.ndarray) -> list[int]:
    """The pictures of a sequence of `Rollouts.sequences`, in order."""
    begins = tokens >= FIRST_PICTURE
    begins[1:] &= tokens[1:] != tokens[:-1]
    return (tokens[begins] - FIRST_PICTURE).tolist()


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
            f"{where} is of the type {kind!r}; of pictures, videos and sounds only image and "
            "image_url are read"
        )
    reference = part.get(kind)
    if kind == "image_url" and isinstance(reference, dict):
        reference = reference.get("url")
    if not isinstance(reference, str) or not reference:
        field = "image" if kind == "image" else "image_url.url"
        raise InputError(
            f"{where}.{field} must be a path or a data URL; pictures in a column beside the "
            "messages are not read"
        )
    return reference


def _local(reference: str, where: str, folder: Path) -> Path:
    if reference.startswith(("http://", "https://")):
        raise InputError(
            f"{where}: {reference[:_SHOWN]} is an address, and nothing is downloaded; save the "
            "picture and give its path"
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
            f"{name}: reading pictures needs Pillow; pip install 'prefixtree-attention[pictures]'"
        ) from None
    from transformers.image_utils import load_image

    try:
        # turned as its EXIF says, and RGB, as transformers' processors get it
        return load_image(Image.open(io.BytesIO(data)))
    except UnidentifiedImageError:
        raise InputError(f"{name}: is no picture that Pillow can read") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
        raise InputError(f"{name}: is a damaged picture: {first_line(problem)}") from None
