"""A tokenizer of bytes with a chat template, made here and downloaded from nowhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# shows reasoning in the last message alone, as templates of reasoning models do
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is defined and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# parts of a message as Qwen's templates write them
IMAGE_CHATML = CHATML.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}",
)
IMAGE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def save_tokenizer(folder: Path, template: str | None, more: Sequence[str] = ()) -> Path:
    """Saves it: 256 bytes, no merges, <|im_start|> and <|im_end|>, which ends a turn."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", *more],
        chat_template=template,
    )
    fast.save_pretrained(folder)
    return folder


def save_image_tokenizer(folder: Path, template: str = IMAGE_CHATML) -> Path:
    """The same with an image processor: a token is 8 x 8 pixels, 4 patches of 4 x 4."""
    save_tokenizer(folder, template, IMAGE_TOKENS)
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder
