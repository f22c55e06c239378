"""The fake browser and its rollouts: pages, screenshots, branches, and the files they make."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from prefixtree.demo.browser import BRANCHING, HEIGHT, TASKS, WIDTH, Browser, write_rollouts
from prefixtree.forest import PrefixForest
from prefixtree.rollouts import ChatTokenizer, expand_turns, read_rollouts
from prefixtree.rollouts.image_messages import image_numbers
from prefixtree.sharing.measure import measure_images

ROOT = Path(__file__).parents[2]


def clicked(browser, *links):
    for link in links:
        assert link in browser.links
        browser, _ = browser.click(link)
    return browser


def test_an_order():
    home = Browser()
    found, reply = home.type("garden lamp")
    # words that any of the goods has
    assert reply == "3 found for garden lamp." and "night lamp" in found.links
    full = clicked(found, "night lamp", "add to basket", "basket")
    assert full.basket == ("night lamp",) and not full.ordered
    assert clicked(full, "order").ordered and clicked(full, "order").links == []
    same, reply = home.click("night lamp")
    assert same == home and reply == "there is no night lamp here."
    assert "order" not in clicked(home, "basket").links
    assert clicked(home, "books", "atlas", "back").page == "books"


def test_a_screenshot_is_of_what_is_seen():
    home, books = Browser(), clicked(Browser(), "books")
    screen = home.screenshot()
    assert screen.shape == (HEIGHT, WIDTH, 3) and screen.dtype == np.uint8
    # another way to the same page
    assert (clicked(books, "back").screenshot() == screen).all()
    assert (clicked(home, "basket", "home").screenshot() == screen).all()
    others = [
        books,
        clicked(books, "atlas"),
        clicked(books, "atlas", "add to basket"),
        clicked(books, "cookbook"),
        clicked(books, "basket"),
        home.type("atlas")[0],
        home.type("lamp")[0],
    ]
    pixels = {browser.screenshot().tobytes() for browser in [home, *others]}
    assert len(pixels) == 1 + len(others)
    # more goods than there is room for
    crowded = Browser(page="basket", basket=("atlas",) * 20).screenshot()
    assert crowded.shape == screen.shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    write_rollouts(folder)
    return folder


def test_the_files(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert {row["group"] for row in rows} == set(TASKS)
    assert len(rows) == len(TASKS) * np.prod(BRANCHING)
    assert {0.0, 1.0} < {row["reward"] for row in rows}
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        turns = roles.count("assistant")
        assert roles == ["system", "user", *["assistant", "tool"] * turns][:-1]
    screens = sorted((folder / "screens").iterdir())
    assert len({Image.open(screen).tobytes() for screen in screens}) == len(screens) > 20
    # the same in every run
    again = write_rollouts(tmp_path)
    assert again.read_text() == (folder / "rollouts.jsonl").read_text()
    tokenizer = "model/tokenizer.json"
    assert (tmp_path / tokenizer).read_text() == (folder / tokenizer).read_text()
    assert write_rollouts(tmp_path, seed=8).read_text() != (folder / "rollouts.jsonl").read_text()


def test_what_they_share(folder):
    page = " ".join((ROOT / "docs" / "images.md").read_text().split())
    tokenizer = ChatTokenizer(folder / "model")
    rollouts = read_rollouts(folder / "rollouts.jsonl", strict=True, tokenizer=tokenizer)
    # a screenshot is 6 x 10 tokens, none is resized
    assert {(p.height, p.width, p.tokens) for p in rollouts.images} == {(HEIGHT, WIDTH, 60)}
    assert all(len(image_numbers(sequence)) == 5 for sequence in rollouts.sequences)
    expected = {48: (240, 120, 30), 240: (720, 120, 30)}
    for unit in (rollouts, expand_turns(rollouts)):
        forest = PrefixForest.from_sequences(unit.sequences)
        facts = measure_images(forest, unit)
        assert tuple(facts["images"].values()) == expected[len(unit)]
        assert facts["ratio"] == expected[len(unit)][0] / 30
        tokens, of_images = facts["tokens"].values()
        # in their rows, both units side by side
        for row, said in (
            ("tokens", f"{forest.num_replicated_tokens:,} | {forest.num_tokens:,}"),
            ("of these, tokens of images", f"{tokens:,} | {of_images:,}"),
            ("images encoded", f"{expected[len(unit)][0]} | 30"),
        ):
            assert said in page.partition(f"| {row} |")[2][:60]
    task = rollouts.first_groups(1)
    facts = measure_images(PrefixForest.from_sequences(task.sequences), task)
    held, placed, distinct = facts["images"].values()
    assert f"Of {held} screenshots {distinct} are distinct" in page
    assert held > placed > distinct


def test_the_image_of_the_page(tmp_path):
    script = ROOT / "docs" / "make_images.py"
    spec = importlib.util.spec_from_file_location("make_images", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.draw_browser(tmp_path / "drawn.png")
    drawn, kept = (
        np.asarray(Image.open(file).convert("RGB"), np.int16)
        for file in (tmp_path / "drawn.png", ROOT / "docs" / "images" / "browser-forest.png")
    )
    # letters may differ by the version of matplotlib, and the size by some of theirs
    assert np.abs(np.subtract(drawn.shape, kept.shape)).max() < 20
    assert (tmp_path / "drawn.png").stat().st_size < 100_000
