"""Replays a trace for each policy and capacity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.serving.report import markdown_table
from bench.trace.belady import belady
from kv_offload.cache.policies import POLICIES
from kv_offload.simulation.replay import ReplayResult, infinite, replay
from kv_offload.simulation.trace import TraceRequest

BELADY = "belady"
INFINITE = "infinite memory"

Cell = Callable[[Sequence[TraceRequest], int], ReplayResult]


def _of_policy(name: str) -> Cell:
    return lambda requests, capacity: replay(requests, name, capacity)


ROWS: Mapping[str, Cell] = {
    **{name: _of_policy(name) for name in POLICIES},
    BELADY: belady,
    INFINITE: lambda requests, capacity: infinite(requests),
}
"""Functions, by name, that replay a trace with a given capacity in blocks."""


@dataclass(frozen=True)
class Row:
    """One replay, with the percentage of blocks that were prefix hits."""

    name: str
    capacity: int
    hit_percent: float
    stored: int
    evicted: int


def measure(
    requests: Sequence[TraceRequest], names: Sequence[str], capacities: Sequence[int]
) -> Iterator[Row]:
    """Yield a row for each name and capacity."""
    for name in names:
        for capacity in capacities:
            result = ROWS[name](requests, capacity)
            percent = round(100 * result.hit_ratio, 2)
            yield Row(name, capacity, percent, result.stored, result.evicted)


def as_markdown(rows: Sequence[Row], question: str) -> str:
    """Return a table with a line for each name and a column for each capacity."""
    capacities = sorted({row.capacity for row in rows})
    percent = {(row.name, row.capacity): row.hit_percent for row in rows}
    lines = [
        [name, *(f"{percent[name, capacity]:.1f}" for capacity in capacities)]
        for name in dict.fromkeys(row.name for row in rows)
    ]
    return markdown_table(question, ["policy", *map("{:,}".format, capacities)], lines)
