"""Runs the jobs of one direction over one copy path, cut into slices with an event after each.

The paths are the swap kernels (`swap.py`) and the copy engine (`gated.py`).

Until a slice's event completes, its copies read the source pages and the path's data for the slice,
and write the destination pages. The owners of the blocks and slots leave both alone until the job
completes. Slices of one lane run in order, slices of different lanes concurrently.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.streams import CopyStream
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError

if TYPE_CHECKING:
    from torch.cuda import Event, Stream

Refusals = Callable[[], Sequence[int]]
"""Returns the rows of a job's pairs that a slice refused; called once, after the slice ends."""

Slice = tuple[int | None, Any]
"""Part of a job: its wave (`None` for whole slots), and the pairs or copies for the path."""

_ROOM_SECONDS = 30.0
"""Maximum seconds that a load before compute waits for room in its stream's queue."""

_ROOM_POLL_SECONDS = 0.0001


class CopyPath(ABC):
    """Queues the copies of one direction, between one layout and one arena.

    A lane cuts a job with `slices`, passes the slices to `queue` in order, and records an event
    after each. The sizes of the slices in flight add up to at most `max_in_flight`, except if there
    is only one slice. `call` names the failed operation in errors.
    """

    call: str
    max_in_flight: int

    def size(self, part: Slice) -> int:
        """Return the size of a slice, in the unit of `max_in_flight`."""
        return 1

    def allowance(self, seconds: float) -> int:
        """Return the total size that may be queued if the next poll comes after `seconds`."""
        return self.max_in_flight

    def set_waves(self, waves: Sequence[Sequence[int]], stream: Stream) -> None:
        """Prepare for jobs in waves, on the lane's stream. Called once. Raises `RuntimeError`."""
        raise NotImplementedError(f"{type(self).__name__} does not copy in waves")

    @abstractmethod
    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Cut a job's pairs, of shape `(n, 2)` with n >= 1, lazily; the iterator keeps `pairs`.

        With `in_waves`, cut them once for every wave, in order.
        """

    @abstractmethod
    def queue(self, part: Slice, stream: Stream) -> Refusals | None:
        """Queue a slice on `stream`. Neither blocks nor allocates on the device.

        Returns a function that reads the refused rows, if rows can be refused; the data it reads
        stays unchanged until `max_in_flight` more slices are queued. Raises `RuntimeError` from
        CUDA; part of the slice may then be queued.
        """

    def warm_up(self, stream: Stream) -> None:  # noqa: B027 - not every path needs it
        """Make CUDA load everything that `queue` needs, so that no step waits for it."""


@dataclass(slots=True, eq=False)
class _Running:
    """A running job: `in_flight` slices are queued, `following` is next, then come the `rest`.

    Before the job has begun (`began`), its stream must wait for `events`. `started` is the one of
    these after which the slices in flight run; `seconds` is the time in which earlier ones were in
    flight. The job owns all its events until it has ended.
    """

    job_id: int
    nbytes: int
    rest: Iterator[Slice]
    submitted: float
    following: Slice | None
    events: list[Event]
    started: Event | None = None
    began: bool = False
    in_flight: int = 0
    seconds: float = 0.0
    error: CopyError | None = None
    refused_rows: list[int] = field(default_factory=list)

    @property
    def to_queue(self) -> bool:
        return self.following is not None and self.error is None

    @property
    def ended(self) -> bool:
        # Even after an error, the job needs its blocks and slots until its last slice has ended.
        return not self.to_queue and self.in_flight == 0

    def has_queued(self, wave: int) -> bool:
        """Return whether a wave and all earlier ones are queued; True for a failed job."""
        if not self.to_queue:
            return True
        assert self.following is not None
        following = self.following[0]
        return following is not None and following > wave


class Pace:
    """Estimates how long an engine's steps take. Each step polls at its start and its end."""

    def __init__(self) -> None:
        self._intervals = (0.0, 0.0)
        self._polled = time.perf_counter()

    def polled(self) -> None:
        """Record a poll."""
        now = time.perf_counter()
        self._intervals, self._polled = (self._intervals[1], now - self._polled), now

    @property
    def seconds(self) -> float:
        """The longer of the last two intervals between polls, in seconds."""
        return max(self._intervals)


