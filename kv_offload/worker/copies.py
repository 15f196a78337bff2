"""A rank's transfer engine, and what all its jobs share: speeds, reports and the log.

The scheduler bounds stores, and chooses loads, by the speeds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from typing import Any

from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob

from kv_offload.medians import ASSUMED_BYTES_PER_SECOND, MIN_MEASUREMENTS, RecentMedian
from kv_offload.worker.reports import Reports

MEASURED_BYTES = 8 << 20
"""A job of fewer bytes says more about its start than about the speed of the link."""

REMEMBERED_STORES = 7
"""Four measurements in a row correct a wrong speed; at worst they take a dozen steps."""


class CopySpeeds:
    """Measures the link with the jobs that had it for themselves.

    A small store spends most of its time on its start, and a store that runs with other copies
    shares the link. The speed of such a store is a lower bound, so it counts only if it is above
    the believed speed. Without these bounds a believed speed that is far too low would never be
    corrected, because it allows small stores only.
    """

    def __init__(self) -> None:
        self._running: dict[Direction, set[int]] = {direction: set() for direction in Direction}
        # Whether the load that started last has been the only load since.
        self._load_alone = False
        # Whether the store that started last has been the only copy since.
        self._store_alone = False
        self._load_speed: float | None = None
        self._store_speeds = RecentMedian(REMEMBERED_STORES)
        self._told_store_speed = ASSUMED_BYTES_PER_SECOND

    def starts(self, job: SwapJob) -> None:
        """Take in a job that the transfer engine has accepted."""
        if job.direction is Direction.LOAD:
            self._load_alone = not self._running[Direction.LOAD]
            self._store_alone = False
        else:
            self._store_alone = not any(self._running.values())
        self._running[job.direction].add(job.job_id)

    def ended(self, done: Completion) -> None:
        """Learn from the completion of such a job; a failed one tells no speed."""
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
        """Return the bytes per second of the last load that ran alone, once."""
        speed, self._load_speed = self._load_speed, None
        return speed

    def take_store_speed(self) -> float | None:
        """Return the bytes per second of stores if that has changed since the last call."""
        told, self._told_store_speed = self._told_store_speed, self._store_speed
        return None if told == self._told_store_speed else self._told_store_speed

    @property
    def _store_speed(self) -> float:
        enough = len(self._store_speeds) >= MIN_MEASUREMENTS
        return self._store_speeds.value if enough else ASSUMED_BYTES_PER_SECOND


class RankLog(logging.LoggerAdapter[logging.Logger]):
    """Puts the plugin's name and the rank in front of every line."""

    def __init__(self, logger: logging.Logger, rank: int) -> None:
        super().__init__(logger, {})
        self._prefix = f"kv-offload: rank {rank}: "

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, Any]:
        """Put the prefix in front of a message."""
        return f"{self._prefix}{msg}", kwargs


class Copies:
    """Starts jobs, and counts and measures those that end. Never blocks."""

    def __init__(self, reports: Reports, log: RankLog) -> None:
        self.transfer: SwapEngine | None = None
        """None before the registration of KV caches and after the end."""
        self.speeds = CopySpeeds()
        self.reports = reports
        self.log = log

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
        except Exception as error:  # noqa: BLE001 - whatever it is, one job has failed
            return error
        self.speeds.starts(job)
        return None

    def poll(self) -> Iterator[Completion]:
        """Yield the jobs that ended since the last call, each counted as it is yielded."""
        for done in () if self.transfer is None else self.transfer.poll():
            self.speeds.ended(done)
            if done.error is not None:
                self.log.error("%s", done.error)
            else:
                name = "stored" if done.direction is Direction.STORE else "loaded"
                self.reports.count(f"{name}_bytes", done.nbytes)
                self.reports.count(f"{name}_seconds", done.seconds)
            yield done
