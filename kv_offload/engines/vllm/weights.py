"""When host memory outlives a sleep, and what empties it because the weights may have changed.

vLLM resets the connector for several reasons in the same words: sleep of level 1 and 2, a pause for
a weight update, a user's reset. Only the first leaves the weights alone, so the engine core's own
methods are watched (`patches`), which know the reason.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kv_offload.engines.vllm.halves import schedulers_of, workers_of_process

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

`checkpoint_prepare` and `checkpoint_restore` concern what ranks share with each other. Others are
named without `collective_rpc`: those of LoRA adapters, sleep, profiles, health, sharded states."""


def may_change_weights(method: str | Callable[..., Any]) -> bool:
    """Tell whether a call on the workers may change weights; functions and unknown names may."""
    return not isinstance(method, str) or method not in KEEPS_WEIGHTS


def watched_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineCore.collective_rpc`."""

    # vLLM converts the arguments of a call by the signature of the method, hence `wraps`.
    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if may_change_weights(method):
            for scheduler in schedulers_of(self):
                if scheduler.contents.weights_change():
                    logger.info("kv-offload: host memory emptied: %r may change weights", method)
        return original(self, method, *args, **kwargs)

    return collective_rpc


def watched_sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `EngineCore.sleep`."""

    @functools.wraps(original)
    def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        contents = [scheduler.contents for scheduler in schedulers_of(self)]
        keeping = [content for content in contents if content.keeps_on_sleep]
        if level != 1 or not keeping:
            return original(self, level, *args, **kwargs)
        # Where requests must end first, the engine core resets later, in a callback that it adds.
        callbacks = getattr(self, "_idle_state_callbacks", [])
        before = len(callbacks)
        with _kept(keeping):
            result = original(self, level, *args, **kwargs)
        for index in range(before, len(callbacks)):
            callbacks[index] = functools.partial(_call_kept, keeping, callbacks[index])
        return result

    return sleep


def _call_kept(kept_contents: Sequence[Any], callback: Callable[..., Any], *args: Any) -> Any:
    with _kept(kept_contents):
        return callback(*args)


def hear_of_weight_loads(core: Any, schedulers: Sequence[Any]) -> None:
    """Ask the ranks whether their models were given weights in another way.

    A report of theirs may come later than a reset, and is not to empty what follows it.
    """
    for weight_loads in core.model_executor.collective_rpc(weight_loads_of_rank):
        for scheduler in schedulers:
            scheduler.contents.weights_were_loaded(weight_loads)


def weight_loads_of_rank(_worker: Any) -> dict[int, int]:
    """Return how often this process's model has been given weights, by rank. Runs in the worker."""
    weight_loads: dict[int, int] = {}
    for worker in workers_of_process():
        weight_loads.update(worker.weight_loads)
    return weight_loads


@contextlib.contextmanager
def _kept(kept_contents: Sequence[Any]) -> Iterator[None]:
    """Have host memory outlive the resets of a sleep that happen meanwhile."""
    for contents in kept_contents:
        contents.falling_asleep = True
    try:
        yield
    finally:
        for contents in kept_contents:
            contents.falling_asleep = False
