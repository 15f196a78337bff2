"""The plugin's figures as vLLM takes them, for its log line and for `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kv_offload.metrics import KINDS, METRICS, PREFIX, OffloadStats


class ConnectorStats(OffloadStats, KVConnectorStats):
    """What one half counted; vLLM adds up the ranks' figures, and those of several steps."""

    @classmethod
    def of(cls, stats: OffloadStats | None) -> ConnectorStats | None:
        """Return figures as vLLM takes them."""
        return None if stats is None else cls(stats.data)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: OffloadStats) -> ConnectorStats:
        """Add another rank's, or a later, set of figures."""
        for name, value in other.data.items():
            (self.count if KINDS[name] == "counter" else self.gauge)(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for vLLM's periodic log line."""
        return {name: round(value, 4) for name, value in self.data.items()}


class ConnectorPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics with the engine's labels and feeds them."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: Any, per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labels, per_engine)
        classes = {"counter": self._counter_cls, "gauge": self._gauge_cls}
        # One child per engine and metric now, so that each reads 0 before its first event.
        self._metrics = {
            metric.name: {
                engine: family.labels(*labelvalues) for engine, labelvalues in per_engine.items()
            }
            for metric in METRICS
            for family in [classes[metric.kind](PREFIX + metric.name, metric.documentation, labels)]
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Feed one engine's figures."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            (metric.inc if KINDS[name] == "counter" else metric.set)(value)
