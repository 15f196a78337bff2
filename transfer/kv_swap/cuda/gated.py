"""The gated path: the copy engine copies in pieces, with a gate after each.

A copy engine serves a stream until the stream's queue is empty, so the copy of sampled tokens would
wait milliseconds for everything in the queue. A gate is a 32-bit value that the stream writes after
each piece of 8 MiB. It makes the engine yield, so a small copy on another stream waits for only one
piece, 0.1 ms. The link stays full, and no SM is used. NVIDIA does not document this behaviour, so
`gate_test.py` verifies it at every start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.block_copies import BlockCutter, Copies
from kv_swap.cuda.device import OnDevice, import_cupy
from kv_swap.cuda.driver import load_driver
from kv_swap.cuda.lane import CopyPath, Slice
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

PIECE_BYTES = 8 << 20
"""Bytes between two gates. With 4 MiB, the rate is 4 % lower; with 16 MiB, a small copy waits 0.3
ms instead of 0.1 ms (H200, driver 580, 28 Nov 2026)."""

SLICE_PIECES = 8
"""Pieces in a slice, which ends with an event."""

FIRST_PIECES = 32
"""Minimum number of pieces queued at a time: 256 MiB keep the link full for 5 ms, as long as a step
of decodes, and cost the step's thread 0.3 to 0.8 ms (H200, 28 Nov 2026)."""

PIECES_PER_SECOND = 8000
"""Pieces queued per second until the next poll: 67 GB/s, slightly more than PCIe Gen5 x16."""

MOST_CALLS = 768
"""Maximum calls (copies and gates) queued at a time. A stream's queue holds about 1,000, or 512
batches with a gate each; when it is full, CUDA blocks the caller. 384 batches keep the link full
for 60 ms."""

CUT_BYTES = 256 << 20
"""Bytes whose copies are listed together."""


class Gates:
    """Queues copies in pieces with a gate after each, on streams of one device."""

    def __init__(self, device: torch.device) -> None:
        cuda: Any = import_cupy().cuda
        self._driver = load_driver()
        self._on_device = OnDevice(device)
        with cuda.Device(self._on_device.index):
            # Allocated by CUDA, outside the pools, whose memory a caller discards to sleep.
            self._word = cuda.Memory(4)

    def copy(self, copies: Copies, stream: int) -> None:
        """Queue copies one by one, without gates."""
        self._on_device(self._one_by_one(copies, stream), 0, len(copies))

    def queue(self, copies: Copies, pieces: Sequence[tuple[int, int]], stream: int) -> None:
        """Queue pieces of `copies`. Raises `RuntimeError`; some pieces may then be queued."""
        self._on_device(self._queue_pieces, copies, pieces, stream)

    def _queue_pieces(self, copies: Copies, pieces: Sequence[tuple[int, int]], stream: int) -> None:
        word, write = self._word.ptr, self._driver.write_one
        queue_piece = self._queue_piece(copies, stream)
        for first, end in pieces:
            queue_piece(first, end)
            write(stream, word)

    def calls_of(self, cutter: BlockCutter) -> int:
        """Return the maximum number of calls for one piece of a cutter's copies and its gate."""
        return 2 if self._driver.has_batches else 1 + max(1, PIECE_BYTES // cutter.least_copy_bytes)

    def _queue_piece(self, copies: Copies, stream: int) -> Callable[[int, int], None]:
        """Return a function that queues a range of these copies with the least work per piece."""
        if self._driver.has_batches:
            batch = self._driver.copy_batch
            to, of, sizes = (
                array.ctypes.data for array in (copies.destinations, copies.sources, copies.nbytes)
            )

            def copy_batch(first: int, end: int) -> None:
                at = 8 * first
                batch(to + at, of + at, sizes + at, end - first, stream)

            return copy_batch
        return self._one_by_one(copies, stream)

    def _one_by_one(self, copies: Copies, stream: int) -> Callable[[int, int], None]:
        copy = self._driver.copy

        def copy_singly(first: int, end: int) -> None:
            parts = slice(first, end)
            arrays = (copies.destinations, copies.sources, copies.nbytes)
            listed = (array[parts].tolist() for array in arrays)
            for destination, source, nbytes in zip(*listed, strict=True):
                copy(destination, source, nbytes, stream)

        return copy_singly


class GatedPath(CopyPath):
    """Gated copies of one direction, between a raw layout and a registered arena.

    Raises `DeviceError` if the driver does not support gates.
    """

    call = "queueing gated copies"

    def __init__(
        self, direction: Direction, layout: KVLayout, arena: HostArena, device: torch.device
    ) -> None:
        self._direction = direction
        self._gates = Gates(device)
        self._cutter = BlockCutter(layout.regions, arena)
        self.max_in_flight = max(1, MOST_CALLS // self._gates.calls_of(self._cutter))

    def size(self, part: Slice) -> int:
        """Return the number of pieces."""
        return len(part[1][1])

    def allowance(self, seconds: float) -> int:
        """Return just enough to keep the link busy: queuing 1 GiB would take milliseconds."""
        pieces = max(FIRST_PIECES, math.ceil(seconds * PIECES_PER_SECOND))
        return min(pieces, self.max_in_flight)

    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Yield copies and at most `SLICE_PIECES` pieces of them."""
        assert not in_waves, "loads that come in waves are copied by kernels"
        count = max(1, CUT_BYTES // self._cutter.nbytes)
        for first in range(0, len(pairs), count):
            copies = self._cutter.cut(pairs[first : first + count], self._direction)
            pieces = copies.pieces(PIECE_BYTES)
            for piece in range(0, len(pieces), SLICE_PIECES):
                yield None, (copies, pieces[piece : piece + SLICE_PIECES])

    def queue(self, part: Slice, stream: Stream) -> None:
        """Queue the pieces of a slice on `stream`. Refuses nothing."""
        copies, pieces = part[1]
        self._gates.queue(copies, pieces, stream.cuda_stream)
