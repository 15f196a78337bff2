"""The columns of a result, and the settings of their engines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bench.pool.workload import Share
from bench.serving.shapes import Shape

OFF, PEER, OURS, IN_GPU = "off", "vllm", "kv-offload", "gpu-cache"
PLUGIN_COLUMNS: dict[str, dict[str, Any]] = {
    OURS: {},
    f"{OURS}-lru": {"eviction_policy": "lru"},
    f"{OURS}-packed": {"pack_kv": True},
}
"""Columns of this project, with their options besides `cpu_bytes`; the default has none."""
COLUMNS = (OFF, PEER, *PLUGIN_COLUMNS, IN_GPU)
"""Without offloading, vLLM's OffloadingConnector, this project, and a GPU cache with room for every
prompt, which is an upper bound: no copy can be faster."""
WITHOUT_CONNECTOR = OFF, IN_GPU


@dataclass(frozen=True)
class EngineSettings:
    """The settings of one engine. `column` is one of `COLUMNS`."""

    shape: Shape
    column: str
    model: str = ""
    """The folder of the model's configuration; vLLM finds compiled code by its path."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of this project in addition to those of the column."""
    share: Share | None = None
    """The conversations that the engine serves, if it is one of several replicas."""
    device: str = ""
    """The engine's GPU for CUDA_VISIBLE_DEVICES; empty for the environment's value."""

    @property
    def is_ours(self) -> bool:
        """True if loads are counted and must be proven."""
        return self.column in PLUGIN_COLUMNS

    @property
    def gpu_blocks(self) -> int:
        """Number of blocks in the GPU cache."""
        blocks = self.shape.gpu_blocks
        return blocks + self.shape.batch_blocks if self.column == IN_GPU else blocks

    @property
    def transfer_config(self) -> dict[str, Any] | None:
        """vLLM's `kv_transfer_config`; every connector gets the same host memory."""
        host_bytes = self.shape.host_bytes
        if self.column in WITHOUT_CONNECTOR:
            return None
        if self.column == PEER:
            return {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
            }
        options = PLUGIN_COLUMNS[self.column] | self.options
        return {
            "kv_connector": "KVOffloadConnector",
            "kv_connector_module_path": "kv_offload.engines.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes": host_bytes, **options},
        }
