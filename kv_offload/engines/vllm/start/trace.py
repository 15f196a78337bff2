"""The file that an engine records its requests to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kv_offload.config import OffloadConfig
from kv_offload.engines.vllm.start.disk import replica_index
from kv_offload.scheduler.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_recorder(config: OffloadConfig, vllm_config: VllmConfig) -> TraceRecorder | None:
    """Return what records this replica's requests; None without `record_trace`.

    Data-parallel replicas after the first have `.replica-1` and so on behind the file's name.
    Raises `ConfigError` where the file cannot be made.
    """
    if config.record_trace is None:
        return None
    replica = replica_index(vllm_config)
    path = Path(config.record_trace + (f".replica-{replica}" if replica else ""))
    return TraceRecorder(path, config.record_trace_bytes)
