"""The entry point that vLLM calls in every process of an engine."""

from __future__ import annotations

import copy
import logging

from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.patches import install_in_process
from kv_offload.engines.vllm.versions import vllm_version
from kv_offload.errors import UnsupportedError

PREFIX = "kv-offload: "
"""How every line of ours begins, errors included (`kv_offload.errors`)."""
VLLM_LOG = logging.getLogger("vllm.kv_offload")
"""Only children of the logger `vllm` have a handler."""


class _Forward(logging.Handler):
    """Hands records to vLLM's log, each with the name of the plugin in front."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record as if it were logged there. `kv_swap` does not know whose part it is."""
        if VLLM_LOG.isEnabledFor(record.levelno):
            message = record.getMessage()
            if not message.startswith(PREFIX):
                record = copy.copy(record)
                record.msg, record.args = f"{PREFIX}{message}", None
            VLLM_LOG.handle(record)


def register() -> None:
    """Make `KVOffloadConnector` known to vLLM; a second call does nothing.

    Also shows our log in vLLM's, and patches what every process needs. vLLM calls this in engines
    that do not ask for the plugin, too. So a vLLM that is not supported, and lacks what is needed
    here, is an error in its log, and the engine continues: to it our connector has an unknown name.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        _show_log()
        install_in_process()
        if CONNECTOR not in KVConnectorFactory._registry:
            # Imported by vLLM only if it is configured.
            KVConnectorFactory.register_connector(
                CONNECTOR, "kv_offload.engines.vllm.connector", CONNECTOR
            )
    except (ImportError, AttributeError):
        try:
            vllm_version()
        except UnsupportedError as error:
            VLLM_LOG.error("%s", error)
        else:
            raise


def _show_log() -> None:
    for source in map(logging.getLogger, ("kv_offload", "kv_swap")):
        if not any(isinstance(handler, _Forward) for handler in source.handlers):
            source.addHandler(_Forward())
            source.setLevel(logging.INFO)
            # vLLM's logger may reach the root logger too: each line would be there twice.
            source.propagate = False
