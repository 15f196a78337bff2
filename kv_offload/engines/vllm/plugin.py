"""The entry point that vLLM calls in every process of an engine."""

from __future__ import annotations

import copy
import logging

from kv_offload.engines.vllm import CONNECTOR
from kv_offload.engines.vllm.patches import install_in_process
from kv_offload.engines.vllm.versions import vllm_version
from kv_offload.errors import UnsupportedError

PREFIX = "kv-offload: "
"""Prefix of all our log lines, errors included (`kv_offload.errors`)."""
VLLM_LOG = logging.getLogger("vllm.kv_offload")
"""Has a handler, as only children of the logger `vllm` do."""


class _Forward(logging.Handler):
    """Forwards records to vLLM's log, with the plugin's name as a prefix."""

    def emit(self, record: logging.LogRecord) -> None:
        """Forward a record; `kv_swap` does not add the plugin's name itself."""
        if VLLM_LOG.isEnabledFor(record.levelno):
            message = record.getMessage()
            if not message.startswith(PREFIX):
                record = copy.copy(record)
                record.msg, record.args = f"{PREFIX}{message}", None
            VLLM_LOG.handle(record)


def register() -> None:
    """Register `KVOffloadConnector` with vLLM; a second call does nothing.

    Also forwards our log to vLLM's, and installs the patches that every process needs. vLLM calls
    this even in engines that do not use the plugin. So if an unsupported vLLM lacks something
    needed here, this only logs it: the engine continues and does not know our connector's name.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        _show_log()
        install_in_process()
        if CONNECTOR not in KVConnectorFactory._registry:
            # vLLM imports the module only if the connector is configured.
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
            # vLLM's logger may also propagate to the root logger; each line would appear twice.
            source.propagate = False
