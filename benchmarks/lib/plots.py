"""One look for the suite's plots: no pyplot, no state. Machines with GPUs may lack matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# one colour per side everywhere
COLOURS = {
    "packed": "#225ea8",
    "own": "#7fcdbb",
    "fa2": "#d7301f",
    "fa4": "#fdae61",
    "grouper": "#8c6bb1",
    "flex": "#8c6bb1",
    "bound": "#777777",
}
LABELS = {
    "packed": "packed",
    "own": "replicated, our backend",
    "fa2": "replicated, FA2",
    "fa4": "replicated, flash-attn-4",
    "grouper": "prefix-grouper",
    "flex": "FlexAttention over the forest",
    "bound": "FLOP bound",
}


def figure(columns: int, title: str, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """A row (or several) of panels, left to right, top to bottom."""
    from matplotlib.figure import Figure

    out = Figure(figsize=(4.6 * columns, 3.6 * rows), layout="constrained", dpi=120)
    out.suptitle(title, fontsize=11)
    axes = out.subplots(rows, columns, squeeze=False).ravel().tolist()
    for axis in axes:
        axis.grid(True, color="#e4e4e4", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    return out, axes


def line(axis: Axes, side: str, x: Sequence[Any], y: Sequence[Any], **more: Any) -> None:
    """One side's line; None is a gap. The bound is dashed."""
    values = [float("nan") if value is None else value for value in y]
    style = {"color": COLOURS.get(side), "label": LABELS.get(side, side), "marker": "o"}
    if side == "bound":
        style |= {"linestyle": "--", "marker": ""}
    axis.plot(list(x), values, markersize=4, linewidth=1.6, **(style | more))


def bars(axis: Axes, values: Mapping[str, Sequence[Any]]) -> None:
    """In every group one bar per side; None is a gap."""
    width = 0.8 / len(values)
    for i, (side, some) in enumerate(values.items()):
        at = [n + (i - (len(values) - 1) / 2) * width for n in range(len(some))]
        heights = [float("nan") if value is None else value for value in some]
        axis.bar(at, heights, width, color=COLOURS[side], label=LABELS[side])


def name(axis: Axes, x: str, y: str, title: str = "", legend: bool = True) -> None:
    """Labels, and a legend where something has a name."""
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.set_title(title, fontsize=9)
    if legend and axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, frameon=False)


def ticks(axis: Axes, values: Sequence[float], labels: Sequence[str] | None = None) -> None:
    """Just these, without minor ones; for axes of powers of two."""
    axis.set_xticks(list(values), list(labels or [f"{v:g}" for v in values]))
    axis.minorticks_off()


def save(fig: Figure, path: Path) -> None:
    """Writes it, and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    print(f"drawn: {path}")
