"""The pictures: what is drawn is what the forest and the tables say, and can be read."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import re
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from prefixtree import PrefixForest, TileShape, TreeMask, UnsupportedError, pack, plotting
from prefixtree.cli.plots import check_picture_path, write_pictures
from prefixtree.errors import ForestError, InputError
from prefixtree.plotting import plot_forest, plot_mask
from prefixtree.rollouts import expand_turns, read_rollouts
from tests.support.cli_runs import run, run_json, write_rollouts
from tests.support.full import each_once, mostly
from tests.support.strategies import (
    ancestors_or_self,
    forests,
    mask_of,
    query_ranges,
    random_forest,
)
from tests.support.table_checks import listed_forward

ROOT = Path(__file__).parents[1]
DOC = ROOT / "docs" / "how-it-works.md"
AIRLINE = ROOT.parent / "shared" / "data" / "airline_rollouts.jsonl.gz"
FIVE = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 7, 8], [1, 2, 3, 4]]


def five_nodes() -> PrefixForest:
    return PrefixForest.from_sequences(FIVE)


def deep_forest(num_nodes: int, max_length: int, reach: float, seed: int = 0) -> PrefixForest:
    """Conversations: a node mostly continues one of the last; two in a hundred are new roots."""
    rng = np.random.default_rng(seed)
    back = np.arange(num_nodes) - rng.geometric(reach, num_nodes)
    parents = np.where(rng.random(num_nodes) < 0.02, -1, np.maximum(back, 0))
    parents[0] = -1
    return PrefixForest.from_parents(parents, rng.integers(1, max_length, num_nodes))


# named by what is hard to draw in them
FORESTS = {
    "five nodes": five_nodes,
    "one token": lambda: PrefixForest.from_sequences([[5]]),
    "a leaf too low for its label": lambda: PrefixForest.from_parents(
        [-1, 0, 0, 2, 2], [1200, 400, 300, 150, 900]
    ),
    "documents": lambda: PrefixForest.from_parents([-1] * 32, [4096] * 32),
    "1,000 leaves on 3 tokens": lambda: PrefixForest.from_parents(
        [-1] + [0] * 1000, [3] + [256] * 1000
    ),
    "one document of 60M tokens": lambda: PrefixForest.from_parents([-1], [60_000_000]),
    "a chain": lambda: PrefixForest.from_parents(
        np.arange(200) - 1, [40] * 200, sequence_ends=range(200)
    ),
    "many equal sequences": lambda: PrefixForest.from_sequences([[1, 2, 3]] * 12_345),
    "100 nodes": lambda: deep_forest(100, 900, 0.3),
    "5,000 nodes": lambda: deep_forest(5000, 300, 0.02),
    "5,000 nodes, wide": lambda: PrefixForest.from_parents(
        [-1] * 50 + [i // 99 for i in range(4950)],
        np.random.default_rng(0).integers(20, 900, 5000),
    ),
}
# labels, bars and lines of each size
QUICK = (
    *("five nodes", "one token", "a leaf too low for its label", "many equal sequences"),
    *("1,000 leaves on 3 tokens", "100 nodes"),
)


# ---- reading a figure ----------------------------------------------------------------------------


def texts_of(figure: Figure) -> list:
    """Every text that is drawn: titles, labels, legends and the ticks within their axes."""
    figure.draw_without_rendering()
    found = list(figure.texts)
    for ax in figure.axes:
        found += [ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts]
        if ax.get_legend() is not None:
            found += [ax.get_legend().get_title(), *ax.get_legend().get_texts()]
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
            found += [label for at, label in ticks if low <= at <= high]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def assert_readable(figure: Figure) -> None:
    """No text overlaps another or leaves the figure, and none is set smaller than 7 points."""
    texts = texts_of(figure)
    boxes = np.array([text.get_window_extent().extents for text in texts])
    width, height = figure.bbox.size
    inside = (boxes[:, :2] >= -0.5).all(1) & (boxes[:, 2] <= width + 0.5)
    inside &= boxes[:, 3] <= height + 0.5
    for bad in np.flatnonzero(~inside):
        raise AssertionError(f"{texts[bad].get_text()!r} is clipped")
    x0, y0, x1, y1 = boxes.T
    overlap = (x0 < x1[:, None]) & (x0[:, None] < x1) & (y0 < y1[:, None]) & (y0[:, None] < y1)
    for a, b in np.argwhere(np.triu(overlap, 1)):
        raise AssertionError(f"{texts[a].get_text()!r} overlaps {texts[b].get_text()!r}")
    assert min(text.get_fontsize() for text in texts) >= 7


def nodes_drawn(figure: Figure) -> tuple[np.ndarray, np.ndarray]:
    """Rectangles (left, top, right, bottom) of the nodes, in preorder, and their values."""
    nodes = figure.axes[0].collections[0]
    corners = np.array([path.vertices[:4] for path in nodes.get_paths()])
    rectangles = np.concatenate([corners.min(1), corners.max(1)], axis=1)
    order = np.argsort(rectangles[:, 0], kind="stable")
    return rectangles[order], np.asarray(nodes.get_array())[order]


def legend_of(figure: Figure) -> str:
    legend = figure.axes[0].get_legend()
    texts = [legend.get_title(), *legend.get_texts()]
    return "\n".join(text.get_text() for text in texts)


def tiles_drawn(figure: Figure) -> np.ndarray:
    """[Pq, Pk] of the mask's image: 2 where the cell is full, 1 partial, 0 empty."""
    image = np.asarray(figure.axes[0].images[0].get_array()).astype(int)
    colours = [plotting._EMPTY, plotting._PARTIAL, plotting._FULL]
    ours = np.array([np.rint(np.array(to_rgb(c)) * 255) for c in colours]).astype(int)
    equal = (image[:, :, None] == ours).all(-1)
    assert (equal.sum(-1) == 1).all(), "a cell has a colour that is none of the legend's"
    return equal.argmax(-1)


