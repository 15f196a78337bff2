"""KV caches in host memory: copies on one worker thread.

A forward on the CPU runs on the thread that calls `submit`, and has returned by then. The lock that
hands a job over makes its writes visible to the worker, and completions come back under it.

The worker holds arena and KV tensors, and never the engine. So dropping the engine in mid-copy is
safe: the worker finishes on live memory, lets go of it and ends.
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
from kv_swap.host.packed import copy_packed
from kv_swap.host.transfers import Transfer, WorkerState, copy_slices, cut_runs, run, stop, work
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from kv_swap.packing.slots import SlotPacker


@dataclass(slots=True)
class _Arrival:
    """A load before compute: the waves left of it, and the seconds its copies took so far."""

    waves: deque[Transfer]
    nbytes: int
    next_wave: int = 0
    seconds: float = 0.0


class HostSwapEngine(SwapEngine):
    """Copies between KV tensors and an arena that both lie in host memory.

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
        # Why the load before compute that was submitted last failed.
        self._failure: TransferError | None = None
        self._thread = threading.Thread(
            target=work, args=(self._state,), name="kv-swap-copy", daemon=True
        )
        self._thread.start()
        weakref.finalize(self, stop, self._state)

    def submit(self, job: SwapJob) -> None:
        """Queue the job for the worker, or copy it here if compute is to come after it.

        Of a load in waves the first is copied now, each other one when it is awaited.
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
        """Return the copies of some regions, by their indices: of all, or of a wave."""
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
        """Do nothing: compute has returned when it is queued."""

    def set_waves(self, waves: Sequence[Sequence[int]]) -> None:
        self.check_waves(waves)
        self._num_waves = len(waves)
        self._waves = [sorted(wave) for wave in waves]

    def await_loads(self) -> None:
        """Copy the waves that are left; all else was copied by `submit`."""
        self.await_wave(self._num_waves)

    def await_wave(self, wave: int) -> None:
        """Copy what is left of the waves up to this one. A failed copy ends the load."""
        self._copy_waves(wave)
        if self._failure is not None:
            raise self._failure

    def load_now(self, pairs: NDArray[np.int32]) -> None:
        """See `SwapEngine`: a copy of everything, on this thread."""
        job = SwapJob(-1, Direction.LOAD, pairs)
        self.check_pairs(job)
        arrival, self._arrival, self._failure = self._arrival, None, None
        if arrival is not None:
            # Its waves are not copied any more; its job has ended.
            given_up = CopyError("a load in waves was given up for a load at once")
            self._end(arrival, Completion(arrival.waves[0].job_id, Direction.LOAD, 0, 0, given_up))
        error = run(self._transfer(job, self._regions)).error
        if error is not None:
            raise error

    def _end(self, arrival: _Arrival, last: Completion) -> None:
        """Complete a load in waves, of which `last` was the last."""
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
        """Return what has ended, in the order of its end."""
        if not self._undelivered:
            return []
        time.sleep(0)  # to the worker: a caller that spins would keep the GIL for 5 ms at a time
        with self._state.condition:
            completions, self._state.done = self._state.done, []
        self._undelivered -= len(completions)
        return completions

    def wait(self, timeout_seconds: float) -> bool:
        """Block until the worker is idle; False on timeout. Copies the waves that are left here."""
        self._copy_waves(self._num_waves)
        state = self._state
        with state.condition:
            return state.condition.wait_for(
                lambda: not state.loads and not state.stores, timeout_seconds
            )

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Zero the pages before returning: the forward runs on this very thread."""
        self.check_blocks(blocks)
        for region in self.layout.regions:
            for block in blocks:
                address = region.address + block * region.block_stride_bytes
                ctypes.memset(address, 0, region.page_bytes)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Let the worker finish and end; completions can still be polled."""
        self._copy_waves(self._num_waves)
        self._closed = True
        stop(self._state)
        self._thread.join(timeout_seconds)
