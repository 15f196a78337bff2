"""The synchronous loads of one step, which arrive as one transfer.

Until the forward, or the layer that reads them, is queued, a failure can be made good: the host
copies the blocks itself, while the engine waits. Later it cannot. Under asynchronous scheduling the
engine has no way back from a forward that read what was not there, because the next step is planned
already. Such loads are lost, and their requests end with an error.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError

from kv_offload.messages import LoadJob, Pairs
from kv_offload.worker.copies import Copies
from kv_offload.worker.log import RankLog
from kv_offload.worker.reports import Reports


class Phase(enum.Enum):
    """How far an arrival has come."""

    NOT_STARTED = enum.auto()
    STARTED = enum.auto()
    """The forward does not wait for it yet."""
    IN_WAVES = enum.auto()
    """The forward waits for the first wave, and layers wait for the others."""
    AWAITED = enum.auto()
    """The forward waits for all copies: a failure that is found now loses the loads."""
    MADE_GOOD = enum.auto()
    """The host has copied the blocks. How the transfer ends does not matter any more."""
    LOST = enum.auto()
    """A forward may have read what was not there."""


class Arrival:
    """Its state, and how it is made good, lost or ended. Every job is reported as ended once."""

    def __init__(
        self, jobs: Sequence[LoadJob], copies: Copies, reports: Reports, log: RankLog
    ) -> None:
        self.jobs = jobs
        self.job_id = jobs[0].job_id
        """The id of the transfer."""
        self.whole = any(job.whole for job in jobs)
        """Whether a forward writes to blocks that are loaded, before a layer waits for them."""
        self.phase = Phase.NOT_STARTED
        self.in_waves = False
        self.copying = False
        """Whether the transfer engine may still write the blocks."""
        self.error: Exception | None = None
        """What went wrong before the forward was made to wait."""
        self._copies = copies
        self._reports = reports
        self._log = log

    @property
    def nbytes(self) -> int:
        """How much it brings."""
        return self._nbytes(self.jobs)

    def _nbytes(self, jobs: Sequence[LoadJob]) -> int:
        slot_bytes = self._copies.require_transfer().layout.slot_bytes
        return sum(len(job.pairs) for job in jobs) * slot_bytes

    @property
    def can_be_made_good(self) -> bool:
        """Whether what reads the blocks has not been queued yet."""
        return self.phase in (Phase.NOT_STARTED, Phase.STARTED, Phase.IN_WAVES)

    def start(self, *, in_waves: bool) -> None:
        """Start the transfer; a failure is kept in `error`."""
        self.phase, self.in_waves = Phase.STARTED, in_waves
        if any(job.incomplete for job in self.jobs):
            self.error = CopyError("host memory lacks some of its slots")
            return
        pairs = _all_pairs(self.jobs)
        try:
            self._copies.start(SwapJob(self.job_id, Direction.LOAD, pairs, True, in_waves))
        except Exception as error:  # noqa: BLE001 - whatever it is, the load is made good
            self.error = error
        else:
            self.copying = True

    def make_good(self, error: Exception) -> None:
        """Copy the blocks at once; the host waits, before what reads them is queued.

        What host memory lacks cannot be copied, and is lost.
        """
        self.phase = Phase.MADE_GOOD
        jobs = [job for job in self.jobs if not job.incomplete]
        failed = [job for job in self.jobs if job.incomplete]
        if jobs:
            try:
                self._copies.require_transfer().load_now(_all_pairs(jobs))
            except Exception as second:  # noqa: BLE001 - its requests end, the engine goes on
                error = CopyError(f"{error}; and when it was copied at once: {second}")
                jobs, failed = [], list(self.jobs)
        if jobs:
            nbytes = self._nbytes(jobs)
            self._log.error(
                "a load before a forward failed, and its %d bytes were copied at once instead, "
                "while the engine waited: %s",
                nbytes,
                error,
            )
            self._reports.count("repaired_loads", len(jobs))
            self._reports.count("loaded_bytes", nbytes)
        for job in jobs:
            self._reports.synchronous_load_ended(job)
        for job in failed:
            self._lose(job, str(error))
            self._reports.synchronous_load_ended(job)

    def lose(self, why: str) -> None:
        """Report all loads as lost, and as ended if no copy runs."""
        self.phase = Phase.LOST
        for job in self.jobs:
            self._lose(job, why)
            if not self.copying:
                self._reports.synchronous_load_ended(job)

    def _lose(self, job: LoadJob, why: str) -> None:
        self._log.error(
            "%d blocks of request %s were not loaded when they were read, so it ends with an "
            "error, as does whoever shares them: %s",
            len(job.pairs),
            job.request_id,
            why,
        )
        self._reports.load_lost(job)

    def ended(self, done: Completion) -> None:
        """Take in the end of the transfer."""
        self.copying = False
        if self.phase is Phase.MADE_GOOD:
            return
        if done.error is not None and self.can_be_made_good:
            self.error = done.error  # it is made good before the forward, or lost after it
            return
        for job in self.jobs:
            if done.error is not None and self.phase is not Phase.LOST:
                self._lose(job, str(done.error))
            self._reports.synchronous_load_ended(job)


def _all_pairs(jobs: Sequence[LoadJob]) -> Pairs:
    return np.concatenate([job.pairs for job in jobs])
