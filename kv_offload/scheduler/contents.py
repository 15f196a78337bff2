"""Whether what is kept still holds what its keys say: it is not where the weights may change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

logger = logging.getLogger(__name__)


class Forget(Protocol):
    """Forgets all that is kept; returns whether there was anything."""

    def __call__(self, *, weights_changed: bool) -> bool:
        """Forget it for a reset, or because the weights may have changed."""


@dataclass(eq=False, repr=False)
class Contents:
    """Says when all that is kept must be forgotten."""

    _forget: Forget
    falling_asleep: bool = False
    """Set while the engine resets everything for a sleep that host memory is to outlive."""
    _weights_changed: bool = False
    _weight_loads: dict[int, int] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all for a reset; does nothing while `falling_asleep`."""
        if not self.falling_asleep:
            self._forget(weights_changed=False)

    def weights_change(self) -> bool:
        """Forget all, since the weights may be about to change, and at the next reset again.

        Until then the engine's own cache may serve blocks of the old weights, which are stored.
        Returns whether there was anything to forget.
        """
        self._weights_changed = True
        return self._forget(weights_changed=True)

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
            self._forget(weights_changed=True)
            self._weights_changed = False
