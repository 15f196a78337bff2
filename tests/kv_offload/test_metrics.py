"""Names and help texts of the metrics, and the figures counted under them."""

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


def test_every_metric_has_a_name_of_its_own_a_help_and_buckets_if_it_is_a_histogram():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert metric.documentation.endswith(".")
        words = set(re.findall(r"[a-z]+", metric.documentation.lower()))
        assert len(words - set(metric.name.split("_"))) >= 4, f"{metric} says no more than its name"
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_the_help_of_samples_says_how_many_there_are_and_what_fits():
    help_of = {metric.name: metric.documentation for metric in METRICS}
    assert f"one in {SAMPLED_TILES} " in help_of["sampled_tiles"]
    least, most = escape_capacity(MAX_COLUMNS), escape_capacity(8)
    assert f"{least} to {most} of them fit" in help_of["sampled_escapes"]


DOCS = Path(__file__).parents[2] / "docs/use"
REFERENCE = DOCS / "metrics_reference.md"


def rows(page: Path, heading: str) -> list[str]:
    section = page.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [row for row in section.splitlines() if row.startswith("| `")]


def test_every_metric_is_documented_as_its_help_says():
    assert rows(REFERENCE, "All metrics") == [
        f"| `{m.name}` | {m.kind} | {m.documentation} |" for m in METRICS
    ]


def test_every_reason_to_skip_a_store_has_a_remedy():
    table = rows(DOCS / "metrics.md", "When something is not stored")
    assert [row.split("|")[1].strip() for row in table] == [f"`skipped_{r}`" for r in SKIP_REASONS]
