"""KV caches on a CUDA device: the swap engine that copies with the swap kernels.

Lifetime. Streams, lists, arena and KV tensors belong to an inner state, which outlives the engine
until both streams are idle: dropping the engine in mid-copy synchronises them before anything is
freed. The engine itself holds addresses and numbers only.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transfer.device import device_index
from transfer.engine import Completion, Direction, SwapEngine, SwapJob
from transfer.errors import JobError, LayoutError, PinnedMemoryError
from transfer.lane import RING_ENTRIES, Lane
from transfer.layout import KVLayout
from transfer.pinned import CudaRegistrar, HostArena
from transfer.streams import CopyStream
from transfer.swap import SwapKernel
from transfer.zero import BlockZeroer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.0001


@dataclass(slots=True)
class _State:
    """What copies in flight need. Loads are advanced first: somebody waits for them."""

    lanes: dict[Direction, Lane]
    zeroer: BlockZeroer | None
    arena: HostArena | None
    keep_alive: Sequence[object]


_LEAKED: list[_State] = []
"""What copies used of which nobody knows whether they have ended; it is never freed."""


class KernelSwapEngine(SwapEngine):
    """Copies between KV tensors on `device` and a registered arena, a stream per direction.

    `keep_alive` are the tensors behind `layout`. Stores wait for `output_copy_stream` besides the
    compute stream, which is whatever stream is current on `device` at each call. `seconds` of a
    completion are the device's: from when the compute stream reached the point of submission.

    The constructor compiles the kernels, allocates all it needs and synchronises; construct it
    before any CUDA graph is captured.

    Raises `LayoutError` if a slot of the arena does not fit the layout, `PinnedMemoryError` if the
    arena is not registered, `DeviceError` if the kernels cannot be prepared.
    """

    def __init__(
        self,
        layout: KVLayout,
        arena: HostArena,
        device: torch.device,
        keep_alive: Sequence[object],
        output_copy_stream: torch.cuda.Stream | None = None,
    ) -> None:
        if arena.slot_bytes != layout.slot_bytes:
            raise LayoutError(
                f"slots of the arena have {arena.slot_bytes} bytes, a block has {layout.slot_bytes}"
            )
        if not arena.registered:
            raise PinnedMemoryError(
                f"the arena of {arena.nbytes} bytes is not page-locked, so no kernel can reach it; "
                f"make it with register=CudaRegistrar(device)"
            )
        super().__init__(layout, arena.num_slots)
        import torch

        self._cuda: Any = torch.cuda
        self._device = torch.device("cuda", device_index(device))
        kernel = SwapKernel(layout, arena, self._device)
        registrar = CudaRegistrar(self._device)
        lanes = {}
        for direction, awaited in ((Direction.LOAD, None), (Direction.STORE, output_copy_stream)):
            # As many events for jobs as for slices: a job has one of its own and at least a slice.
            stream = CopyStream(self._device, 2 * RING_ENTRIES, awaited)
            lanes[direction] = Lane(direction, kernel, stream, layout.slot_bytes, registrar)
            lanes[direction].warm_up()
            stream.stream.synchronize()
        zeroer = BlockZeroer(layout, self._device, registrar)
        self._state = _State(lanes, zeroer, arena, tuple(keep_alive))
        self._done: deque[Completion] = deque()
        self._undelivered = 0
        self._closed = False
        self._release = weakref.finalize(self, _release, self._state)

    def submit(self, job: SwapJob) -> None:
        """Queue the job behind what is queued on the compute stream now; see `SwapEngine`.

        Raises `JobError`; a failure of CUDA becomes the job's completion.
        """
        self.check_pairs(job)
        if self._closed:
            raise JobError(f"job {job.job_id} was submitted to an engine that is closed")
        if self._capturing():
            raise JobError(f"job {job.job_id} was submitted while a CUDA graph is captured")
        nbytes = len(job.pairs) * self.layout.slot_bytes
        self._undelivered += 1
        self._state.lanes[job.direction].submit(job, nbytes)

    def poll(self) -> list[Completion]:
        """Return what has ended; launch slices that found the ring full. Queries events only."""
        self._advance()
        completions = list(self._done)
        self._done.clear()
        self._undelivered -= len(completions)
        return completions

    def wait(self, timeout_seconds: float) -> bool:
        """Poll until every copy has ended; False on timeout."""
        deadline = time.monotonic() + timeout_seconds
        while not self._advance():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Queue the zeroing on the compute stream; see `BlockZeroer`.

        Raises `JobError`, or `CopyError` from CUDA.
        """
        self.check_blocks(blocks)
        zeroer = self._state.zeroer
        if self._closed or zeroer is None:
            raise JobError(f"zeroing {len(blocks)} blocks was asked of an engine that is closed")
        zeroer.zero(blocks)

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Wait for what is in flight, then let go of everything; completions can still be polled.

        On timeout the state stays until a later `close` or `poll` finds the copies ended, or until
        the engine is dropped.
        """
        self._closed = True
        self.wait(timeout_seconds)

    def hold(self, objects: Sequence[object]) -> Sequence[object]:
        """See `SwapEngine`."""
        held, self._state.keep_alive = self._state.keep_alive, tuple(objects)
        return held

    @property
    def in_flight(self) -> int:
        """Jobs whose completion has not been polled."""
        return self._undelivered

    def _capturing(self) -> bool:
        try:
            return bool(self._cuda.is_current_stream_capturing())
        except RuntimeError:
            # The CUDA context is lost. The lanes meet the same error and report it with their jobs.
            return False

    def _advance(self) -> bool:
        """Move both lanes on; True if they are idle.

        Not within a capture: querying an event would invalidate it.
        """
        lanes = self._state.lanes.values()
        if lanes and not self._capturing():
            for lane in lanes:
                self._done.extend(lane.advance())
        idle = all(lane.idle for lane in lanes)
        if idle and self._closed:
            self._release()
        return idle


def _release(state: _State) -> None:
    """Let the streams run out, then drop what their copies used. Runs once, on any thread.

    Slices that were never launched are not: nobody is left to hear of their job.
    """
    for lane in state.lanes.values():
        try:
            lane.stream.stream.synchronize()
            if state.zeroer is not None:
                state.zeroer.synchronize()
        except RuntimeError:
            logger.exception("cannot synchronise a copy stream; what its copies use is not freed")
            _LEAKED.append(state)
            return
    state.lanes.clear()
    state.zeroer = None
    state.arena = None
    state.keep_alive = ()
