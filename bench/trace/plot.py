"""Plots hit ratios by capacity as SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from bench.trace.table import Row

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 50, 20, 220, 40
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#555555", "#aaaaaa")


def as_svg(rows: Sequence[Row], title: str) -> str:
    """Return a plot with one line per policy over capacity in blocks, on a logarithmic axis."""
    capacities = sorted({row.capacity for row in rows})
    top = 10 * math.ceil(max(row.hit_percent for row in rows) / 10) or 10
    low, high = math.log(capacities[0]), math.log(capacities[-1])

    def place(capacity: int, percent: float) -> tuple[float, float]:
        across = (math.log(capacity) - low) / (high - low) if high > low else 0.5
        x = LEFT + across * (WIDTH - LEFT - RIGHT)
        return round(x, 1), round(HEIGHT - BOTTOM - percent / top * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for percent in range(0, top + 1, 10):
        x, y = place(capacities[0], percent)
        right = WIDTH - RIGHT
        parts.append(f'<line x1="{x}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4}" text-anchor="end">{percent} %</text>')
    for capacity in capacities:
        x, y = place(capacity, 0)
        parts.append(f'<text x="{x}" y="{y + 18}" text-anchor="middle">{capacity:,}</text>')
    names = list(dict.fromkeys(row.name for row in rows))
    for at, name in enumerate(names):
        color = COLORS[at % len(COLORS)]
        points = [place(row.capacity, row.hit_percent) for row in rows if row.name == name]
        path = " ".join(f"{x},{y}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        y_name = TOP + 20 * at + 10
        x_name = WIDTH - RIGHT + 14
        parts.append(f'<rect x="{x_name}" y="{y_name - 9}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x_name + 16}" y="{y_name}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
