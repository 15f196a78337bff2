"""Reads the MultiConnectors around the connector, and the settings for all their members.

vLLM gives each member only its own part of the configuration, but the engine reads the outermost
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kv_offload.config import EXTRA_CONFIG, FILE_KEY, SCHEMA, SECTIONS
from kv_offload.config.file import show
from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.locate import callers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OTHERS_OPTIONS = frozenset({"eviction_policy"})
"""Options of ours that vLLM's `OffloadingConnector` has too."""


def enclosing_connectors() -> tuple[MultiConnector, ...]:
    """Return the MultiConnectors around the connector, innermost first.

    Must be called while the connector is being built, since it finds them on the call stack.
    """
    return tuple(caller for caller in callers() if isinstance(caller, MultiConnector))


def is_asked_of_member() -> bool:
    """Return whether a MultiConnector is asking its members' classes, before it builds them."""
    return any(isinstance(cls, type) and issubclass(cls, MultiConnector) for cls in callers("cls"))


def served_by_peer_connector(
    connector: Any, enclosing: Sequence[MultiConnector], request_id: str
) -> bool:
    """Return whether a member that is asked before this connector loads a request's tokens.

    Called while the MultiConnectors ask this connector. The other member may have answered in an
    earlier step.
    """
    places = _places(connector, enclosing, request_id)
    return any(chosen is not None and chosen < own for own, chosen in places)


def is_chosen(connector: Any, enclosing: Sequence[MultiConnector], request_id: str) -> bool:
    """Return whether this connector is the member chosen to load a request's tokens."""
    return all(chosen == own for own, chosen in _places(connector, enclosing, request_id))


def _places(
    connector: Any, enclosing: Sequence[MultiConnector], request_id: str
) -> Iterator[tuple[int, int | None]]:
    """Yield, per MultiConnector, the index of our member, and of the one that loads or None."""
    for outer in enclosing:
        yield outer._connectors.index(connector), outer._requests_to_connector.get(request_id)
        connector = outer


def engine_transfer(
    vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]
) -> KVTransferConfig:
    """Return the transfer configuration that the engine reads: the outermost connector's."""
    return enclosing[-1] if enclosing else vllm_config.kv_transfer_config


def asks_for_us(transfer: KVTransferConfig | dict[str, Any] | None) -> bool:
    """Return whether a configuration contains our connector, alone or in a MultiConnector."""
    return any(own_parts(transfer))


def own_parts(
    transfer: KVTransferConfig | dict[str, Any] | None,
) -> Iterator[tuple[KVTransferConfig, ...]]:
    """Yield each configuration of our connector, followed by the enclosing ones, innermost first.

    In arguments, `transfer` may be a dictionary, which vLLM turns into a configuration.
    """
    if transfer is None:
        return
    config: Any = KVTransferConfig(**transfer) if isinstance(transfer, dict) else transfer
    if config.kv_connector == CONNECTOR:
        yield (config,)
    if config.kv_connector == "MultiConnector":
        for member in config.kv_connector_extra_config.get("connectors", []):
            for parts in own_parts({"engine_id": config.engine_id, **member}):
                yield (*parts, config)


def problems(vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]) -> Iterator[str]:
    """Yield the reasons why an engine with these members cannot be served."""
    for name, where in _misplaced(vllm_config, enclosing).items():
        if name not in OTHERS_OPTIONS:
            yield where
    count = len(list(own_parts(engine_transfer(vllm_config, enclosing))))
    if count > 1:
        yield (
            f"the MultiConnector has {count} members {CONNECTOR}, which would keep the same "
            "blocks: list it once"
        )


def unread(vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]) -> Iterator[str]:
    """Return warnings about options that a MultiConnector ignores and another member may read."""
    misplaced = _misplaced(vllm_config, enclosing)
    return (where for name, where in misplaced.items() if name in OTHERS_OPTIONS)


def _misplaced(vllm_config: VllmConfig, enclosing: Sequence[KVTransferConfig]) -> dict[str, str]:
    """Return our options next to `connectors`, except those with the member's own value."""
    own = vllm_config.kv_transfer_config.kv_connector_extra_config
    return {
        name: f"{name}: {show(value)} is next to connectors in the {EXTRA_CONFIG} of the "
        f"MultiConnector, where no member reads it: move it into the {EXTRA_CONFIG} of the member "
        f"{CONNECTOR}"
        for outer in enclosing
        for name, value in outer.kv_connector_extra_config.items()
        if (name in SCHEMA or name in (*SECTIONS, FILE_KEY))
        and (name not in own or own[name] != value)
    }
