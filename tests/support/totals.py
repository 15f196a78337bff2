"""Sum what the connector counts, in this process or in those of replicas."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

from kv_offload.engines.vllm.connector import KVOffloadConnector
from kv_offload.metrics import KINDS, PREFIX


@contextlib.contextmanager
def counted_stats() -> Iterator[Counter[str]]:
    """Yield a counter that follows `KVOffloadConnector.get_kv_connector_stats` on both sides."""
    totals: Counter[str] = Counter()
    original = KVOffloadConnector.get_kv_connector_stats

    def take(self: KVOffloadConnector) -> Any:
        stats = original(self)
        if stats is not None:
            totals.update({n: v for n, v in stats.data.items() if KINDS[n] != "histogram"})
        return stats

    with mock.patch.object(KVOffloadConnector, "get_kv_connector_stats", take):
        yield totals


def figures(llm: Any) -> dict[str, float]:
    """Return the plugin's counters and gauges as an engine's front end shows them."""
    return {
        metric.name.removeprefix(PREFIX): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(PREFIX) and hasattr(metric, "value")
    }


def totals_by_replica(name: str, replicas: int) -> list[int]:
    """Return a counter of the plugin by replica, as this front end would show it."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    found = [0] * replicas
    for metric in get_metrics_snapshot():
        if metric.name == PREFIX + name:
            found[int(metric.labels["engine"])] = int(metric.value)
    return found
