"""How a request ends: what it leaves behind is stored, or it ends because its KV was lost."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from kv_offload.engine import BlockPool, Request
from kv_offload.scheduler.load_jobs import LoadJobs, SynchronousLoad
from kv_offload.scheduler.lookups import Lookups
from kv_offload.scheduler.request import Phase, RequestTable, TrackedRequest
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.stores.leftovers import Leftovers
from kv_offload.scheduler.stores.planner import StorePlanner


@dataclass(eq=False, repr=False)
class Ends:
    """Ends requests. Their loads go on until every rank has reported them."""

    _requests: RequestTable
    _lookups: Lookups
    _loads: LoadJobs
    _stores: StorePlanner
    _leftovers: Leftovers
    _pool: BlockPool
    _statistics: Statistics

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]]) -> None:
        """Plan the stores of what a request leaves behind, just before its blocks are freed."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        cursor, loading = tracked.cursor, tracked.held is not None
        self._end(tracked)
        if cursor is None or loading:
            return
        # Steps in flight are executed before what is planned now is submitted, so all that is
        # computed at their end counts; drafts and placeholders have no hashes.
        end = min(request.num_computed_tokens, request.num_tokens)
        candidates = self._stores.candidates
        if not candidates.is_behind(cursor, end):
            return
        # Blocks that it shares with no other request and no store has pinned are free in a moment.
        own_blocks = sum(self._pool.blocks[b].ref_cnt == 1 for group in block_ids for b in group)
        # The remembered ids: of a group that reads a window the engine's have null blocks where it
        # has moved on, though these blocks may still hold what they held.
        candidates.next_step()
        candidates.examine(cursor, end)
        self._stores.pin_chosen(own_blocks)
        self._statistics.count("deferred_slots", self._leftovers.keep(cursor, end))

    def forget(self, request_id: str) -> None:
        """End a request without storing what it leaves behind."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._end(tracked)

    def lose(self, lost_loads: Set[int], cut_short: int | None = None) -> set[str] | None:
        """Take it that a forward read what these synchronous loads had not brought.

        Returns the requests that have computed with those blocks by now: their own, and all that
        share these blocks or what was computed with them. The engine must end them, and know no
        block by its key any more, before it takes in the output of that forward. Nothing that is on
        its way to host memory becomes readable, and of the requests returned nothing is stored any
        more. None where nothing was lost.

        After the step `cut_short` (see `OffloadWorkerMetadata`) any named block may be one that
        nobody computed, so that is all requests with blocks; none if the engine's own cache has
        been emptied since.

        What they computed in that step and in the one behind it cannot be readable yet: a store
        ends in a later step than the forward whose KV it copies, and `lose` comes first.
        """
        loads = self._loads.running_synchronous(lost_loads)
        step_lost = cut_short is not None and cut_short > self._requests.admissions_at_reset
        if not loads and not step_lost:
            return None
        self._stores.jobs.distrust()
        lost = self._computed_with(loads) if loads else set()
        if step_lost:
            lost |= {tracked for tracked in self._requests if tracked.cursor is not None}
        # An aborted request has left the table, where another may have its name by now.
        alive = [tracked for tracked in lost if tracked.phase is not Phase.ENDED]
        for tracked in alive:
            self._end(tracked)
        self._statistics.count("lost_requests", len(alive))
        return {tracked.request_id for tracked in lost}

    def _computed_with(self, loads: Sequence[SynchronousLoad]) -> set[TrackedRequest]:
        """Return the requests of these loads, and all that have computed with wrong KV since.

        A request shares blocks of those that were admitted before it, and of no others: one that
        was preempted before such a load was planned may still name blocks that the load was given.
        What it has behind a wrong block is wrong, too. One that reads a window may share that
        alone.
        """
        lost = {load.tracked for load in loads}
        wrong = {int(block) for load in loads for block in load.blocks}
        by_cursor = {load.cursor: load.tracked for load in loads}
        first = min(cursor.admission for cursor in by_cursor)
        for tracked in self._requests:
            if tracked.cursor is not None and tracked.cursor.admission > first:
                by_cursor[tracked.cursor] = tracked
        for cursor in sorted(by_cursor, key=lambda cursor: cursor.admission):
            for ids in cursor.block_ids:
                shared = next((at for at, block in enumerate(ids) if block in wrong), None)
                if shared is not None:
                    lost.add(by_cursor[cursor])
                    wrong.update(ids[shared:])
        return lost

    def _end(self, tracked: TrackedRequest) -> None:
        self._lookups.settle(tracked)
        self._requests.end(tracked)
