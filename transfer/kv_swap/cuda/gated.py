"""The gated path: copies of the copy engine in pieces, with a gate after each.

A copy engine serves a stream until the stream's queue is empty, so the sampled tokens' copy would
wait for all that is queued: milliseconds. A gate is a 32-bit value that the stream writes after
each piece of 8 MiB. It makes the engine yield, and a small copy on another stream waits for one
piece, 0.1 ms. The link stays full, and no SM is used. The yield is not documented by NVIDIA, so
`gate_test.py` proves it at every start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

SLICE_PIECES = 4
"""Pieces of a slice, which ends with an event; `submit` queues one slice itself."""

IN_FLIGHT = 64
"""Slices queued at once: 256 gates. With about 512 in a stream's queue CUDA makes the caller wait,
and 256 pieces are 40 ms of a full link."""

CUT_BYTES = 1 << 30
"""Bytes whose copies are listed together, after those of the first slice."""


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

    def queue(
        self, copies: Copies, pieces: Sequence[tuple[int, int]], stream: int, *, gated: bool = True
    ) -> None:
        """Queue pieces of `copies`. Raises `RuntimeError`; some may then be queued."""
        if self._current_device() != self._index:
            with self._device(self._index):
                self.queue(copies, pieces, stream, gated=gated)
            return
        driver, word = self._driver, self._word.ptr
        batches = driver.has_batches and copies.strided is None
        to, of, sizes = (
            array.ctypes.data for array in (copies.destinations, copies.sources, copies.nbytes)
        )
        for first, end in pieces:
            if batches and end - first > 1:
                at = 8 * first
                driver.copy_batch(to + at, of + at, sizes + at, end - first, stream)
            else:
                self._copy_singly(copies, first, end, stream)
            if gated:
                driver.write_value(stream, word, 1)

    def _copy_singly(self, copies: Copies, first: int, end: int, stream: int) -> None:
        parts = slice(first, end)
        descriptors = 0 if copies.descriptors is None else copies.descriptors.ctypes.data
        strided = [-1] * (end - first) if copies.strided is None else copies.strided[parts].tolist()
        listed = zip(
            strided,
            copies.destinations[parts].tolist(),
            copies.sources[parts].tolist(),
            copies.nbytes[parts].tolist(),
            strict=True,
        )
        for row, destination, source, nbytes in listed:
            if row < 0:
                self._driver.copy(destination, source, nbytes, stream)
            else:
                self._driver.copy_strided(descriptors + row * STRIDED_COPY.itemsize, stream)


class GatedPath(CopyPath):
    """Gated copies of one direction, between a raw layout and a registered arena.

    Raises `DeviceError` without a driver that has gates.
    """

    call = "queueing gated copies"
    max_in_flight = IN_FLIGHT

    def __init__(
        self, direction: Direction, layout: KVLayout, arena: HostArena, device: torch.device
    ) -> None:
        self._direction = direction
        self._layout = layout
        self._arena = arena
        self._gates = Gates(device)
        self._whole = BlockCutter(layout.regions, arena)
        self._waves: list[tuple[WaveRange, BlockCutter]] = []

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
        # What the first slice needs comes first: the caller's step waits for it.
        count = max(1, SLICE_PIECES * PIECE_BYTES // cutter.nbytes)
        first = 0
        while first < len(pairs):
            copies = cutter.cut(pairs[first : first + count], self._direction)
            pieces = copies.pieces(PIECE_BYTES)
            for piece in range(0, len(pieces), SLICE_PIECES):
                yield waves, (copies, pieces[piece : piece + SLICE_PIECES])
            first += count
            count = max(1, CUT_BYTES // cutter.nbytes)

    def queue(self, part: Slice, stream: Stream) -> None:
        """Queue the pieces of a slice on `stream`; nothing is refused."""
        copies, pieces = part[1]
        self._gates.queue(copies, pieces, stream.cuda_stream)
