"""Jobs of one direction over one copy path: cut into slices, an event after each.

The paths are the swap kernels (`swap.py`) and the copy engine (`gated.py`).

Until the event of a slice completes, its copies read the source pages and what the path keeps for
it, and write the destination pages. The owners of the blocks and slots leave both alone until the
job's completion. Slices of one lane run in order, slices of two lanes side by side.
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

WaveRange = range
"""Waves that follow one another and are copied together."""

Refusals = Callable[[], Sequence[int]]
"""Reads which rows of a job's pairs a slice refused; called once, when it has ended."""

Slice = tuple[WaveRange | None, Any]
"""Part of a job: its waves, `None` for whole slots, and its pairs or copies, as its path wants."""

LEAST_WAVE_BYTES = 512 << 10
"""Least bytes of a slot for every part that a load in waves has beyond its first.

Behind the loads of a lone prompt of 2,048, 8,192 and 32,768 tokens (0.25, 1 and 4 GiB), time to
first token was 9.5, 26.6 and 97.6 ms with five launches, 11.9, 28.9 and 97.7 with two, 12.2, 30.1
and 102.9 with one (slots of 2 MiB, H200, PCIe Gen5 x16, 23 Nov 2026)."""

_ROOM_SECONDS = 30.0
"""How long a load that compute waits for may wait for room in the queue of its stream."""

_ROOM_POLL_SECONDS = 0.0001


def join_waves(wave_bytes: Sequence[int]) -> list[WaveRange]:
    """Return the waves that are copied together: the first are joined where slots are small.

    More parts would cost more than they hide. `wave_bytes` are those of a slot in each wave.
    """
    parts = 1 + sum(wave_bytes) // LEAST_WAVE_BYTES
    joined = max(1, len(wave_bytes) + 1 - parts)
    return [range(joined), *(range(wave, wave + 1) for wave in range(joined, len(wave_bytes)))]


class CopyPath(ABC):
    """Queues the copies of one direction, between one layout and one arena.

    A lane cuts a job with `slices`, hands them to `queue` in order, and records an event after
    each. The sizes of those in flight add up to `max_in_flight` at most, or there is only one.
    `call` names in errors what failed.
    """

    call: str
    max_in_flight: int

    def size(self, part: Slice) -> int:
        """Return the size of a slice, in the unit of `max_in_flight`."""
        return 1

    def allowance(self, seconds: float) -> int:
        """Return the sizes that may be queued where the lane is polled again after `seconds`."""
        return self.max_in_flight

    def set_waves(self, waves: Sequence[Sequence[int]], stream: Stream) -> None:
        """Prepare for jobs in waves, on the lane's stream; once. Raises `RuntimeError`."""
        raise NotImplementedError(f"{type(self).__name__} does not copy in waves")

    @abstractmethod
    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Cut a job's pairs, `(n, 2)`, n >= 1, lazily; the iterator keeps `pairs`.

        With `in_waves` once for every range of waves; the ranges are in order.
        """

    @abstractmethod
    def queue(self, part: Slice, stream: Stream) -> Refusals | None:
        """Queue a slice on `stream`. Neither blocks nor allocates on the device.

        Returns what reads its refusals, if it may refuse any. What that reads stays as it is until
        `max_in_flight` more slices are queued. Raises `RuntimeError` from CUDA; part of the slice
        may then be queued.
        """

    def warm_up(self, stream: Stream) -> None:  # noqa: B027 - not every path needs it
        """Have CUDA load what `queue` needs, so that it does not do so within a step."""


@dataclass(slots=True, eq=False)
class _Running:
    """A job on its way: `in_flight` slices are queued, `following` is next, then come `rest`.

    Until it `began`, its stream has to wait for `events`. While some are in flight they `started`
    at one of these; `seconds` are how long it had slices in flight before. All events are the job's
    until it has ended.
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
        # After an error, too, the job holds its blocks and slots until its last slice has ended.
        return not self.to_queue and self.in_flight == 0

    def has_queued(self, wave: int) -> bool:
        """Return whether a wave and all before it are queued; always if the job has failed."""
        if not self.to_queue:
            return True
        assert self.following is not None
        waves = self.following[0]
        return waves is not None and waves.start > wave


