"""A rank's copies that no forward waits for: its stores and its asynchronous loads.

Nothing may write a source block until the store has ended on all ranks, so the scheduler pins it.
The request of an asynchronous load waits in vLLM's queue until the load has ended. Meanwhile no
forward reads or writes the blocks that the load fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import TransferError

from kv_offload.messages import JobResult, LoadJob, StoreJob
from kv_offload.worker.copies import Copies
from kv_offload.worker.sharing import Peers

REMEMBERED_FAILURES = 1024
"""Failed stores kept for a drain, which also asks after stores whose report is under way."""


class BackgroundCopies:
    """The stores and asynchronous loads that wait for their start or run."""

    def __init__(self, copies: Copies, peers: Peers) -> None:
        self.peers = peers
        """The ranks that share this rank's host memory: each copies a part of every store."""
        self._copies = copies
        self._reports = copies.reports
        self._queued_stores: deque[StoreJob] = deque()
        # Ids of the stores that are queued or run.
        self._storing: set[int] = set()
        self._failed_stores: deque[int] = deque(maxlen=REMEMBERED_FAILURES)
        # Ids rise; stores from this one on have not reached this rank.
        self._next_store_id = 0
        self._loads_to_start: deque[LoadJob] = deque()
        self._loading: dict[int, LoadJob] = {}

    def queue_stores(self, jobs: Iterable[StoreJob]) -> None:
        """Keep jobs for the start of the next step."""
        for job in jobs:
            self._reached(job)
            self._queued_stores.append(job)
            self._storing.add(job.job_id)

    def fail_stores(self, jobs: Iterable[StoreJob]) -> None:
        """Report jobs that could not be queued as failed."""
        for job in jobs:
            self._reached(job)
            self._store_ended(job.job_id, ok=False)

    def _reached(self, job: StoreJob) -> None:
        """Report the stores that should have come before this one and did not as failed."""
        for missing in range(self._next_store_id, job.job_id):
            self._store_ended(missing, ok=False)
        self._next_store_id = job.job_id + 1

    def submit_stores(self) -> None:
        """Start what is queued; on the device the copies wait for all compute until now."""
        while self._queued_stores:
            job = self._queued_stores[0]
            pairs = self.peers.own_part(job)
            self._queued_stores.popleft()
            if not len(pairs):
                self._store_ended(job.job_id, ok=True)
            elif not self._start(SwapJob(job.job_id, Direction.STORE, pairs)):
                self._store_ended(job.job_id, ok=False)

    def _start(self, job: SwapJob) -> bool:
        error = self._copies.start(job)
        if error is not None:
            self._copies.log.error("%s", _text(error))
        return error is None

    def _store_ended(self, job_id: int, *, ok: bool) -> None:
        self._storing.discard(job_id)
        if not ok:
            self._failed_stores.append(job_id)
        self._reports.store_ended(job_id, ok=ok)

    def store_results(self, job_ids: Iterable[int]) -> dict[int, JobResult]:
        """Return the results of those stores that have ended, reported or not."""
        return {
            job_id: self._reports.result(ok=job_id not in self._failed_stores)
            for job_id in job_ids
            if job_id not in self._storing and job_id < self._next_store_id
        }

    def take_loads(self, jobs: Iterable[LoadJob]) -> None:
        """Take in the loads of a step."""
        self._loads_to_start = deque(jobs)

    def start_loads(self, *, behind_compute: bool) -> None:
        """Start the loads of this step that have not started; see `SwapJob.behind_compute`."""
        while self._loads_to_start:
            job = self._loads_to_start.popleft()
            if job.incomplete:
                self._fail_load(job)
                continue
            self._reports.load_starts(job)
            self._loading[job.job_id] = job
            swap = SwapJob(job.job_id, Direction.LOAD, job.pairs, behind_compute=behind_compute)
            if not self._start(swap):
                self._fail_load(self._loading.pop(job.job_id))

    def fail_loads(self) -> None:
        """Report the loads of this step that an error kept from starting as failed."""
        while self._loads_to_start:
            self._fail_load(self._loads_to_start.popleft())

    @property
    def loading_requests(self) -> set[str]:
        """The requests whose blocks a copy may still write."""
        return {job.request_id for job in self._loading.values()}

    def ended(self, done: Completion) -> bool:
        """Take in the end of a job's copies; False if it is no job of this kind."""
        if done.direction is Direction.STORE:
            self._store_ended(done.job_id, ok=done.error is None)
            return True
        job = self._loading.pop(done.job_id, None)
        if job is None:
            return False
        if done.error is None:
            self._reports.load_copied(done.nbytes, done.seconds)
            self._reports.load_ended(job, failed=False)
        else:
            self._fail_load(job)
        return True

    def _fail_load(self, job: LoadJob) -> None:
        """Report a failed load, and zero its blocks: some may hold parts of copies.

        The engine does not zero blocks that were to be loaded.
        """
        self._reports.load_ended(job, failed=True)
        try:
            self._copies.require_transfer().zero_blocks([int(block) for block in job.pairs[:, 0]])
        except Exception as error:  # noqa: BLE001 - the load has failed anyway
            # They are recomputed before they are read; only NaNs in unused rows could remain.
            self._copies.log.error("%s", _text(error))


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, TransferError) else repr(error)