def tiles_expected(mask: TreeMask, shape: TileShape, window: int | None) -> np.ndarray:
    """[Tq, T] in the same way, from the tables tile by tile."""
    tables = mask.tables(shape, window)
    names = ("q_tiles", "k_tiles", "q_ptr", "q_split", "q_runs")
    t = {name: getattr(tables, name).numpy() for name in names}
    listed = listed_forward(t)
    kinds = np.where(listed == 0, 2, np.where(listed > 0, 1, 0))
    by_row = np.repeat(kinds, t["q_tiles"][:, 2], axis=0)
    return np.repeat(by_row, t["k_tiles"][:, 1], axis=1)


@cache
def drawn(name: str) -> tuple[PrefixForest, Figure]:
    """One of FORESTS, drawn once."""
    forest = FORESTS[name]()
    return forest, plot_forest(forest)


# ---- the forest ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly(FORESTS, QUICK))
def test_every_forest_can_be_read(name: str) -> None:
    forest, figure = drawn(name)
    assert_readable(figure)
    rectangles, values = nodes_drawn(figure)
    assert (values == forest.node_multiplicity).all()
    assert (rectangles[:, 0] == forest.node_start).all()
    assert (rectangles[:, 1] == forest.node_position).all()
    # within a pixel's least size and the gap between nodes
    ax = figure.axes[0]
    slack = np.abs(np.diff(ax.transData.inverted().transform([(0, 0), (1.5, 1.5)]), axis=0))[0]
    right = forest.node_subtree_end - rectangles[:, 2]
    bottom = forest.node_position + forest.node_length - rectangles[:, 3]
    assert (np.abs(right) <= slack[0]).all()
    assert (np.abs(bottom) <= slack[1]).all()
    # a node is never invisible
    least = slack / 1.5 * 0.999
    assert (rectangles[:, 2] - rectangles[:, 0] >= least[0]).all()
    assert (rectangles[:, 3] - rectangles[:, 1] >= least[1]).all()


