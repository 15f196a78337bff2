"""When host memory outlives a sleep, and what empties it because the weights may have changed.

vLLM resets the connector for several reasons in the same words: sleep of level 1 and 2, a pause for
a weight update, a user's reset. Only the first leaves the weights alone, so the engine core's own
methods are watched, which know the reason.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kv_offload.engines.vllm.compat import halves, logger
from kv_offload.errors import UnsupportedError

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


def watch_weights() -> None:
    """Have every engine core tell the plugin of sleep and of calls that may change weights.

    Host memory is emptied before a call on the workers that is not known to leave weights alone,
    and once more when the engine's own cache is reset after it, also where that reset does not name
    the connector. Each reset also asks the ranks whether their models were given weights in another
    way. With `keep_on_sleep` host memory is kept in the reset that belongs to `sleep(level=1)`. A
    second call replaces nothing.
    """
    from vllm.v1.engine.core import EngineCore

    if getattr(EngineCore.sleep, "_kv_offload_watches", False):
        return
    EngineCore.sleep = _watched_sleep(EngineCore.sleep)
    EngineCore.collective_rpc = _watched_rpc(EngineCore.collective_rpc)
    EngineCore.reset_prefix_cache = _watched_reset(EngineCore.reset_prefix_cache)


def check_keep_on_sleep() -> None:
    """Raise `UnsupportedError` where a change of weights could pass unseen.

    Must be called while the engine core builds its scheduler: it is looked for on the call stack.
    """
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    problem = None
    if "level" not in inspect.signature(EngineCore.sleep).parameters:
        problem = "this vLLM does not tell the level of a sleep"
    elif "method" not in inspect.signature(EngineCore.collective_rpc).parameters:
        problem = "this vLLM does not tell which method is called on the workers"
    else:
        core = _find_on_stack(EngineCore)
        if not isinstance(core, EngineCoreProc):
            problem = (
                "the engine core runs in the process of its user, who can change weights without a "
                "call that the plugin sees; set VLLM_ENABLE_V1_MULTIPROCESSING=1"
            )
    if problem is not None:
        raise UnsupportedError(
            f"keep_on_sleep is true, but {problem}, or leave keep_on_sleep at false"
        )


def _find_on_stack(kind: type) -> Any | None:
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, kind):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


def may_change_weights(method: str | Callable[..., Any]) -> bool:
    """Tell whether a call on the workers may change weights; functions and unknown names may."""
    return not isinstance(method, str) or method not in KEEPS_WEIGHTS


def weight_loads_of_rank(_worker: Any) -> dict[int, int]:
    """Return how often this process's model has been given weights, by rank. Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    weight_loads: dict[int, int] = {}
    for worker in halves(get_kv_transfer_group(), "offload_worker"):
        weight_loads.update(worker.weight_loads)
    return weight_loads


def _schedulers(core: Any) -> list[Any]:
    """Return our schedulers in an engine core: none while it is built."""
    scheduler = getattr(core, "scheduler", None)
    connector = None if scheduler is None else scheduler.get_kv_connector()
    return list(halves(connector, "offload_scheduler"))


def _watched_rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    # vLLM converts the arguments of a call by the signature of the method, hence `wraps`.
    @functools.wraps(original)
    def collective_rpc(self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if may_change_weights(method):
            for scheduler in _schedulers(self):
                if scheduler.contents.weights_change():
                    logger.info("kv-offload: host memory emptied: %r may change weights", method)
        return original(self, method, *args, **kwargs)

    return collective_rpc


def _watched_reset(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reset_prefix_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        schedulers = _schedulers(self)
        if schedulers:
            # A report may come later than the reset, and is not to empty what follows it.
            for weight_loads in self.model_executor.collective_rpc(weight_loads_of_rank):
                for scheduler in schedulers:
                    scheduler.contents.weights_were_loaded(weight_loads)
        done = original(self, *args, **kwargs)
        if done:
            for scheduler in schedulers:
                scheduler.contents.engine_was_reset()
        return done

    return reset_prefix_cache


def _watched_sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def sleep(self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        keeping = [
            scheduler for scheduler in _schedulers(self) if scheduler.contents.keeps_on_sleep
        ]
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

    sleep._kv_offload_watches = True  # type: ignore[attr-defined]
    return sleep


def _call_kept(schedulers: Sequence[Any], callback: Callable[..., Any], *args: Any) -> Any:
    with _kept(schedulers):
        return callback(*args)


@contextlib.contextmanager
def _kept(schedulers: Sequence[Any]) -> Iterator[None]:
    for scheduler in schedulers:
        scheduler.contents.falling_asleep = True
    try:
        yield
    finally:
        for scheduler in schedulers:
            scheduler.contents.falling_asleep = False
