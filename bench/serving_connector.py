"""This project's connector with its byte counts in a file, readable from another process.

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

TOTALS_VARIABLE = "KV_OFFLOAD_BENCH_TOTALS"
NAMES = ("loaded_bytes", "stored_bytes", "pool_bytes", "ready_bytes")


class SharedTotals:
    """Sums that one process adds to and others read: a mapped file of one float64 per name.

    `pool_bytes` is what the slots of all ranks take, `ready_bytes` what they may use already.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(np.zeros(len(NAMES)).tobytes())
        self._values: NDArray[np.float64] = np.memmap(path, np.float64, "r+", shape=len(NAMES))

    def __getitem__(self, name: str) -> int:
        return int(self._values[NAMES.index(name)])

    def add(self, data: dict[str, float]) -> None:
        """Add the named sums of a connector's stats, from the only process that writes."""
        for index, name in enumerate(NAMES):
            self._values[index] += data.get(name, 0)


class CountedConnector(KVOffloadConnector):
    """Adds what the worker's half reports to the file that `TOTALS_VARIABLE` names."""

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
