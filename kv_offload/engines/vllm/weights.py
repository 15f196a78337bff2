"""When host memory outlives a sleep, and what empties it because the weights may have changed.

vLLM resets the connector for several reasons in the same words: sleep of level 1 and 2, a pause for
a weight update, a user's reset. Only the first leaves the weights alone, so the engine core's own
methods are watched (`patches`), which know the reason.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from kv_offload.engines.vllm.halves import schedulers_of, workers_of_process
from kv_offload.engines.vllm.idle import tell_front_end

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
            if scheduler.contents.weights_change():
                logger.info("kv-offload: host memory emptied: %r may change weights", method)
        tell_front_end(self, schedulers)
    return original(self, method, *args, **kwargs)


def keep_on_sleep(
    original: Callable[..., Any], self: Any, level: int = 1, *args: Any, **kwargs: Any
) -> Any:
    """Run around `EngineCore.sleep`."""
    contents = [scheduler.contents for scheduler in schedulers_of(self)]
    keeping = [content for content in contents if content.keeps_on_sleep]
    if level != 1 or not keeping:
        return original(self, level, *args, **kwargs)
    # If requests must end first, the engine core resets later, in a callback that it adds.
    callbacks = self._idle_state_callbacks
    before = len(callbacks)
    result = _call_kept(keeping, original, self, level, *args, **kwargs)
    for index in range(before, len(callbacks)):
        callbacks[index] = functools.partial(_call_kept, keeping, callbacks[index])
    return result


def _call_kept(
    kept_contents: Sequence[Any], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call what sleeps; host memory outlives the resets that happen meanwhile."""
    for contents in kept_contents:
        contents.falling_asleep = True
    try:
        return call(*args, **kwargs)
    finally:
        for contents in kept_contents:
            contents.falling_asleep = False


def hear_of_weight_loads(core: Any, schedulers: Sequence[Any]) -> None:
    """Ask the ranks whether their models were given weights in another way.

    A rank's own report may come after the reset, and must not empty what is stored since.
    """
    for weight_loads in core.model_executor.collective_rpc(weight_loads_of_rank):
        for scheduler in schedulers:
            scheduler.contents.weights_were_loaded(weight_loads)


def weight_loads_of_rank(_worker: Any) -> dict[int, int]:
    """Return how often this process's model has been given weights, by rank. Runs in the worker."""
    return {rank: n for worker in workers_of_process() for rank, n in worker.weight_loads.items()}
