"""Plots of a forest and of its block mask, for the extra `plot` (matplotlib).

Both functions return a new `Figure`: no pyplot, no global state, no window.
Legend: N nodes, R runs of tiles, Pq and Pk cells of the mask's image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from prefixtree.errors import ForestError, UnsupportedError
from prefixtree.forest import PrefixForest
from prefixtree.packing.block_tables import BlockTables, TileShape
from prefixtree.packing.mask import TreeMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# light to dark in print too
_SHADES = ("#e0da9e", "#a9d5a9", "#5fb7bf", "#2f80b4", "#253f8e", "#131d4f")
_END = "#d7301f"
_FULL, _PARTIAL, _EMPTY = "#225ea8", "#fdae61", "#f2f2f2"
_PAIR = "#101010"
# beyond this many cells along an axis the mask is averaged: no more can be told apart
_MAX_CELLS = 1024
# visible pairs are drawn one by one up to this many rows or keys
_MAX_PAIRS = 64
_MAX_DISCRETE_SHADES = 8
# in larger forests only large nodes are labelled, without the sequences that end in them
_MAX_ALL_LABELS = 40
# more nodes or ends than this are pixels in a PDF or SVG too
_MAX_VECTORS = 20_000
_MAX_NAMED_ENDS = 3
# points; the smallest label is one line of it with a margin
_LEAST_SIZE = 7.5
# a cell of the mask with any work in it shows at least this share of the work's colour
_LEAST_SHARE = 0.4
_ROUNDING = 1e-6


def plot_forest(forest: PrefixForest) -> Figure:
    """Draws a forest from its roots downwards.

    A node is a rectangle. Its width is the number of tokens of its subtree, in packed order, and
    its height is the number of its own tokens. Its columns are the packed tokens that see it. A
    darker node is in more sequences. A red line closes a node at whose last token a sequence ends.
    A node with room is labelled with its tokens and sequences. No node is drawn smaller than a
    pixel.

    Returns:
        The figure; `figure.savefig("forest.png")` writes it.

    Raises:
        UnsupportedError: matplotlib is not installed.
        TypeError: anything but a PrefixForest.
    """
    require_matplotlib()
    if not isinstance(forest, PrefixForest):
        raise TypeError(
            f"plot_forest expects a PrefixForest, got {type(forest).__name__}; a PackedForest has "
            "one as .forest"
        )
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import NullLocator

    figure, ax = _new_axes(10, 5.6)
    node_end = forest.node_position + forest.node_length
    ax.set_xlim(0, forest.num_tokens)
    # a little room under the deepest end
    ax.set_ylim(int(node_end.max()) * 1.015, 0)
    _count_axis(ax.xaxis, "packed tokens; a node is as wide as its subtree")
    _count_axis(ax.yaxis, "position, in tokens")
    ax.set_title(
        f"{_count(forest.num_nodes, 'node')}, {_count(forest.num_sequences, 'sequence')}: "
        f"{forest.num_tokens:,} distinct of {_count(forest.num_replicated_tokens, 'token')} "
        f"({forest.replication_ratio:.1f}x)",
        fontsize="medium",
    )
    ax.spines[["top", "right"]].set_visible(False)

    most_shared = int(forest.node_multiplicity.max())
    cmap, norm, ticks = _shades(most_shared)
    bar = figure.colorbar(
        ScalarMappable(norm, cmap), ax=ax, label="sequences through the node", pad=0.02, aspect=30
    )
    bar.set_ticks(ticks, labels=[f"{tick:,}" for tick in ticks])
    bar.ax.yaxis.set_minor_locator(NullLocator())
    handles = [
        Patch(facecolor=cmap(norm(most_shared)), label="node: its height is its number of tokens"),
        Line2D([], [], color=_END, lw=2, label="a sequence ends here"),
    ]
    _legend_below(ax, handles, columns=2)

    # runs the layout, so that what is drawn next can be measured in pixels
    figure.draw_without_rendering()
    rectangles = np.stack(
        [forest.node_start, forest.node_position, forest.node_subtree_end, node_end], axis=1
    ).astype(np.float64)
    _draw_nodes(ax, rectangles, forest.node_multiplicity, cmap, norm)
    _draw_ends(ax, forest, node_end)
    _draw_labels(ax, forest, rectangles, cmap, norm)
    return figure


def plot_mask(mask: TreeMask, shape: TileShape | None = None, window: int | None = None) -> Figure:
    """Draws which tiles a block kernel visits: full, partial, or empty and skipped.

    Rows are queries and columns are keys, both in packed order. The tiles are those of
    `mask.tables(shape, window)`. Up to 64 tokens, each visible pair is a dot. Up to 1,024 tokens,
    each pair has one cell. A larger mask is averaged: a cell blends the colours of its pairs, and a
    cell with any work keeps at least 0.4 of the work's colour.

    Args:
        mask: the TreeMask. Of a mask `for_queries(...)`, only its rows are drawn.
        shape: the tiles. Default: 128 x 128 on the aligned grid.
        window: the sliding window, in tokens. Default: none.

    Returns:
        The figure; `figure.savefig("mask.png")` writes it.

    Raises:
        UnsupportedError: matplotlib is not installed.
        TypeError: anything but a TreeMask.
        ForestError: a mask without a query.
    """
    require_matplotlib()
    if not isinstance(mask, TreeMask):
        raise TypeError(
            f"plot_mask expects a TreeMask, got {type(mask).__name__}; a PackedForest has one as "
            ".mask"
        )
    if mask.num_queries == 0:
        raise ForestError("the mask has no query, so there is nothing to draw")
    from matplotlib.colors import to_rgb

    shape = TileShape(128, 128) if shape is None else shape
    tables = mask.tables(shape, window).to("cpu")
    num_q, num_k = mask.num_queries, mask.num_tokens
    figure, ax = _new_axes(6.4, 7.6)

    full, partial = _tile_areas(tables, num_q, num_k)
    colours = np.array([to_rgb(c) for c in (_FULL, _PARTIAL, _EMPTY)])
    work = full + partial
    # a thin diagonal through millions of empty pairs stays visible
    shown = np.where(work > _ROUNDING, np.maximum(work, _LEAST_SHARE), 0)
    scale = shown / np.maximum(work, _ROUNDING)
    shares = np.stack([full * scale, partial * scale, 1 - shown], axis=-1)
    pixels = np.rint(shares @ colours * 255).astype(np.uint8)
    ax.imshow(pixels, extent=(0, num_k, num_q, 0), aspect="auto")
    ax.set_box_aspect(1)
    _count_axis(ax.xaxis, "keys, in packed order")
    queries = "queries, in packed order" if mask.query_tokens is None else "queries, rows of q"
    _count_axis(ax.yaxis, queries)
    far = "" if window is None else f", window {window:,}"
    ax.set_title(f"{_by(num_q, num_k)}{far}", fontsize="medium")
    _legend_below(ax, _mask_handles(mask, shape, window, tables), columns=2, title=_tiles(shape))

    figure.draw_without_rendering()
    # how much height the square leaves over depends on the width of the labels
    figure.set_figheight(figure.get_tightbbox().height + 0.1)
    figure.draw_without_rendering()
    _draw_tile_borders(ax, tables)
    if max(num_q, num_k) <= _MAX_PAIRS:
        query, key = np.nonzero(mask.dense(window).cpu().numpy())
        # a third of a cell across, in points
        cells = max(num_q, num_k, 12)
        size = ax.get_window_extent().width / ax.figure.dpi * 72 / cells / 3
        ax.scatter(
            key + 0.5, query + 0.5, s=size**2, c=_PAIR, edgecolors="white", linewidths=size / 10
        )
    return figure


# ---- the forest ----------------------------------------------------------------------------------


def _shades(most: int) -> tuple[Any, Any, list[int]]:
    """Makes colours for 1 to `most` sequences: one each while few, else by the logarithm."""
    from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap, ListedColormap, LogNorm

    cmap = LinearSegmentedColormap.from_list("sequences", _SHADES)
    if most == 1:
        # a single step would lie in the middle of the colours
        cmap = ListedColormap(_SHADES[:1])
    if most <= _MAX_DISCRETE_SHADES:
        return cmap, BoundaryNorm(np.arange(most + 1) + 0.5, cmap.N), list(range(1, most + 1))
    steps = [factor * 10**power for power in range(10) for factor in (1, 2, 5)]
    # the last step gives way to the greatest number where the two would touch
    return cmap, LogNorm(1, most), [*(step for step in steps if step * 1.3 < most), most]


def _draw_nodes(
    ax: Axes, rectangles: np.ndarray, multiplicity: np.ndarray, cmap: Any, norm: Any
) -> None:
    """Draws all nodes; rectangles float64 [N, 4] are left, top, right, bottom."""
    from matplotlib.collections import PolyCollection

    pixel = _pixel(ax)
    size = rectangles[:, 2:] - rectangles[:, :2]
    # a gap to the next node, where most of this one stays visible
    gap = np.where(size > 4 * pixel, pixel * ax.figure.dpi / 110, 0)
    drawn = rectangles.copy()
    drawn[:, 2:] = drawn[:, :2] + np.maximum(size - gap, pixel)
    # a small node is drawn larger than it is, and must not hide one that more sequences share
    order = np.argsort(multiplicity, kind="stable")
    left, top, right, bottom = drawn[order].T
    corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    vertices = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    nodes = PolyCollection(
        vertices,
        array=multiplicity[order],
        cmap=cmap,
        norm=norm,
        linewidths=0,
        antialiaseds=False,
    )
    nodes.set_rasterized(len(size) > _MAX_VECTORS)
    ax.add_collection(nodes, autolim=False)


def _draw_ends(ax: Axes, forest: PrefixForest, node_end: np.ndarray) -> None:
    """Draws a line under each node that ends a sequence; no child is drawn under its tokens."""
    from matplotlib.collections import LineCollection

    node = np.unique(forest.sequence_node)
    pixel, _ = _pixel(ax)
    left = forest.node_start[node].astype(np.float64)
    length = np.maximum(forest.node_length[node], pixel)
    # a gap to the next node, where there is room for one
    gap = np.minimum(2 * pixel, 0.15 * length)
    bottom = node_end[node]
    ends = np.stack(
        [
            np.stack([left + gap, bottom], axis=-1),
            np.stack([left + length - gap, bottom], axis=-1),
        ],
        axis=1,
    )
    # lines as dense as pixels would hide the nodes
    width, alpha = (2.0, 1.0) if len(node) <= 100 else (1.2, 1.0)
    if len(node) > 10_000:
        width, alpha = 0.5, 0.2
    lines = LineCollection(
        ends, colors=_END, linewidths=width, alpha=alpha, capstyle="butt", clip_on=False
    )
    lines.set_rasterized(len(node) > _MAX_VECTORS)
    ax.add_collection(lines, autolim=False)


def _draw_labels(
    ax: Axes, forest: PrefixForest, rectangles: np.ndarray, cmap: Any, norm: Any
) -> None:
    """Labels each node that has room with its tokens and sequences; in a small forest also turned.

    A leaf's label may stand below it, where its columns are free down to the end of the axes.
    """
    small = forest.num_nodes <= _MAX_ALL_LABELS
    bottom = ax.get_ylim()[0]
    pixel = _pixel(ax)
    least = _LEAST_SIZE / 72 * ax.figure.dpi
    is_leaf = rectangles[:, 2] == rectangles[:, 0] + forest.node_length
    room = (rectangles[:, 2:] - rectangles[:, :2]) / pixel
    wide = np.flatnonzero(room[:, 0] > least)
    for n in wide if small else wide[room[wide, 1] > least]:
        left, top, right, end = rectangles[n]
        red, green, blue, _ = cmap(norm(forest.node_multiplicity[n]))
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.55
        choices = _label_choices(forest, int(n), small)
        middle = (left + right) / 2
        label = ax.text(
            middle, (top + end) / 2, "", ha="center", va="center", color="white" if dark else "k"
        )
        if _fit(label, choices, *room[n]):
            continue
        label.set(y=end + least / 2 * pixel[1], va="top", color="k")
        below = (bottom - end) / pixel[1] - least / 2
        if not (small and is_leaf[n] and _fit(label, choices, room[n, 0], below)):
            label.remove()


def _label_choices(forest: PrefixForest, node: int, small: bool) -> list[tuple[str, float, bool]]:
    """Lists (text, font size, turned), the fullest first."""
    tokens = _count(int(forest.node_length[node]), "token")
    sequences = _count(int(forest.node_multiplicity[node]), "sequence")
    texts = [f"{tokens}\n{sequences}", f"{tokens}, {sequences}"]
    ends = np.flatnonzero(forest.sequence_node == node)
    if small and 0 < len(ends) <= _MAX_NAMED_ENDS:
        verb = "ends" if len(ends) == 1 else "end"
        texts.insert(0, f"{texts[0]}\n{', '.join(f'#{s}' for s in ends)} {verb}")
    turns = (False, True) if small else (False,)
    return [
        (text, size, turned) for text in texts for size in (9.0, _LEAST_SIZE) for turned in turns
    ]


def _fit(label: Any, choices: list[tuple[str, float, bool]], width: float, height: float) -> bool:
    """Sets the first choice that fits with a margin, in pixels, and says whether one does."""
    margin = _LEAST_SIZE / 144 * label.figure.dpi
    for text, size, turned in choices:
        label.set(text=text, fontsize=size, rotation=90 if turned else 0)
        box = label.get_window_extent()
        if box.width + margin < width and box.height + margin < height:
            return True
    return False


# ---- the mask ------------------------------------------------------------------------------------


def _tile_areas(tables: BlockTables, num_q: int, num_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Computes the shares of each cell under full and under partial tiles, float64 [Pq, Pk].

    A run of tiles is a rectangle. Its share of every cell is a double cumulative sum over sixteen
    numbers at its corners, so the cost does not depend on areas.
    """
    q_tiles, k_tiles = tables.q_tiles.numpy(), tables.k_tiles.numpy()
    runs, ptr = tables.q_runs.numpy(), tables.q_ptr.numpy()
    rows = np.repeat(q_tiles[:, 1:], np.diff(ptr), axis=0)
    cells_q, cells_k = min(num_q, _MAX_CELLS), min(num_k, _MAX_CELLS)
    at_q, weight_q = _corners(rows[:, 0], rows.sum(1), cells_q / num_q)
    left = k_tiles[runs[:, 0], 0]
    right = k_tiles[runs[:, 1] - 1].sum(1)
    at_k, weight_k = _corners(left, right, cells_k / num_k)
    # corners lie up to one cell beyond the image
    size_q, size_k = cells_q + 2, cells_k + 2
    areas = []
    for chosen in (runs[:, 2] == 0, runs[:, 2] != 0):
        at = at_q[chosen, :, None] * size_k + at_k[chosen, None, :]
        weight = weight_q[chosen, :, None] * weight_k[chosen, None, :]
        corners = np.bincount(at.ravel(), weight.ravel(), size_q * size_k).reshape(size_q, size_k)
        areas.append(corners.cumsum(0).cumsum(1)[:cells_q, :cells_k])
    return areas[0], areas[1]