class Pace:
    """How long the steps of an engine take. Each polls at its start and at its end."""

    def __init__(self) -> None:
        self._intervals = (0.0, 0.0)
        self._polled = time.perf_counter()

    def polled(self) -> None:
        """Take in a poll."""
        now = time.perf_counter()
        self._intervals, self._polled = (self._intervals[1], now - self._polled), now

    @property
    def seconds(self) -> float:
        """The longer of the last two intervals between polls."""
        return max(self._intervals)


class Lane:
    """Runs the jobs of one direction on one stream over one path, in order.

    One thread calls all methods, and nothing here blocks but the wait of `await_all` and
    `await_wave` for slices that are not queued yet.
    """

    def __init__(
        self, direction: Direction, path: CopyPath, stream: CopyStream, pace: Pace
    ) -> None:
        self.path = path
        self.stream = stream
        self._direction = direction
        self._jobs: deque[_Running] = deque()
        # Those of the jobs that may have slices to queue, and what a new job comes after.
        self._unqueued: deque[_Running] = deque()
        self._fences: dict[int, Event] = {}
        # What a job was to wait for that failed before it began: the next comes after it as well.
        self._handed_on: list[Event] = []
        self._slices: deque[tuple[Event, _Running, Refusals | None, int]] = deque()
        # The sizes of these. The step waits while slices are queued: no more than keep the device
        # busy until it polls, twice as many whenever that was too little.
        self._in_flight = 0
        self._allowed = path.allowance(0.0)
        self._pace = pace
        # If the job submitted last comes in waves: the event after the last slice of each range of
        # waves, by its first wave. Those of waves that have ended may be in other use:
        # waiting for them does no harm.
        self._waves: dict[int, Event] = {}
        self._awaited: tuple[int, int] | None = None

    @property
    def idle(self) -> bool:
        """True if every submitted job has been returned by `advance`."""
        return not self._jobs

    def submit(self, job: SwapJob, nbytes: int) -> None:
        """Order the job after what is queued on the compute stream now, if it is `after_compute`.

        And after what was at the last `wait_for_compute`. Then queue what may be.
        """
        events, started, failure = [*self._handed_on, *self._fences.values()], None, None
        try:
            if job.after_compute:
                # First: the device works on it while the slice is made.
                marks = self.stream.mark()
                started = marks[0]
                events += marks
        except RuntimeError as error:
            failure = error
        rest = self.path.slices(job.pairs.copy(), in_waves=job.in_waves)
        now, first = time.perf_counter(), next(rest)
        running = _Running(job.job_id, nbytes, rest, now, first, events, started)
        self._waves.clear()
        self._awaited = None
        self._fences.clear()
        self._handed_on.clear()
        if failure is not None:
            self._fail(running, "waiting for the compute stream", failure)
        self._jobs.append(running)
        self._unqueued.append(running)
        self._collect()
        self._queue(self._allowance())

    def wait_for_compute(self) -> None:
        """Order jobs submitted from now on after what is queued on the compute stream now."""
        stream = self.stream.compute_stream()
        self._fences[stream] = self.stream.mark_compute(self._fences.get(stream))

    def await_all(self) -> None:
        """Make what the compute stream is given from now on wait for all slices of all jobs.

        The host waits where not all of them fit into the stream's queue. Raises `CopyError` if the
        job submitted last has failed, or cannot be waited for.
        """
        if self._jobs:
            self._queue_until(lambda: not self._jobs[-1].to_queue)
        if self._slices:
            self._make_wait(self.stream.compute_stream(), self._slices[-1][0])
        self._raise_failure()

    def await_wave(self, wave: int) -> None:
        """As `await_all`, for a wave of the job submitted last and for all waves before it."""
        stream = self.stream.compute_stream()
        if self._awaited and stream == self._awaited[0] and wave <= self._awaited[1]:
            return
        if self._jobs:
            self._queue_until(lambda: self._jobs[-1].has_queued(wave))
            self._raise_failure()
        for first in reversed(self._waves):
            if first <= wave:
                self._make_wait(stream, self._waves[first])
                self._raise_failure()
                self._awaited = stream, wave
                return

    def _queue_until(self, queued: Callable[[], bool]) -> None:
        """Queue slices as earlier ones end. The device has a full queue of copies meanwhile."""
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
        """Fail the jobs of which slices are not queued: none will be."""
        for running in self._unqueued:
            self._fail(running, self.path.call, RuntimeError("its load was made good"))

    def _raise_failure(self) -> None:
        # The job submitted last, which is the last here unless it has ended well.
        if self._jobs and (error := self._jobs[-1].error) is not None:
            raise error

    def _make_wait(self, stream: int, event: Event) -> None:
        try:
            self.stream.make_compute_wait(stream, event)
        except RuntimeError as error:
            if self._jobs:
                self._fail(self._jobs[-1], "having compute wait for it", error)

    def advance(self) -> list[Completion]:
        """Queue what may be queued now, and return the jobs that have ended."""
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
        """Take off the slices that have ended; they end in order."""
        try:
            while self._slices and self._slices[0][0].query():
                event, running, refusals, size = self._slices.popleft()
                self._in_flight -= size
                running.in_flight -= 1
                if refusals is not None:
                    running.refused_rows.extend(refusals())
                if not running.in_flight and running.started is not None:
                    # The job has ended, or its stream is empty until more of it is queued.
                    running.seconds += running.started.elapsed_time(event) / 1000
                    running.started = None
                self.stream.recycle(event)
        except RuntimeError as error:
            # Querying an event fails only when the CUDA context is lost; no copy runs on then.
            lost = "; the CUDA context is lost, end this process and restart the engine"
            self._slices.clear()
            self._in_flight = 0
            for running in self._jobs:
                running.in_flight = 0
                self._fail(running, "querying its event", error, lost)

    def _queue(self, allowance: int) -> None:
        """Queue the slices that have room, oldest job first."""
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
        waves, _ = part
        try:
            event = self.stream.take()
        except RuntimeError as error:
            # Nothing would tell when the slice has ended, so it must not be queued.
            self._fail(running, "making an event", error)
            return
        try:
            if not running.began:
                self.stream.wait_stream(running.events)
                running.began = True
            if running.started is None:
                # It does not wait for compute, or goes on: it starts when all before it have ended.
                running.started = self.stream.record()
                running.events.append(running.started)
        except RuntimeError as error:
            self._fail(running, "waiting for the compute stream", error)
            return
        refusals = running.following = None
        try:
            refusals = self.path.queue(part, self.stream.stream)
            running.following = next(running.rest, None)
        except Exception as error:  # noqa: BLE001 - whatever it is, it fails the job alone
            self._fail(running, self.path.call, error)
        # Also after a slice that failed: part of it may run.
        try:
            self.stream.record(event)
        except RuntimeError as error:
            self._fail(running, "recording an event", error)
            return
        if waves is not None:
            self._waves[waves.start] = event
        running.in_flight += 1
        self._in_flight += size
        self._slices.append((event, running, refusals, size))

    def _fail(self, running: _Running, call: str, error: Exception, consequence: str = "") -> None:
        if running.error is None:
            running.error = CopyError(
                f"{call} failed with {error}: {self._direction.value} job {running.job_id} of "
                f"{running.nbytes} bytes{consequence}"
            )
            if not running.began:
                follower = next((job for job in self._unqueued if job is not running), None)
                (self._handed_on if follower is None else follower.events).extend(running.events)
