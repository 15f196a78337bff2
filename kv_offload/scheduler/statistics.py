"""What the scheduler's side tells of itself: counters, and gauges that have changed."""

from __future__ import annotations

import time

from kv_offload.cache.manager import CacheManager
from kv_offload.metrics import OffloadStats
from kv_offload.scheduler.leftovers import Leftovers
from kv_offload.scheduler.load_jobs import LoadJobs
from kv_offload.scheduler.steps import StepWatch
from kv_offload.scheduler.stores import StorePlanner

GAUGE_SECONDS = 0.1
"""While requests run gauges are reported no more often."""


class Statistics:
    """Counts events, and reads gauges where they stand."""

    def __init__(
        self,
        manager: CacheManager,
        loads: LoadJobs,
        stores: StorePlanner,
        leftovers: Leftovers,
        watch: StepWatch,
        slot_bytes: int,
    ) -> None:
        self._manager = manager
        self._loads = loads
        self._stores = stores
        self._leftovers = leftovers
        self._watch = watch
        self._slot_bytes = slot_bytes
        self._stats = OffloadStats()
        self._evictions_told = 0
        self._gauges_told: dict[str, float] = {}
        self._gauges_due = 0.0

    def count(self, name: str, amount: float) -> None:
        """Add to the counter `name` of `kv_offload.metrics`."""
        self._stats.count(name, amount)

    def observe(self, name: str, value: float) -> None:
        """Add a value to the histogram `name` of `kv_offload.metrics`."""
        self._stats.observe(name, value)

    @property
    def has_told(self) -> bool:
        """Whether the gauges have been told at least once: until then they read 0."""
        return bool(self._gauges_told)

    def take(self, *, idle: bool) -> OffloadStats | None:
        """Return the counters since the last call, and gauges that changed; None if nothing did.

        Gauges change with every step of decodes, and are read at intervals of seconds. So they are
        looked at every `GAUGE_SECONDS`, or at once where the engine is `idle`.
        """
        evictions = self._manager.evictions
        if evictions != self._evictions_told:
            self.count("evictions", evictions - self._evictions_told)
            self._evictions_told = evictions
        if self._stores.skipped:
            for reason, slots in self._stores.take_skipped().items():
                self.count(f"skipped_{reason}", slots)
        now = time.monotonic()
        if idle or now >= self._gauges_due:
            self._gauges_due = now + GAUGE_SECONDS
            self._add_gauges()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadStats()
        return stats

    def _add_gauges(self) -> None:
        gauges: dict[str, float] = {
            "slots": self._manager.usable_slots,
            "slots_in_use": self._manager.slots_in_use,
            "pool_slots": self._manager.num_slots,
            "slot_bytes": self._slot_bytes,
            "running_loads": self._loads.running,
            "running_stores": self._stores.jobs.running,
            "pinned_blocks": self._stores.jobs.pinned_blocks,
            "waiting_slots": self._leftovers.slots,
            **self._watch.gauges(),
        }
        if gauges != self._gauges_told:
            for name, value in gauges.items():
                if self._gauges_told.get(name) != value:
                    self._stats.gauge(name, value)
            self._gauges_told = gauges
