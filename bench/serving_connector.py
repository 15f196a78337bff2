"""This project's connector with its metrics in a file, readable from another process.

A serving figure counts only beside a proof that the bytes came back, and with the engine core in a
process of its own, what the `LLM` class shows does not have them (see `bench/totals.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_offload.config import load_config
from kv_offload.connector import KVOffloadConnector
from kv_offload.engine_compat import bytes_per_block
from kv_offload.metrics import METRICS

TOTALS_VARIABLE = "KV_OFFLOAD_BENCH_TOTALS"
KINDS = {"pool_bytes": "counter", "ready_bytes": "counter"} | {m.name: m.kind for m in METRICS}
NAMES = tuple(KINDS)


class SharedTotals:
    """Metrics that one process keeps and others read: a mapped file of one float64 per name.

    Beside those of `kv_offload.metrics` there are `pool_bytes`, what the slots of all ranks take,
    and `ready_bytes`, what they may use already.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(np.zeros(len(NAMES)).tobytes())
        self._values: NDArray[np.float64] = np.memmap(path, np.float64, "r+", shape=len(NAMES))

    def __getitem__(self, name: str) -> int:
        return int(self._values[NAMES.index(name)])

    def add(self, data: dict[str, float]) -> None:
        """Take in a connector's stats, in the only process that writes: counters are summed."""
        for name, value in data.items():
            index = NAMES.index(name)
            self._values[index] = value + (self._values[index] if KINDS[name] == "counter" else 0)

    def counters(self) -> dict[str, float]:
        """Return every counter by its name."""
        return {
            name: float(self._values[NAMES.index(name)])
            for name in NAMES
            if KINDS[name] == "counter"
        }


class CountedConnector(KVOffloadConnector):
    """Adds what both halves report to the file that `TOTALS_VARIABLE` names."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._totals = SharedTotals(Path(os.environ[TOTALS_VARIABLE]))
        options = load_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._ready_bytes = 0
        self._slot_bytes = bytes_per_block(kv_cache_config) * options.blocks_per_slot

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Count the slots that this rank got."""
        super().register_kv_caches(kv_caches)
        self._totals.add({"pool_bytes": self.offload_worker.num_slots * self._slot_bytes})

    def get_kv_connector_stats(self) -> Any:
        """Count what goes to the engine."""
        stats = super().get_kv_connector_stats()
        if self.offload_worker is not None:
            ready_bytes = self.offload_worker.capacity().ready_slots * self._slot_bytes
            self._totals.add({"ready_bytes": ready_bytes - self._ready_bytes})
            self._ready_bytes = ready_bytes
        if stats is not None:
            self._totals.add(stats.data)
        return stats
