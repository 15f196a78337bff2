"""Copies between GPU and host memory that run, or fail, when a test says so."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.errors import CopyError, JobError
from kv_swap.layout import KVLayout
from numpy.typing import NDArray

GARBAGE = 0xA5


class ManualWindows:
    """Windows on the arenas of other manual engines; `arenas` has those by file path."""

    window_slots = 1 << 12

    def __init__(self, arenas: Mapping[str, NDArray[np.uint8]]) -> None:
        self.arenas = arenas
        self.mapped: dict[int, NDArray[np.uint8]] = {}
        self.ready_slots = [0] * 64

    def __len__(self) -> int:
        return len(self.ready_slots)

    def attach(self, window: int, path: str, num_slots: int) -> None:
        self.mapped[window] = self.arenas[path]
        self.ready_slots[window] = num_slots

    def detach(self, window: int) -> None:
        del self.mapped[window]
        self.ready_slots[window] = 0


class ManualSwapEngine(SwapEngine):
    """Keeps submitted jobs until `run`; copies as `kv_swap.host` does.

    `faults` counts how often an operation will fail: `submit` refuses a job, `before_compute` fails
    a load that compute waits for, `load_now` the copy that replaces it, `copy` any other copy.
    Failed copies leave garbage behind, as do stores of `unpackable` blocks.
    """

    windows: Any = None
    """The `ManualWindows` of an engine in a pool."""

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        super().__init__(layout, num_slots)
        self.locked_slots = num_slots
        self.arena: NDArray[np.uint8] = np.full((num_slots, layout.slot_bytes), GARBAGE, np.uint8)
        self.submitted: list[SwapJob] = []
        self.stuck = False
        self.eager = False
        """Whether each job is copied as soon as it is submitted."""
        self.faults: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.unpackable: Container[int] = ()
        """Blocks that do not fit packed slots, so their stores are refused."""
        self._failure: CopyError | None = None
        self.bytes_per_second: float | None = None
        """Speed of copies, including their start; None if each copy takes a millisecond."""
        self._done: list[Completion] = []
        self._undelivered = 0

    def submit(self, job: SwapJob) -> None:
        self.check_pairs(job)
        if self._fails("submit"):
            raise JobError("injected fault: refused")
        self.submitted.append(dataclasses.replace(job, pairs=job.pairs.copy()))
        self._undelivered += 1
        if job.before_compute:
            fails = self._fails("before_compute")
            self._failure = CopyError("injected fault: before compute") if fails else None
            self.run(-1, fail=fails)
        if self.eager:
            self.run_all()

    @property
    def ready_slots(self) -> int:
        return self.locked_slots

    def await_loads(self) -> None:
        """Do nothing: `submit` ran the loads."""
        if self._failure is not None:
            raise self._failure

    def load_now(self, pairs: NDArray[np.int32]) -> None:
        self._failure = None
        fails = self._fails("load_now")
        self._copy(SwapJob(-1, Direction.LOAD, pairs), fails)
        if fails:
            raise CopyError("injected fault: at once")

    def _fails(self, site: str) -> bool:
        fails = self.faults[site] > 0
        self.faults[site] -= fails
        self.happened[site] += fails
        return fails

    def _copy(self, job: SwapJob, fail: bool) -> tuple[int, ...]:
        """Copy; return the refused rows of a store."""
        loads = job.direction is Direction.LOAD
        refused = []
        for row, (block, slot) in enumerate(job.pairs.tolist()):
            if not loads and block in self.unpackable:
                refused.append(row)
            for page, place in self._pages(block, slot):
                source, target = (place, page) if loads else (page, place)
                target[:] = GARBAGE if fail or row in refused else source
        self.happened["unpackable"] += len(refused)
        return tuple(refused)

    def run(self, index: int = 0, *, fail: bool = False) -> None:
        """Run one job now. If it fails, it leaves garbage behind."""
        job = self.submitted.pop(index)
        fail = fail or (not job.before_compute and self._fails("copy"))
        refused = self._copy(job, fail)
        nbytes = len(job.pairs) * self.layout.block_bytes
        error = CopyError("injected fault") if fail else None
        seconds = 0.001 if self.bytes_per_second is None else nbytes / self.bytes_per_second
        refused = () if fail else refused
        self._done.append(Completion(job.job_id, job.direction, nbytes, seconds, error, refused))

    def run_all(self) -> None:
        while self.submitted:
            self.run()

    def _pages(
        self, block: int, slot: int
    ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
        arena = self.arena
        if self.windows is not None and slot >= self.windows.window_slots:
            window, slot = divmod(slot, self.windows.window_slots)
            arena = self.windows.mapped[window - 1]
        for region in self.layout.regions:
            start = region.slot_offset_bytes
            yield (
                bytes_at(region.address + block * region.block_stride_bytes, region.page_bytes),
                arena[slot, start : start + region.page_bytes],
            )

    def poll(self) -> list[Completion]:
        done, self._done = self._done, []
        self._undelivered -= len(done)
        return done

    def wait(self, timeout_seconds: float) -> bool:
        if not self.stuck:
            self.run_all()
        return not self.stuck

    def fence_loads(self) -> None:
        """Do nothing: no compute runs meanwhile."""

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        self.check_blocks(blocks)
        for block in blocks:
            for page, _ in self._pages(block, 0):
                page[:] = 0

    def close(self, timeout_seconds: float = 30.0) -> None:
        self.wait(timeout_seconds)

    def slots(self) -> NDArray[np.uint8]:
        return self.arena

    def keep_alive(self, objects: Sequence[object]) -> Sequence[object]:
        return ()

    @property
    def in_flight(self) -> int:
        return self._undelivered


def bytes_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Return a view of memory at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@contextlib.contextmanager
def manual_copies() -> Iterator[list[ManualSwapEngine]]:
    """Make all workers that register KV caches in this context use a `ManualSwapEngine`."""
    made: list[ManualSwapEngine] = []

    def create(_kind: str, layout: KVLayout, num_slots: int, **_more: Any) -> ManualSwapEngine:
        made.append(ManualSwapEngine(layout, num_slots))
        return made[-1]

    with mock.patch("kv_offload.worker.allocation.create_engine", create):
        yield made
