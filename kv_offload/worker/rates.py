"""How fast this rank copies: the scheduler bounds stores, and chooses loads, by these speeds."""

from __future__ import annotations

from kv_swap.engine import Completion, Direction, SwapJob

from kv_offload.medians import ASSUMED_BYTES_PER_SECOND, MIN_MEASUREMENTS, RecentMedian

MEASURED_BYTES = 8 << 20
"""A job of fewer bytes says more about its start than about the speed of the link."""

REMEMBERED_STORES = 7
"""A rate of stores that has become wrong is corrected by four measurements in a row.

While the rate is far too low only a slot is stored at a time, so these take a dozen steps."""


class StoreRate:
    """Bytes per second of the stores of one rank.

    A small store spends most of its time on its start. A store that runs with other copies shares
    the link with them. The speed of such a store is a lower bound of the link's speed, so it counts
    only if it is above the believed speed. Without these bounds a believed speed that is far too
    low would never be corrected, because it allows small stores only.
    """

    def __init__(self) -> None:
        self._recent = RecentMedian(REMEMBERED_STORES)
        self._told = ASSUMED_BYTES_PER_SECOND

    @property
    def bytes_per_second(self) -> float:
        """The believed speed."""
        if len(self._recent) < MIN_MEASUREMENTS:
            return ASSUMED_BYTES_PER_SECOND
        return self._recent.value

    def learn(self, bytes_per_second: float, *, exact: bool) -> None:
        """Take the speed of a store; if it is not `exact`, the link may be faster."""
        if exact or bytes_per_second > self.bytes_per_second:
            self._recent.add(bytes_per_second)

    def take_change(self) -> float | None:
        """Return the speed if it has changed since the last call."""
        speed = self.bytes_per_second
        if speed == self._told:
            return None
        self._told = speed
        return speed


class CopySpeeds:
    """Measures the link with the jobs that had it for themselves.

    Call `starts` for every job that the transfer engine accepts, and `ended` for its completion.
    """

    def __init__(self) -> None:
        self._running: dict[Direction, set[int]] = {direction: set() for direction in Direction}
        # Whether the load that started last has been the only load since.
        self._load_alone = False
        # Whether the store that started last has been the only copy since.
        self._store_alone = False
        self._load_bytes_per_second: float | None = None
        self._store_rate = StoreRate()

    def starts(self, job: SwapJob) -> None:
        """Note which jobs run with this one."""
        if job.direction is Direction.LOAD:
            self._load_alone = not self._running[Direction.LOAD]
            self._store_alone = False
        else:
            self._store_alone = not any(self._running.values())
        self._running[job.direction].add(job.job_id)

    def ended(self, done: Completion) -> None:
        """Learn from a job that has ended; a failed one tells no speed."""
        self._running[done.direction].discard(done.job_id)
        if done.error is not None or done.seconds <= 0:
            return
        speed, large = done.nbytes / done.seconds, done.nbytes >= MEASURED_BYTES
        if done.direction is Direction.STORE:
            self._store_rate.learn(speed, exact=large and self._store_alone)
        elif large and self._load_alone:
            self._load_bytes_per_second = speed

    def take_load_speed(self) -> float | None:
        """Return the bytes per second of the last load that ran alone, once."""
        speed, self._load_bytes_per_second = self._load_bytes_per_second, None
        return speed

    def take_store_speed(self) -> float | None:
        """Return the bytes per second of stores if that has changed since the last call."""
        return self._store_rate.take_change()
