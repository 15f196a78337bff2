"""Sends changed figures to vLLM's front end while the engine runs no step."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def publish_stats(core: Any) -> None:
    """Send the plugin's figures to the front end of a vLLM engine core, between two steps.

    vLLM asks connectors for figures only at the end of a step. An engine in its user's process has
    no front end; its next step sends them. Errors are only logged: the caller's own work is done.
    """
    outputs = getattr(core, "output_queue", None)
    if outputs is None:
        return
    try:
        from vllm.v1.engine import EngineCoreOutputs

        stats = _stats_of(core.scheduler.get_kv_connector())
        made = None if stats is None else core.scheduler.make_stats(kv_connector_stats=stats)
        if made is not None:
            outputs.put_nowait((0, EngineCoreOutputs(scheduler_stats=made)))
    except Exception:
        logger.exception("kv-offload: metrics are not updated until the engine's next step")


def _stats_of(connector: Any) -> Any:
    """Return our figures as those of the engine's connector, which may enclose ours."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

    from kv_offload.engines.vllm.metrics import ConnectorStats

    scheduler = getattr(connector, "offload_scheduler", None)
    if scheduler is not None:
        return ConnectorStats.of(scheduler.take_stats(at_once=True))
    found = {type(m).__name__: _stats_of(m) for m in getattr(connector, "_connectors", ())}
    members = {name: stats for name, stats in found.items() if stats is not None}
    return MultiKVConnectorStats(data=members) if members else None
