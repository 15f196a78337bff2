"""Jobs of one direction over one copy path: cut into slices, an event behind each.

The paths are the swap kernels (`swap.py`) and the copy engine (`dma.py`).

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


class CopyPath(ABC):
    """Queues the copies of one direction, between one layout and one arena.

    A lane cuts a job with `slices`, hands them to `queue` in order, and records an event behind
    each. At most `max_in_flight` slices are in flight, and one call of the engine queues at most
    `slices_per_call`. `call` names in errors what failed.
    """

    call: str
    max_in_flight: int
    slices_per_call: int

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
    """A job on its way: `in_flight` slices are queued, `following` is next, then come `rest`."""

    job_id: int
    nbytes: int
    rest: Iterator[Slice]
    submitted: float
    following: Slice | None
    started: Event | None = None
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
        return self.in_flight == 0 and not self.to_queue


class Lane:
    """Runs the jobs of one direction on one stream over one path, in order. Nothing here blocks."""

    def __init__(self, direction: Direction, path: CopyPath, stream: CopyStream) -> None:
        self.path = path
        self.stream = stream
        self._direction = direction
        self._jobs: deque[_Running] = deque()
        self._slices: deque[tuple[Event, _Running, Refusals | None]] = deque()
        # Of the job submitted last, if it comes in waves: the event behind the last slice of every
        # range of waves, by its first wave. Those of waves that have ended may be in other use:
        # waiting for them does no harm.
        self._waves: dict[int, Event] = {}
        self._awaited: tuple[int, int] | None = None

    @property
    def idle(self) -> bool:
        """Whether every submitted job has been returned by `advance`."""
        return not self._jobs

    def submit(self, job: SwapJob, nbytes: int) -> None:
        """Order the job after what is queued on the compute stream now, if it is `behind_compute`.

        Then queue what may be. Slices of earlier jobs that were not queued yet will wait, too.
        """
        started = failure = None
        try:
            # First: what the device does about it goes on while the slice is made.
            started = self.stream.wait_stream() if job.behind_compute else None
        except RuntimeError as error:
            failure = error
        rest = self.path.slices(job.pairs.copy(), in_waves=job.in_waves)
        self._waves.clear()
        self._awaited = None
        running = _Running(job.job_id, nbytes, rest, time.perf_counter(), next(rest), started)
        if failure is not None:
            self._fail(running, "waiting for the compute stream", failure)
        self._jobs.append(running)
        self._queue()

    def wait_for_compute(self) -> None:
        """Order all slices queued from now on after what is queued on the compute stream now."""
        self.stream.recycle(self.stream.wait_stream())

    def await_all(self) -> None:
        """Make what the compute stream is given from now on wait for all slices queued so far.

        Raises `CopyError` if the job submitted last has failed, or cannot be waited for.
        """
        if self._slices:
            self._make_wait(self.stream.compute_stream(), self._slices[-1][0])
        self._raise_failure()

    def await_wave(self, wave: int) -> None:
        """As `await_all`, for a wave of the job submitted last and for all waves before it."""
        self._raise_failure()
        stream = self.stream.compute_stream()
        if self._awaited and stream == self._awaited[0] and wave <= self._awaited[1]:
            return
        for first in reversed(self._waves):
            if first <= wave:
                self._make_wait(stream, self._waves[first])
                self._raise_failure()
                self._awaited = stream, wave
                return

    def _raise_failure(self) -> None:
        # The job submitted last, which is the last here unless it has ended well.
        if self._jobs and (error := self._jobs[-1].error) is not None:
            raise error

    def fail_unqueued(self) -> None:
        """Fail the jobs with slices still to be queued: compute could not be made to wait."""
        full = RuntimeError(f"{len(self._slices)} slices are in flight, no more fit")
        for running in self._jobs:
            if running.to_queue:
                self._fail(running, self.path.call, full)

    def _make_wait(self, stream: int, event: Event) -> None:
        try:
            self.stream.make_compute_wait(stream, event)
        except RuntimeError as error:
            if self._jobs:
                self._fail(self._jobs[-1], "having compute wait for it", error)

    def advance(self) -> list[Completion]:
        """Queue what may be queued now, and return the jobs that have ended."""
        try:
            self._collect()
        except RuntimeError as error:
            # Querying an event fails only when the CUDA context is lost; no copy runs on then.
            self._slices.clear()
            lost = "; the CUDA context is lost, end this process and start the engine anew"
            for running in self._jobs:
                running.in_flight = 0
                self._fail(running, "querying its event", error, lost)
        self._queue()
        completions = []
        while self._jobs and self._jobs[0].ended:
            running = self._jobs.popleft()
            if running.error is not None:
                running.seconds = time.perf_counter() - running.submitted
            elif running.started is not None:
                self.stream.recycle(running.started)
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
        return completions

    def _collect(self) -> None:
        """Take off the slices that have ended; they end in order."""
        while self._slices and self._slices[0][0].query():
            event, running, refusals = self._slices.popleft()
            running.in_flight -= 1
            if refusals is not None:
                running.refused_rows.extend(refusals())
            if running.ended and running.started is not None:
                running.seconds = running.started.elapsed_time(event) / 1000
            self.stream.recycle(event)

    def _queue(self) -> None:
        """Queue slices, oldest job first, as many as the path allows within a call."""
        left = self.path.slices_per_call
        for running in self._jobs:
            while running.to_queue:
                if left == 0 or len(self._slices) == self.path.max_in_flight:
                    return
                left -= 1
                self._queue_slice(running)

    def _queue_slice(self, running: _Running) -> None:
        part = running.following
        assert part is not None, "a job without slices left was asked for one"
        waves, _ = part
        try:
            event = self.stream.take()
            if running.started is None:
                # It does not wait for compute: it starts when all slices before it have ended.
                running.started = self.stream.record()
        except RuntimeError as error:
            # Nothing would tell when the slice has ended, so it must not be queued.
            self._fail(running, "making an event", error)
            return
        refusals = None
        try:
            refusals = self.path.queue(part, self.stream.stream)
        except RuntimeError as error:
            self._fail(running, self.path.call, error)
        running.following = next(running.rest, None)
        # Also behind a slice that failed: part of it may run.
        try:
            self.stream.record(event)
        except RuntimeError as error:
            self._fail(running, "recording an event", error)
            return
        if waves is not None:
            self._waves[waves.start] = event
        self._slices.append((event, running, refusals))
        running.in_flight += 1

    def _fail(
        self, running: _Running, call: str, error: RuntimeError, consequence: str = ""
    ) -> None:
        if running.error is None:
            running.error = CopyError(
                f"{call} failed with {error}: {self._direction.value} job {running.job_id} of "
                f"{running.nbytes} bytes{consequence}"
            )
