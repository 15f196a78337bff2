"""What is compared, and what an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from bench.serving.shapes import Shape

OURS = "kv-offload"
PACKED = "kv-offload-packed"
PLUGINS = (OURS, PACKED)
"""This project, whose loads are counted and must be proven."""
LIMIT = "limit"
"""No offloading, and a GPU cache for everything that conversations ever use again."""
NO_PEERS = ("off", *PLUGINS, LIMIT)
"""Engines that must not fail: without offloading, or with this project."""
SERVER_STEP_TOKENS = 8192
"""What `vllm serve` computes in a step at most, by default on a GPU with 70 GiB or more. An engine
in one process computes twice as many."""


@dataclass(frozen=True)
class Connector:
    """A connector by its name in vLLM, and the option that says how much host memory it takes."""

    name: str
    size_option: str = "cpu_bytes_to_use"
    module: str | None = None
    """Where it is, if vLLM does not know."""
    first_tokens: int = 1
    """How many tokens to ask for where prompts are to be stored."""
    options: dict[str, Any] = field(default_factory=dict)
    """What it is always configured with, besides."""


_PLUGIN = Connector("KVOffloadConnector", "cpu_bytes", "kv_offload.engines.vllm.connector")
CONNECTORS = {
    "off": None,
    OURS: _PLUGIN,
    PACKED: replace(_PLUGIN, options={"pack_kv": True}),
    "vllm": Connector("OffloadingConnector"),
    # Stores what a request has computed when its next token is scheduled, so of a request with one
    # token nothing but what earlier steps computed.
    "vllm-simple": Connector("SimpleCPUOffloadConnector", first_tokens=4),
}


@dataclass(frozen=True)
class EngineSettings:
    """What one engine is started with. `connector` is one of `CONNECTORS`, or `LIMIT`."""

    shape: Shape
    connector: str
    model: str = ""
    """The folder of the model's configuration: what was compiled is found again under its path."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of this project."""
    step_tokens: int | None = None
    """Computed in a step at most; None leaves it to vLLM."""

    @property
    def is_ours(self) -> bool:
        """Whether loads are counted, and must be proven."""
        return self.connector in PLUGINS

    @property
    def offloading(self) -> Connector | None:
        """The connector; None without offloading."""
        return CONNECTORS.get(self.connector)

    @property
    def cache_blocks(self) -> int:
        """Blocks of the GPU's cache: `gpu_blocks`, or of the limit as many as are ever used."""
        return self.shape.blocks_ever_used if self.connector == LIMIT else self.shape.gpu_blocks

    @property
    def transfer_config(self) -> dict[str, Any] | None:
        """vLLM's `kv_transfer_config`; every connector gets the same host memory."""
        offloading = self.offloading
        if offloading is None:
            return None
        options = self.options if self.is_ours else {}
        return {
            "kv_connector": offloading.name,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                offloading.size_option: self.shape.host_bytes,
                **options,
                **offloading.options,
            },
            **({"kv_connector_module_path": offloading.module} if offloading.module else {}),
        }
