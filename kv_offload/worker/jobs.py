"""The jobs of a rank: starts their copies, and knows how those ended that must be reported."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from typing import Any

from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.errors import CopyError, TransferError

from kv_offload.messages import LoadJob, MoveJob, OffloadMetadata, Outcome, StoreJob
from kv_offload.metrics import OffloadStats
from kv_offload.worker.speeds import CopySpeeds


class RankLog(logging.LoggerAdapter[logging.Logger]):
    """Puts the plugin's name and the rank in front of every line."""

    def __init__(self, logger: logging.Logger, rank: int) -> None:
        super().__init__(logger, {})
        self._prefix = f"kv-offload: rank {rank}: "

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, Any]:
        """Put the prefix in front of a message."""
        return f"{self._prefix}{msg}", kwargs


class RankJobs:
    """The rank's transfer engine, and what all its jobs share. Never blocks."""

    def __init__(self, rank: int, log: RankLog) -> None:
        self.transfer: SwapEngine | None = None
        """None before the registration of KV caches and after the end."""
        self.ended: dict[int, Outcome] = {}
        """By job id, how the jobs ended that the scheduler does not know to have ended."""
        self.failed_rows: dict[int, tuple[int, ...]] = {}
        """Failed pairs of the stores and moves among them, if any failed."""
        self.speeds = CopySpeeds()
        self.stats = OffloadStats()
        self.log = log
        self._rank = rank
        self._next_job_id = 0

    def take_plan(self, plan: OffloadMetadata) -> None:
        """Take in which jobs there are. What should have come before and did not has failed."""
        for job_id in plan.known:
            self.ended.pop(job_id, None)
            self.failed_rows.pop(job_id, None)
        if plan.next_job_id <= self._next_job_id:
            return  # as in most steps
        jobs: tuple[StoreJob | LoadJob | MoveJob, ...] = (*plan.stores, *plan.loads, *plan.moves)
        here = {job.job_id for job in jobs}
        for job_id in range(self._next_job_id, plan.next_job_id):
            if job_id not in here:
                self.end(job_id, Outcome.FAILED)
        self._next_job_id = plan.next_job_id

    def end(self, job_id: int, outcome: Outcome, failed_rows: tuple[int, ...] = ()) -> None:
        """Take in that nothing copies for a job any more; of some also which pairs failed."""
        self.ended[job_id] = outcome
        if failed_rows:
            self.failed_rows[job_id] = failed_rows

    def require_transfer(self) -> SwapEngine:
        """Return the transfer engine, which must be there."""
        assert self.transfer is not None, "a copy was asked for before register_kv_caches"
        return self.transfer

    @property
    def ready_slots(self) -> int:
        """Slots from 0 on that jobs may name by now."""
        return 0 if self.transfer is None else self.transfer.ready_slots

    def start(self, job: SwapJob) -> Exception | None:
        """Start a job; return the error if the transfer engine refuses it and copies nothing."""
        transfer = self.require_transfer()
        try:
            transfer.submit(job)
        except TransferError as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, one job has failed
            return CopyError(repr(error))
        self.speeds.starts(job)
        return None

    def poll(self) -> Sequence[Completion]:
        """Return the copies that ended since the last call."""
        return () if self.transfer is None else self.transfer.poll()

    def count(self, done: Completion) -> None:
        """Count a copy that has ended, and learn from its speed."""
        self.speeds.ended(done)
        if done.error is not None:
            self.log.error("%s", done.error)
            return
        name = "stored" if done.direction is Direction.STORE else "loaded"
        self.stats.count(f"{name}_bytes", done.nbytes)
        self.stats.count(f"{name}_seconds", done.seconds)

    def not_taken_in(self, job_id: int) -> None:
        """Fail a job whose end could not be taken in, with the error that is being handled."""
        self.log.exception("an error of the plugin: job %d counts as failed", job_id)
        self.end(job_id, Outcome.FAILED)

    def load_copied(self, nbytes: int, seconds: float) -> None:
        """Count a load whose copies ended well, once: of all ranks only the first does."""
        if self._rank == 0:
            self.stats.observe("load_bytes", nbytes)
            self.stats.observe("load_seconds", seconds)
