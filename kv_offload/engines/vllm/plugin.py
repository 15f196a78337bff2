"""The entry point that vLLM calls in every process of an engine."""

from __future__ import annotations

import logging

from kv_offload.engines.vllm.patches import install_in_process

CONNECTOR = "KVOffloadConnector"
VLLM_LOG = logging.getLogger("vllm.kv_offload")
"""Only children of the logger `vllm` have a handler."""


class _Forward(logging.Handler):
    """Hands records to vLLM's log."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as if it were logged there."""
        if VLLM_LOG.isEnabledFor(record.levelno):
            VLLM_LOG.handle(record)


def forward_log(name: str) -> None:
    """Show only in vLLM's log what is logged under `name`. A second call changes nothing.

    vLLM's logger may reach the root logger, so ours must not: each line would be there twice.
    """
    source = logging.getLogger(name)
    if not any(isinstance(handler, _Forward) for handler in source.handlers):
        source.addHandler(_Forward())
        source.setLevel(logging.INFO)
        source.propagate = False


def register() -> None:
    """Make `KVOffloadConnector` known to vLLM's connector factory; a second call does nothing.

    Also shows our log in vLLM's, and patches what every process needs. The module of the connector
    is named, not imported: the factory loads it where it is configured.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in ("kv_offload", "kv_swap"):
        forward_log(name)
    install_in_process()
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            CONNECTOR, "kv_offload.engines.vllm.connector", CONNECTOR
        )