@pytest.mark.parametrize("name", mostly(FORESTS, QUICK))
def test_sequences_end_where_the_red_lines_are(name: str) -> None:
    forest, figure = drawn(name)
    lines = np.array(figure.axes[0].collections[1].get_segments())
    node = np.unique(forest.sequence_node)
    assert len(lines) == len(node)
    assert (lines[:, :, 1] == (forest.node_position + forest.node_length)[node][:, None]).all()
    start = forest.node_start[node]
    assert (lines[:, 0, 0] >= start).all()
    assert (lines[:, 0, 0] < lines[:, 1, 0]).all()
    # below the node's own tokens, where no child stands
    pixel = forest.num_tokens / figure.axes[0].get_window_extent().width
    assert (lines[:, 1, 0] <= start + np.maximum(forest.node_length[node], pixel)).all()


def test_five_nodes_carry_tokens_sequences_and_ends() -> None:
    figure = plot_forest(five_nodes())
    labels = sorted(text.get_text() for text in figure.axes[0].texts)
    assert labels == [
        "1 token\n3 sequences\n#3 ends",
        "2 tokens\n1 sequence\n#0 ends",
        "2 tokens\n1 sequence\n#2 ends",
        "3 tokens\n1 sequence\n#1 ends",
        "3 tokens\n4 sequences",
    ]
    title = figure.axes[0].get_title()
    assert title == "5 nodes, 4 sequences: 11 distinct of 22 tokens (2.0x)"
    assert legend_of(figure) == "\nnode: its height is its number of tokens\na sequence ends here"


def test_a_label_that_does_not_fit_its_leaf_stands_below_it() -> None:
    forest = FORESTS["a leaf too low for its label"]()
    figure = plot_forest(forest)
    (label,) = [t for t in figure.axes[0].texts if t.get_text().startswith("150 tokens")]
    figure.draw_without_rendering()
    ax = figure.axes[0]
    box = label.get_window_extent().transformed(ax.transData.inverted())
    node = int(np.flatnonzero(forest.node_length == 150)[0])
    assert forest.node_start[node] < box.x0 < box.x1 < forest.node_subtree_end[node]
    assert min(box.y0, box.y1) > forest.node_position[node] + 150
    assert len(ax.texts) == 5


@pytest.mark.full
@settings(max_examples=6)
@given(forests(max_nodes=12, max_length=200))
def test_labels_lie_within_their_columns(forest: PrefixForest) -> None:
    figure = plot_forest(forest)
    assert_readable(figure)
    ax = figure.axes[0]
    spans = list(zip(forest.node_start, forest.node_subtree_end, strict=True))
    for label in ax.texts:
        box = label.get_window_extent().transformed(ax.transData.inverted())
        middle = label.get_position()[0]
        assert any(
            a < box.x0 and box.x1 < b and np.isclose(middle, (a + b) / 2) for a, b in spans
        ), label.get_text()


def test_large_forests_name_great_nodes_only() -> None:
    few = plot_forest(FORESTS["5,000 nodes"]()).axes[0].texts
    assert len(few) < 20
    top = PrefixForest.from_parents([-1] + [0] * 500, [900] + [100] * 500)
    assert [t.get_text() for t in plot_forest(top).axes[0].texts] == ["900 tokens\n500 sequences"]


@pytest.mark.full
def test_the_colour_bar_runs_from_one_to_the_most_sequences() -> None:
    for most in (1, 2, 8, 9, 579, 12_345):
        figure = plot_forest(PrefixForest.from_sequences([[1, 2, 3]] * most + [[7]]))
        bar = figure.axes[1]
        ticks = [label.get_text() for label in bar.get_yticklabels()]
        assert ticks[0] == "1"
        assert ticks[-1] == f"{most:,}"
        assert bar.get_ylabel() == "sequences through the node"


def test_darker_is_more() -> None:
    for most in (1, 2, 8, 9, 1000):
        cmap, norm, _ = plotting._shades(most)
        steps = np.unique(np.geomspace(1, most, 20).astype(int))
        grey = [np.dot(cmap(norm(n))[:3], (0.3, 0.59, 0.11)) for n in steps]
        assert (np.diff(grey) < 0).all(), most


def test_the_check_of_overlaps_finds_one() -> None:
    figure = plot_forest(five_nodes())
    label = figure.axes[0].texts[0]
    figure.axes[0].text(*label.get_position(), "in the way")
    with pytest.raises(AssertionError, match="overlaps"):
        assert_readable(figure)
    figure = plot_forest(five_nodes())
    figure.text(0.95, 0.5, "beyond the edge of the figure")
    with pytest.raises(AssertionError, match="clipped"):
        assert_readable(figure)