def _corners(begin: np.ndarray, end: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Finds cells and summands, [R, 4] each, whose cumulative sum is each cell's share."""
    at, weight = [], []
    for edge, sign in ((begin * scale, 1), (end * scale, -1)):
        cell = np.floor(edge).astype(np.int64)
        inside = edge - cell
        at += [cell, cell + 1]
        weight += [sign * (1 - inside), sign * inside]
    return np.stack(at, axis=1), np.stack(weight, axis=1)


def _mask_handles(
    mask: TreeMask, shape: TileShape, window: int | None, tables: BlockTables
) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    stats = mask.stats(shape, window)
    full = stats.tile_pairs - stats.partial_tiles
    empty = len(tables.q_tiles) * len(tables.k_tiles) - stats.tile_pairs
    handles: list[Any] = [
        Patch(color=_FULL, label=f"full: {_count(full, 'tile')}"),
        Patch(color=_PARTIAL, label=f"partial: {_count(stats.partial_tiles, 'tile')}"),
        Patch(facecolor=_EMPTY, edgecolor="#999999", label=f"empty: {_count(empty, 'tile')}"),
        Patch(alpha=0, label=f"useful share of pairs: {stats.useful_share:.3f}"),
    ]
    if max(mask.num_queries, mask.num_tokens) <= _MAX_PAIRS:
        pairs = _count(stats.visible_pairs, "visible pair")
        dot = Line2D([], [], color=_PAIR, marker="o", ms=5, mec="white", lw=0, label=pairs)
        handles.insert(3, dot)
    return handles


def _tiles(shape: TileShape) -> str:
    kind = "cut at node borders" if shape.cut else "aligned grid"
    return f"tiles of {_by(shape.tile_q, shape.tile_k)}, {kind}"


def _draw_tile_borders(ax: Axes, tables: BlockTables) -> None:
    """Draws lines between tiles, if most of each tile then stays visible."""
    from matplotlib.collections import LineCollection

    rows = np.append(tables.q_tiles[:, 1].numpy(), tables.q_tiles[-1, 1:].sum())
    keys = np.append(tables.k_tiles[:, 0].numpy(), tables.k_tiles[-1].sum())
    pixel_k, pixel_q = _pixel(ax)
    across = np.median(np.diff(keys)) / pixel_k
    along = np.median(np.diff(rows)) / pixel_q
    if min(across, along) < 6:
        return
    lines = [[(x, 0), (x, rows[-1])] for x in keys] + [[(0, y), (keys[-1], y)] for y in rows]
    ax.add_collection(LineCollection(lines, colors="white", linewidths=0.8), autolim=False)


# ---- both ----------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raises an UnsupportedError, with what to install, if matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "pictures need matplotlib, which is not installed: "
            "pip install 'prefixtree-attention[plot]'"
        ) from None


