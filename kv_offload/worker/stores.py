"""A rank's stores: queued at the end of a step, submitted at the start of the next one.

So their copies delay neither the copy of the sampled tokens nor the compute of their own step.
Nothing may write a source block until the store has ended on all ranks, so the scheduler pins it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kv_swap.engine import Completion, Direction, SwapJob

from kv_offload.messages import JobResult, StoreJob
from kv_offload.worker.copies import Copies
from kv_offload.worker.reports import Reports
from kv_offload.worker.sharing import Peers

REMEMBERED_FAILURES = 1024
"""Failed stores kept for a drain, which also asks after stores whose report is under way."""


class Stores:
    """The stores that are queued, those that run, and those that failed lately."""

    def __init__(self, copies: Copies, reports: Reports, peers: Peers) -> None:
        self.peers = peers
        """The ranks that share this rank's host memory: each copies a part of every job."""
        self._copies = copies
        self._reports = reports
        self._queued: deque[StoreJob] = deque()
        self._running: set[int] = set()
        self._failed: deque[int] = deque(maxlen=REMEMBERED_FAILURES)
        # Ids rise; jobs from this one on have not reached this rank.
        self._next_job_id = 0

    def queue(self, jobs: Iterable[StoreJob]) -> None:
        """Keep jobs for the start of the next step."""
        for job in jobs:
            self._queued.append(job)
            self._next_job_id = job.job_id + 1

    def fail(self, jobs: Iterable[StoreJob]) -> None:
        """Report jobs that could not be queued as failed."""
        for job in jobs:
            self._next_job_id = job.job_id + 1
            self._end(job.job_id, ok=False)

    def submit(self) -> None:
        """Start what is queued; on the device the copies wait for all compute until now."""
        while self._queued:
            job = self._queued[0]
            pairs = self.peers.own_part(job)
            if not len(pairs):
                self._queued.popleft()
                self._end(job.job_id, ok=True)
                continue
            self._running.add(job.job_id)
            self._queued.popleft()
            refused = self._copies.submit(SwapJob(job.job_id, Direction.STORE, pairs))
            if refused is not None:
                self.ended(refused)

    def ended(self, done: Completion) -> None:
        """Take in the end of a store's copies."""
        self._running.discard(done.job_id)
        self._end(done.job_id, ok=done.error is None)

    def _end(self, job_id: int, *, ok: bool) -> None:
        if not ok:
            self._failed.append(job_id)
        self._reports.store_ended(job_id, ok=ok)

    def results(self, job_ids: Iterable[int]) -> dict[int, JobResult]:
        """Return how those of these jobs ended that have ended, reported or not."""
        waiting = self._running.union(job.job_id for job in self._queued)
        return {
            job_id: self._reports.result(ok=job_id not in self._failed)
            for job_id in job_ids
            if job_id not in waiting and job_id < self._next_job_id
        }
