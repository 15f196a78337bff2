"""Counters and gauges, from both halves of the connector to vLLM's log line and `/metrics`.

Names start with `vllm:host_kv_cache_`: vLLM clears what carries its prefix when a second engine is
built in a process, and the prefixes of its own offloading connectors are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kv_offload.scheduler.stores import SKIP_REASONS

PREFIX = "vllm:host_kv_cache_"


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure: `name` in the stats, `vllm:host_kv_cache_<name>` in Prometheus."""

    name: str
    kind: Literal["counter", "gauge"]
    documentation: str


METRICS = (
    Metric(
        "lookup_tokens", "counter", "Tokens looked up in host memory after the GPU prefix cache."
    ),
    Metric("hit_tokens", "counter", "Tokens loaded from host memory instead of being computed."),
    Metric(
        "recomputed_tokens",
        "counter",
        "Tokens that host memory had but that were computed, since that was sooner.",
    ),
    Metric("evictions", "counter", "Slots whose content was replaced."),
    Metric("stored_bytes", "counter", "Bytes copied to host memory, over all ranks."),
    Metric(
        "stored_seconds", "counter", "Time from submitting stores to their end, over all ranks."
    ),
    Metric("loaded_bytes", "counter", "Bytes copied from host memory, over all ranks."),
    Metric("loaded_seconds", "counter", "Time from submitting loads to their end, over all ranks."),
    Metric("synchronous_loads", "counter", "Loads that the forward of their step waited for."),
    Metric("failed_loads", "counter", "Requests whose load failed and that were recomputed."),
    Metric(
        "repaired_loads",
        "counter",
        "Loads that failed just before a forward and were copied at once, over all ranks.",
    ),
    Metric(
        "lost_requests",
        "counter",
        "Requests that ended with an error since a forward read KV that was not loaded.",
    ),
    Metric("hook_errors", "counter", "Errors within the plugin that the engine survived."),
    *(
        Metric(f"skipped_{reason}", "counter", f"Slots not stored: {reason.replace('_', ' ')}.")
        for reason in SKIP_REASONS
    ),
    Metric(
        "deferred_slots",
        "counter",
        "Slots of ended requests that no store budget was left for and that wait for one.",
    ),
    Metric("slots_in_use", "gauge", "Slots that hold KV or are being written."),
    Metric("slots", "gauge", "Slots in the pool that may be used."),
    Metric("running_loads", "gauge", "Loads that some rank has not completed."),
    Metric("running_stores", "gauge", "Stores that some rank has not completed."),
    Metric("pinned_blocks", "gauge", "GPU blocks kept from reuse until their store has ended."),
    Metric("waiting_slots", "gauge", "Slots of ended requests that wait to be stored."),
    Metric(
        "load_bytes_per_second",
        "gauge",
        "Speed of loads that ran alone, of the slowest rank; 0 until it was measured.",
    ),
    Metric(
        "prefill_tokens_per_second",
        "gauge",
        "Speed of computing prompts in large steps; 0 until it was measured.",
    ),
)
_KINDS = {metric.name: metric.kind for metric in METRICS}


class OffloadStats(KVConnectorStats):
    """A flat dictionary by metric name: counters add up, of a gauge the last value stays."""

    data: dict[str, float]

    def count(self, name: str, amount: float) -> None:
        """Add to a counter."""
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def gauge(self, name: str, value: float) -> None:
        """Set a gauge."""
        self.data[name] = value

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> OffloadStats:
        """Add another rank's, or a later, set of figures."""
        for name, value in other.data.items():
            if _KINDS[name] == "counter":
                self.count(name, value)
            else:
                self.gauge(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for vLLM's periodic log line."""
        return {name: round(value, 4) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Tell whether there is nothing to report."""
        return not self.data


class OffloadPromMetrics(KVConnectorPromMetrics):
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
            for family in [
                classes[metric.kind](
                    name=PREFIX + metric.name,
                    documentation=metric.documentation,
                    labelnames=labels,
                )
            ]
        }

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Feed one engine's figures."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if _KINDS[name] == "counter":
                metric.inc(value)
            else:
                metric.set(value)