def _new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    """Makes a figure of so many inches, which savefig writes without a display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _pixel(ax: Axes) -> np.ndarray:
    """Measures a pixel in data units, float64 [2], both positive."""
    corners = ax.transData.inverted().transform([(0, 0), (1, 1)])
    return np.abs(corners[1] - corners[0])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _by(num_q: int, num_k: int) -> str:
    return f"{num_q:,} {'query' if num_q == 1 else 'queries'} x {_count(num_k, 'key')}"


def _count_axis(axis: Any, label: str) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    # numbers of millions are wide
    steps = 7 if max(axis.get_view_interval()) < 1_000_000 else 4
    axis.set_major_locator(MaxNLocator(nbins=steps, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_label_text(label)


def _legend_below(ax: Axes, handles: list[Any], columns: int, title: str | None = None) -> None:
    """Puts a legend under the axes' label, at a distance in inches: right for axes of any size."""
    from matplotlib.transforms import ScaledTranslation

    below = ScaledTranslation(0, -0.5, ax.figure.dpi_scale_trans)
    ax.legend(
        handles=handles,
        title=title,
        loc="upper center",
        bbox_to_anchor=(0.5, 0),
        bbox_transform=ax.transAxes + below,
        ncols=columns,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        fontsize="small",
        title_fontsize="small",
    )
