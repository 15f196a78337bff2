"""The jobs of a rank: starts and times their copies, and keeps outcomes that must be reported."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence
from typing import Any

from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.errors import CopyError, TransferError

from kv_offload.measurement import ASSUMED_BYTES_PER_SECOND, MIN_MEASUREMENTS, RecentMedian
from kv_offload.messages import LoadJob, MoveJob, OffloadMetadata, Outcome, StoreJob
from kv_offload.metrics import OffloadStats
from kv_offload.worker.sharing import ALONE, SharingRanks

logger = logging.getLogger(__name__)

MEASURED_BYTES = 8 << 20
"""Minimum bytes of a measured job: a smaller one shows latency rather than the link's speed."""


class RankLog(logging.LoggerAdapter[logging.Logger]):
    """Prefixes every line with the plugin's name and the rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(logger, {})
        self._prefix = f"kv-offload: rank {rank}: "

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, Any]:
        """Add the prefix to a message."""
        return f"{self._prefix}{msg}", kwargs


class CopySpeeds:
    """Measures the link with jobs that had it to themselves.

    A small store is dominated by its latency, and a store that runs with other copies shares the
    link. The speed of either is a lower bound, so it counts only if it exceeds the last speeds of
    stores that were neither. Without these lower bounds, an estimate that is far too low would
    never be corrected, because it allows only small stores.
    """

    def __init__(self) -> None:
        self._running: dict[Direction, set[int]] = {direction: set() for direction in Direction}
        # True if the last started load has been the only load since its start.
        self._load_alone = False
        # True if the last started store has been the only copy since its start.
        self._store_alone = False
        self._stores_alone = RecentMedian(MIN_MEASUREMENTS)
        self._stores_alone.add(ASSUMED_BYTES_PER_SECOND)
        self._news: dict[str, float] = {}

    def starts(self, job: SwapJob) -> None:
        """Record a job that the transfer engine has accepted."""
        if job.direction is Direction.LOAD:
            self._load_alone = not self._running[Direction.LOAD]
            self._store_alone = False
        else:
            self._store_alone = not any(self._running.values())
        self._running[job.direction].add(job.job_id)

    def ended(self, done: Completion) -> None:
        """Measure the speed of a job that has ended, unless it failed."""
        self._running[done.direction].discard(done.job_id)
        if done.error is not None or done.seconds <= 0:
            return
        speed, large = done.nbytes / done.seconds, done.nbytes >= MEASURED_BYTES
        if done.direction is Direction.LOAD:
            counts = large and self._load_alone
        elif large and self._store_alone:
            self._stores_alone.add(speed)
            counts = True
        else:
            counts = speed > self._stores_alone.value
        if counts:
            self.measured(done.direction.value, speed)

    def measured(self, name: str, bytes_per_second: float) -> None:
        """Note a speed by its name in `RankReport`, until `take` returns it."""
        self._news[name] = bytes_per_second

    def take(self) -> dict[str, float] | None:
        """Return the last speeds since the previous call; None without any."""
        news, self._news = self._news, {}
        return news or None


class RankJobs:
    """The rank's transfer engine, and the state that all its jobs share. Never blocks."""

    def __init__(self, rank: int, sharing: SharingRanks = ALONE) -> None:
        self.sharing = sharing
        """The ranks that share this host memory, including this one."""
        self.transfer: SwapEngine | None = None
        """None before KV caches are registered and after shutdown."""
        self.ended: dict[int, Outcome] = {}
        """Outcomes by job id that the scheduler has not acknowledged yet."""
        self.failed_rows: dict[int, tuple[int, ...]] = {}
        """Failed pairs of stores and moves among them, by job id."""
        self.speeds = CopySpeeds()
        self.stats = OffloadStats()
        self.log = RankLog(rank)
        self._rank = rank
        self._next_job_id = 0

    def take_plan(self, plan: OffloadMetadata) -> None:
        """Accept the jobs of a plan. Jobs of earlier plans that never arrived have failed."""
        for job_id in plan.acknowledged:
            self.ended.pop(job_id, None)
            self.failed_rows.pop(job_id, None)
        if plan.next_job_id <= self._next_job_id:
            return  # the case in most steps
        jobs: tuple[StoreJob | LoadJob | MoveJob, ...] = (*plan.stores, *plan.loads, *plan.moves)
        here = {job.job_id for job in jobs}
        for job_id in range(self._next_job_id, plan.next_job_id):
            if job_id not in here:
                self.end(job_id, Outcome.FAILED)
        self._next_job_id = plan.next_job_id

    def end(self, job_id: int, outcome: Outcome, failed_rows: tuple[int, ...] = ()) -> None:
        """Record the outcome of a job with no running copy, and the pairs that failed, if any."""
        self.ended[job_id] = outcome
        if failed_rows:
            self.failed_rows[job_id] = failed_rows

    def require_transfer(self) -> SwapEngine:
        """Return the transfer engine, which must exist."""
        assert self.transfer is not None, "a copy was asked for before register_kv_caches"
        return self.transfer

    @property
    def ready_slots(self) -> int:
        """Number of slots, from 0 on, that jobs may use now."""
        return 0 if self.transfer is None else self.transfer.ready_slots

    def start(self, job: SwapJob) -> Exception | None:
        """Start a job; return the error if the transfer engine refuses it and copies nothing."""
        transfer = self.require_transfer()
        try:
            transfer.submit(job)
        except TransferError as error:
            return error
        except Exception as error:  # noqa: BLE001 - any error fails only this job
            return CopyError(repr(error))
        self.speeds.starts(job)
        return None

    def poll(self) -> Sequence[Completion]:
        """Return the copies that ended since the last call."""
        return () if self.transfer is None else self.transfer.poll()

    def count(self, done: Completion) -> None:
        """Count a copy that has ended, and measure its speed."""
        self.speeds.ended(done)
        if done.error is not None:
            self.log.error("%s", done.error)
            return
        name = "stored" if done.direction is Direction.STORE else "loaded"
        self.stats.count(f"{name}_bytes", done.nbytes)
        self.stats.count(f"{name}_seconds", done.seconds)

    def not_taken_in(self, job_id: int) -> None:
        """Fail a job whose completion could not be processed, and log the current exception."""
        self.log.exception("an error of the plugin: job %d counts as failed", job_id)
        self.end(job_id, Outcome.FAILED)

    def load_copied(self, nbytes: int, seconds: float) -> None:
        """Count a load whose copies succeeded. Only the first rank does, so it counts once."""
        if self._rank == 0:
            self.stats.observe("load_bytes", nbytes)
            self.stats.observe("load_seconds", seconds)
