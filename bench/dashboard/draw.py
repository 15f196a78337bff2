"""Draws the recorded panels of the dashboard as SVG, in the dashboard's own grid.

usage: python -m bench.dashboard.draw

Reads bench/results/cpu/dashboard.json, which `python -m bench.dashboard` writes, and writes
docs/images/dashboard.svg.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "bench/results/cpu/dashboard.json"
PICTURE = ROOT / "docs/images/dashboard.svg"

COLUMN, ROW = 42, 26
"""Pixels of one unit of the grid, which has 24 columns."""
HEAD, LEFT, RIGHT, TIMES, LEGEND = 26, 58, 24, 18, 14
"""Pixels around a plot: title, values, right margin, times, and each line of the legend."""
COLORS = (
    *("#3b8a4a", "#c99400", "#2a78c2", "#d1662b", "#c23b4b"),
    *("#7a52a8", "#3a9aa8", "#8a6d3b", "#555555"),
)

Panel = dict[str, Any]


def shown(value: float, unit: str) -> str:
    """Format a value with one of Grafana's units: seconds, bytes, shares, or a plain number."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "s":
        return f"{value:.3g} s" if value >= 1 or not value else f"{1e3 * value:.3g} ms"
    step, names = (
        (1024, (" B", " KiB", " MiB", " GiB")) if unit == "bytes" else (1000, ("", *"kMG"))
    )
    if unit == "Bps":
        names = (" B/s", " kB/s", " MB/s", " GB/s")
    power = 0
    while abs(value) >= step and power < 3:
        value, power = value / step, power + 1
    return f"{value:.3g}{names[power]}"


def stacked(series: Sequence[dict[str, Any]]) -> list[list[list[float]]]:
    """Return the values of each series stacked on the previous ones."""
    below: dict[float, float] = {}
    found = []
    for one in series:
        values = [[at, below.get(at, 0) + value] for at, value in one["values"]]
        below |= dict(values)
        found.append(values)
    return found


def draw(document: dict[str, Any]) -> str:
    """Return the picture of all panels."""
    panels, seconds = document["panels"], document["load"]["seconds"]
    height = ROW * max(y + h for _, y, _, h in (panel["place"] for panel in panels))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {24 * COLUMN} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>The dashboard of a server under load</title>",
        f'<rect width="{24 * COLUMN}" height="{height}" fill="#f4f5f5"/>',
    ]
    for panel in panels:
        x, y, w, h = panel["place"]
        inside = w * COLUMN - 6, h * ROW - 6
        parts.append(f'<g transform="translate({x * COLUMN + 3} {y * ROW + 3})">')
        if panel["type"] == "row":
            parts.append(f'<text x="4" y="15" font-weight="bold">{escape(panel["title"])}</text>')
        else:
            parts.append(
                f'<rect width="{inside[0]}" height="{inside[1]}" fill="white" stroke="#ddd"/>'
                f'<text x="8" y="17" font-weight="bold">{escape(panel["title"])}</text>'
            )
            plot = _plot if panel["type"] == "timeseries" else _last_value
            parts += plot(panel, *inside, seconds)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>"]) + "\n"


def _last_value(panel: Panel, width: int, height: int, _seconds: int) -> list[str]:
    values = [value for one in panel["series"] for _, value in one["values"][-1:]]
    text = shown(values[0], panel["unit"]) if values else "no data"
    return [
        f'<text x="{width / 2}" y="{height / 2 + 22}" text-anchor="middle" font-size="30" '
        f'fill="{COLORS[0]}">{text}</text>'
    ]


def _plot(panel: Panel, width: int, height: int, seconds: int) -> list[str]:
    series, unit = panel["series"], panel["unit"]
    legend, legend_lines = _legend([one["name"] for one in series], width)
    right, bottom = width - RIGHT, height - TIMES - LEGEND * legend_lines - 6
    lines = stacked(series) if panel["stacked"] else [one["values"] for one in series]
    highest = max((value for line in lines for _, value in line), default=0)
    top = panel["max"] or _top(highest, unit)
    parts = []

    def place(at: float, value: float) -> str:
        x = LEFT + at / seconds * (right - LEFT)
        return f"{x:.1f},{bottom - min(value / top, 1) * (bottom - HEAD):.1f}"

    for part in range(5):
        y = bottom - part / 4 * (bottom - HEAD)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{LEFT - 5}" y="{y + 4:.1f}" font-size="10" text-anchor="end">'
            f"{shown(top * part / 4, unit)}</text>"
        )
    for minute in range(seconds // 60 + 1):
        x = place(60 * minute, 0).partition(",")[0]
        parts.append(
            f'<text x="{x}" y="{bottom + 14}" font-size="10" text-anchor="middle">'
            f"{minute} min</text>"
        )
    # The first line of a stack is the lowest, so its area must be drawn over the others'.
    colored = [*zip(itertools.cycle(COLORS), lines, strict=False)]
    for color, line in reversed(colored):
        points = " ".join(place(at, value) for at, value in line)
        if panel["stacked"] and line:
            ends = place(line[-1][0], 0), place(line[0][0], 0)
            parts.append(
                f'<polygon points="{points} {" ".join(ends)}" fill="white" stroke="none"/>'
                f'<polygon points="{points} {" ".join(ends)}" fill="{color}" opacity="0.3"/>'
            )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        )
    return [*parts, *(f'<g transform="translate(0 {bottom + 28})">', *legend, "</g>")]


def _top(highest: float, unit: str) -> float:
    """Return the end of the axis: a round number at or above the highest value."""
    if not highest:
        return 1
    base = 1024 if unit == "bytes" else 10
    power = 1.0
    while power > highest:
        power /= base
    while power * base <= highest:
        power *= base
    steps = [1, 2, 4, 6, 8, 10, 12, 16, 20, 32, 48, 64, 80, 128, 160, 256, 320, 512, 640, 1024]
    return next(step * power for step in steps if step * power >= highest)


def _legend(names: Sequence[str], width: int) -> tuple[list[str], int]:
    """Return the names with the colors of their lines, and the number of lines that they take."""
    parts, x, line = [], 8.0, 0
    for color, name in zip(itertools.cycle(COLORS), names, strict=False):
        size = 22 + 5.9 * len(name)
        if x > 8 and x + size > width - 8:
            x, line = 8.0, line + 1
        y = line * LEGEND
        parts.append(f'<rect x="{x:.0f}" y="{y - 5}" width="9" height="3" fill="{color}"/>')
        parts.append(f'<text x="{x + 12:.0f}" y="{y}" font-size="10">{escape(name)}</text>')
        x += size
    return parts, line + 1


def main() -> int:
    """Draw the picture."""
    PICTURE.write_text(draw(json.loads(RESULT.read_text())))
    print(f"drew {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
