"""A tier whose jobs are done by the threads of `workers.py`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from kv_swap.tiers.engine import TierCompletion, TierDirection, TierEngine, TierJob
from kv_swap.tiers.mover import Mover
from kv_swap.tiers.workers import Task, start, stop


class ThreadedTier(TierEngine):
    """A tier with a thread for each of its movers, by direction.

    A job is cut into chunks of at most `chunk_slots`. `release` is called by the last thread to
    end: the tier is in nobody's use then.
    """

    def __init__(
        self,
        num_slots: int,
        arena_shape: tuple[int, int],
        movers: Mapping[TierDirection, Sequence[Mover]],
        chunk_slots: int,
        release: Callable[[], None],
    ) -> None:
        arena_slots, slot_bytes = arena_shape
        super().__init__(num_slots, arena_slots)
        self._state, self._threads = start(movers, slot_bytes, chunk_slots, release)
        self._stop = weakref.finalize(self, stop, self._state)

    def submit(self, job: TierJob) -> None:
        """See `TierEngine`."""
        self.check_job(job)
        self._undelivered += 1
        task = Task(job.job_id, job.direction, job.pairs.copy(), tuple(job.names))
        self._state.lanes[job.direction].queue.put(task)

    def poll(self) -> list[TierCompletion]:
        """Return what has ended, in the order of its end."""
        completions = []
        while self._state.done:
            completions.append(self._state.done.popleft())
        self._undelivered -= len(completions)
        return completions

    def wait(self, timeout_seconds: float) -> bool:
        """See `TierEngine`."""
        state = self._state
        with state.ended:
            return state.ended.wait_for(
                lambda: len(state.done) == self._undelivered, timeout_seconds
            )

    def close(self, timeout_seconds: float = 30.0) -> None:
        """See `TierEngine`. Another engine can have the tier once all threads have ended."""
        self._closed = True
        self._stop()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
