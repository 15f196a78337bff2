"""The stats of both halves and their Prometheus side; and how ranks' reports are merged."""

from __future__ import annotations

import functools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="needs vLLM, which is not installed")

import vllm
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kv_offload.engines.vllm.connector import KVOffloadConnector
from kv_offload.messages import (
    JobResult,
    LoadJob,
    OffloadMetadata,
    OffloadWorkerMetadata,
    StoreJob,
)
from kv_offload.metrics import METRICS, PREFIX, OffloadPromMetrics, OffloadStats
from kv_offload.scheduler.stores import SKIP_REASONS

COUNTERS = [metric.name for metric in METRICS if metric.kind == "counter"]
GAUGES = [metric.name for metric in METRICS if metric.kind == "gauge"]


def stats(**figures: float) -> OffloadStats:
    return OffloadStats(data=dict(figures))


# -- stats -------------------------------------------------------------------------------------


def test_counters_add_up_and_gauges_are_replaced() -> None:
    total = stats(stored_bytes=10, slots_in_use=3, evictions=1)
    result = total.aggregate(stats(stored_bytes=5, slots_in_use=7, failed_loads=2))
    assert result is total
    assert total.data == {
        "stored_bytes": 15,
        "slots_in_use": 7,
        "evictions": 1,
        "failed_loads": 2,
    }


def test_aggregating_leaves_the_other_alone() -> None:
    other = stats(stored_bytes=5)
    stats(stored_bytes=1).aggregate(other)
    assert other.data == {"stored_bytes": 5}


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


def test_reset_forgets_everything_and_shares_nothing() -> None:
    figures = stats(evictions=1)
    data = figures.data
    figures.reset()
    assert figures.is_empty()
    assert data == {"evictions": 1}
    assert OffloadStats().data is not OffloadStats().data


def test_the_log_line_has_figures_of_a_readable_length() -> None:
    assert stats(stored_seconds=0.123456789, slots=3).reduce() == {
        "stored_seconds": 0.1235,
        "slots": 3,
    }


def test_stats_cross_a_process_boundary() -> None:
    figures = stats(stored_bytes=5, slots=2)
    assert pickle.loads(pickle.dumps(figures)).data == figures.data
    rebuilt = KVOffloadConnector.build_kv_connector_stats(data=figures.data)
    assert isinstance(rebuilt, OffloadStats)
    assert rebuilt.data == figures.data
    assert KVOffloadConnector.build_kv_connector_stats().is_empty()


# -- names -------------------------------------------------------------------------------------


def test_names_are_unique_and_fit_for_prometheus() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in names)
    assert all(metric.documentation.endswith(".") for metric in METRICS)


def test_every_reason_to_skip_a_store_has_a_counter() -> None:
    assert {f"skipped_{reason}" for reason in SKIP_REASONS} <= set(COUNTERS)


def test_every_metric_is_documented() -> None:
    rows = (Path(__file__).parents[2] / "docs/use/metrics.md").read_text().splitlines()
    table = [row for row in rows if row.startswith("| `")]
    assert table == [f"| `{m.name}` | {m.kind} | {m.documentation} |" for m in METRICS]


def test_names_are_not_vllms() -> None:
    """Two collectors of one name end the API server; some prefixes belong to its connectors."""
    assert PREFIX.startswith("vllm:"), "vLLM unregisters its metrics by name for a second engine"
    assert not PREFIX.startswith(("vllm:kv_offload_", "vllm:simple_kv_offload_"))
    package = Path(vllm.__file__).parent
    sources = [*(package / "v1/metrics").rglob("*.py"), *(package / "distributed").rglob("*.py")]
    assert len(sources) > 20
    assert not [source for source in sources if PREFIX in source.read_text()]


# -- Prometheus --------------------------------------------------------------------------------


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def build(registry: CollectorRegistry, engines: int = 1) -> OffloadPromMetrics:
    """Build the metrics as vLLM's front end does, in a registry of our own."""
    types: dict[Any, Any] = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    labels = ["model_name", "engine"]
    per_engine: dict[int, list[object]] = {engine: ["m", str(engine)] for engine in range(engines)}
    return KVOffloadConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), types, labels, per_engine
    )


def value(registry: CollectorRegistry, name: str, engine: int = 0) -> float | None:
    suffix = "_total" if name in COUNTERS else ""
    labels = {"model_name": "m", "engine": str(engine)}
    return registry.get_sample_value(f"{PREFIX}{name}{suffix}", labels)


