"""Empties host memory and the lower tiers, for resets by the user and for new weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

from kv_offload.scheduler.core import Core
from kv_offload.scheduler.stores.planner import StorePlanner
from kv_offload.tiers.lower import LowerTiers

logger = logging.getLogger(__name__)


class Resets:
    """Drops all blocks computed so far. Running copies end on their own and leave none."""

    def __init__(self, core: Core, stores: StorePlanner, tiers: LowerTiers) -> None:
        self._manager, self._retention = core.manager, core.retention
        self._requests, self._subscribers = core.requests, core.subscribers
        self._stores, self._tiers = stores, tiers
        self._weight_loads: dict[int, int] = {}
        self._weights_changed = False
        self._keeps_memory = False

    def reset_cache(self) -> None:
        """Empty host memory, except within `kept_over_resets`."""
        if not self._keeps_memory:
            self._empty(weights_changed=False)

    @contextlib.contextmanager
    def kept_over_resets(self) -> Iterator[None]:
        """Keep host memory while the engine resets its caches in order to sleep."""
        self._keeps_memory = True
        try:
            yield
        finally:
            self._keeps_memory = False

    def weights_change(self) -> bool:
        """Drop all blocks because weights may be about to change; return whether there were any.

        The next reset does so again: until then the engine's own cache may serve old blocks.
        """
        self._weights_changed = True
        return self._empty(weights_changed=True)

    def weights_were_loaded(self, weight_loads: Mapping[int, int]) -> None:
        """Apply how often each rank's model was given weights since the start.

        A count that is no higher than the last one changes nothing: it may come late, or twice.
        """
        news = [r for r, loads in weight_loads.items() if loads > self._weight_loads.get(r, 0)]
        if news:
            self._weight_loads.update({rank: weight_loads[rank] for rank in news})
            if self.weights_change():
                logger.info("kv-offload: host memory emptied: the model was given weights")

    def engine_was_reset(self) -> None:
        """Note that the engine's own cache is empty, and that no request has blocks."""
        if self._weights_changed:
            self._empty(weights_changed=True)
            self._weights_changed = False
        self._requests.engine_was_reset()
        for notify in self._subscribers.engine_reset:
            notify()

    def _empty(self, *, weights_changed: bool) -> bool:
        """Drop all blocks and the backlog of stores; return whether there were any blocks."""
        held = self._manager.slots_in_use > 0
        self._retention.drop()
        self._manager.reset()
        for notify in self._subscribers.emptied:
            notify()
        self._stores.forget(weights_changed=weights_changed)
        return self._tiers.clear(weights_changed=weights_changed) or held
