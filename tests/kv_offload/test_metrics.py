"""Names and help of the metrics, and the figures that are counted under them."""

from __future__ import annotations

import re
from pathlib import Path

from kv_offload.metrics import METRICS, SKIP_REASONS, OffloadStats


def test_a_counter_that_counted_nothing_is_not_reported() -> None:
    figures = OffloadStats()
    assert figures.is_empty()
    figures.count("evictions", 0)
    assert figures.is_empty()
    figures.count("evictions", 2)
    figures.count("evictions", 3)
    assert not figures.is_empty()
    assert figures.data == {"evictions": 5}


def test_a_gauge_of_zero_is_reported() -> None:
    figures = OffloadStats()
    figures.gauge("pinned_blocks", 0)
    assert not figures.is_empty()


def test_names_are_unique_and_fit_for_prometheus() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    assert all(metric.documentation.endswith(".") for metric in METRICS)


def test_every_reason_to_skip_a_store_has_a_counter() -> None:
    counters = {metric.name for metric in METRICS if metric.kind == "counter"}
    assert {f"skipped_{reason}" for reason in SKIP_REASONS} <= counters


def test_every_metric_is_documented() -> None:
    rows = (Path(__file__).parents[2] / "docs/use/metrics.md").read_text().splitlines()
    table = [row for row in rows if row.startswith("| `")]
    assert table == [f"| `{m.name}` | {m.kind} | {m.documentation} |" for m in METRICS]
