"""Empties host memory on calls that may change weights; keeps it over a sleep if configured.

vLLM resets the connector in the same way for a sleep of level 1 or 2, a pause for a weight update,
and a user's reset. Only the engine core's own methods know the reason, so these are wrapped.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kv_offload.engines.vllm.actions import ACTIONS, act
from kv_offload.engines.vllm.locate import connector_of
from kv_offload.engines.vllm.patches.reset_prefix_cache import settle
from kv_offload.engines.vllm.publish_stats import publish_stats

if TYPE_CHECKING:
    from kv_offload.scheduler.scheduler import OffloadScheduler

logger = logging.getLogger(__name__)

KEEPS_WEIGHTS = frozenset(
    {
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "release_late_interaction_query_cache",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "update_max_model_len",
    }
)
"""Methods that vLLM's front ends call on workers and that change no weights.

`checkpoint_prepare` and `checkpoint_restore` handle state that ranks share with each other. Front
ends do not use `collective_rpc` for LoRA adapters, sleep, profiles, health or sharded states."""


def may_change_weights(method: str | Callable[..., Any]) -> bool:
    """Return whether a call on the workers may change weights; functions and unknown names may."""
    return not isinstance(method, str) or method not in KEEPS_WEIGHTS


def watch_call(
    original: Callable[..., Any], self: Any, method: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `EngineCore.collective_rpc`."""
    if isinstance(method, str) and method in ACTIONS:
        return [act(self, method)]
    if may_change_weights(method):
        connector = connector_of(self)
        if connector is not None:
            offload = connector.offload_scheduler
            was_settled = offload.tiers.is_settled
            if offload.resets.weights_change():
                logger.info("kv-offload: host memory emptied: %r may change weights", method)
            if was_settled:  # otherwise a trainer would wait for a dead disk at every tensor
                settle(self, offload)
        publish_stats(self)
    return original(self, method, *args, **kwargs)


def keep_on_sleep(
    original: Callable[..., Any], self: Any, level: int = 1, *args: Any, **kwargs: Any
) -> Any:
    """Run around `EngineCore.sleep`. Level 1 changes no weights."""
    offload = getattr(connector_of(self), "offload_scheduler", None)
    if level != 1 or offload is None or not offload.config.keep_on_sleep:
        return original(self, level, *args, **kwargs)
    # If requests must end first, the engine core adds a callback, which resets later.
    callbacks = self._idle_state_callbacks
    before = len(callbacks)
    result = _call_kept(offload, original, self, level, *args, **kwargs)
    for index in range(before, len(callbacks)):
        callbacks[index] = functools.partial(_call_kept, offload, callbacks[index])
    return result


def _call_kept(
    offload: OffloadScheduler, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `call`, which puts the engine to sleep; host memory survives the resets in it."""
    with offload.resets.kept_over_resets():
        return call(*args, **kwargs)
