"""A tokenizer and its chat template as a model's folder holds them, read without transformers: a
report on chats runs no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from prefixtree.errors import InputError, missing
from prefixtree.hub import explain, first_line

_WORDS, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# of older folders
_MORE_SETTINGS = "special_tokens_map.json"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_FILES = [_WORDS, _SETTINGS, _TEMPLATE, _MORE_SETTINGS]


class TokenizerFiles:
    """The words, special tokens and chat template of a folder or a name on the Hugging Face hub.

    Raises InputError without a tokenizer.json, ModuleNotFoundError without the package tokenizers.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import AddedToken, Tokenizer
        except ModuleNotFoundError:
            raise missing("a tokenizer", "tokenizers", "prefixtree-attention[chat]") from None
        folder = _folder(path)
        self._templates: dict[bool, Any] = {}
        try:
            self._settings: dict[str, Any] = {}
            for name in (_MORE_SETTINGS, _SETTINGS):
                if (folder / name).exists():
                    self._settings |= json.loads((folder / name).read_text())
            self._template = self._settings.get("chat_template")
            if (folder / _TEMPLATE).exists():
                self._template = (folder / _TEMPLATE).read_text()
            self._words = Tokenizer.from_file(str(folder / _WORDS))
            # what a trainer's last batch left in the file
            self._words.no_truncation()
            self._words.no_padding()
            added = self._settings.get("added_tokens_decoder", {}).items()
            for _, token in sorted(added, key=lambda item: int(item[0])):
                if self.id_of(token["content"]) is None:
                    self._words.add_tokens([AddedToken(**_of_added(token))])
        except Exception as problem:  # tokenizers raises bare exceptions
            raise InputError(explain("--tokenizer", path, problem)) from None

    def __len__(self) -> int:
        return self._words.get_vocab_size()

    @property
    def has_template(self) -> bool:
        return bool(self._template)

    @property
    def eos_id(self) -> int | None:
        """The token id that ends a turn; None where the folder names none."""
        return self.id_of(self.special.get("eos_token", ""))

    def id_of(self, token: str) -> int | None:
        """The id of a token, None where it is none of the vocabulary."""
        return self._words.token_to_id(token)

    def encode(self, text: str, *, special: bool = False) -> tuple[np.ndarray, list[int]]:
        """Finds token ids int64 [n], and the character at which each ends.

        Special tokens are those of the text, and with `special` those that the tokenizer puts
        around it.
        """
        encoded = self._words.encode(text, add_special_tokens=special)
        return np.array(encoded.ids, np.int64), [end for _, end in encoded.offsets]

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special ones included."""
        return self._words.decode(token_ids, skip_special_tokens=False)

    def render(self, messages: Any, tools: Any, add_generation_prompt: bool = False) -> str:
        """Writes messages by the chat template; InputError if the template refuses them."""
        try:
            return self._compiled(bool(tools)).render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special,
            )
        except ModuleNotFoundError:
            raise
        except Exception as problem:
            raise InputError(
                f"the chat template refuses the messages: {first_line(problem)}"
            ) from None

    @cached_property
    def special(self) -> dict[str, Any]:
        """Special tokens by the names that templates have for them, as eos_token."""
        extra = self._settings.get("extra_special_tokens")
        named = {**self._settings, **(extra if isinstance(extra, dict) else {})}
        return {
            name: text
            for name, token in named.items()
            if name.endswith("token")
            and isinstance(text := token["content"] if isinstance(token, dict) else token, str)
        }

    def _compiled(self, with_tools: bool) -> Any:
        if with_tools not in self._templates:
            template = self._template
            if isinstance(template, list):
                # several, by name
                named = {one["name"]: one["template"] for one in template}
                template = named.get("tool_use") if with_tools else None
                template = template or named["default"]
            self._templates[with_tools] = _environment().from_string(template)
        return self._templates[with_tools]


def _folder(path: str | Path) -> Path:
    """The folder of a tokenizer; of a name on the hub what is downloaded or in the cache."""
    folder = Path(path)
    if not folder.exists():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(path), allow_patterns=_FILES))
        except Exception as problem:
            raise InputError(explain("--tokenizer", path, problem)) from None
    if not (folder / _WORDS).exists():
        raise InputError(
            f"--tokenizer {path}: has no {_WORDS}, which tells what characters a token stands "
            "for; transformers writes one, if it knows the tokenizer: "
            "AutoTokenizer.from_pretrained(PATH).save_pretrained(FOLDER)"
        )
    return folder


def _of_added(token: dict[str, Any]) -> dict[str, Any]:
    known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: token[name] for name in known if name in token}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its reasoning under every name that templates and engines have for it."""
    given = (message[name] for name in _REASONING if message.get(name) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _environment() -> Any:
    """Jinja as chat templates expect it, with nothing within reach of a template from the hub."""
    try:
        from jinja2 import TemplateError, nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ModuleNotFoundError:
        raise missing("a chat template", "jinja2", "prefixtree-attention[chat]") from None

    class Generation(Extension):
        """{% generation %} .. {% endgeneration %} mark the assistant's text and change nothing."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, indent: int | None = None, **options: Any) -> str:
        # jinja's would write < and & for the web
        return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = as_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    environment.globals.update(functions)
    return environment