# ---- the mask ------------------------------------------------------------------------------------


@settings(max_examples=8)
@given(st.data())
def test_the_mask_shows_each_tile_as_the_tables_list_it(data: st.DataObject) -> None:
    forest = data.draw(forests())
    mask = mask_of(forest)
    if data.draw(st.booleans()):
        ranges = data.draw(query_ranges(forest.num_tokens))
        mask = mask.for_queries(ranges or [(0, 1)])
    shape = TileShape(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)), cut=True)
    shape = data.draw(st.sampled_from([shape, TileShape(shape.tile_q, shape.tile_k)]))
    window = data.draw(st.sampled_from([None, 1, 3]))
    figure = plot_mask(mask, shape, window)
    assert_readable(figure)
    expected = tiles_expected(mask, shape, window)
    assert (tiles_drawn(figure) == expected).all()
    assert figure.axes[0].images[0].get_extent() == [0, mask.num_tokens, mask.num_queries, 0]
    if max(expected.shape) <= 64:
        dots = np.floor(figure.axes[0].collections[-1].get_offsets()).astype(int)
        dense = mask.dense(window).numpy()
        assert sorted(map(tuple, dots[:, ::-1])) == list(map(tuple, np.argwhere(dense)))


@pytest.mark.parametrize(("window", "cut"), each_once([None, 20], [False, True]))
def test_the_legend_states_what_stats_say(cut: bool, window: int | None) -> None:
    forest = random_forest(np.random.default_rng(3), 60, 30)
    mask, shape = mask_of(forest), TileShape(8, 16, cut=cut)
    figure = plot_mask(mask, shape, window)
    assert_readable(figure)
    stats = mask.stats(shape, window)
    text = legend_of(figure)
    numbers = {
        name: int(re.search(rf"{name}: ([\d,]+) tile", text)[1].replace(",", ""))
        for name in ("full", "partial", "empty")
    }
    assert numbers["partial"] == stats.partial_tiles
    assert numbers["full"] + numbers["partial"] == stats.tile_pairs
    rows = -(-forest.num_tokens // 8)
    assert sum(numbers.values()) == rows * stats.key_tiles
    assert f"useful share of pairs: {stats.useful_share:.3f}" in text
    kind = "cut at node borders" if cut else "aligned grid"
    assert text.startswith(f"tiles of 8 queries x 16 keys, {kind}")
    assert ("window 20" in figure.axes[0].get_title()) == (window == 20)


@pytest.mark.parametrize("cells", [1, 7, 16, 50])
@pytest.mark.parametrize("cut", [False, True])
def test_cells_of_a_large_mask_are_averages(
    cells: int, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plotting, "_MAX_CELLS", cells)
    forest = deep_forest(30, 12, 0.3)
    mask, shape = mask_of(forest), TileShape(4, 6, cut=cut)
    num = forest.num_tokens
    tiles = tiles_expected(mask, shape, None)
    # how much of each token's row lies in each cell, by overlap
    edge = np.arange(cells + 1)[:, None] * num / cells
    token = np.arange(num)
    overlap = np.clip(np.minimum(edge[1:], token + 1) - np.maximum(edge[:-1], token), 0, None)
    overlap /= num / cells
    full, partial = plotting._tile_areas(mask.tables(shape), num, num)
    np.testing.assert_allclose(full, overlap @ (tiles == 2) @ overlap.T, atol=1e-9)
    np.testing.assert_allclose(partial, overlap @ (tiles == 1) @ overlap.T, atol=1e-9)


@pytest.mark.full
def test_a_thin_diagonal_of_a_large_mask_is_seen() -> None:
    # documents of 100 tokens: work fills a fifth of each cell on the diagonal, none elsewhere
    forest = PrefixForest.from_parents([-1] * 12_000, [100] * 12_000)
    figure = plot_mask(mask_of(forest), TileShape(128, 128))
    assert_readable(figure)
    image = np.asarray(figure.axes[0].images[0].get_array()).astype(int)
    empty = np.rint(np.array(to_rgb(plotting._EMPTY)) * 255)
    contrast = np.abs(image - empty).sum(-1)
    assert image.shape == (1024, 1024, 3)
    full_contrast = np.abs(np.rint(np.array(to_rgb(plotting._PARTIAL)) * 255) - empty).sum()
    assert contrast.diagonal().min() > 0.35 * full_contrast
    off = np.abs(np.subtract.outer(np.arange(1024), np.arange(1024))) > 1
    assert contrast[off].max() == 0


@pytest.mark.full
def test_tile_borders_are_drawn_where_tiles_can_be_told_apart() -> None:
    forest = five_nodes()
    lines = plot_mask(mask_of(forest), TileShape(2, 2)).axes[0].collections[0].get_segments()
    assert len(lines) == 7 + 7
    dense = plot_mask(mask_of(PrefixForest.from_sequences([range(4000)])), TileShape(16, 16))
    assert list(dense.axes[0].collections) == []


def test_padding_and_subsets_are_drawn() -> None:
    packed = pack(five_nodes(), pad_to_multiple_of=8)
    figure = plot_mask(packed.mask, TileShape(4, 4))
    assert figure.axes[0].get_title() == "16 queries x 16 keys"
    subset = plot_mask(packed.mask.for_queries([(7, 8)]), TileShape(4, 4))
    assert subset.axes[0].get_title() == "1 query x 16 keys"
    assert subset.axes[0].get_ylabel() == "queries, rows of q"


# ---- size and surroundings -----------------------------------------------------------------------


@pytest.mark.full
def test_huge_inputs_are_drawn_in_seconds() -> None:
    forest = deep_forest(60_000, 160, 0.01)
    assert forest.num_tokens > 4_000_000
    start = time.process_time()
    picture = io.BytesIO()
    plot_forest(forest).savefig(picture, format="svg")
    forest_seconds = time.process_time() - start
    mask = mask_of(forest)
    mask.tables(TileShape(128, 128))
    start = time.process_time()
    figure = plot_mask(mask)
    figure.savefig(io.BytesIO())
    mask_seconds = time.process_time() - start
    print(f"60,000 nodes: {forest_seconds:.1f} s; 5M tokens' mask: {mask_seconds:.1f} s")
    assert forest_seconds < 20
    assert mask_seconds < 20
    assert len(picture.getvalue()) < 2e6
    # at most five artists hold it all, whatever its size
    assert len(figure.axes[0].get_children()) < 20


def test_pyplot_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    plot_forest(five_nodes()).savefig(io.BytesIO())
    plot_mask(mask_of(five_nodes()), TileShape(2, 2)).savefig(io.BytesIO())


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (plot_forest, plot_mask):
        with pytest.raises(UnsupportedError, match=r"pip install 'prefixtree-attention\[plot\]'"):
            draw(five_nodes())


def test_what_cannot_be_drawn_is_refused() -> None:
    packed = pack(five_nodes())
    with pytest.raises(TypeError, match=r"expects a PrefixForest, got PackedForest; .*\.forest"):
        plot_forest(packed)
    with pytest.raises(TypeError, match=r"expects a TreeMask, got PackedForest; .*\.mask"):
        plot_mask(packed)
    with pytest.raises(ForestError, match="no query"):
        plot_mask(packed.mask.for_queries([]))
    with pytest.raises(ValueError, match="window"):
        plot_mask(packed.mask, window=0)


# ---- the files of `report --plot` ----------------------------------------------------------------


@pytest.mark.parametrize("ending", mostly(["png", "pdf", "svg"], ["png"]))
def test_pictures_are_two_files(ending: str, tmp_path: Path) -> None:
    files = write_pictures(tmp_path / f"out.{ending}", five_nodes())
    assert files == [tmp_path / f"out.{ending}", tmp_path / f"out-mask.{ending}"]
    marks = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    assert all(file.read_bytes().startswith(marks[ending]) for file in files)


def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"out\.txt: expected a name that ends in \.png"):
        check_picture_path(tmp_path / "out.txt")
    with pytest.raises(InputError, match="cannot be written: No such file"):
        write_pictures(tmp_path / "missing" / "out.png", five_nodes())


