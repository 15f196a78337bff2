"""KV caches in host memory: copies on one worker thread.

A forward on the CPU runs on the thread that calls `submit`, so it has returned by then. The lock
under which a job is handed over makes the forward's writes visible to the worker; completions are
returned under the same lock.

The worker holds the arena and KV tensors, but not the engine. So the engine can be dropped during a
copy: the worker finishes on live memory, releases it and ends.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob, slots_for
from kv_swap.errors import CopyError, TransferError
from kv_swap.host.transfers import (
    Transfer,
    WorkerState,
    copy_packed,
    copy_slices,
    cut_runs,
    run,
    stop,
    work,
)
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from kv_swap.packing.slots import SlotPacker


@dataclass(slots=True)
class _Arrival:
    """A load before compute: its remaining waves, and the seconds its copies have taken so far."""

    waves: deque[Transfer]
    nbytes: int
    next_wave: int = 0
    seconds: float = 0.0


class HostSwapEngine(SwapEngine):
    """Copies between KV tensors and an arena that are both in host memory.

    `keep_alive` own the memory of `layout`. Raises `LayoutError` if a slot does not fit.
    """

    _state: WorkerState

    def __init__(self, layout: KVLayout, arena: HostArena, keep_alive: Sequence[object]) -> None:
        super().__init__(layout, slots_for(layout, arena))
        self._arena_address = arena.address
        self._state = WorkerState(arena, tuple(keep_alive))
        self._packer = SlotPacker(layout) if layout.num_tiles else None
        self._regions = range(len(layout.regions))
        self._waves: list[Sequence[int]] = []
        self._arrival: _Arrival | None = None
        # The error of the last load before compute, if it failed.
        self._failure: TransferError | None = None
        self._thread = threading.Thread(
            target=work, args=(self._state,), name="kv-swap-copy", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, stop, self._state)

    def submit(self, job: SwapJob) -> None:
        """Queue the job for the worker, or copy it on this thread if compute must wait for it.

        The first wave of a load in waves is copied now, each later one when it is awaited.
        """
        self.check_job(job)
        self._undelivered += 1
        if job.before_compute:
            self._copy_waves(self._num_waves)
            waves_regions = self._waves if job.in_waves else [self._regions]
            waves = deque(self._transfer(job, regions) for regions in waves_regions)
            self._arrival = _Arrival(waves, sum(wave.nbytes for wave in waves))
            self._failure = None
            self._copy_waves(0)
            return
        state = self._state
        queue = state.loads if job.direction is Direction.LOAD else state.stores
        with state.condition:
            queue.append(self._transfer(job, self._regions))
            state.condition.notify_all()

    def _transfer(self, job: SwapJob, regions: Sequence[int]) -> Transfer:
        """Return the copies of some regions, given by their indices: all of them, or a wave's."""
        layout = self.layout
        pairs = job.pairs.astype(np.int64)
        slots = layout.slot_bytes, self._arena_address
        chosen = [layout.regions[index] for index in regions]
        if self._packer is None:
            slices = copy_slices(cut_runs(chosen, *slots, job.direction, pairs))
        else:
            slices = copy_packed(self._packer, regions, *slots, job.direction, pairs)
        nbytes = len(pairs) * sum(region.page_bytes for region in chosen)
        return Transfer(job.job_id, job.direction, nbytes, time.perf_counter(), slices)

    def fence_loads(self) -> None:
        """Do nothing: compute on the host is synchronous."""

    def set_waves(self, waves: Sequence[Sequence[int]]) -> None:
        self.check_waves(waves)
        self._num_waves = len(waves)
        self._waves = [sorted(wave) for wave in waves]

    def await_loads(self) -> None:
        """Copy the remaining waves; `submit` has already copied everything else."""
        self.await_wave(self._num_waves)

    def await_wave(self, wave: int) -> None:
        """Copy the remaining waves up to this one. A failed copy ends the load."""
        self._copy_waves(wave)
        if self._failure is not None:
            raise self._failure

    def load_now(self, pairs: NDArray[np.int32]) -> None:
        """See `SwapEngine`. Copies everything on this thread."""
        job = SwapJob(-1, Direction.LOAD, pairs)
        self.check_pairs(job)
        arrival, self._arrival, self._failure = self._arrival, None, None
        if arrival is not None:
            # The job ends here, without its remaining waves.
            given_up = CopyError("a load in waves was given up for a load at once")
            self._end(arrival, Completion(arrival.waves[0].job_id, Direction.LOAD, 0, 0, given_up))
        error = run(self._transfer(job, self._regions)).error
        if error is not None:
            raise error

    def _end(self, arrival: _Arrival, last: Completion) -> None:
        """Complete a load in waves whose last completion is `last`."""
        done = replace(last, nbytes=arrival.nbytes, seconds=arrival.seconds)
        with self._state.condition:
            self._state.done.append(done)

    def _copy_waves(self, last: int) -> None:
        while (arrival := self._arrival) is not None and arrival.next_wave <= last:
            transfer = arrival.waves.popleft()
            transfer.submitted = time.perf_counter()
            done = run(transfer)
            arrival.next_wave += 1
            arrival.seconds += done.seconds
            if done.error is not None or not arrival.waves:
                self._arrival = None
                self._failure = done.error
                self._end(arrival, done)

    def poll(self) -> list[Completion]:
        """Return the jobs that have ended, in the order in which they ended."""
        if not self._undelivered:
            return []
        time.sleep(0)  # let the worker run: a spinning caller would keep the GIL for 5 ms at a time
        with self._state.condition:
            completions, self._state.done = self._state.done, []
        self._undelivered -= len(completions)
        return completions

    def wait(self, timeout_seconds: float) -> bool:
        """Copy the remaining waves on this thread, then block until the worker is idle."""
        self._copy_waves(self._num_waves)
        state = self._state
        with state.condition:
            return state.condition.wait_for(
                lambda: not state.loads and not state.stores, timeout_seconds
            )

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Zero the pages before returning, because the forward runs on this thread."""
        self.check_blocks(blocks)
        for region in self.layout.regions:
            for block in blocks:
                address = region.address + block * region.block_stride_bytes
                ctypes.memset(address, 0, region.page_bytes)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Wait for the worker to finish; completions can still be polled."""
        self._copy_waves(self._num_waves)
        self._closed = True
        stop(self._state)
        self._thread.join(timeout_seconds)
