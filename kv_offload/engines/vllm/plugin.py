"""The entry point that vLLM calls in every process of an engine."""

from __future__ import annotations

from kv_offload.engines.vllm.compat import note_replicas

CONNECTOR = "KVOffloadConnector"


def register() -> None:
    """Make `KVOffloadConnector` known to vLLM's connector factory; a second call does nothing.

    Also has configurations say how many replicas of the engine run on this host. The module of the
    connector is named, not imported: the factory loads it where it is configured.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # The front end is the only process that knows it, and loads nothing else of ours.
    note_replicas()
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR, "kv_offload.engines.vllm.connector", CONNECTOR
        )
