"""Pictures of results, for tests/bench/report.py: equal rows give equal bytes.

A picture whose rows are missing is not drawn, so an interrupted or a quick run is no error.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

Row = Mapping[str, Any]
#: label -> (x, y) points
Lines = dict[str, list[tuple[float, float]]]

#: ours is drawn through, a peer is dashed; a colour is a case
_STYLES = {"dynamo": "--s"}
_INCHES, _DPI = (6.0, 3.6), 100


def draw(bench: str, rows: Sequence[Row], folder: Path) -> list[tuple[str, str]]:
    """Draw what there is to draw of a bench; return (title, file name) of each picture."""
    drawn = []
    for name, (title, paint) in _PICTURES.get(bench, {}).items():
        figure, axes = plt.subplots(figsize=_INCHES, dpi=_DPI)
        if paint(axes, rows):
            axes.set_title(title, fontsize=10)
            axes.grid(visible=True, which="major", alpha=0.3)
            figure.tight_layout()
            folder.mkdir(parents=True, exist_ok=True)
            # without the version of matplotlib in it
            figure.savefig(folder / f"{name}.png", metadata={"Software": None})
            drawn.append((title, f"{name}.png"))
        plt.close(figure)
    return drawn


# --- the pictures -----------------------------------------------------------------------------


def _match_by_blocks(axes: Axes, rows: Sequence[Row]) -> bool:
    where = {"holders": 256, "hit_percent": 100}
    lines: Lines = {}
    for layout in ("one chain", "forked", "staircase"):
        of_layout = {**where, "layout": layout}
        for side, points in _by_side(rows, "match", "num_blocks", of_layout).items():
            lines[f"{side}, {layout}"] = points
    return _log_lines(axes, lines, "blocks asked for", "match, us")


def _apply_by_blocks(axes: Axes, rows: Sequence[Row]) -> bool:
    where = {"workers": 256, "shared_by": 1}
    lines: Lines = {}
    for phase in ("stored", "removed"):
        for side, points in _by_side(rows, f"apply {phase}", "blocks_per_event", where).items():
            lines[f"{side}, {phase}"] = points
    return _log_lines(axes, lines, "blocks of an event", "bytes to index, us")


def _bytes_per_pair(axes: Axes, rows: Sequence[Row]) -> bool:
    found = [row for row in rows if row["case"] == "bytes per pair"]
    labels = [f"{row['side']}\n{_sharing(row)}" for row in found]
    colors = ["C0" if row["side"] == "kvatlas" else "C1" for row in found]
    bars = axes.bar(labels, [row["rss_mean"] for row in found], color=colors)
    axes.bar_label(bars, fmt="%.3g", fontsize=8)
    axes.margins(y=0.1)
    axes.set_ylabel("resident bytes per (block, worker)", fontsize=9)
    return bool(found)


def _sharing(row: Row) -> str:
    return "alone" if row["shared_by"] == 1 else f"shared by {row['shared_by']}"


def _scale(what: str) -> Callable[[Axes, Sequence[Row]], bool]:
    def paint(axes: Axes, rows: Sequence[Row]) -> bool:
        lines: Lines = {}
        for case in ("match", "match again", "stored", "removed"):
            for points in _by_side(rows, case, what, {"grows": what}).values():
                lines[case] = points
        return _log_lines(axes, lines, f"{what} in the index", "us")

    return paint


_PICTURES: dict[str, dict[str, tuple[str, Callable[[Axes, Sequence[Row]], bool]]]] = {
    "index": {
        "match_by_blocks": ("A match, 256 holders", _match_by_blocks),
        "apply_by_blocks": ("An event, 256 workers, each its own chains", _apply_by_blocks),
        "bytes_per_pair": ("Memory, averaged over growth", _bytes_per_pair),
    },
    "scale": {
        "scale_blocks": ("Growth of the table", _scale("blocks")),
        "scale_workers": ("Growth of the fleet, 16 holders a block", _scale("workers")),
    },
}


# --- below ------------------------------------------------------------------------------------


def _by_side(rows: Sequence[Row], case: str, x: str, where: Mapping[str, Any]) -> Lines:
    """Return the smallest time over x, a line per side."""
    lines: Lines = {}
    for row in rows:
        is_wanted = row["case"] == case and all(row.get(key) == where[key] for key in where)
        if is_wanted and x in row and "min" in row:
            lines.setdefault(row["side"], []).append((row[x], row["min"]))
    return {side: sorted(dict(points).items()) for side, points in lines.items()}


def _log_lines(axes: Axes, lines: Lines, x: str, y: str) -> bool:
    """Draw lines of two points or more, both axes logarithmic; return whether there is one."""
    lines = {label: points for label, points in lines.items() if len(points) > 1}
    if not lines:
        return False
    colors: dict[str, str] = {}
    for label, points in lines.items():
        side, _, case = label.rpartition(", ")
        color = colors.setdefault(case, f"C{len(colors)}")
        style = _STYLES.get(side, "-o")
        axes.plot(*zip(*points, strict=True), style, label=label, color=color, markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(_short))
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.legend(fontsize=8)
    return True


def _short(value: float, _: int | None = None) -> str:
    """Return 8192, 100 k, 1.2 M."""
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k")):
        if value >= least:
            return f"{value / size:.3g} {unit}"
    return f"{value:g}"
