"""The figures as vLLM takes them: its log line, and Prometheus."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client.values
import pytest
import vllm
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.utils import floatToGoString
from prometheus_client.values import MultiProcessValue

from kv_offload.engines.vllm.connector import KVOffloadConnector
from kv_offload.engines.vllm.metrics import ConnectorPromMetrics, ConnectorStats
from kv_offload.metrics import METRICS, PREFIX


def stats(**figures: float | list[float]) -> ConnectorStats:
    return ConnectorStats(data=dict(figures))


def test_counters_add_up_gauges_are_replaced_and_values_of_histograms_are_collected():
    """vLLM adds up in the first of several: what was added must not be shared with it."""
    counted = {"stored_bytes": 5, "slots_in_use": 7, "failed_loads": 2}
    later = stats(**counted, load_bytes=[3], load_seconds=[0.5])
    before = copy.deepcopy(later.data)
    total = stats(stored_bytes=10, slots_in_use=3, evictions=1, load_bytes=[1, 2])
    assert total.aggregate(later).aggregate(stats(load_seconds=[0.25])) is total
    data = total.data
    assert data == {
        "stored_bytes": 15,
        "slots_in_use": 7,
        "evictions": 1,
        "failed_loads": 2,
        "load_bytes": [1, 2, 3],
        "load_seconds": [0.5, 0.25],
    }
    assert later.data == before
    total.reset()
    assert total.is_empty()
    assert data["stored_bytes"] == 15, "what was sent is not taken back"


def test_the_log_line_has_figures_of_a_readable_length():
    assert stats(stored_seconds=0.123456789, slots=3, load_seconds=[0.123456, 3, 0.2]).reduce() == {
        "stored_seconds": 0.1235,
        "slots": 3,
        "load_seconds_median": 0.2,
        "load_seconds_max": 3,
    }


def test_stats_cross_a_process_boundary():
    figures = stats(stored_bytes=5, slots=2, load_bytes=[7, 8])
    sent = pickle.loads(pickle.dumps(figures)).data
    rebuilt = KVOffloadConnector.build_kv_connector_stats(data=sent)
    assert isinstance(rebuilt, ConnectorStats)
    assert rebuilt.data == figures.data
    assert KVOffloadConnector.build_kv_connector_stats().is_empty()


def test_names_are_not_vllms():
    """Two collectors of one name end the API server; some prefixes belong to its connectors."""
    assert PREFIX.startswith("vllm:"), "vLLM unregisters its metrics by name for a second engine"
    assert not PREFIX.startswith(("vllm:kv_offload_", "vllm:simple_kv_offload_"))
    package = Path(vllm.__file__).parent
    sources = [*(package / "v1/metrics").rglob("*.py"), *(package / "distributed").rglob("*.py")]
    assert len(sources) > 20
    assert not [source for source in sources if PREFIX in source.read_text()]


def build(registry: CollectorRegistry, engines: int) -> ConnectorPromMetrics:
    types: dict[Any, Any] = {
        kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)
    }
    per_engine: dict[int, list[object]] = {engine: ["m", str(engine)] for engine in range(engines)}
    return KVOffloadConnector.build_prom_metrics(
        SimpleNamespace(kv_transfer_config=None), types, ["model_name", "engine"], per_engine
    )


SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_count", "_sum"]}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_of_an_engine_reads_zero_and_then_what_its_stats_hold(metric):
    registry = CollectorRegistry()

    def values(engine: int) -> list[float | None]:
        labels = {"model_name": "m", "engine": str(engine)}
        names = (PREFIX + metric.name + suffix for suffix in SUFFIXES[metric.kind])
        return [registry.get_sample_value(name, labels) for name in names]

    metrics = build(registry, engines=2)
    assert {*values(0), *values(1)} == {0.0}
    figures = ConnectorStats()
    if metric.kind == "histogram":
        least, most = metric.buckets[0], metric.buckets[-1]
        figures.observe(metric.name, least, most, 2 * most)
        metrics.observe(figures.data, engine_idx=1)
        assert values(1) == [3, least + 3 * most]
        for bound, below in ((least, 1), (most, 2), (float("inf"), 3)):
            at = {"model_name": "m", "engine": "1", "le": floatToGoString(bound)}
            assert registry.get_sample_value(f"{PREFIX}{metric.name}_bucket", at) == below
    else:
        (figures.count if metric.kind == "counter" else figures.gauge)(metric.name, 2)
        metrics.observe(figures.data, engine_idx=1)
        metrics.observe(figures.data, engine_idx=1)
        assert values(1) == [4 if metric.kind == "counter" else 2]
    assert {*values(0)} == {0.0}


def test_a_gauge_of_several_api_servers_has_the_last_value(tmp_path, monkeypatch):
    """Each of them hears of some steps only; vLLM has them share a folder."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for server, slots in enumerate((7, 5)):
        of_server = MultiProcessValue(lambda server=server: server)
        monkeypatch.setattr(prometheus_client.values, "ValueClass", of_server)
        build(CollectorRegistry(), engines=1).observe({"slots": slots, "evictions": 2})
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value(f"{PREFIX}slots", labels) == 5
    assert registry.get_sample_value(f"{PREFIX}evictions_total", labels) == 4
