"""A rank's asynchronous loads.

The request of such a load waits in vLLM's queue until the load has ended. Meanwhile no forward
reads or writes the blocks that the load fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kv_swap.engine import Completion, Direction, SwapJob

from kv_offload.messages import LoadJob, Outcome
from kv_offload.worker.jobs import RankJobs


class Loads:
    """Those of this step that wait for their start, and those that run."""

    def __init__(self, jobs: RankJobs) -> None:
        self._jobs = jobs
        self._to_start: deque[LoadJob] = deque()
        self._running: dict[int, LoadJob] = {}

    def take(self, jobs: Iterable[LoadJob]) -> None:
        """Take in the loads of a step; those of an earlier one that nothing has started fail."""
        self.fail()
        self._to_start = deque(jobs)

    def start(self, *, behind_compute: bool) -> None:
        """Start the loads of this step that have not started; see `SwapJob.behind_compute`."""
        while self._to_start:
            job = self._to_start.popleft()
            if job.incomplete:
                self._fail(job)
                continue
            self._running[job.job_id] = job
            swap = SwapJob(job.job_id, Direction.LOAD, job.pairs, behind_compute=behind_compute)
            error = self._jobs.start(swap)
            if error is not None:
                self._jobs.log.error("%s", error)
                self._fail(self._running.pop(job.job_id))

    def fail(self) -> None:
        """Report the loads of this step that an error kept from starting as failed."""
        while self._to_start:
            self._fail(self._to_start.popleft())

    def ended(self, done: Completion) -> bool:
        """Take in the end of a load's copies; False if it is no asynchronous one."""
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
        """Report a failed load, and zero its blocks: some may hold parts of copies.

        The engine does not zero blocks that were to be loaded.
        """
        self._jobs.end(job.job_id, Outcome.FAILED)
        try:
            self._jobs.require_transfer().zero_blocks([int(block) for block in job.pairs[:, 0]])
        except Exception as error:  # noqa: BLE001 - the load has failed anyway
            # They are recomputed before they are read; only NaNs in unused rows could remain.
            self._jobs.log.error("%s", error)
