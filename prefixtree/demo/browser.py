"""A small fake browser: a web shop whose pages are drawn, for an agent that looks at screenshots;
and rollouts in it, as files: messages with screenshots, and a tiny model's folder.

    prefixtree report FOLDER/rollouts.jsonl --tokenizer FOLDER/model
    prefixtree verify FOLDER/rollouts.jsonl --tokenizer FOLDER/model \
        --model FOLDER/model/config.json --limit 8

Deterministic: the same clicks and words lead to the same page, and the same page to the same
pixels. So screenshots repeat along a history, and in its branches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

HEIGHT, WIDTH = 96, 160
_SHELVES = {
    "kettles": {"red kettle": 24, "blue kettle": 19},
    "lamps": {"desk lamp": 31, "garden lamp": 12, "night lamp": 9},
    "books": {"atlas": 40, "cookbook": 22},
}
PRICES = {item: price for shelf in _SHELVES.values() for item, price in shelf.items()}
_COLOURS = {
    "red kettle": (201, 60, 60),
    "blue kettle": (66, 99, 184),
    "desk lamp": (240, 200, 90),
    "garden lamp": (96, 150, 90),
    "night lamp": (110, 90, 150),
    "atlas": (70, 150, 170),
    "cookbook": (190, 130, 90),
}
_HOME, _SEARCH, _BASKET, _DONE = "home", "search", "basket", "thanks"
_ADD, _ORDER, _BACK = "add to basket", "order", "back"


@dataclass(frozen=True)
class Browser:
    """The state of the browser; `click` and `type` give the next one.

    Attributes:
        page: home, search, a shelf, an item, basket or thanks.
        query: the words in the search field.
        basket: the items in it.
        visited: the pages before this one, for going back.
    """

    page: str = _HOME
    query: str = ""
    basket: tuple[str, ...] = ()
    visited: tuple[str, ...] = ()

    @property
    def ordered(self) -> bool:
        """Whether the basket was ordered; nothing is to be done then."""
        return self.page == _DONE

    @property
    def links(self) -> list[str]:
        """The links that can be clicked."""
        if self.page == _HOME:
            return [*_SHELVES, _BASKET]
        if self.page == _BASKET:
            return [_ORDER, _HOME] if self.basket else [_HOME]
        if self.page == _DONE:
            return []
        return [*self._items(), *([_ADD] if self.page in PRICES else []), _BASKET, _BACK]

    def click(self, link: str) -> tuple[Browser, str]:
        """The browser after a click, and what the tool says of it."""
        if link not in self.links:
            return self, f"there is no {link} here."
        if link == _ADD:
            after = replace(self, basket=(*self.basket, self.page))
            return after, f"the {self.page} is in the basket."
        if link == _BACK:
            return replace(self, page=self.visited[-1], visited=self.visited[:-1]), "went back."
        page = {_ORDER: _DONE}.get(link, link)
        return replace(self, page=page, visited=(*self.visited, self.page)), f"opened {page}."

    def type(self, words: str) -> tuple[Browser, str]:
        """The browser after words typed into the search field, and what the tool says of it."""
        after = replace(self, page=_SEARCH, query=words, visited=(*self.visited, self.page))
        return after, f"{len(after._items())} found for {words}."

    def _items(self) -> list[str]:
        if self.page == _SEARCH:
            return [item for item in PRICES if set(self.query.split()) & set(item.split())]
        return list(_SHELVES.get(self.page, ()))

    def screenshot(self) -> np.ndarray:
        """The page as the agent sees it: uint8 [HEIGHT, WIDTH, 3]."""
        screen = np.full((HEIGHT, WIDTH, 3), 250, np.uint8)
        _fill(screen, 0, 0, 11, WIDTH, (38, 70, 83))
        _write(screen, 3, 4, f"shop / {self.page}", (255, 255, 255))
        _write(screen, 3, 118, f"basket {len(self.basket)}", (233, 196, 106))
        _fill(screen, 15, 4, 24, 110, (255, 255, 255), border=(120, 120, 120))
        _write(screen, 17, 7, self.query if self.page == _SEARCH else "", (60, 60, 60))
        _fill(screen, 15, 114, 24, 156, (42, 157, 143))
        _write(screen, 17, 121, "search", (255, 255, 255))
        row = 30
        if self.page in PRICES:
            _fill(screen, 30, 4, 78, 60, _COLOURS[self.page])
            _write(screen, 32, 68, self.page, (0, 0, 0))
            _write(screen, 42, 68, f"price {PRICES[self.page]}", (0, 0, 0))
            row = 54
        elif self.page == _DONE:
            _write(screen, 50, 40, "thank you. order 4711.", (0, 0, 0))
        shown = self.basket if self.page == _BASKET else self._items()
        for item in shown:
            _fill(screen, row, 4, row + 9, 18, _COLOURS[item])
            _write(screen, row + 2, 24, f"{item}  {PRICES[item]}", (0, 0, 0))
            row += 12
        left = 68 if self.page in PRICES else 4
        for link in (link for link in self.links if link not in shown):
            _fill(screen, row, left, row + 9, left + 4 * len(link) + 7, (244, 162, 97))
            _write(screen, row + 2, left + 4, link, (0, 0, 0))
            row += 12
        return screen


# ---- drawing -------------------------------------------------------------------------------------

# 3 x 5 pixels a letter: an octal digit is a row
_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789./"
_GLYPHS = """
25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 65555 25552 65644
25563 65655 34216 72222 55557 55552 55775 55255 55222 71247 75557 26227 61247 61216 55711 74616
34757 71222 75757 75716 00002 11244
"""
_LETTERS = dict(zip(_ALPHABET, _GLYPHS.split(), strict=True))


def _write(screen: np.ndarray, top: int, left: int, text: str, colour: tuple[int, ...]) -> None:
    for letter in text:
        if top + 5 > HEIGHT or left + 3 > WIDTH:
            return
        rows = _LETTERS.get(letter, "00000")
        dots = np.array([[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in rows], bool)
        screen[top : top + 5, left : left + 3][dots] = colour
        left += 4


def _fill(
    screen: np.ndarray,
    top: int,
    left: int,
    bottom: int,
    right: int,
    colour: tuple[int, ...],
    border: tuple[int, ...] | None = None,
) -> None:
    screen[top:bottom, left:right] = colour if border is None else border
    if border is not None:
        screen[top + 1 : bottom - 1, left + 1 : right - 1] = colour


# continuations of each turn: 3 x 2 x 2 rollouts per task, fewer where one orders early
BRANCHING = (3, 2, 2, 1, 1)
TASKS = {
    "order the red kettle.": ["red kettle"],
    "order the cheapest lamp.": ["night lamp"],
    "order a book with recipes.": ["cookbook"],
    "order the atlas and the desk lamp.": ["atlas", "desk lamp"],
}
_SYSTEM = """you help customers of a web shop. after every turn you get a screenshot of the page and
a line from the tool. the page has a search field at the top. orange fields and names of goods can
be clicked. the number at the upper right tells how many goods are in the basket.
tools, one a turn: click, with the text of a link; type, with the words to search for.
rules: say in a few words what you see and what you will do, then call one tool. put nothing into
the basket that was not asked for. order once, when all goods are in the basket. there is no way to
take goods out of the basket again, and an order cannot be undone. compare prices where the customer
asks for the cheapest. be kind to the customer, and do not ask back.
reward: 1 when exactly the right goods were ordered, otherwise one half for goods that are in the
basket rightly."""
_THOUGHTS = (
    "i see the page {page}. next is {action}.",
    "this is {page}. i try {action}.",
    "the page is {page}, so {action} it is.",
)
# how often the agent takes the way to the goods, and not any link
_SKILL = 0.6

_MERGE, _PATCH = 2, 8
_VOCABULARY = 480
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}\n{{ c.function.name }}: {{ c.function.arguments.what }}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass
class _Files:
    """Screenshots that were drawn so far, and the files they go to."""

    folder: Path
    names: dict[bytes, str] = field(default_factory=dict)

    def name(self, screen: np.ndarray) -> str:
        """The path of a screenshot, relative to the folder; it is written when it first comes."""
        from PIL import Image

        key = screen.tobytes()
        if key not in self.names:
            name = f"screens/{len(self.names):03}.png"
            self.names[key] = name
            Image.fromarray(screen).save(self.folder / name)
        return self.names[key]


def write_rollouts(folder: Path, seed: int = 7) -> Path:
    """Plays all tasks with branches, and writes rollouts, screenshots and a tiny model's folder.

    A rollout is one line of OpenAI chat messages. `folder`/model has a tokenizer, an image
    processor and the configuration of a Qwen3-VL, for random weights.

    Args:
        folder: is made where it is missing.
        seed: of what the agent says and does.

    Returns:
        The file of rollouts, `folder`/rollouts.jsonl.
    """
    (folder / "screens").mkdir(parents=True, exist_ok=True)
    rng, files = np.random.default_rng(seed), _Files(folder)
    rows, talks = [], []
    for task, wanted in TASKS.items():
        for n, (talk, browser) in enumerate(_play(task, wanted, files, rng)):
            reward = _reward(browser, wanted)
            talks.append(talk)
            rows.append({"id": f"{task} {n}", "group": task, "reward": reward, "messages": talk})
    path = folder / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _write_model(folder / "model", talks)
    return path


# ---- the agent -----------------------------------------------------------------------------------


def _play(
    task: str, wanted: list[str], files: _Files, rng: np.random.Generator
) -> list[tuple[list[dict[str, Any]], Browser]]:
    """The rollouts of a task: their messages, and where the browser ended."""
    start = Browser()
    first: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": _seen(f"please {task}", start, files)},
    ]
    # by pairs: the messages so far, which end before a turn, and the browser
    open_, done = [(first, start)], list[tuple[list[dict[str, Any]], Browser]]()
    for turn, continuations in enumerate(BRANCHING):
        following = []
        for talk, browser in open_:
            for _ in range(continuations):
                tool, what = _choose(browser, wanted, rng)
                thought = str(rng.choice(_THOUGHTS)).format(page=browser.page, action=what)
                call = {"function": {"name": tool, "arguments": {"what": what}}}
                said = [*talk, {"role": "assistant", "content": thought, "tool_calls": [call]}]
                after, reply = getattr(browser, tool)(what)
                if after.ordered or turn == len(BRANCHING) - 1:
                    done.append((said, after))
                    continue
                result = {"role": "tool", "content": _seen(reply, after, files)}
                following.append(([*said, result], after))
        open_ = following
    return done


def _choose(browser: Browser, wanted: list[str], rng: np.random.Generator) -> tuple[str, str]:
    """A tool and its argument: a step to the goods, or any link, or a search for any goods."""
    missing = [item for item in wanted if item not in browser.basket]
    links = browser.links
    if rng.random() < _SKILL:
        for link in ["add to basket"] if browser.page in missing else missing:
            if link in links:
                return "click", link
        if missing:
            return "type", missing[0]
        return "click", "order" if "order" in links else "basket"
    if rng.random() < 0.25:
        return "type", str(rng.choice(list(PRICES)))
    return "click", str(rng.choice(links))


def _seen(text: str, browser: Browser, files: _Files) -> list[dict[str, Any]]:
    image = files.name(browser.screenshot())
    return [{"type": "image", "image": image}, {"type": "text", "text": text}]


def _reward(browser: Browser, wanted: list[str]) -> float:
    if browser.ordered:
        return float(sorted(browser.basket) == sorted(wanted))
    return 0.5 * sum(item in browser.basket for item in wanted) / len(wanted)


# ---- the model's folder --------------------------------------------------------------------------


def _write_model(folder: Path, talks: list[list[dict[str, Any]]]) -> None:
    """A tokenizer trained on the rollouts' text, an image processor and a configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLConfig

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([_text(talk) for talk in talks], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    # one token is 16 x 16 pixels; no screenshot is resized
    edges = {"shortest_edge": (_PATCH * _MERGE) ** 2, "longest_edge": HEIGHT * WIDTH}
    Qwen2VLImageProcessorPil(patch_size=_PATCH, merge_size=_MERGE, size=edges).save_pretrained(
        folder
    )
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in {
            "image_token_id": "<|image_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }.items()
    }
    Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "hidden_size": 64,
            "intermediate_size": 192,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGE,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 256,
        },
        # no token stands for a video
        video_token_id=len(tokenizer),
        **ids,
    ).save_pretrained(folder)


def _text(talk: list[dict[str, Any]]) -> str:
    parts = [
        part.get("text", "")
        for message in talk
        for part in (
            message["content"]
            if isinstance(message["content"], list)
            else [{"text": message["content"]}]
        )
    ]
    return "\n".join(parts)
