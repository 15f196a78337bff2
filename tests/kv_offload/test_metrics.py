"""Names and help of the metrics, and the figures that are counted under them."""

from __future__ import annotations

import re
from pathlib import Path

from kv_swap.packing.format import MAX_COLUMNS, escape_capacity
from kv_swap.packing.samples import SAMPLED_TILES

from kv_offload.metrics import METRICS, SKIP_REASONS, OffloadStats


def test_figures_that_were_counted_are_reported_and_a_gauge_also_if_it_is_zero():
    figures = OffloadStats()
    figures.count("evictions", 0)
    assert figures.is_empty()
    figures.count("evictions", 2)
    figures.count("evictions", 3)
    figures.gauge("pinned_blocks", 0)
    figures.observe("load_bytes", 3)
    figures.observe("load_bytes", 1, 2)
    assert not figures.is_empty()
    assert figures.data == {"evictions": 5, "pinned_blocks": 0, "load_bytes": [3, 1, 2]}


def test_names_are_unique_and_fit_for_prometheus():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    assert all(metric.documentation.endswith(".") for metric in METRICS)


def test_a_histogram_has_buckets_that_grow_and_nothing_else_has_any():
    for metric in METRICS:
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_every_help_says_more_than_its_name():
    for metric in METRICS:
        words = set(re.findall(r"[a-z]+", metric.documentation.lower()))
        assert len(words - set(metric.name.split("_"))) >= 4, metric


def test_the_help_of_samples_says_how_many_there_are_and_what_fits():
    help_of = {metric.name: metric.documentation for metric in METRICS}
    assert f"one in {SAMPLED_TILES} " in help_of["sampled_tiles"]
    least, most = escape_capacity(MAX_COLUMNS), escape_capacity(8)
    assert f"{least} to {most} of them fit" in help_of["sampled_escapes"]


DOCS = Path(__file__).parents[2] / "docs/use"
REFERENCE = DOCS / "metrics_reference.md"


def rows(page: Path, heading: str) -> list[str]:
    """Return the rows of the table below a heading of a page that begin with a name."""
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [row for row in section.splitlines() if row.startswith("| `")]


def test_every_metric_is_documented_as_its_help_says():
    assert rows(REFERENCE, "All metrics") == [
        f"| `{m.name}` | {m.kind} | {m.documentation} |" for m in METRICS
    ]


def test_every_reason_to_skip_a_store_has_a_remedy():
    table = rows(DOCS / "metrics.md", "When something is not stored")
    assert [row.split("|")[1].strip() for row in table] == [f"`skipped_{r}`" for r in SKIP_REASONS]
