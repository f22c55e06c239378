"""Draws docs/images/rooms.svg: the rooms of prefixtree, and which room imports which.

    python -m tools.rooms

Sources are parsed, not imported. Imports inside functions count; those for types alone do not. The
picture's metadata holds what it shows, as JSON: a test compares it with the sources.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import networkx

from tools.reach import PACKAGE, ROOT, Sources, imported, running

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = ROOT / "docs" / "images" / "rooms.svg"

_PARTS = ("division.", "micro_batches.", "part", "schedule.", "split.", "steps.", "trunks.")
_OF_STATES = ("packing.segments.", "packing.state_borders.")
#: Layers from top to bottom; of each room how the names of its modules begin.
#: Files of no room (errors, numbers) are not drawn.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "shells": {
        **{name: (f"integrations.{name}.",) for name in ("verl", "megatron")},
        "common": ("integrations.",),
        "trl": ("integrations.trl.",),
    },
    "tools": {
        **{name: (f"{name}.",) for name in ("rollouts", "sharing", "testing")},
        "cli": ("cli.", "demo.", "doctor.", "plotting."),
        "sampling": ("sampling.",),
    },
    "ways of running": {
        "runs of parts": ("scoring.group_", "scoring.in_", "scoring.kept_", "scoring.part_runs."),
        "parallel": ("parallel.",),
        "parts": tuple(f"planning.{name}" for name in _PARTS),
    },
    "wings": {
        "sparse": ("sparse.", "kernels.best_keys.", "kernels.indexer_kernels.", "kernels.latents."),
        "images": ("images.",),
        "recompute": ("recompute.",),
        "states": ("states.", "kernels.recurrence.", *_OF_STATES),
        "experts": ("experts.", "kernels.expert_products."),
    },
    "core": {
        **{name: (f"{name}.",) for name in ("scoring", "models", "kernels")},
        "costs": ("planning.",),
        "wings.py": ("wings.",),
        "packing": ("packing.",),
        "forest": ("forest.", "_forest_inputs.", "loops."),
    },
}


@cache
def room_of(module: str) -> tuple[str, str]:
    """(layer, room) of a module of the package: by the longest name that it begins with."""
    name = f"{module.removeprefix('prefixtree.')}."
    fits = [
        (len(begin), layer, room)
        for layer, rooms in ROOMS.items()
        for room, begins in rooms.items()
        for begin in begins
        if name.startswith(begin)
    ]
    return max(fits, default=(0, "", ""))[1:]


def found() -> dict[str, Any]:
    """What the picture shows: lines of each room, and pairs (room, room that it imports)."""
    sources = Sources()
    lines, arrows = Counter[str](), set[tuple[str, str]]()
    for module, file in sources.modules.items():
        room = room_of(module)[1] if module.startswith(f"{PACKAGE}.") else ""
        if room:
            text = sources.text(file)
            lines[room] += len(text.splitlines())
            for node in running(ast.parse(text)):
                targets = (name for name in imported(node, file) if name.startswith(f"{PACKAGE}."))
                arrows |= {(room, room_of(name)[1]) for name in targets}
    arrows = {(a, b) for a, b in arrows if b and a != b}
    return {"lines": dict(sorted(lines.items())), "arrows": sorted(map(list, arrows))}


def shown(picture: str) -> Any:
    """The same, as a picture (text of an SVG) has it."""
    (data,) = re.findall(r"<dc:description>(.*?)</dc:description>", picture, re.DOTALL)
    return json.loads(data)


# ---- the picture ---------------------------------------------------------------------------------

_LEFT, _RIGHT = 8, 92
# of each layer: the colour of its rooms, of its arrows, and where the line of these runs
_LOOKS = {
    "shells": ("#f2f2f2", "#7a7a7a", 2.5),
    "tools": ("#e0da9e", "#a08a10", 97.5),
    "ways of running": ("#a9d5a9", "#2f8a3a", 5.5),
    "wings": ("#5fb7bf", "#10808a", 94.5),
    "core": ("#8fbce0", "#225ea8", 50),
}
# rooms in a row, where not all of a layer are
_ROW = {"core": 4}


def draw(data: dict[str, Any]) -> None:
    """Writes the picture. The core's rooms stand in two rows."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "rooms", "font.family": "sans-serif"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(5, 6.1), facecolor="white")
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(0, 100), ylim=(121, 0))
        ax.axis("off")
        boxes, frames = _boxes(ax, data["lines"])
        _arrows_inside(ax, data["arrows"], boxes)
        _arrows_between(ax, data["arrows"], frames)
        figure.savefig(PICTURE, metadata={"Date": None, "Description": json.dumps(data)})


