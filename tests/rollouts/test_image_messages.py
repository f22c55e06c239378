"""Images in messages: which are one, their tokens in sequences, masks and turns, refusals."""

import base64
import io
import json
import sys

import numpy as np
import pytest
from PIL import Image, PngImagePlugin
from transformers import AutoImageProcessor

from prefixtree.errors import InputError
from prefixtree.forest import PrefixForest
from prefixtree.rollouts import ChatTokenizer, expand_turns, read_rollouts
from prefixtree.rollouts.image_messages import FIRST_IMAGE, image_numbers
from prefixtree.sharing.measure import measure_images
from tests.support.chat_tokenizer import (
    IMAGE_CHATML,
    IMAGE_TOKENS,
    save_image_tokenizer,
    save_tokenizer,
)


def screen(seed, height=16, width=24):
    """Noise, 6 tokens of 8 x 8 pixels by default."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def png(image, comment=None):
    info = PngImagePlugin.PngInfo()
    if comment is not None:
        info.add_text("Comment", comment)
    file = io.BytesIO()
    image.save(file, format="png", pnginfo=info)
    return file.getvalue()


def data_url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def seen(reference, text="now?"):
    return {
        "role": "user",
        "content": [{"type": "image", "image": reference}, {"type": "text", "text": text}],
    }


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_image_tokenizer(tmp_path_factory.mktemp("images"))


@pytest.fixture
def tokenizer(folder):
    return ChatTokenizer(folder)


@pytest.fixture
def screens(tmp_path):
    """One image under two names and with other bytes, and another of its size."""
    for name, data in {
        "a.png": png(screen(0)),
        "also-a.png": png(screen(0), "taken at noon"),
        "b.png": png(screen(1)),
        "wide.png": png(screen(2, 16, 64)),
    }.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


def read(write, tokenizer, *talks, **fields):
    rows = [{"messages": talk, **fields} for talk in talks]
    return read_rollouts(write(*rows), strict=True, tokenizer=tokenizer)


def test_placeholders_grow_to_the_tokens_of_their_image(write, screens, tokenizer):
    talk = [seen("a.png"), said("click"), seen("wide.png", "and now?"), said("done")]
    rollouts = read(write, tokenizer, talk)
    (tokens,), (mask,), (ends,) = rollouts.sequences, rollouts.loss_masks, rollouts.turn_ends
    assert tokenizer.decode(tokens.tolist()) == (
        "<|im_start|>user\n<|vision_start|>[image 0]<|vision_end|>now?<|im_end|>\n"
        "<|im_start|>assistant\nclick<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>[image 1]<|vision_end|>and now?<|im_end|>\n"
        "<|im_start|>assistant\ndone<|im_end|>\n"
    )
    assert [(p.height, p.width, p.patches, p.tokens) for p in rollouts.images] == [
        (16, 24, 24, 6),
        (16, 64, 64, 16),
    ]
    assert (tokens == FIRST_IMAGE).sum() == 6 and (tokens == FIRST_IMAGE + 1).sum() == 16
    assert image_numbers(tokens) == [0, 1]
    # masks and turns count the tokens of images before them
    starts = np.flatnonzero(np.diff(mask.astype(int)) == 1) + 1
    turns = [tokenizer.decode(tokens[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]
    assert turns == ["click<|im_end|>", "done<|im_end|>"]
    assert mask.sum() == sum(b - a for a, b in zip(starts, ends, strict=True))
    per_turn = expand_turns(rollouts, strict=True)
    assert [image_numbers(s) for s in per_turn.sequences] == [[0], [0, 1]]
    assert [len(s) for s in per_turn.sequences] == ends.tolist()
    # the template's own count of tokens: one more placeholder per image and token
    text = tokenizer._tokenizer.render(talk, None)
    assert len(tokens) == len(tokenizer._tokenizer.encode(text)[0]) + 5 + 15


def test_images_are_one_where_their_pixels_are(write, screens, tokenizer):
    url = data_url(png(screen(0), "in the message"))
    other = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "now?"}]
    talks = [
        [seen("a.png"), said("one")],
        [seen("also-a.png"), said("two")],
        [{"role": "user", "content": other}, said("six")],
        [seen(f"file://{screens / 'a.png'}"), said("ten")],
        [seen("b.png"), said("one")],
    ]
    rollouts = read(write, tokenizer, *talks)
    assert [image_numbers(s) for s in rollouts.sequences] == [[0]] * 4 + [[1]]
    assert len(rollouts.images) == 2 and rollouts.images[0].name == "a.png"
    # long data URLs are not kept, neither here nor in what report quotes
    named = [message[0]["content"][0] for message in rollouts.messages]
    assert [part["image"] for part in named] == ["[image 0]"] * 4 + ["[image 1]"]
    forest = PrefixForest.from_sequences(rollouts.sequences)
    assert measure_images(forest, rollouts) == {
        "images": {"replicated": 5, "packed": 2, "distinct": 2},
        "tokens": {"replicated": 30, "packed": 12},
        "patches": {"replicated": 120, "packed": 48, "distinct": 48},
        "ratio": 2.5,
    }


def test_an_image_in_two_branches_is_placed_twice(write, screens, tokenizer):
    talks = [[seen("a.png"), said(word), seen("b.png"), said("end")] for word in ("left", "right")]
    rollouts = read(write, tokenizer, *talks)
    facts = measure_images(PrefixForest.from_sequences(rollouts.sequences), rollouts)
    assert facts["images"] == {"replicated": 4, "packed": 3, "distinct": 2}
    # of the first rollouts alone only their own count
    assert measure_images(PrefixForest.from_sequences([[1, 2]]), rollouts.take([])) is None


def test_a_processed_image_is_what_the_image_processor_makes(write, screens, folder, tokenizer):
    rollouts = read(write, tokenizer, [seen("b.png"), said("x")], [seen("wide.png"), said("x")])
    processor = AutoImageProcessor.from_pretrained(folder)
    for image, shown in zip(rollouts.images, [screen(1), screen(2, 16, 64)], strict=True):
        pixels, grid = image.processed()
        expected = processor(images=[shown], return_tensors="pt")
        assert pixels.shape == (image.patches, 3 * 2 * 4 * 4)
        assert (pixels == expected["pixel_values"]).all()
        assert (grid == expected["image_grid_thw"][0]).all()
    (screens / "b.png").write_bytes(png(screen(1, 32, 32)))
    with pytest.raises(InputError, match=r"b\.png: has 64 patches now, it had 24 when"):
        rollouts.images[0].processed()


def test_a_template_that_rewrites_turns_keeps_each_turns_images(write, screens, tokenizer):
    talk = [
        seen("a.png"),
        said("1", reasoning_content="easy"),
        seen("b.png"),
        said("2", reasoning_content="hard"),
    ]
    turns = expand_turns(read(write, tokenizer, talk), strict=True)
    assert [image_numbers(s) for s in turns.sequences] == [[0], [0, 1]]
    scored = [
        tokenizer.decode(s[m].tolist())
        for s, m in zip(turns.sequences, turns.loss_masks, strict=True)
    ]
    assert scored == ["<think>easy</think>1<|im_end|>", "<think>hard</think>2<|im_end|>"]
    # of the second sequence the policy sampled its first turn too, and no image
    sampled = tokenizer.decode(turns.sequences[1][turns.sampled[1]].tolist())
    assert "1<|im_end|>" in sampled and "image" not in sampled


def test_token_ids_beside_images(write, screens, tokenizer):
    """Token ids of an engine: expanded placeholders, told apart by the messages' images."""
    talk = [seen("a.png"), said("x"), seen("b.png"), said("y")]
    of_template = read(write, tokenizer, talk).sequences[0]
    pad = tokenizer.placeholder
    recorded = np.where(of_template >= FIRST_IMAGE, pad, of_template).tolist()
    row = {"token_ids": recorded, "turn_ends": [len(recorded)], "messages": talk}
    rollouts = read_rollouts(write(row), strict=True, tokenizer=tokenizer)
    assert (rollouts.sequences[0] == of_template).all() and rollouts.placeholder == pad
    assert rollouts.messages[0][2]["content"][0]["image"] == "[image 1]"
    first = recorded.index(pad)
    for ids, message in (
        (recorded[:first] + recorded[first + 1 :], r"5 placeholders .* for image 0, which is 6"),
        (recorded[: first + 6], r"1 runs of placeholders .* for 2 images of the messages"),
    ):
        with pytest.raises(InputError, match=message):
            row = {"token_ids": ids, "messages": talk}
            read_rollouts(write(row), strict=True, tokenizer=tokenizer)
    with pytest.raises(InputError, match="token ids alone do not tell images apart"):
        read_rollouts(write({"token_ids": recorded, "messages": talk}), strict=True)
    with pytest.raises(InputError, match=r"has placeholders of images .* and no messages"):
        read_rollouts(write({"token_ids": recorded}), strict=True, tokenizer=tokenizer)
    with pytest.raises(InputError, match=r"ids from 2\^30 on stand for images"):
        read_rollouts(write({"token_ids": [2**30]}), strict=True, tokenizer=tokenizer)


