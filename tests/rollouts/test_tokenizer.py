"""A tokenizer's files, read with and without transformers: the same text and the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from prefixtree.errors import InputError
from prefixtree.rollouts.tokenizer import TokenizerFiles
from tests.rollouts.conftest import TALK
from tests.support.chat_tokenizer import CHATML, IMAGE_CHATML, IMAGE_TOKENS, save_tokenizer

TALK_OF_TEMPLATES = [
    {"role": "user", "content": "1 < 2 & ünï?"},
    {"role": "assistant", "content": "  yes\n", "reasoning": "easy"},
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"a": "<é>"}}}]
TEMPLATES = {
    "chatml": CHATML,
    "tools": "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHATML,
    "indented": "{{ messages | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':')) }}",
    "generation": "{% for m in messages %}\n    {% generation %}\n{{ m.content }}<|im_end|>\n"
    "    {% endgeneration %}\n{% endfor %}",
    "loop controls": "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "today": "{{ strftime_now('%Y') }}{{ eos_token }}{{ pad_token }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
    "two": [
        {"name": "default", "template": "no tools"},
        {"name": "tool_use", "template": "with {{ tools[0].function.name }}"},
    ],
}


def change(folder: Path, name: str, **fields: Any) -> None:
    settings = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(settings | fields))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_the_text_and_its_tokens(tmp_path: Path, name: str, tools: Any) -> None:
    folder = save_tokenizer(tmp_path, None)
    change(folder, "tokenizer_config.json", chat_template=TEMPLATES[name], bos_token="<|im_start|>")
    ours, theirs = TokenizerFiles(folder), AutoTokenizer.from_pretrained(folder)
    for prompt in (False, True):
        text = ours.render(TALK_OF_TEMPLATES, tools, prompt)
        assert text == theirs.apply_chat_template(
            TALK_OF_TEMPLATES, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        expected = theirs(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, ends = ours.encode(text)
        assert tokens.tolist() == expected["input_ids"]
        assert ends == [end for _, end in expected["offset_mapping"]]
        assert ours.decode(tokens.tolist()) == theirs.decode(tokens.tolist()) == text
    assert (len(ours), ours.eos_id) == (len(theirs), theirs.eos_token_id)


def test_tokens_that_the_settings_alone_name(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, CHATML)
    added = json.loads((folder / "tokenizer_config.json").read_text()).get(
        "added_tokens_decoder", {}
    )
    token = {"content": "<|call|>", "special": True, "normalized": False}
    change(folder, "tokenizer_config.json", added_tokens_decoder={**added, "258": token})
    ours, theirs = TokenizerFiles(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.id_of("<|call|>") == theirs.convert_tokens_to_ids("<|call|>") == 258
    assert ours.encode("a<|call|>b")[0].tolist() == theirs("a<|call|>b")["input_ids"]


def test_what_a_batch_left_in_the_file(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, CHATML)
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    change(folder, "tokenizer.json", truncation=cut)
    assert len(TokenizerFiles(folder).encode("many words")[0]) == 10


def test_images_have_their_token(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, IMAGE_CHATML, IMAGE_TOKENS)
    extra = {"image_token": "<|image_pad|>"}
    change(folder, "tokenizer_config.json", extra_special_tokens=extra)
    assert TokenizerFiles(folder).special["image_token"] == "<|image_pad|>"


def test_a_template_reaches_nothing(tmp_path: Path) -> None:
    reach = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    files = TokenizerFiles(save_tokenizer(tmp_path, reach))
    with pytest.raises(InputError, match=r"refuses the messages: .*unsafe"):
        files.render(TALK, None)


def test_a_folder_without_its_words(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, CHATML)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(InputError, match=r"has no tokenizer\.json, .*save_pretrained\(FOLDER\)"):
        TokenizerFiles(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"^--tokenizer .*: "):
        TokenizerFiles(folder)
