"""This project's connector with its metrics in a file, readable from another process.

A serving figure counts only beside a proof that the bytes came back, and with the engine core in a
process of its own, what the `LLM` class shows does not have them (see `tests/support/totals.py`).
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

from kv_offload.engines.vllm.connector import KVOffloadConnector
from kv_offload.engines.vllm.versions import bytes_per_block
from kv_offload.metrics import METRICS

TOTALS_VARIABLE = "KV_OFFLOAD_BENCH_TOTALS"
KINDS = {"pool_bytes": "counter", "ready_bytes": "counter"} | {
    m.name: m.kind for m in METRICS if m.kind != "histogram"
}
PLACES = {name: place for place, name in enumerate(KINDS)}


class SharedTotals:
    """Metrics that one process keeps and others read: a mapped file of one double per name.

    Beside those of `kv_offload.metrics` there are `pool_bytes`, what the slots of all ranks take,
    and `ready_bytes`, what they may use already.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(PLACES)))
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def __getitem__(self, name: str) -> int:
        return int(self._values[PLACES[name]])

    def add(self, data: dict[str, Any]) -> None:
        """Take in a connector's stats, in the only process that writes: counters are summed."""
        values = self._values
        for name in data.keys() & PLACES.keys():
            place, value = PLACES[name], data[name]
            values[place] = values[place] + value if KINDS[name] == "counter" else value

    def counters(self) -> dict[str, float]:
        """Return every counter by its name."""
        return {
            name: self._values[place] for name, place in PLACES.items() if KINDS[name] == "counter"
        }


class CountedConnector(KVOffloadConnector):
    """Adds what both halves report to the file that `TOTALS_VARIABLE` names."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._totals = SharedTotals(Path(os.environ[TOTALS_VARIABLE]))
        self._ready_slots = 0
        self._slot_bytes = bytes_per_block(kv_cache_config)

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Count the slots that this rank got."""
        super().register_kv_caches(kv_caches)
        self._totals.add({"pool_bytes": self.offload_worker.num_slots * self._slot_bytes})

    def get_kv_connector_stats(self) -> Any:
        """Count what goes to the engine, in a microsecond or so: it counts as the connector's."""
        stats = super().get_kv_connector_stats()
        if self.offload_worker is not None and self._ready_slots < self.offload_worker.num_slots:
            more_slots = self.offload_worker.capacity().ready_slots - self._ready_slots
            self._totals.add({"ready_bytes": more_slots * self._slot_bytes})
            self._ready_slots += more_slots
        if stats is not None:
            self._totals.add(stats.data)
        return stats