def test_images_in_parquet(write_parquet, screens, tokenizer):
    """Every part of a struct column has every field, null where it is absent."""
    parts = [
        {"type": "image", "image": "a.png", "text": None},
        {"type": "text", "image": None, "text": "now?"},
    ]
    path = write_parquet(messages=[[{"role": "user", "content": parts}]])
    rollouts = read_rollouts(path, strict=True, tokenizer=tokenizer)
    assert image_numbers(rollouts.sequences[0]) == [0]
    assert "now?" in tokenizer.decode(rollouts.sequences[0].tolist())


def _part(**part):
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    "talk, message",
    [
        (_part(type="image", image="https://x.org/a.png"), "is an address, and nothing is downlo"),
        (_part(type="image", image="gone.png"), "gone.png cannot be read: No such file"),
        (_part(type="image"), r"content\[0\]\.image must be a path or a data URL"),
        (_part(type="image_url", image_url={"url": 3}), "image_url.url must be a path or a data"),
        (_part(type="image", image="data:image/png,abc"), "expected a data URL as data:image/png;"),
        (_part(type="image", image="data:image/png;base64,a"), "the data URL is not valid base64"),
        (_part(type="image", image="not.png"), "not.png: is no image that Pillow can read"),
        (_part(type="image", image="cut.png"), "cut.png: is a damaged image"),
        (_part(type="image", image="thin.png"), "thin.png: the image processor refuses it: absol"),
        (_part(type="video", video="a.mp4"), "is of the type 'video'; of images, videos and"),
        (_part(video="a.mp4"), "is of the type None; of images"),
        (_part(type="input_image", image_url="a.png"), "is of the type 'input_image'"),
        ([seen("a.png", "a literal <|image_pad|>")], "writes 2 placeholders for 1 images"),
    ],
)
def test_what_is_refused(write, screens, tokenizer, talk, message):
    (screens / "not.png").write_text("hello")
    (screens / "cut.png").write_bytes(png(screen(0))[:400])
    (screens / "thin.png").write_bytes(png(screen(0, 2, 1000)))
    with pytest.raises(InputError, match=f":1: .*{message}"):
        read(write, tokenizer, talk)


