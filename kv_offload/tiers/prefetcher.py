"""Reads from lower tiers for requests that the engine has queued and not looked up yet."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

from kv_offload.scheduler.core import Core
from kv_offload.scheduler.request import Phase, TrackedRequest
from kv_offload.scheduler.transfers import Transfer
from kv_offload.tiers.promoter import Promoter

WINDOW = 16
"""Maximum queued requests that one step looks at. A remote store is asked for one at a time."""

MAX_AHEAD_SHARE = 4
"""At most one in this many slots of host memory is filled for queued requests. More reads would
evict the blocks of the first ones."""


class Prefetcher:
    """Reads blocks from lower tiers into host memory while their request is queued.

    vLLM looks a request up only when it could run it. That can take seconds, during which a slow
    tier would be idle. Requests are handled in order of arrival. If a read has not ended when the
    engine looks the request up, the request waits for it as for any other.
    """

    def __init__(self, core: Core, promoter: Promoter) -> None:
        self._pool, self._host, self._prefixes = core.engine.pool, core.manager, core.prefixes
        self._statistics = core.statistics
        self._promoter, self._lookups = promoter, core.lookups
        self._queue: deque[TrackedRequest] = deque()
        self._room = 0
        """Slots that this step may still read ahead."""
        self._ahead: dict[TrackedRequest, list[Transfer]] = {}
        """Queued requests and the transfers that read for them; requests can share transfers."""

    def arrived(self, tracked: TrackedRequest) -> None:
        """Consider a request that the engine has just queued."""
        self._queue.append(tracked)

    def plan_step(self) -> None:
        """Begin reads for the first queued requests, within the step's limit of lookups."""
        if self._ahead:
            waiting = Phase.WAITING
            self._ahead = {one: moves for one, moves in self._ahead.items() if one.phase is waiting}
        if not self._queue:
            return  # as in most steps
        ahead = {move for moves in self._ahead.values() for move in moves}
        self._room = self._host.usable_slots // MAX_AHEAD_SHARE - _count_slots(ahead)
        window = [self._queue.popleft() for _ in range(min(WINDOW, len(self._queue)))]
        left = [tracked for tracked in window if not self._is_done(tracked, ahead)]
        self._queue.extendleft(reversed(left))

    def _is_done(self, tracked: TrackedRequest, ahead: set[Transfer]) -> bool:
        """Begin to read for a request; False if the next step must look at it again."""
        if tracked.phase is not Phase.WAITING or not tracked.may_load:
            return True
        wait = tracked.tier_wait
        if wait is None and self._promoter.questions.any_open:
            return False  # answers come in order, and the engine's next question must not wait long
        if self._room <= 0 or self._lookups.is_spent():
            return False
        start_tokens = self._gpu_tokens(tracked) if wait is None else wait.start_tokens
        moves = self._promoter.prefetch(tracked, start_tokens)
        if moves:
            self._ahead[tracked] = moves
            slots = _count_slots({*moves} - ahead)
            ahead.update(moves)
            self._room -= slots
            self._statistics.count("prefetched_slots", slots)
        return moves is not None

    def _gpu_tokens(self, tracked: TrackedRequest) -> int:
        """Return how many tokens of a prompt the engine's own cache has; 0 if that is hard to tell.

        Takes O(log tokens), since the engine evicts the end of a prompt first.
        """
        groups = self._prefixes.groups
        if len(groups) > 1 or groups[0].block_tokens != self._pool.hash_block_size:
            return 0
        hashes, ids, pool = tracked.request.block_hashes, [groups[0].group_id], self._pool
        cached = bisect_left(hashes, True, key=lambda key: not pool.get_cached_block(key, ids))
        return cached * groups[0].block_tokens


def _count_slots(moves: Iterable[Transfer]) -> int:
    return sum(len(move.slots) for move in moves)
