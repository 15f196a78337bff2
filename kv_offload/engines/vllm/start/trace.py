"""The file that an engine records its requests to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kv_offload.config import OffloadConfig
from kv_offload.config.checks import check_recording
from kv_offload.engines.vllm.start.disk import replica_index
from kv_offload.scheduler.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def find_recorder(config: OffloadConfig, vllm_config: VllmConfig) -> TraceRecorder | None:
    """Return what records this replica's requests; None without `record_trace`.

    Raises `ConfigError` where the file cannot be made.
    """
    path = _path(config, vllm_config)
    return None if path is None else TraceRecorder(path, config.record_trace_bytes)


def check_trace(config: OffloadConfig, vllm_config: VllmConfig) -> None:
    """Raise `ConfigError` where this replica's file could not be made; make none."""
    path = _path(config, vllm_config)
    if path is not None:
        check_recording(path)


def _path(config: OffloadConfig, vllm_config: VllmConfig) -> Path | None:
    """Return this replica's file: those after the first have `.replica-1` and so on after it."""
    if config.record_trace is None:
        return None
    replica = replica_index(vllm_config)
    return Path(config.record_trace + (f".replica-{replica}" if replica else ""))