class _NeedsTorchvision:
    @staticmethod
    def from_pretrained(*_, **__):
        raise ImportError("AutoImageProcessor requires the Torchvision library")


def test_folders_and_templates_that_do_not_fit(write, screens, tmp_path, monkeypatch):
    talk = [seen("a.png"), said("x")]
    plain = ChatTokenizer(save_tokenizer(tmp_path / "plain", IMAGE_CHATML, IMAGE_TOKENS))
    with pytest.raises(InputError, match=r"plain: has no preprocessor_config\.json; the messages"):
        read(write, plain, talk)
    no_token = save_tokenizer(tmp_path / "no-token", IMAGE_CHATML)
    config = (save_image_tokenizer(tmp_path / "vl") / "preprocessor_config.json").read_text()
    (no_token / "preprocessor_config.json").write_text(config)
    with pytest.raises(InputError, match=r"has no token <\|image_pad\|> to stand for an image"):
        read(write, ChatTokenizer(no_token), talk)
    side_by_side = IMAGE_CHATML.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    close = ChatTokenizer(save_image_tokenizer(tmp_path / "close", side_by_side))
    with pytest.raises(InputError, match="writes two images side by side"):
        read(write, close, [{"role": "user", "content": [seen("a.png")["content"][0]] * 2}])
    siglip = save_tokenizer(tmp_path / "siglip", IMAGE_CHATML, IMAGE_TOKENS)
    (siglip / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "SiglipImageProcessor"})
    )
    with pytest.raises(InputError, match="gives no image_grid_thw; images are read for"):
        read(write, ChatTokenizer(siglip), talk)
    with monkeypatch.context() as patch:
        # as older versions of transformers without torchvision
        patch.setattr("transformers.AutoImageProcessor", _NeedsTorchvision)
        with pytest.raises(InputError, match=r"pip install torchvision, or take transformers 5.23"):
            read(write, ChatTokenizer(tmp_path / "vl"), talk)
    fresh = ChatTokenizer(tmp_path / "vl")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"pip install 'prefixtree-attention\[images\]'"):
        read(write, fresh, talk)