class Lane:
    """Runs the jobs of one direction on one stream over one path, in order.

    One thread calls all methods. Only `await_all` and `await_wave` block, until slices are queued.
    """

    def __init__(
        self, direction: Direction, path: CopyPath, stream: CopyStream, pace: Pace
    ) -> None:
        self.path = path
        self.stream = stream
        self._direction = direction
        self._jobs: deque[_Running] = deque()
        # Jobs that may have slices to queue.
        self._unqueued: deque[_Running] = deque()
        self._slices: deque[tuple[Event, _Running, Refusals | None, int]] = deque()
        # The total size of these slices. Queuing delays the step, so the allowance is just enough
        # to keep the device busy until the next poll, and doubles whenever it was too small.
        self._in_flight = 0
        self._allowed = path.allowance(0.0)
        self._pace = pace
        # If the last submitted job comes in waves: the event after the last slice of each. Events
        # of ended waves may have been reused; waiting for them is harmless.
        self._waves: dict[int, Event] = {}
        self._awaited: tuple[int, int] | None = None

    @property
    def idle(self) -> bool:
        """True if every submitted job has been returned by `advance`."""
        return not self._jobs

    def submit(self, job: SwapJob, nbytes: int) -> None:
        """Order the job and queue slices as the allowance permits.

        The job runs after all work queued before the last `wait_for_compute` and, if it is
        `after_compute`, after all work already queued on the compute stream.
        """
        events: list[Event] = []
        failure = None
        try:
            if job.after_compute:
                # Queued first, so that the device works on it while the slice is cut.
                events = self.stream.mark()
        except RuntimeError as error:
            failure = error
        rest = self.path.slices(job.pairs.copy(), in_waves=job.in_waves)
        now, first = time.perf_counter(), next(rest)
        started = events[0] if events else None
        running = _Running(job.job_id, nbytes, rest, now, first, events, started)
        self._waves.clear()
        self._awaited = None
        if failure is not None:
            self._fail(running, "waiting for the compute stream", failure)
        self._jobs.append(running)
        self._unqueued.append(running)
        self._collect()
        self._queue(self._allowance())

    def wait_for_compute(self) -> None:
        """Order slices queued later after the work already queued on the compute stream.

        Applies to jobs submitted later, and to the rest of earlier ones.
        """
        fence = self.stream.mark_compute()
        self.stream.wait_stream([fence])
        self.stream.recycle(fence)

    def await_all(self) -> None:
        """Make work queued later on the compute stream wait for all slices of all jobs.

        The host waits while they do not all fit into the stream's queue. Raises `CopyError` if the
        last submitted job has failed, or if compute cannot wait for it.
        """
        if self._jobs:
            self._queue_until(lambda: not self._jobs[-1].to_queue)
        if self._slices:
            self._make_wait(self.stream.compute_stream(), self._slices[-1][0])
        self._raise_failure()

    def await_wave(self, wave: int) -> None:
        """Like `await_all`, for one wave of the last submitted job and all earlier waves."""
        stream = self.stream.compute_stream()
        if self._awaited and stream == self._awaited[0] and wave <= self._awaited[1]:
            return
        if self._jobs:
            self._queue_until(lambda: self._jobs[-1].has_queued(wave))
            self._raise_failure()
        if (event := self._waves.get(wave)) is not None:
            self._make_wait(stream, event)
            self._raise_failure()
            self._awaited = stream, wave

    def _queue_until(self, queued: Callable[[], bool]) -> None:
        """Queue slices as earlier ones end, which keeps the device's queue full."""
        deadline = time.monotonic() + _ROOM_SECONDS
        self._queue(self.path.max_in_flight)
        while not queued():
            if time.monotonic() > deadline:
                full = f"{len(self._slices)} slices have not ended for {_ROOM_SECONDS:g} s"
                for running in self._unqueued:
                    self._fail(running, self.path.call, RuntimeError(full))
                return
            time.sleep(_ROOM_POLL_SECONDS)
            self._collect()
            self._queue(self.path.max_in_flight)

    def drop_unqueued(self) -> None:
        """Fail the jobs that still have slices to queue, without queuing them."""
        for running in self._unqueued:
            self._fail(running, self.path.call, RuntimeError("its load was made good"))

    def _raise_failure(self) -> None:
        # The last submitted job is last in `_jobs`, unless it has ended successfully.
        if self._jobs and (error := self._jobs[-1].error) is not None:
            raise error

    def _make_wait(self, stream: int, event: Event) -> None:
        try:
            self.stream.make_compute_wait(stream, event)
        except RuntimeError as error:
            if self._jobs:
                self._fail(self._jobs[-1], "having compute wait for it", error)

    def advance(self) -> list[Completion]:
        """Queue slices as the allowance permits, and return the jobs that have ended."""
        self._collect()
        if self._unqueued and not self._slices:
            self._allowed = min(2 * self._allowed, self.path.max_in_flight)
        self._queue(self._allowance())
        completions = []
        while self._jobs and self._jobs[0].ended:
            running = self._jobs.popleft()
            if running.error is not None:
                running.seconds = time.perf_counter() - running.submitted
            else:
                self.stream.recycle(*running.events)
            completions.append(
                Completion(
                    running.job_id,
                    self._direction,
                    running.nbytes,
                    running.seconds,
                    running.error,
                    tuple(running.refused_rows),
                )
            )
        if not self._jobs:
            self._allowed = self.path.allowance(0.0)
        return completions

    def _allowance(self) -> int:
        return max(self._allowed, self.path.allowance(self._pace.seconds))

    def _collect(self) -> None:
        """Remove the slices that have ended; slices end in order."""
        try:
            while self._slices and self._slices[0][0].query():
                event, running, refusals, size = self._slices.popleft()
                self._in_flight -= size
                running.in_flight -= 1
                if refusals is not None:
                    running.refused_rows.extend(refusals())
                if not running.in_flight and running.started is not None:
                    # The job has ended, or its stream is idle until more of it is queued.
                    running.seconds += running.started.elapsed_time(event) / 1000
                    running.started = None
                self.stream.recycle(event)
        except RuntimeError as error:
            # Querying an event fails only if the CUDA context is lost, and then no copy is running.
            lost = "; the CUDA context is lost, end this process and restart the engine"
            self._slices.clear()
            self._in_flight = 0
            for running in self._jobs:
                running.in_flight = 0
                self._fail(running, "querying its event", error, lost)

    def _queue(self, allowance: int) -> None:
        """Queue slices within the allowance, oldest job first."""
        while self._unqueued:
            running = self._unqueued[0]
            if not running.to_queue:
                self._unqueued.popleft()
                continue
            assert running.following is not None
            size = self.path.size(running.following)
            if self._slices and self._in_flight + size > allowance:
                return
            self._queue_slice(running, running.following, size)

    def _queue_slice(self, running: _Running, part: Slice, size: int) -> None:
        wave, _ = part
        try:
            event = self.stream.take()
        except RuntimeError as error:
            # Without an event, the slice's end could not be seen, so the slice must not be queued.
            self._fail(running, "making an event", error)
            return
        try:
            if not running.began:
                self.stream.wait_stream(running.events)
                running.began = True
            if running.started is None:
                # The job does not wait for compute, or is continued: its slices start once earlier
                # ones have ended.
                running.started = self.stream.record()
                running.events.append(running.started)
        except RuntimeError as error:
            self._fail(running, "waiting for the compute stream", error)
            return
        refusals = running.following = None
        try:
            refusals = self.path.queue(part, self.stream.stream)
            running.following = next(running.rest, None)
        except Exception as error:  # noqa: BLE001 - any error fails only this job
            self._fail(running, self.path.call, error)
        # Recorded even if the slice failed: part of it may be running.
        try:
            self.stream.record(event)
        except RuntimeError as error:
            self._fail(running, "recording an event", error)
            return
        if wave is not None:
            self._waves[wave] = event
        running.in_flight += 1
        self._in_flight += size
        self._slices.append((event, running, refusals, size))

    def _fail(self, running: _Running, call: str, error: Exception, consequence: str = "") -> None:
        if running.error is None:
            running.error = CopyError(
                f"{call} failed with {error}: {self._direction.value} job {running.job_id} of "
                f"{running.nbytes} bytes{consequence}"
            )
