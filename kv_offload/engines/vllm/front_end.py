"""Tells vLLM's front end figures that have changed while the engine makes no step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kv_offload.scheduler.scheduler import OffloadScheduler

logger = logging.getLogger(__name__)


def tell_front_end(core: Any, schedulers: Sequence[OffloadScheduler]) -> None:
    """Send the figures of our schedulers to the front end of their vLLM engine core.

    vLLM asks connectors for figures at the end of a step, and an idle engine makes none: without
    this its gauges would go on showing what a reset has emptied. Called between two steps, on the
    scheduler's thread. An engine in its user's process has no front end; its next step tells. An
    error is only logged, because what the caller was asked for is done.
    """
    outputs = getattr(core, "output_queue", None)
    if outputs is None:
        return
    try:
        from vllm.v1.engine import EngineCoreOutputs

        engine_scheduler = core.scheduler
        for scheduler in schedulers:
            stats = _stats_of(engine_scheduler.get_kv_connector(), scheduler)
            made = None if stats is None else engine_scheduler.make_stats(kv_connector_stats=stats)
            if made is not None:
                outputs.put_nowait((0, EngineCoreOutputs(scheduler_stats=made)))
    except Exception:
        logger.exception("kv-offload: metrics stand still until the engine's next step")


def _stats_of(connector: Any, scheduler: OffloadScheduler) -> Any:
    """Return our scheduler's figures as the engine's connector, which may enclose ours, would."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats

    from kv_offload.engines.vllm.metrics import ConnectorStats

    if getattr(connector, "offload_scheduler", None) is scheduler:
        return ConnectorStats.of(scheduler.take_stats(at_once=True))
    for member in getattr(connector, "_connectors", ()):
        stats = _stats_of(member, scheduler)
        if stats is not None:
            return MultiKVConnectorStats(data={type(member).__name__: stats})
    return None
