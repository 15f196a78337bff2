"""Measures a rank's copy speeds, from which the scheduler limits stores and chooses loads."""

from __future__ import annotations

from kv_swap.engine import Completion, Direction, SwapJob

from kv_offload.measurement import ASSUMED_BYTES_PER_SECOND, MIN_MEASUREMENTS, RecentMedian

MEASURED_BYTES = 8 << 20
"""Minimum bytes of a measured job: a smaller one shows latency rather than the link's speed."""

REMEMBERED_STORES = 7
"""Four measurements in a row correct a wrong speed, which takes at most a dozen steps."""


class CopySpeeds:
    """Measures the link with jobs that had it to themselves.

    A small store is dominated by its latency, and a store that runs with other copies shares the
    link. The speed of either is a lower bound, so it counts only if it exceeds the current
    estimate. Without these lower bounds, an estimate that is far too low would never be corrected,
    because it allows only small stores.
    """

    def __init__(self) -> None:
        self._running: dict[Direction, set[int]] = {direction: set() for direction in Direction}
        # True if the last started load has been the only load since its start.
        self._load_alone = False
        # True if the last started store has been the only copy since its start.
        self._store_alone = False
        self._load_speed: float | None = None
        self._store_speeds = RecentMedian(REMEMBERED_STORES)
        self._reported_store_speed = ASSUMED_BYTES_PER_SECOND

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
        if done.direction is Direction.STORE:
            if (large and self._store_alone) or speed > self._store_speed:
                self._store_speeds.add(speed)
        elif large and self._load_alone:
            self._load_speed = speed

    def take_load_speed(self) -> float | None:
        """Return the bytes per second of the last load that ran alone, once; None without one."""
        speed, self._load_speed = self._load_speed, None
        return speed

    def take_store_speed(self) -> float | None:
        """Return the bytes per second of stores if the value has changed since the last call."""
        reported, self._reported_store_speed = self._reported_store_speed, self._store_speed
        return None if reported == self._store_speed else self._store_speed

    @property
    def _store_speed(self) -> float:
        enough = len(self._store_speeds) >= MIN_MEASUREMENTS
        return self._store_speeds.value if enough else ASSUMED_BYTES_PER_SECOND
