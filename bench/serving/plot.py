"""Draws time to first token by prompt length as SVG, from the serving benchmark's results.

usage: python -m bench.serving.plot

Reads `bench/results/*/serving-*.json`, writes `docs/images/ttft.svg` with one panel for each result
that has times to first token, and puts the picture between `<!-- plot: ttft -->` and `<!-- end plot
-->` in README.md and docs/benchmarks/serving.md. A point is the median of all measurements in its
column, and its bar is their range. Both axes are logarithmic.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bench.serving.settings import OFF, OURS, PEER
from bench.serving.stats import spread

ROOT = Path(__file__).parents[2]
PICTURE = Path("docs/images/ttft.svg")
PAGES = ("README.md", "docs/benchmarks/serving.md")
MARKED = re.compile(r"(<!-- plot: ttft -->\n)(.*?)(<!-- end plot -->)", re.DOTALL)

WIDTH, PANEL_HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 360, 70, 44, 210, 44
COLORS = {OFF: "#777777", PEER: "#d55e00", OURS: "#0072b2"}
NAMES = {OFF: "computed again", PEER: "vLLM's OffloadingConnector", OURS: "kv-offload"}


@dataclass(frozen=True)
class Line:
    """Time to first token of one column in milliseconds: median, minimum and maximum by tokens."""

    column: str
    points: dict[int, dict[str, float]]


def lines(document: dict[str, Any]) -> list[Line]:
    """Return the columns of a result that have times to first token, without variants.

    If no engine ran without a connector, uses the prompts that the peer computed instead.
    """
    found = []
    for column in (OFF, PEER, OURS):
        times: dict[int, list[float]] = {}
        source = PEER if column == OFF and OFF not in document["results"] else column
        for one in document["results"].get(source, ()):
            for tokens, measured in one.get("ttft", {}).items():
                key = "computed" if column == OFF else "repeated"
                times.setdefault(int(tokens), []).extend(1e3 * s for s in measured[key])
        if points := {tokens: spread(of) for tokens, of in sorted(times.items()) if of}:
            found.append(Line(column, points))
    return found


def title(document: dict[str, Any]) -> str:
    """Return a panel's title: shape, GPU and vLLM's version."""
    machine = document["machine"]
    parts = [document["shape"]["name"], machine.get("gpu", "CPU"), f"vLLM {machine.get('vllm')}"]
    return ", ".join(parts)


def draw(documents: Sequence[dict[str, Any]]) -> str:
    """Return the picture. Raises `ValueError` if no document has a time to first token."""
    panels = [(title(one), found) for one in documents if (found := lines(one))]
    if not panels:
        raise ValueError("no result has times to first token")
    height = PANEL_HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        "<title>Time to first token of a repeated prompt</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for at, (name, found) in enumerate(panels):
        parts += _panel(name, found, at * PANEL_HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(name: str, found: Sequence[Line], above: int) -> list[str]:
    tokens = sorted({n for line in found for n in line.points})
    values = [p[key] for line in found for p in line.points.values() for key in ("min", "max")]
    ticks = [mantissa * 10.0**power for power in range(-3, 7) for mantissa in (1, 2, 5)]
    low = max(tick for tick in ticks if tick <= min(values))
    high = min(tick for tick in ticks if tick > max(values))
    first, last = math.log(tokens[0]), math.log(tokens[-1])
    right, bottom = WIDTH - RIGHT, above + PANEL_HEIGHT - BOTTOM

    def x_of(count: int) -> float:
        share = (math.log(count) - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (right - LEFT), 1)

    def y_of(ms: float) -> float:
        share = math.log(ms / low) / math.log(high / low)
        return round(bottom - share * (PANEL_HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<text x="{LEFT}" y="{above + 24}" font-weight="bold">'
        f"Time to first token of a repeated prompt, ms: {escape(name)}</text>"
    ]
    for tick in ticks:
        if low <= tick <= high:
            y = y_of(tick)
            parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{right}" y2="{y}" stroke="#ddd"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{tick:,g}</text>')
    for count in tokens:
        at = f'x="{x_of(count)}" y="{bottom + 20}"'
        parts.append(f'<text {at} text-anchor="middle">{count:,}</text>')
    for line in found:
        color = COLORS[line.column]
        places = [(x_of(n), y_of(p["median"])) for n, p in line.points.items()]
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (x, y), point in zip(places, line.points.values(), strict=True):
            parts.append(f'<circle cx="{x}" cy="{y}" r="3.5" fill="{color}"/>')
            parts.append(
                f'<line x1="{x}" y1="{y_of(point["min"])}" x2="{x}" y2="{y_of(point["max"])}" '
                f'stroke="{color}"/>'
            )
    # Names are at the ends of their lines, moved apart if they would overlap.
    ends = sorted((y_of([*line.points.values()][-1]["median"]), line.column) for line in found)
    lowest = 0.0
    for y, column in ends:
        lowest = max(y, lowest + 16)
        parts.append(
            f'<text x="{right + 12}" y="{round(lowest + 4, 1)}" fill="{COLORS[column]}">'
            f"{escape(NAMES[column])}</text>"
        )
    parts.append(
        f'<text x="{right + 34}" y="{bottom + 20}" fill="#555">tokens of the prompt</text>'
    )
    return parts


def pictured(text: str, page: Path, picture: Path, sources: Sequence[Path]) -> str:
    """Return a page's text with the picture and links to its sources between its markers."""
    link, *files = (os.path.relpath(path, page.parent) for path in (picture, *sources))
    named = ", ".join(
        f"[{path.parent.name}/{path.name}]({file})"
        for path, file in zip(sources, files, strict=True)
    )
    image = f"![Time to first token by prompt length]({link})\n\nDrawn from {named}."
    return MARKED.sub(lambda match: f"{match[1]}\n{image}\n\n{match[3]}", text)


def main(root: Path = ROOT) -> int:
    """Draw the picture and put it into the pages; return 1 if there is nothing to draw."""
    kept = {
        path: json.loads(path.read_text())
        for path in sorted(root.glob("bench/results/*/serving-*.json"))
    }
    shown = {path: document for path, document in kept.items() if lines(document)}
    if not shown:
        print("no bench/results/*/serving-*.json has times to first token", file=sys.stderr)
        return 1
    picture = root / PICTURE
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.write_text(draw([*shown.values()]))
    for name in PAGES:
        page = root / name
        page.write_text(pictured(page.read_text(), page, picture, [*shown]))
    print(f"drew {picture.relative_to(root)} from {len(shown)} results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
