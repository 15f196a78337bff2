"""The panels of a Grafana dashboard, drawn from a Prometheus's answers to their queries."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.screens.units import scale
from tests.support.dashboard import filled_in
from tests.support.prometheus import Prometheus

RATE_INTERVAL = "10s"
POINTS = 70
GRID_COLUMNS, COLUMN_INCHES, ROW_INCHES = 24, 0.5, 0.34
"""Of Grafana, and of the picture."""

LEFT, RIGHT, TOP, BOTTOM = 0.68, 0.22, 0.42, 0.7
"""Inches between the edges of a panel and what is drawn in it."""

STYLE = {
    "svg.fonttype": "none",  # text, which can be searched and needs a third of the space
    "svg.hashsalt": "kv-offload",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "0.7",
    "axes.grid": True,
    "grid.color": "0.92",
}

Panel = Mapping[str, Any]
Line = tuple[list[float], list[float]]
"""Seconds and values; nan where there is none."""


def draw(
    panels: Sequence[Panel], prometheus: Prometheus, time: tuple[float, float], out: Path
) -> None:
    """Draw all panels as SVG, over the time between two timestamps, in seconds."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    with mpl.rc_context(STYLE):
        figure = Figure((GRID_COLUMNS * COLUMN_INCHES, rows * ROW_INCHES), facecolor="0.95")
        for panel in panels:
            axes = _place(figure, panel, rows)
            if panel["type"] == "timeseries":
                _draw_lines(axes, panel, prometheus, time)
            else:
                _draw_value(axes, panel, prometheus, time)
        written = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=no_metadata)
    out.write_text(re.sub(' d="[^"]*"', _rounded, written.getvalue()))


def _rounded(path: re.Match[str]) -> str:
    """Return a path with one digit behind each point: half the size."""
    return re.sub(r"(\.\d)\d+", r"\1", path[0])


def _place(figure: Figure, panel: Panel, rows: int) -> Axes:
    """Return the axes of a panel, on a card of its own that has its title."""
    place = panel["gridPos"]
    width, height = GRID_COLUMNS * COLUMN_INCHES, rows * ROW_INCHES
    left, bottom = place["x"] * COLUMN_INCHES, height - (place["y"] + place["h"]) * ROW_INCHES
    wide, high = place["w"] * COLUMN_INCHES, place["h"] * ROW_INCHES

    def part(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        return (x / width, y / height, w / width, h / height)

    card = figure.add_axes(part(left + 0.04, bottom + 0.04, wide - 0.08, high - 0.08))
    card.set(xticks=[], yticks=[])
    card.spines[:].set_visible(False)
    x, y, *_ = part(left + 0.15, bottom + high - 0.16, 0, 0)
    figure.text(x, y, panel["title"], fontweight="bold", fontsize=9, va="top")
    return figure.add_axes(
        part(left + LEFT, bottom + BOTTOM, wide - LEFT - RIGHT, high - BOTTOM - TOP),
        facecolor="none",
    )


def _draw_lines(
    axes: Axes, panel: Panel, prometheus: Prometheus, time: tuple[float, float]
) -> None:
    options = panel["fieldConfig"]["defaults"]
    lines = {t["legendFormat"]: _over(prometheus, t["expr"], time) for t in panel["targets"]}
    values = [v for _, line in lines.values() for v in line if not math.isnan(v)]
    largest = max(values, default=0.0)
    divisor, unit = scale(options["unit"], largest)
    stacked = options["custom"]["stacking"]["mode"] == "normal"
    below = [0.0] * POINTS
    for name, (seconds, line) in lines.items():
        shown = [value / divisor for value in line]
        if stacked:
            shown = [b + (0 if math.isnan(v) else v) for b, v in zip(below, shown, strict=True)]
        (drawn,) = axes.plot(seconds, shown, linewidth=1.2, label=name)
        if stacked:
            axes.fill_between(seconds, below, shown, color=drawn.get_color(), alpha=0.3, lw=0)
            below = shown
    axes.autoscale(axis="y")
    top = options["max"] / divisor if "max" in options else axes.get_ylim()[1] if largest else 1
    axes.set_ylim(0, 1.03 * top)
    axes.set_xlim(0, time[1] - time[0])
    axes.xaxis.set_major_formatter("{x:.0f} s")
    axes.yaxis.set_major_formatter(f"{{x:,g}} {unit}")
    axes.tick_params(length=0, labelcolor="0.35")
    axes.locator_params(nbins=5)
    axes.legend(
        loc="upper left", bbox_to_anchor=(-0.02, -0.15), ncols=3, frameon=False,
        handlelength=1, columnspacing=1.2, borderaxespad=0, borderpad=0,
    )  # fmt: skip


def _draw_value(
    axes: Axes, panel: Panel, prometheus: Prometheus, time: tuple[float, float]
) -> None:
    """Draw a number, and with a gauge how much of the whole it is."""
    options = panel["fieldConfig"]["defaults"]
    (target,) = panel["targets"]
    found = prometheus.ask("query", query=_filled(target["expr"], time), time=str(time[1]))
    value = float(found["result"][0]["value"][1]) if found["result"] else math.nan
    divisor, unit = scale(options["unit"], value)
    digits = options.get("decimals", 0)
    text = "No data" if math.isnan(value) else f"{value / divisor:,.{digits}f} {unit}"
    axes.axis("off")
    axes.text(0.45, 0, text, fontsize=20, ha="center", va="center", transform=axes.transAxes)
    if panel["type"] == "gauge":
        axes.set(xlim=(0, 1), ylim=(0, 1))
        for width, colour in ((1.0, "0.9"), (value, "tab:green")):
            axes.barh(-1.4, width, 0.35, color=colour, clip_on=False)


def _over(prometheus: Prometheus, expression: str, time: tuple[float, float]) -> Line:
    """Return `POINTS` values of an expression; the first one's time is 0 s."""
    start, end = time
    step = (end - start) / (POINTS - 1)
    series = prometheus.ask(
        "query_range",
        query=_filled(expression, time),
        start=f"{start:.3f}",
        end=f"{end + step / 2:.3f}",
        step=f"{step:.6f}",
    )["result"]
    values = [math.nan] * POINTS
    for moment, value in series[0]["values"] if series else ():
        values[round((moment - start) / step)] = float(value)  # "NaN" where nothing was counted
    return [step * index for index in range(POINTS)], values


def _filled(expression: str, time: tuple[float, float]) -> str:
    span = f"{math.ceil(time[1] - time[0])}s"
    return filled_in(expression.replace("$__range", span), RATE_INTERVAL)
