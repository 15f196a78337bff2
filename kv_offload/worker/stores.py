"""A rank's stores: queued at the end of a step, submitted at the start of the next one.

Nothing may write a source block until the store has ended on all ranks, so the scheduler pins it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kv_swap.engine import Completion, Direction, SwapJob

from kv_offload.messages import Outcome, StoreJob
from kv_offload.worker.jobs import RankJobs
from kv_offload.worker.sharing import Peers


class Stores:
    """Those that wait for the start of a step. `peers` share this rank's host memory."""

    def __init__(self, jobs: RankJobs, peers: Peers) -> None:
        self.peers = peers
        self._jobs = jobs
        self._queued: deque[StoreJob] = deque()

    def queue(self, jobs: Iterable[StoreJob]) -> None:
        """Keep jobs for the start of the next step."""
        self._queued.extend(jobs)

    def fail(self, jobs: Iterable[StoreJob]) -> None:
        """Report jobs that could not be queued as failed."""
        for job in jobs:
            self._jobs.end(job.job_id, Outcome.FAILED)

    def submit(self) -> None:
        """Start what is queued; on the device the copies wait for all compute until now."""
        while self._queued:
            job = self._queued.popleft()
            pairs = self.peers.own_part(job)
            if not len(pairs):
                self._jobs.end(job.job_id, Outcome.OK)
                continue
            error = self._jobs.start(SwapJob(job.job_id, Direction.STORE, pairs))
            if error is not None:
                self._jobs.log.error("%s", error)
                self._jobs.end(job.job_id, Outcome.FAILED)

    def ended(self, done: Completion) -> None:
        """Take in the end of a store's copies."""
        self._jobs.end(done.job_id, Outcome.FAILED if done.error else Outcome.OK)
