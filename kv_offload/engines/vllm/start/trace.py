"""The file to which an engine records its requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kv_offload.config import OffloadConfig
from kv_offload.config.checks import check_recording
from kv_offload.engines.vllm.start.tiers import replica_index
from kv_offload.simulation.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_recorder(config: OffloadConfig, vllm_config: VllmConfig) -> TraceRecorder | None:
    """Return a recorder of this replica's requests; None without `record_trace`.

    Raises `ConfigError` if the file cannot be created.
    """
    path = _path(config, vllm_config)
    return None if path is None else TraceRecorder(path, config.record_trace_bytes)


def check_trace(config: OffloadConfig, vllm_config: VllmConfig) -> None:
    """Raise `ConfigError` if this replica's file could not be created; creates none."""
    path = _path(config, vllm_config)
    if path is not None:
        check_recording(path)


def _path(config: OffloadConfig, vllm_config: VllmConfig) -> Path | None:
    """Return this replica's file; replicas after the first append `.replica-1` and so on."""
    if config.record_trace is None:
        return None
    replica = replica_index(vllm_config)
    return Path(config.record_trace + (f".replica-{replica}" if replica else ""))
