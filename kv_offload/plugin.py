"""The entry point that vLLM calls in every process of an engine."""

from __future__ import annotations

CONNECTOR = "KVOffloadConnector"


def register() -> None:
    """Make `KVOffloadConnector` known to vLLM's connector factory; a second call does nothing.

    The module of the connector is named, not imported: the factory loads it where it is configured.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "kv_offload.connector", CONNECTOR)
