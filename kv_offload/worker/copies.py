"""A rank's copies that no forward waits for: stores and asynchronous loads.

Stores are queued at the end of a step and submitted at the start of the next one. Nothing may write
a source block until the store has ended on all ranks, so the scheduler pins it.

The request of an asynchronous load waits in vLLM's queue until the load has ended. Until then no
forward reads or writes the blocks that the load fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.packing.samples import TileSampler
from numpy.typing import NDArray

from kv_offload.messages import LoadJob, Outcome, Pairs, StoreJob
from kv_offload.worker.jobs import RankJobs


class Stores:
    """Stores that wait for the start of a step, and running ones.

    `sampler` samples packed slots, if any.
    """

    def __init__(self, jobs: RankJobs) -> None:
        self._jobs = jobs
        self.sampler: TileSampler | None = None
        self._queued: deque[StoreJob] = deque()
        # By job: this rank's pairs, and the index of the first one among all pairs of the job.
        self._running: dict[int, tuple[int, Pairs]] = {}

    def queue(self, jobs: Iterable[StoreJob]) -> None:
        """Keep jobs for the start of the next step."""
        self._queued.extend(jobs)

    def fail(self, jobs: Iterable[StoreJob]) -> None:
        """Report jobs that could not be queued as failed."""
        for job in jobs:
            self._jobs.end(job.job_id, Outcome.FAILED)

    def submit(self) -> None:
        """Start the queued stores; on the device, the copies wait for all compute queued so far."""
        while self._queued:
            job = self._queued.popleft()
            part = self._jobs.sharing.own_part(job)
            pairs = job.pairs[part]
            if not len(pairs):
                self._jobs.end(job.job_id, Outcome.OK)
                continue
            self._running[job.job_id] = part.start, pairs
            error = self._jobs.start(SwapJob(job.job_id, Direction.STORE, pairs))
            if error is not None:
                self._jobs.log.error("%s", error)
                del self._running[job.job_id]
                self._jobs.end(job.job_id, Outcome.FAILED)

    def ended(self, done: Completion) -> None:
        """Process the completion of a store; blocks that do not fit their slots were refused."""
        first, pairs = self._running.pop(done.job_id)
        if done.error is not None:
            self._jobs.end(done.job_id, Outcome.FAILED)
            return
        refused = tuple(first + row for row in done.refused_rows)
        self._jobs.end(done.job_id, Outcome.OK, refused)
        if self.sampler is not None:
            # No copy writes these slots before the report. Slots of refused blocks hold garbage.
            slots = np.delete(pairs[:, 1], done.refused_rows) if refused else pairs[:, 1]
            self._count(self.sampler, slots)

    def _count(self, sampler: TileSampler, slots: NDArray[np.int32]) -> None:
        """Sample some tiles of slots that were just packed, and count the results."""
        found = sampler.sample(self._jobs.require_transfer().slots(), slots)
        self._jobs.stats.count("sampled_tiles", found.tiles)
        self._jobs.stats.count("sampled_escapes", found.escapes)
        self._jobs.stats.count("sampled_raw_tiles", found.raw_tiles)


class Loads:
    """Asynchronous loads of this step that have not started, and running ones."""

    def __init__(self, jobs: RankJobs) -> None:
        self._jobs = jobs
        self._to_start: deque[LoadJob] = deque()
        self._running: dict[int, LoadJob] = {}

    def take(self, jobs: Iterable[LoadJob]) -> None:
        """Accept the loads of a step; unstarted loads of an earlier step fail."""
        self.fail()
        self._to_start = deque(jobs)

    def start(self, *, after_compute: bool) -> None:
        """Start the loads of this step that have not been started; see `SwapJob.after_compute`."""
        while self._to_start:
            job = self._to_start.popleft()
            if job.incomplete:
                self._fail(job)
                continue
            self._running[job.job_id] = job
            swap = SwapJob(job.job_id, Direction.LOAD, job.pairs, after_compute=after_compute)
            error = self._jobs.start(swap)
            if error is not None:
                self._jobs.log.error("%s", error)
                self._fail(self._running.pop(job.job_id))

    def fail(self) -> None:
        """Report as failed the loads of this step that could not start because of an error."""
        while self._to_start:
            self._fail(self._to_start.popleft())

    def ended(self, done: Completion) -> bool:
        """Process the completion of a load; return False if it is not an asynchronous one."""
        job = self._running.pop(done.job_id, None)
        if job is None:
            return False
        if done.error is None:
            self._jobs.load_copied(done.nbytes, done.seconds)
            self._jobs.end(job.job_id, Outcome.OK)
        else:
            self._fail(job)
        return True

    def _fail(self, job: LoadJob) -> None:
        """Report a failed load, and zero its blocks, because some may be partly copied.

        The engine does not zero blocks that it expects to be loaded.
        """
        self._jobs.end(job.job_id, Outcome.FAILED)
        try:
            self._jobs.require_transfer().zero_blocks([int(block) for block in job.pairs[:, 0]])
        except Exception as error:  # noqa: BLE001 - the load has failed anyway
            # The blocks are recomputed before they are read; only NaNs in unused rows could remain.
            self._jobs.log.error("%s", error)
