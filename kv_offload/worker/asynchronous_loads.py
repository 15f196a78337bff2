"""A rank's asynchronous loads: each request waits in vLLM's queue until its load has ended.

Meanwhile no forward reads or writes the blocks that such a load fills.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import TransferError

from kv_offload.messages import LoadJob
from kv_offload.worker.copies import Copies
from kv_offload.worker.log import RankLog
from kv_offload.worker.reports import Reports


class AsynchronousLoads:
    """The loads of this step that have not started, and all that run."""

    def __init__(self, copies: Copies, reports: Reports, log: RankLog) -> None:
        self._copies = copies
        self._reports = reports
        self._log = log
        self._to_start: deque[LoadJob] = deque()
        self._running: dict[int, LoadJob] = {}

    @property
    def running_requests(self) -> set[str]:
        """The requests whose blocks a copy may still write."""
        return {job.request_id for job in self._running.values()}

    def take(self, jobs: Iterable[LoadJob]) -> None:
        """Take in the loads of a step."""
        self._to_start = deque(jobs)

    def start(self) -> None:
        """Start the loads of this step that have not started."""
        while self._to_start:
            self._start(self._to_start.popleft())

    def fail_those_not_started(self) -> None:
        """Report the loads of this step that an error kept from starting as failed."""
        while self._to_start:
            self._reports.load_ended(self._to_start.popleft(), failed=True)

    def _start(self, job: LoadJob) -> None:
        if job.incomplete:
            self._fail(job)
            return
        self._reports.load_starts(job)
        self._running[job.job_id] = job
        refused = self._copies.submit(SwapJob(job.job_id, Direction.LOAD, job.pairs))
        if refused is not None:
            self.ended(refused)

    def ended(self, done: Completion) -> bool:
        """Take in the end of a load's copies; False if it is no load of this kind."""
        job = self._running.pop(done.job_id, None)
        if job is None:
            return False
        if done.error is None:
            self._reports.load_ended(job, failed=False)
        else:
            self._fail(job)
        return True

    def _fail(self, job: LoadJob) -> None:
        """Report a failed load, and zero its blocks: some may hold parts of copies.

        The engine does not zero blocks that were to be loaded.
        """
        self._reports.load_ended(job, failed=True)
        try:
            self._copies.require_transfer().zero_blocks([int(block) for block in job.pairs[:, 0]])
        except TransferError as error:
            # They are recomputed before they are read; only NaNs in unused rows could remain.
            self._log.error("%s", error)
