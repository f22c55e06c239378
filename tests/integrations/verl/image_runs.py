"""Vision checkpoints for the runs: tiny models, and rollouts that hold images, with the four rows
of positions that verl's agent loop gives such models, for text alone too."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.support.image_cases import CONFIGS, END, IMAGE, NO_VIDEOS, START, VIDEO, pixels
from tests.support.image_cases import run as placeholders
from tests.support.models import as_lists, randomise

VISION = tuple(name for name in CONFIGS if name not in NO_VIDEOS)
_GRIDS = {"a": (1, 8, 4), "a2": (1, 8, 4), "b": (1, 4, 6)}


def vision_config(model_type: str, vocabulary: int) -> Any:
    """Of a tiny model with a vision encoder."""
    shape = as_lists(CONFIGS[model_type])
    shape["text_config"] |= {"vocab_size": vocabulary, "max_position_embeddings": 512}
    return AutoConfig.for_model(
        model_type,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
        **shape,
    )


def save_vision_model(config: Any, path: Path) -> None:
    """Random weights, in which every parameter matters."""
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    randomise(model)
    model.save_pretrained(path)


def shown(rows: dict[str, list[Any]], path: Path, with_images: bool) -> dict[str, list[Any]]:
    """Groups of four rollouts, as a model sees them: with positions, and with images if wanted.

    The second and third group hold prompts alike but for pixels, also within the third; one branch
    of the second sees an image in a tool's output; the last group sees none. Without images the
    policy sampled some of the placeholders, which are text then.
    """
    special = torch.tensor([IMAGE, VIDEO, START, END])
    rows = {name: list(values) for name, values in rows.items()}
    for name in ("prompts", "responses"):
        rows[name] = [row.masked_fill(torch.isin(row, special), 3) for row in rows[name]]
    if not with_images:
        rows["responses"][1][-2:] = IMAGE
        rows["responses"][6][-1] = VIDEO
    rows["multi_modal_inputs"] = [{} for _ in rows["prompts"]]
    for i in range(len(rows["prompts"]) if with_images else 0):
        _show(rows, i)
    rope = _model(path).model.get_rope_index
    rows["position_ids"] = []
    for prompt, response, held in zip(
        rows["prompts"], rows["responses"], rows["multi_modal_inputs"], strict=True
    ):
        ids = torch.cat([prompt, response])[None]
        count = torch.arange(ids.shape[1])
        three = count.expand(3, -1)
        if held:
            types = (ids == IMAGE).to(torch.int32)
            three = rope(ids, types, image_grid_thw=held["image_grid_thw"])[0][:, 0]
        rows["position_ids"].append(torch.cat([count[None], three]))
    return rows


def _show(rows: dict[str, list[Any]], i: int) -> None:
    group, member = divmod(i, 4)
    names = [["a"], ["a2"], ["a2" if member % 2 else "a"], []][group]
    if names:
        prompt = rows["prompts"][i]
        rows["prompts"][i] = torch.cat([prompt[:3], _run(names[0]), prompt[3:]])
    if group == 1 and member % 2:
        # behind the first token that the tool gave
        at = rows["response_mask"][i].tolist().index(0) + 1
        run = _run("b")
        for name, more in (("responses", run), ("response_mask", torch.zeros_like(run))):
            row = rows[name][i]
            rows[name][i] = torch.cat([row[:at], more, row[at:]])
        names = [*names, "b"]
    if names:
        rows["multi_modal_inputs"][i] = {
            "pixel_values": torch.cat([_pixels(name) for name in names]),
            "image_grid_thw": torch.tensor([_GRIDS[name] for name in names]),
        }


def _run(name: str) -> torch.Tensor:
    return torch.tensor(placeholders(_GRIDS[name]))


def _pixels(name: str) -> torch.Tensor:
    return pixels(list(_GRIDS).index(name), _GRIDS[name]).float()


@cache
def _model(path: Path) -> Any:
    """Without weights; its positions are transformers'."""
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path))


@contextmanager
def patches_taken_back() -> Iterator[None]:
    """Behind it the classes of models with vision encoders are as they were: verl's engine patches
    them."""
    before = {kind: dict(vars(kind)) for kind in _classes()}
    try:
        yield
    finally:
        for kind, held in before.items():
            for attribute, value in dict(vars(kind)).items():
                if attribute not in held:
                    delattr(kind, attribute)
                elif held[attribute] is not value:
                    setattr(kind, attribute, held[attribute])


def _classes() -> Iterator[type[nn.Module]]:
    for model_type in VISION:
        name = f"transformers.models.{model_type}.modeling_{model_type}"
        for kind in vars(importlib.import_module(name)).values():
            if isinstance(kind, type) and issubclass(kind, nn.Module):
                yield kind
