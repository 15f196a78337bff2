"""Requests and GPU blocks that copies hold. The engine asks before it preempts, resets or rests.

This is a view of the owners; it has no state.
"""

from __future__ import annotations

from kv_offload.scheduler.core import Core
from kv_offload.scheduler.effects import PendingEffects


class InFlight:
    """Answers from the tables of requests and transfers. Requests are named by their ids."""

    def __init__(self, core: Core, effects: PendingEffects) -> None:
        self._requests, self._transfers = core.requests, core.transfers
        self._effects = effects

    @property
    def awaits_ranks(self) -> bool:
        """True while some rank has not reported the end of a transfer."""
        return self._transfers.any_running

    @property
    def pinned_blocks(self) -> set[int]:
        """GPU blocks that stores pin."""
        return set(self._transfers.pinned())

    @property
    def holds_idle_blocks(self) -> bool:
        """True if some GPU block would be free but for a store."""
        return self._transfers.holds_idle_blocks

    @property
    def num_requests(self) -> int:
        """Number of requests that were looked up and have not ended."""
        return len(self._requests)

    @property
    def loading(self) -> set[str]:
        """Requests with an asynchronous load that has not ended; some may have ended themselves."""
        return self._transfers.loading_requests()

    @property
    def abandoned(self) -> set[str]:
        """Ended requests whose load has not ended: the engine still holds their blocks."""
        return {name for name in self.loading if self._requests.get(name) is None}

    @property
    def has_loaded(self) -> bool:
        """True while the engine has not taken the end of some asynchronous load."""
        return self._effects.has_loaded

    @property
    def waiting(self) -> set[str]:
        """Requests that may wait for a load, or for their turn after it."""
        return {tracked.request_id for tracked in self._requests if tracked.loaded is not None}

    @property
    def loaded(self) -> set[str]:
        """Requests whose loads have ended and that have not been scheduled since."""
        return {tracked.request_id for tracked in self._requests if tracked.is_loaded}
