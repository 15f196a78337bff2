"""Converts the plugin's figures for vLLM's log line and for `/metrics`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kv_offload.metrics import KINDS, METRICS, PREFIX, Metric, OffloadStats


class ConnectorStats(OffloadStats, KVConnectorStats):
    """Figures of one half of the connector; vLLM adds them up over ranks and steps."""

    @classmethod
    def of(cls, stats: OffloadStats | None) -> ConnectorStats | None:
        """Return figures in vLLM's form."""
        return None if stats is None else cls(stats.data)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: OffloadStats) -> ConnectorStats:
        """Add the figures of another rank or of a later step."""
        for name, value in other.data.items():
            kind = KINDS[name]
            if kind == "counter":
                self.count(name, value)
            elif kind == "gauge":
                self.gauge(name, value)
            else:
                self.observe(name, *value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return figures for vLLM's periodic log line; for a histogram, median and maximum."""
        line: dict[str, int | float] = {}
        for name, value in self.data.items():
            if KINDS[name] == "histogram":
                line[f"{name}_median"] = round(statistics.median(value), 4)
                line[f"{name}_max"] = round(max(value), 4)
            else:
                line[name] = round(value, 4)
        return line


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics with the engine's labels, and updates them."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: Any, per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labels, per_engine)
        # Create every metric of every engine now, so that it reads 0 before its first event.
        self._metrics = {
            metric.name: {
                engine: family.labels(*labelvalues) for engine, labelvalues in per_engine.items()
            }
            for metric in METRICS
            for family in [_register(metric, metric_types, labels)]
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric, kind = self._metrics[name][engine_idx], KINDS[name]
            if kind == "counter":
                metric.inc(value)
            elif kind == "gauge":
                metric.set(value)
            else:
                for one in value:
                    metric.observe(one)


def _register(metric: Metric, metric_types: Any, labels: Any) -> Any:
    """Return the metric family, in vLLM's class for its kind."""
    kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}[metric.kind]
    # With several API servers, each gets the figures of different steps: the latest gauge counts.
    more: dict[str, dict[str, Any]] = {
        "gauge": {"multiprocess_mode": "mostrecent"},
        "histogram": {"buckets": metric.buckets},
    }
    return metric_types[kind](
        PREFIX + metric.name, metric.documentation, labels, **more.get(metric.kind, {})
    )
