"""Empties host memory when vLLM is asked for a call on the workers that may change weights.

vLLM resets the connector for several reasons in the same words: sleep of level 1 and 2, a pause for
a weight update, a user's reset. So the engine core's own methods are watched, which know the
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kv_offload.engines.vllm.front_end import tell_front_end
from kv_offload.engines.vllm.halves import schedulers_of

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
"""Methods that vLLM's front ends call on the workers and that change no weight.

`checkpoint_prepare` and `checkpoint_restore` concern what ranks share with each other. Front ends
do not call these by `collective_rpc`: LoRA adapters, sleep, profiles, health, sharded states."""


def may_change_weights(method: str | Callable[..., Any]) -> bool:
    """Tell whether a call on the workers may change weights; functions and unknown names may."""
    return not isinstance(method, str) or method not in KEEPS_WEIGHTS


def watch_call(
    original: Callable[..., Any], self: Any, method: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run around `EngineCore.collective_rpc`."""
    if may_change_weights(method):
        schedulers = schedulers_of(self)
        for scheduler in schedulers:
            if scheduler.weights_change():
                logger.info("kv-offload: host memory emptied: %r may change weights", method)
        tell_front_end(self, schedulers)
    return original(self, method, *args, **kwargs)
