"""Actions that a front end runs in the engine core, through vLLM's own `collective_rpc`.

No worker has a method with the action's name: `patches.weights.watch_call` intercepts the call.
Every data-parallel replica of the front end receives it.
"""

from __future__ import annotations

import logging
from typing import Any

from kv_offload.engines.vllm.locate import connector_of
from kv_offload.engines.vllm.publish_stats import publish_stats
from kv_offload.errors import UnsupportedError

logger = logging.getLogger(__name__)

PAUSE_STORES = "kv_offload.pause_stores"
RESUME_STORES = "kv_offload.resume_stores"
ACTIONS = frozenset((PAUSE_STORES, RESUME_STORES))


def act(core: Any, action: str) -> str:
    """Run an operator's action between two steps; return `paused` or `running`."""
    connector = connector_of(core)
    if connector is None:
        raise UnsupportedError(f"{action}: this engine has no KVOffloadConnector: configure it")
    paused = action == PAUSE_STORES
    connector.offload_scheduler.pause_stores(paused=paused)
    publish_stats(core)
    state = "paused" if paused else "running"
    logger.info("kv-offload: stores are %s, as an operator requested", state)
    return state