def test_every_metric_reads_zero_before_its_first_event(registry: CollectorRegistry) -> None:
    build(registry, engines=2)
    for engine in (0, 1):
        assert {value(registry, metric.name, engine) for metric in METRICS} == {0.0}


def test_counters_grow_and_gauges_are_set(registry: CollectorRegistry) -> None:
    metrics = build(registry, engines=2)
    metrics.observe({"stored_bytes": 5, "slots": 9}, engine_idx=1)
    metrics.observe({"stored_bytes": 6, "slots": 4}, engine_idx=1)
    assert value(registry, "stored_bytes", 1) == 11
    assert value(registry, "slots", 1) == 4
    assert value(registry, "stored_bytes", 0) == 0
    metrics.observe({"stored_bytes": 3})
    assert value(registry, "stored_bytes", 0) == 3


@pytest.mark.parametrize("name", [*COUNTERS, *GAUGES])
def test_what_the_stats_hold_can_be_observed(registry: CollectorRegistry, name: str) -> None:
    figures = OffloadStats()
    (figures.count if name in COUNTERS else figures.gauge)(name, 2)
    build(registry).observe(figures.data)
    assert value(registry, name) == 2


# -- reports of the ranks ----------------------------------------------------------------------


def result(*ranks: int, ok: bool = True) -> JobResult:
    return JobResult(frozenset(ranks), ok)


def test_reports_of_ranks_are_merged_by_job() -> None:
    merged = OffloadWorkerMetadata({1: result(0), 2: result(0)}, frozenset({"a"})).aggregate(
        OffloadWorkerMetadata({2: result(1), 3: result(1)}, frozenset({"b", "a"}))
    )
    assert merged.stores == {1: result(0), 2: result(0, 1), 3: result(1)}
    assert merged.failed_loads == {"a", "b"}


def test_the_slowest_rank_that_measured_says_how_fast_loads_are() -> None:
    reports = [OffloadWorkerMetadata(load_bytes_per_second=s) for s in (3e9, None, 2e9)]
    merged = functools.reduce(OffloadWorkerMetadata.aggregate, reports)
    assert merged == OffloadWorkerMetadata(load_bytes_per_second=2e9)


@pytest.mark.parametrize("name", ["ready_slots", "store_bytes_per_second", "weight_loads"])
def test_what_each_rank_says_of_itself_is_kept_by_rank(name: str) -> None:
    merged = OffloadWorkerMetadata(**{name: {0: 4}}).aggregate(
        OffloadWorkerMetadata(**{name: {1: 9}}).aggregate(OffloadWorkerMetadata())
    )
    assert merged == OffloadWorkerMetadata(**{name: {0: 4, 1: 9}})


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (False, False)])
def test_one_failure_makes_a_store_fail(first: bool, second: bool) -> None:
    merged = OffloadWorkerMetadata({1: result(0, ok=first)}).aggregate(
        OffloadWorkerMetadata({1: result(1, ok=second)})
    )
    assert merged.stores == {1: result(0, 1, ok=False)}


def test_merging_changes_neither_report() -> None:
    one, other = OffloadWorkerMetadata({1: result(0)}), OffloadWorkerMetadata({1: result(1)})
    one.aggregate(other)
    assert (one.stores, other.stores) == ({1: result(0)}, {1: result(1)})


def test_any_number_of_ranks_may_be_merged_in_any_order() -> None:
    reports = [OffloadWorkerMetadata({7: result(rank, ok=rank != 2)}) for rank in range(4)]
    for order in (reports, reports[::-1]):
        assert functools.reduce(OffloadWorkerMetadata.aggregate, order).stores == {
            7: result(0, 1, 2, 3, ok=False)
        }


def test_messages_cross_a_process_boundary() -> None:
    pairs = np.array([[1, 2], [3, 4]], np.int32)
    sent = OffloadMetadata((StoreJob(1, pairs),), (LoadJob(2, "a", pairs, incomplete=True),))
    received = pickle.loads(pickle.dumps(sent))
    assert received.stores[0].job_id == 1
    assert (received.loads[0].request_id, received.loads[0].incomplete) == ("a", True)
    for job in (*received.stores, *received.loads):
        assert job.pairs.dtype == np.int32
        assert (job.pairs == pairs).all()
    report = OffloadWorkerMetadata({1: result(0, ok=False)}, frozenset({"a"}))
    assert pickle.loads(pickle.dumps(report)) == report
