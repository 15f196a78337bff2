"""One direction of the CUDA path: jobs cut into slices, a launch each, through a ring of lists.

Who may touch what while a slice is in flight, which is from its launch until its event completes:
- the kernel reads its entry of the ring, the chunk table and the source pages, and writes the
  destination pages;
- the host writes other entries of the ring, never this one;
- the owners of the blocks and slots leave both sides alone until the job's completion.
Slices of one lane run in the order of their launch; those of two lanes run side by side.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from transfer.engine import Completion, Direction, SwapJob
from transfer.errors import CopyError
from transfer.pinned import HostArena, PinnedRegistrar
from transfer.streams import CopyStream
from transfer.swap import LIST_BYTES, MAX_PAIRS, SwapKernel, write_list

if TYPE_CHECKING:
    from torch.cuda import Event

SLICE_BYTES = 256 << 20
"""Bytes of a launch, 5 ms on PCIe Gen5 x16: what needs the SMs of a copy waits no longer. Loads do
not wait for it: they run beside it, on SMs of their own. Every launch costs some microseconds in
which the link idles, so slices of 16 MiB would cost a percent of it."""

RING_ENTRIES = 128
"""Launches queued at once, an event each: far below the about 1,000 operations of a stream after
which CUDA makes the caller wait."""


@dataclass(slots=True, eq=False)
class _Running:
    """A job on its way: `rest` are the pairs not launched yet, `in_flight` counts its slices."""

    job_id: int
    nbytes: int
    rest: NDArray[np.int32]
    submitted: float
    started: Event | None = None
    in_flight: int = 0
    seconds: float = 0.0
    error: CopyError | None = None

    @property
    def ended(self) -> bool:
        # Also after an error the job holds its blocks and slots until its last slice has ended.
        return self.in_flight == 0 and (self.error is not None or len(self.rest) == 0)


class Lane:
    """Runs the jobs of one direction on one stream, in order. Nothing here blocks."""

    def __init__(
        self,
        direction: Direction,
        kernel: SwapKernel,
        stream: CopyStream,
        slot_bytes: int,
        registrar: PinnedRegistrar,
    ) -> None:
        self.stream = stream
        self._direction = direction
        self._kernel = kernel
        self._slice_pairs = min(MAX_PAIRS, max(1, SLICE_BYTES // slot_bytes))
        ring = HostArena(RING_ENTRIES, LIST_BYTES, register=registrar)
        self._ring = ring.view()
        self._ring_address = ring.address
        self._next_entry = 0
        self._jobs: deque[_Running] = deque()
        self._slices: deque[tuple[Event, _Running]] = deque()

    @property
    def idle(self) -> bool:
        """Whether every submitted job has been returned by `advance`."""
        return not self._jobs

    def warm_up(self) -> None:
        """Launch an empty list, so that CUDA loads the kernel now and not within a step."""
        write_list(self._ring[0], np.empty((0, 2), np.int32))
        self._kernel.launch(self._direction, self._ring_address, self.stream.stream)

    def submit(self, job: SwapJob, nbytes: int) -> None:
        """Order the job after what is queued on the compute stream now, and launch what fits.

        Slices of earlier jobs that found the ring full will wait for that too, which harms nobody.
        """
        running = _Running(job.job_id, nbytes, job.pairs.copy(), time.perf_counter())
        try:
            running.started = self.stream.wait_for_compute()
        except RuntimeError as error:
            self._fail(running, "waiting for the compute stream", error)
        self._jobs.append(running)
        self._launch()

    def advance(self) -> list[Completion]:
        """Launch what fits into the ring now, and return the jobs that have ended."""
        try:
            self._collect()
        except RuntimeError as error:
            # Querying an event fails only when the CUDA context is lost; no kernel runs on then.
            self._slices.clear()
            for running in self._jobs:
                running.in_flight = 0
                self._fail(running, "querying its event", error)
        self._launch()
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
                )
            )
        return completions

    def _collect(self) -> None:
        """Take the slices off the ring that have ended; they end in order."""
        while self._slices and self._slices[0][0].query():
            event, running = self._slices.popleft()
            running.in_flight -= 1
            if running.ended and running.started is not None:
                running.seconds = running.started.elapsed_time(event) / 1000
            self.stream.recycle(event)

    def _launch(self) -> None:
        """Launch slices, oldest job first, until the ring is full or nothing is left."""
        for running in self._jobs:
            while len(running.rest) and running.error is None:
                if len(self._slices) == RING_ENTRIES:
                    return
                pairs = running.rest[: self._slice_pairs]
                entry = self._next_entry
                # Free: the slice that used it last was collected, as the ring is not full.
                write_list(self._ring[entry], pairs)
                try:
                    self._kernel.launch(
                        self._direction, self._ring_address + entry * LIST_BYTES, self.stream.stream
                    )
                    event = self.stream.record()
                except RuntimeError as error:
                    self._fail(running, f"launching swap_{self._direction.value}", error)
                    continue
                self._next_entry = (entry + 1) % RING_ENTRIES
                self._slices.append((event, running))
                running.in_flight += 1
                running.rest = running.rest[self._slice_pairs :]

    def _fail(self, running: _Running, call: str, error: RuntimeError) -> None:
        if running.error is None:
            running.error = CopyError(
                f"{call} failed with {error}: {self._direction.value} job {running.job_id} of "
                f"{running.nbytes} bytes"
            )