def test_report_draws_what_it_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, out = write_rollouts(tmp_path / "rollouts.jsonl"), tmp_path / "out.png"
    result = run("report", rollouts, "--plot", out)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-2:] == [f"drawn: {out}", f"drawn: {tmp_path}/out-mask.png"]
    assert (tmp_path / "out-mask.png").read_bytes().startswith(b"\x89PNG")
    out.unlink()
    assert "nodes" in run_json("report", rollouts, "--plot", out)
    assert out.exists()
    bad = run("report", tmp_path / "missing.jsonl", "--plot", tmp_path / "out.txt")
    assert bad.exit_code == 2
    # before the file is read: a large one takes its time
    assert "expected a name that ends in .png, .pdf, .svg" in bad.stderr
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    bare = run("report", rollouts, "--plot", out)
    assert bare.exit_code == 2
    assert "pip install 'prefixtree-attention[plot]'" in bare.stderr


# ---- docs/how-it-works.md ------------------------------------------------------------------------


def test_the_document_prints_what_it_says() -> None:
    text = DOC.read_text()
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL)
    assert len(blocks) == 7
    assert text.count("```") == 2 * sum(1 + bool(said) for _, said in blocks)
    names: dict = {}
    for code, said in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        assert printed.getvalue() == said, code
    # what the prose adds to it
    rollouts, forest = names["rollouts"], names["forest"]
    assert rollouts == FIVE
    assert sum(len(r) - 1 for r in rollouts) == 18
    assert len(names["edges"].token) == 10
    assert (names["packed"].mask.dense().numpy() == ancestors_or_self(forest)).all()
    pairs = {pair for r in rollouts for pair in itertools.pairwise(r)}
    assert (9, 5) not in pairs
    assert (6, 7) not in pairs
    grid, cut = (names["packed"].mask.stats(TileShape(2, 2, cut=c)) for c in (False, True))
    assert grid.partial_tiles - cut.partial_tiles == 1
    assert grid.tile_pairs == cut.tile_pairs


