"""KV caches on a CUDA device.

Each direction has a lane with a separate stream. Loads that compute waits for have a third lane, so
they wait only for each other; the swap kernels copy them. On the other two lanes, blocks that
consist of few long runs are copied by the copy engine, in pieces with a gate after each
(`choose_copies`), and all other blocks by kernels.

The engine itself holds only addresses and numbers. Its state owns the resources that copies use
(`state.py`).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.state import State, make_state, release
from kv_swap.cuda.zeroing import BlockZeroer
from kv_swap.engine import Completion, CopiesWith, Direction, SwapEngine, SwapJob, slots_for
from kv_swap.errors import CopyError, DeviceError, JobError, PinnedMemoryError
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena
from kv_swap.packing.slots import SlotPacker

if TYPE_CHECKING:
    import torch

_POLL_SECONDS = 0.0001

_UNPACKED_BYTES = 64 << 20
"""Bytes that `load_now` unpacks at a time; at least one block."""


class CudaSwapEngine(SwapEngine):
    """Copies between KV tensors on `device` and a registered arena, a stream per direction.

    `keep_alive` are the tensors behind `layout`. The compute stream is the current stream of
    `device` at each call. `copies_with` selects the copy path; by default the layout and a
    self-test do. `seconds` of a completion is device time. It begins when the compute stream
    reaches the point of submission or, for a load that does not wait for it, when earlier loads
    have ended. It excludes the time in which the rest of a job waits for a poll.

    The constructor tests the copy engine or compiles the kernels, allocates everything and
    synchronises, so call it before any CUDA graph capture. Raises `LayoutError` if a slot of the
    arena does not fit the layout, `PinnedMemoryError` if the arena is not registered, `DeviceError`
    if the kernels cannot be prepared, or if the layout is packed and the device cannot pack.
    """

    _state: State

    def __init__(
        self,
        layout: KVLayout,
        arena: HostArena,
        device: torch.device,
        keep_alive: Sequence[object],
        output_copy_stream: torch.cuda.Stream | None = None,
        *,
        copies_with: CopiesWith | None = None,
    ) -> None:
        num_slots = slots_for(layout, arena)
        if not arena.registered:
            raise PinnedMemoryError(
                f"the arena of {arena.nbytes} bytes is not page-locked; make it with "
                f"register=CudaRegistrar(device)"
            )
        super().__init__(layout, num_slots)
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.device("cuda", device_index(device))
        self._block_bytes = layout.block_bytes
        try:
            self._state = make_state(
                layout, arena, self._device, keep_alive, output_copy_stream, copies_with
            )
            self._zeroer = BlockZeroer(layout, self._device)
        except DeviceError:
            raise
        except RuntimeError as error:
            raise DeviceError(
                f"what copies need on {self._device} cannot be made: {error}. If its memory is "
                f"out, leave more to others: lower --gpu-memory-utilization"
            ) from error
        self._done: list[Completion] = []
        self._release = weakref.finalize(self, release, self._state)

    @property
    def copies_with(self) -> CopiesWith:
        return self._state.copies_with

    def submit(self, job: SwapJob) -> None:
        """Queue the job. Raises `JobError`; the job's completion reports a failure of CUDA."""
        self.check_job(job)
        if self._capturing():
            raise JobError(f"job {job.job_id} was submitted while a CUDA graph is captured")
        lane = self._state.lanes["before_compute" if job.before_compute else job.direction]
        lane.submit(job, len(job.pairs) * self._block_bytes)
        self._undelivered += 1

    def await_loads(self) -> None:
        """See `SwapEngine`. The host waits while loads do not fit into the stream's queue."""
        if (lane := self._state.lanes.get("before_compute")) is not None:
            lane.await_all()

    def load_now(self, pairs: NDArray[np.int32]) -> None:
        """See `SwapEngine`. Uses one `cudaMemcpyAsync` per page and no resources of jobs."""
        job = SwapJob(-1, Direction.LOAD, pairs)
        self.check_pairs(job)
        lane = self._state.lanes.get("before_compute")
        arena = self._state.arena
        if lane is None or arena is None or self._capturing():
            raise JobError(
                f"a load of {len(pairs)} blocks before compute was asked of an engine that is "
                f"released, or captures a CUDA graph"
            )
        compute = self._cuda.current_stream(self._device)
        try:
            # Slices of the failed job must not write once the forward has begun.
            lane.drop_unqueued()
            lane.stream.stream.synchronize()
            self._load_pages(arena, pairs, compute)
        except (RuntimeError, ValueError) as error:
            raise CopyError(
                f"cudaMemcpyAsync failed with {error}: a load of {len(pairs)} blocks at once"
            ) from error

    def _load_pages(self, arena: HostArena, pairs: NDArray[np.int32], stream: Any) -> None:
        """Unpack a few blocks at a time on the host and copy their pages. Blocks.

        Raises `RuntimeError` from CUDA, `ValueError` for a slot without packed KV.
        """
        cuda: Any = import_cupy().cuda
        runtime = cuda.runtime
        packer = SlotPacker(self.layout)
        regions = self.layout.regions
        step = max(1, _UNPACKED_BYTES // self._block_bytes)
        for first in range(0, len(pairs), step):
            blocks, slots = pairs[first : first + step].T
            pages = {
                index: np.empty((len(blocks), region.page_bytes), np.uint8)
                for index, region in enumerate(regions)
            }
            packer.unpack(arena.read(slots), pages)
            with cuda.Device(self._device.index):
                for region, rows in zip(regions, pages.values(), strict=True):
                    for row, block in zip(rows, blocks.tolist(), strict=True):
                        runtime.memcpyAsync(
                            region.address + block * region.block_stride_bytes,
                            row.ctypes.data,
                            region.page_bytes,
                            runtime.memcpyDefault,
                            stream.cuda_stream,
                        )
            stream.synchronize()  # the copies read `pages`

    def set_waves(self, waves: Sequence[Sequence[int]]) -> None:
        """See `SwapEngine`. May queue the write of a table. Also raises `CopyError` from CUDA."""
        self.check_waves(waves)
        lane = self._state.lanes.get("before_compute")
        if lane is None or self._capturing():
            raise JobError("waves are set outside of a capture, on an engine that is not released")
        try:
            lane.path.set_waves(waves, lane.stream.stream)
        except RuntimeError as error:
            raise CopyError(f"writing the table of {len(waves)} waves failed: {error}") from error
        self._num_waves = len(waves)

    def await_wave(self, wave: int) -> None:
        """See `SwapEngine`. The host waits while waves do not fit into the stream's queue."""
        if (lane := self._state.lanes.get("before_compute")) is not None:
            lane.await_wave(wave)

    def poll(self) -> list[Completion]:
        """Return the jobs that have ended, and queue waiting slices. Only queries events."""
        self._state.pace.polled()
        if not self._undelivered and not self._closed:
            return []
        self._advance()
        completions, self._done = self._done, []
        self._undelivered -= len(completions)
        return completions

    def wait(self, timeout_seconds: float) -> bool:
        """See `SwapEngine`. Polls in a loop."""
        deadline = time.monotonic() + timeout_seconds
        while not self._advance():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def fence_loads(self) -> None:
        """Make the streams of loads wait for an event of the compute stream."""
        try:
            for name, lane in self._state.lanes.items():
                if name is not Direction.STORE:
                    lane.wait_for_compute()
        except RuntimeError as error:
            raise CopyError(f"having loads wait for compute failed with {error}") from error

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Queue the zeroing on the compute stream. Raises `JobError`, or `CopyError` from CUDA."""
        self.check_blocks(blocks)
        try:
            self._zeroer.zero(blocks)
        except RuntimeError as error:
            raise CopyError(
                f"zeroing {len(blocks)} blocks of {self._block_bytes} bytes failed: {error}"
            ) from error
        finally:  # part of the zeroing may be queued, and must run before later loads
            self.fence_loads()

    def close(self, timeout_seconds: float = 30.0) -> None:
        """See `SwapEngine`. `poll` still works, and frees the resources after a timeout."""
        self._closed = True
        self.wait(timeout_seconds)

    @property
    def ready_slots(self) -> int:
        """Slots whose memory is registered."""
        arena = self._state.arena
        return self.num_slots if arena is None else arena.ready_slots

    def _capturing(self) -> bool:
        try:
            return bool(self._cuda.is_current_stream_capturing())
        except RuntimeError:
            # The CUDA context is lost. The lanes get the same error and report it in completions.
            return False

    def _advance(self) -> bool:
        """Advance the lanes and return whether all are idle.

        Does not advance during a graph capture, which querying an event would end.
        """
        lanes = self._state.lanes.values()
        if lanes and not self._capturing():
            for lane in lanes:
                if not lane.idle:
                    self._done.extend(lane.advance())
        idle = all(lane.idle for lane in lanes)
        if idle and self._closed:
            self._release()
        return idle
