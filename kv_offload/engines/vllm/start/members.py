"""What the MultiConnectors around the connector say, and what they say for all their members.

vLLM gives a member its own part of the configuration, and nothing of what stands around it. But the
engine reads the outermost configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kv_offload.config import EXTRA_CONFIG, FILE_KEY, SCHEMA
from kv_offload.config.file import show
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.halves import callers

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

OTHERS_OPTIONS = frozenset({"eviction_policy"})
"""Options of ours that another connector has by the same name: vLLM's `OffloadingConnector`."""


def enclosing_configs() -> tuple[KVTransferConfig, ...]:
    """Return the transfer configurations of the MultiConnectors around the connector, inner first.

    Looks for them on the call stack, while the connector is built.
    """
    return tuple(
        caller._vllm_config.kv_transfer_config
        for caller in callers()
        if isinstance(caller, MultiConnector)
    )


def engine_transfer(
    vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]
) -> KVTransferConfig:
    """Return the transfer configuration that the engine reads: that of the outermost connector."""
    return enclosing[-1] if enclosing else vllm_config.kv_transfer_config


def problems(vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]) -> Iterator[str]:
    """Yield what stands in the way of any engine with these members."""
    for name, where in _misplaced(vllm_config, enclosing).items():
        if name not in OTHERS_OPTIONS:
            yield where
    outermost = engine_transfer(vllm_config, enclosing)
    name = vllm_config.kv_transfer_config.kv_connector
    count = _count_members(outermost.kv_connector_extra_config, name)
    if count > 1:
        yield (
            f"the MultiConnector has {count} members {name}, which would keep the same blocks: "
            "list it once"
        )


def _count_members(extra_config: Mapping[str, Any], name: str | None) -> int:
    return sum(
        (member.get("kv_connector") == name)
        + _count_members(member.get("kv_connector_extra_config", {}), name)
        for member in extra_config.get("connectors", ())
    )


def unread(vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]) -> Iterator[str]:
    """Say what a MultiConnector leaves unread that may be another connector's, with the remedy."""
    misplaced = _misplaced(vllm_config, enclosing)
    return (where for name, where in misplaced.items() if name in OTHERS_OPTIONS)


def _misplaced(vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]) -> dict[str, str]:
    """Return the options of ours beside `connectors`, unless the member has the same value."""
    own = vllm_config.kv_transfer_config.kv_connector_extra_config
    return {
        name: f"{name}: {show(value)} stands beside connectors in the {EXTRA_CONFIG} of the "
        f"MultiConnector, where no member reads it: move it into the {EXTRA_CONFIG} of the member "
        f"{CONNECTOR}"
        for outer in enclosing
        for name, value in outer.kv_connector_extra_config.items()
        if (name in SCHEMA or name == FILE_KEY) and (name not in own or own[name] != value)
    }