def test_the_documents_pictures_are_what_the_script_draws(tmp_path: Path) -> None:
    script = ROOT / "docs" / "make_images.py"
    spec = importlib.util.spec_from_file_location("make_images", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.ROLLOUTS == FIVE
    module.draw(tmp_path)
    drawn = {file.name for file in tmp_path.iterdir()}
    named = set(re.findall(r"\(images/([\w-]+\.png)\)", DOC.read_text()))
    assert drawn == {name for name in named if not name.startswith("airline")}
    kept = {file.name for file in (ROOT / "docs" / "images").glob("*.png")}
    assert named <= kept
    pages = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    shown = set(re.findall(r"images/([\w-]+\.png)\)", "".join(page.read_text() for page in pages)))
    assert kept <= shown, "a picture that no page shows"


@pytest.mark.skipif(not AIRLINE.exists(), reason=f"needs {AIRLINE}, which is not in the project")
def test_the_document_is_right_about_the_airline_rollouts() -> None:
    rollouts = read_rollouts(AIRLINE)
    forest = PrefixForest.from_sequences(expand_turns(rollouts).sequences)
    figure = plot_forest(forest)
    assert_readable(figure)
    mask = mask_of(forest)
    assert_readable(plot_mask(mask))
    stats = mask.stats(TileShape(128, 128))
    text = " ".join(DOC.read_text().split())
    assert (len(rollouts), len(set(rollouts.groups))) == (40, 10)
    for said in (
        f"{forest.num_nodes} nodes",
        f"{forest.num_tokens:,} of its {forest.num_replicated_tokens:,} tokens are distinct",
        f"in all {forest.node_multiplicity[0]} sequences",
        f"{stats.tile_pairs - stats.partial_tiles:,} full and {stats.partial_tiles:,} partial",
        f"Of the pairs that the tiles compute, {100 * stats.useful_share:.0f} % are visible",
    ):
        assert said in text
    assert round(-(-forest.num_tokens // 128) * stats.key_tiles / 1e6, 1) == 1.5
