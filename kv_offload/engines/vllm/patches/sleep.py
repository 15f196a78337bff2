"""Has host memory outlive a sleep of level 1, which changes no weights, if the user wants it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kv_offload.engines.vllm.halves import schedulers_of

if TYPE_CHECKING:
    from kv_offload.scheduler.scheduler import OffloadScheduler


def keep_on_sleep(
    original: Callable[..., Any], self: Any, level: int = 1, *args: Any, **kwargs: Any
) -> Any:
    """Run around `EngineCore.sleep`."""
    keeping = [half for half in schedulers_of(self) if half.config.keep_on_sleep]
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
    keeping: Sequence[OffloadScheduler], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call what sleeps; host memory outlives the resets that happen meanwhile."""
    for offload in keeping:
        offload.fall_asleep(asleep=True)
    try:
        return call(*args, **kwargs)
    finally:
        for offload in keeping:
            offload.fall_asleep(asleep=False)