def _boxes(ax: Axes, lines: dict[str, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draws layers and rooms; the box of each room and its centre, and each layer's middle."""
    from matplotlib.patches import FancyBboxPatch, Rectangle

    boxes, middles, top = {}, {}, 2.0
    for layer, rooms in ROOMS.items():
        names = list(rooms)
        above = len(names) % _ROW.get(layer, len(names))
        in_rows = [row for row in (names[:above], names[above:]) if row]
        height = 7 + 11.5 * len(in_rows)
        frame = (_LEFT, top), _RIGHT - _LEFT, height
        ax.add_patch(Rectangle(*frame, fc="#fafafa", ec="#999999", lw=0.8))
        middles[layer] = top + height / 2
        size = _thousands(sum(lines[name] for name in names))
        ax.text(_LEFT + 1.5, top + 3.8, layer, fontsize=10, weight="bold", va="center")
        ax.text(_RIGHT - 1.5, top + 3.8, size, fontsize=8.5, va="center", ha="right")
        for number, row in enumerate(in_rows):
            step = (_RIGHT - _LEFT) / len(row)
            width, y = min(step - 2.8, 20), top + 11.2 + 11.5 * number
            for place, name in enumerate(row):
                x = _LEFT + step * (place + 0.5)
                look = {"boxstyle": "round,pad=0,rounding_size=1", "ec": "#333333", "lw": 0.8}
                corner = x - width / 2, y - 3.8
                box = FancyBboxPatch(corner, width, 7.6, fc=_LOOKS[layer][0], zorder=3, **look)
                boxes[name] = ax.add_patch(box), (x, y)
                centred = {"ha": "center", "va": "center", "zorder": 4}
                ax.text(x, y - 1.3, name, fontsize=8.3, **centred)
                ax.text(x, y + 1.9, _thousands(lines[name]), fontsize=7.3, **centred)
        top += height + 2.6
    return boxes, middles


def _thousands(lines: int) -> str:
    return f"{lines / 1000:.1f}K"


def _arrows_inside(ax: Axes, arrows: list[list[str]], boxes: dict[str, Any]) -> None:
    """Arrows between rooms of a layer, without those that others imply."""
    for rooms in ROOMS.values():
        graph = networkx.DiGraph([(a, b) for a, b in arrows if a in rooms and b in rooms])
        if networkx.is_directed_acyclic_graph(graph):
            graph = networkx.transitive_reduction(graph)
        for source, target in sorted(graph.edges):
            (box, a), (other, b) = boxes[source], boxes[target]
            bend = 0.3 if a[1] == b[1] and abs(a[0] - b[0]) > 28 else 0
            style = {"arrowstyle": "-|>,head_width=0.18,head_length=0.35", "color": "#222222"}
            style |= {"patchA": box, "patchB": other, "shrinkA": 0, "shrinkB": 0}
            style |= {"connectionstyle": f"arc3,rad={bend if a[0] < b[0] else -bend}"}
            ax.annotate("", b, a, arrowprops=style, zorder=2)


def _arrows_between(ax: Axes, arrows: list[list[str]], middles: dict[str, float]) -> None:
    """A line per layer beside the frames, with an arrow into each layer that its rooms import."""
    layer_of = {room: layer for layer, rooms in ROOMS.items() for room in rooms}
    for lane, (layer, (_, colour, x)) in enumerate(_LOOKS.items()):
        into = {layer_of[b] for a, b in arrows if layer_of[a] == layer} - {layer}
        side = _LEFT if x < 50 else _RIGHT
        both = [name for name in middles if name in into or (name == layer and into)]
        ends = {name: middles[name] + 2.6 * (lane - 1.5) for name in both}
        for name, y in ends.items():
            style = {"arrowstyle": "-|>,head_width=0.2,head_length=0.4" if name in into else "-"}
            style |= {"lw": 1.6, "color": colour, "shrinkA": 0, "shrinkB": 0}
            ax.annotate("", (side, y), (x, y), arrowprops=style)
        ax.vlines(x, min(ends.values(), default=0), max(ends.values(), default=0), colour, lw=1.6)


if __name__ == "__main__":
    draw(found())
