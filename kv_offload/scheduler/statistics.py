"""Metrics of the scheduler's side: counters, and gauges that have changed."""

from __future__ import annotations

import time
from collections.abc import Callable

from kv_offload.cache.manager import CacheManager
from kv_offload.metrics import OffloadStats, SkipReason

GAUGE_SECONDS = 0.1
"""Minimum time between two reports of gauges while requests run."""


class Statistics(OffloadStats):
    """Counts events and reports gauges; `read_gauges` returns their current values by name."""

    def __init__(self, manager: CacheManager, read_gauges: Callable[[], dict[str, float]]) -> None:
        super().__init__()
        self._manager = manager
        self._read_gauges = read_gauges
        self._reported = {"evictions": 0, "stored_slots": 0}
        self._reported_gauges: dict[str, float] = {}
        self._gauges_due = 0.0

    def skipped(self, reason: SkipReason, slots: int) -> None:
        """Count full slots that were not stored, by reason."""
        self.count(f"skipped_{reason}", slots)

    @property
    def has_reported(self) -> bool:
        """True once the gauges have been reported; until then they read 0."""
        return bool(self._reported_gauges)

    def take(self, *, idle: bool = False) -> OffloadStats | None:
        """Return the counters since the last call, and gauges that changed; None if nothing did.

        Gauges change in every step of decodes, but are scraped at intervals of seconds, so they are
        read every `GAUGE_SECONDS`, or at once if the engine is `idle`.
        """
        manager = self._manager
        counted = {"evictions": manager.evictions, "stored_slots": manager.stored_slots}
        for name, total in counted.items():
            self.count(name, total - self._reported[name])
        self._reported = counted
        now = time.monotonic()
        if idle or now >= self._gauges_due:
            self._gauges_due = now + GAUGE_SECONDS
            gauges = self._read_gauges()
            for name, value in gauges.items():
                if self._reported_gauges.get(name) != value:
                    self.gauge(name, value)
            self._reported_gauges = gauges
        return super().take()
