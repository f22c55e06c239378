"""A tiny Qwen3-VL with a processor of bytes and images, and chats with images. Nothing is
downloaded; the processor is without videos, which would need torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from tests.integrations.trl.runs import tiny_config
from tests.support.chat_tokenizer import save_tokenizer

_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Processor(ProcessorMixin):
    """Text and images, as Qwen's does it: one placeholder per 2 x 2 patches."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **options: Any) -> None:
        super().__init__(image_processor, tokenizer, **options)
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids("<|video_pad|>")

    def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
        from transformers import BatchFeature

        texts = [text] if isinstance(text, str) else list(text)
        shown: dict[str, Any] = {}
        kind = options.pop("return_tensors", None)
        options.pop("return_mm_token_type_ids", None)
        if images is not None and len(images):
            flat = [x for row in images for x in (row if isinstance(row, list) else [row])]
            shown = dict(self.image_processor(images=flat, return_tensors="pt"))
            sizes = iter((shown["image_grid_thw"].prod(1) // 4).tolist())
            texts = [
                "".join(
                    part if i == 0 else self.image_token * next(sizes) + part
                    for i, part in enumerate(line.split(self.image_token))
                )
                for line in texts
            ]
        found = self.tokenizer(texts, return_tensors=kind, **options)
        types = [
            [int(t == self.image_token_id) for t in row]
            for row in (found["input_ids"].tolist() if kind else found["input_ids"])
        ]
        found = dict(found) | {"mm_token_type_ids": torch.tensor(types) if kind else types}
        return BatchFeature({**found, **shown})


def save_vision_model(folder: Path) -> Path:
    """The model's folder, with its tokenizer."""
    save_tokenizer(folder, _TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in _TOKENS])
    tokenizer.save_pretrained(folder)
    start, image, video, end = tokenizer.convert_tokens_to_ids(_TOKENS)
    sizes = tiny_config(vocab_size=len(tokenizer)).to_dict()
    del sizes["model_type"]
    sizes["rope_parameters"] = {
        "rope_type": "default",
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
        "rope_theta": 1e4,
    }
    encoder = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": sizes["hidden_size"],
        "patch_size": 4,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
        "initializer_range": 0.2,
    }
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config=sizes,
        vision_config=encoder,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def processor(folder: Path) -> Processor:
    """Of the model in a folder."""
    # TRL takes the types of tokens from it, of prompts that it pads on the left itself
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=512)
    return Processor(images, tokenizer, chat_template=tokenizer.chat_template)


def chats() -> Dataset:
    """Prompts with an image each; two have one of the same size, and one has none of its own."""
    draw = np.random.default_rng(0)
    sizes = ((16, 24), (16, 24), (24, 16), (16, 16))
    shown = [
        Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
        for height, width in sizes
    ]
    words = ("a", "a", "efghi", "jk" * 6)
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": word}] for word in words],
            "images": [[image] for image in shown],
        }
    )


def captions() -> Dataset:
    """Samples of text, two after each image, that begin alike; one image has another's size."""
    prompts = chats()
    rows = []
    for i, (image,) in enumerate(prompts["images"]):
        start = "<|vision_start|><|image_pad|><|vision_end|>what is it? "
        rows += [{"text": start + word * (i + 1), "images": [image]} for word in ("ab", "cde")]
    return Dataset.from_list(rows)


def pairs() -> Dataset:
    """Two pairs of answers after each prompt with an image."""
    rows = []
    for row in chats():
        for word in ("ab", "cde"):
            said = [[{"role": "assistant", "content": text}] for text in (word, word + "x")]
            rows.append({**row, "chosen": said[0], "rejected": said[1]})
    return Dataset.from_list(rows)
