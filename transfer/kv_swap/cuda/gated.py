"""The gated path: copies of the copy engine in pieces, with a gate after each.

A copy engine serves a stream until the stream's queue is empty, so the sampled tokens' copy would
wait for all that is queued: milliseconds. A gate is a 32-bit value that the stream writes after
each piece of 8 MiB. It makes the engine yield, and a small copy on another stream waits for one
piece, 0.1 ms. The link stays full, and no SM is used. The yield is not documented by NVIDIA, so
`gate_test.py` proves it at every start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.block_copies import BlockCutter, Copies
from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.driver import STRIDED_COPY, load_driver
from kv_swap.cuda.lane import CopyPath, Slice, WaveRange, join_waves
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

PIECE_BYTES = 8 << 20
"""Between two gates. 4 MiB cost 4 % of the rate, with 16 MiB a small copy waits 0.3 ms instead of
0.1 ms (H200, driver 580, 28 Nov 2026)."""

SLICE_PIECES = 8
"""Pieces of a slice, which ends with an event."""

MOST_CALLS = 768
"""Calls of copies and gates queued at once. A stream's queue holds about 1,000, 512 batches with a
gate each, and then CUDA makes the caller wait. 384 batches are 60 ms of a full link."""

CUT_BYTES = 256 << 20
"""Bytes whose copies are listed together."""


class Gates:
    """Queues copies in pieces with a gate after each, on streams of one device."""

    def __init__(self, device: torch.device) -> None:
        cuda = import_cupy().cuda
        self._driver = load_driver()
        self._index = device_index(device)
        self._device: Any = cuda.Device
        self._current_device: Any = cuda.runtime.getDevice
        with cuda.Device(self._index):
            # CUDA's own memory, past the pools: a caller that sleeps leaves it.
            self._word = cuda.Memory(4)

    def copy(self, copies: Copies, stream: int) -> None:
        """Queue copies as others do: one by one, without a gate."""
        with self._device(self._index):
            self._one_by_one(copies, stream)(0, len(copies))

    def queue(self, copies: Copies, pieces: Sequence[tuple[int, int]], stream: int) -> None:
        """Queue pieces of `copies`. Raises `RuntimeError`; some may then be queued."""
        if self._current_device() != self._index:
            with self._device(self._index):
                self.queue(copies, pieces, stream)
            return
        word, write = self._word.ptr, self._driver.write_one
        queue_piece = self._queue_piece(copies, stream)
        for first, end in pieces:
            queue_piece(first, end)
            write(stream, word)

    def calls_of(self, cutter: BlockCutter) -> int:
        """Return how many calls a piece of a cutter's copies may take, with its gate."""
        batches = self._driver.has_batches and not cutter.strided
        return 2 if batches else 1 + max(1, PIECE_BYTES // cutter.least_copy_bytes)

    def _queue_piece(self, copies: Copies, stream: int) -> Callable[[int, int], None]:
        """Return what queues some of these copies: the least work for each piece."""
        if copies.descriptors is not None:
            strided, size = self._driver.copy_strided, STRIDED_COPY.itemsize
            described = copies.descriptors.ctypes.data

            def copy_strided(first: int, end: int) -> None:
                for address in range(described + first * size, described + end * size, size):
                    strided(address, stream)

            return copy_strided
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

    Raises `DeviceError` without a driver that has gates.
    """

    call = "queueing gated copies"

    def __init__(
        self, direction: Direction, layout: KVLayout, arena: HostArena, device: torch.device
    ) -> None:
        self._direction = direction
        self._layout = layout
        self._arena = arena
        self._gates = Gates(device)
        self._whole = BlockCutter(layout.regions, arena)
        self._waves: list[tuple[WaveRange, BlockCutter]] = []
        self.max_in_flight = self._most_slices(self._whole)

    def _most_slices(self, cutter: BlockCutter) -> int:
        return max(1, MOST_CALLS // (SLICE_PIECES * self._gates.calls_of(cutter)))

    def set_waves(self, waves: Sequence[Sequence[int]], stream: Stream) -> None:
        """Cut blocks as the waves do; nothing is queued."""
        regions = self._layout.regions
        sizes = [sum(regions[index].page_bytes for index in wave) for wave in waves]
        self._waves = [
            (
                joined,
                BlockCutter(
                    [regions[index] for wave in joined for index in waves[wave]], self._arena
                ),
            )
            for joined in join_waves(sizes)
        ]
        self.max_in_flight = min(self._most_slices(cutter) for _, cutter in self._waves)

    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Yield copies and at most `SLICE_PIECES` pieces of them."""
        if not in_waves:
            yield from self._cut(None, self._whole, pairs)
            return
        assert self._waves, "a path was asked for waves that it was not given"
        for waves, cutter in self._waves:
            yield from self._cut(waves, cutter, pairs)

    def _cut(
        self, waves: WaveRange | None, cutter: BlockCutter, pairs: NDArray[np.int32]
    ) -> Iterator[Slice]:
        count = max(1, CUT_BYTES // cutter.nbytes)
        for first in range(0, len(pairs), count):
            copies = cutter.cut(pairs[first : first + count], self._direction)
            pieces = copies.pieces(PIECE_BYTES)
            for piece in range(0, len(pieces), SLICE_PIECES):
                yield waves, (copies, pieces[piece : piece + SLICE_PIECES])

    def queue(self, part: Slice, stream: Stream) -> None:
        """Queue the pieces of a slice on `stream`; nothing is refused."""
        copies, pieces = part[1]
        self._gates.queue(copies, pieces, stream.cuda_stream)
