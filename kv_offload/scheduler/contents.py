"""Whether host memory still holds what its keys say: it is emptied when the weights may change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from kv_offload.cache.manager import CacheManager
from kv_offload.scheduler.stores.leftovers import Leftovers

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Contents:
    """Empties host memory, together with what waits to be stored.

    Running copies end on their own and leave nothing.
    """

    _manager: CacheManager
    _leftovers: Leftovers
    falling_asleep: bool = False
    """Set while the engine resets everything for a sleep that host memory is to outlive."""
    _weights_changed: bool = False
    _weight_loads: dict[int, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Empty host memory; does nothing while `falling_asleep`."""
        if not self.falling_asleep:
            self._empty()

    def weights_change(self) -> bool:
        """Empty host memory, since the weights may be about to change, and at the next reset again.

        Until then the engine's own cache may serve blocks of the old weights, which are stored.
        Returns whether there was anything to forget.
        """
        held = self._manager.slots_in_use > 0
        self._empty()
        self._weights_changed = True
        return held

    def weights_were_loaded(self, weight_loads: Mapping[int, int]) -> None:
        """Hear how often each rank's model has been given weights since the start.

        A count that was heard before, or is older than that, changes nothing: it may come from
        several sides, and with a report that was on its way during a reset.
        """
        news = [r for r, loads in weight_loads.items() if loads > self._weight_loads.get(r, 0)]
        if news:
            self._weight_loads.update({rank: weight_loads[rank] for rank in news})
            if self.weights_change():
                logger.info("kv-offload: host memory emptied: the model was given weights")

    def engine_was_reset(self) -> None:
        """Hear that the engine's own cache is empty."""
        if self._weights_changed:
            self._empty()
            self._weights_changed = False

    def _empty(self) -> None:
        self._manager.reset()
        self._leftovers.drop()
