"""The path of the swap kernels: a slice is one launch, its pairs a list in page-locked memory.

The lists lie in a ring with an entry for every slice that may be in flight. Until a slice has
ended, its kernel reads its entry and the table of segments; the host writes other entries only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.lane import CopyPath, Slice, WaveRange
from kv_swap.cuda.swap import LIST_BYTES, MAX_PAIRS, SwapKernel, write_list
from kv_swap.cuda.tiles import WaveTable
from kv_swap.engine import Direction
from kv_swap.memory.arena import HostArena
from kv_swap.memory.pieces import PinnedRegistrar

if TYPE_CHECKING:
    from torch.cuda import Stream

SLICE_BYTES = 256 << 20
"""Bytes of a launch, 5 ms on PCIe Gen5 x16: what needs the SMs of a store waits no longer. At every
launch the link idles for microseconds: slices of 16 MiB would cost a percent of it."""

PIECE_BYTES = 512 << 10
"""Least bytes of a slot for every launch that a load in waves makes beyond its first.

Behind the loads of a lone prompt of 2,048, 8,192 and 32,768 tokens (0.25, 1 and 4 GiB), time to
first token was 9.5, 26.6 and 97.6 ms with five launches, 11.9, 28.9 and 97.7 with two, 12.2, 30.1
and 102.9 with one (slots of 2 MiB, H200, PCIe Gen5 x16, 23 Nov 2026)."""

RING_ENTRIES = 128
"""Launches queued at once: behind about 1,000 operations of a stream CUDA makes the caller wait."""


class KernelPath(CopyPath):
    """Launches a swap kernel for every slice; in waves where it was given a table for them."""

    def __init__(
        self,
        direction: Direction,
        kernel: SwapKernel,
        slot_bytes: int,
        registrar: PinnedRegistrar,
        wave_table: WaveTable | None = None,
    ) -> None:
        self.call = f"launching swap_{direction.value}"
        self.max_in_flight = self.slices_per_call = RING_ENTRIES
        self._direction = direction
        self._kernel = kernel
        self._slot_bytes = slot_bytes
        ring = HostArena(RING_ENTRIES, LIST_BYTES, register=registrar)
        self._ring = ring.view()
        self._ring_address = ring.address
        self._next_entry = 0
        self._wave_table = wave_table

    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Yield views of at most MAX_PAIRS pairs and `SLICE_BYTES`, at least one pair.

        The first waves are joined where more launches would cost more than they hide.
        """
        if not in_waves:
            yield from self._cut(None, pairs, self._slot_bytes)
            return
        assert self._wave_table is not None, "a path without a table was asked for waves"
        wave_bytes = self._wave_table.wave_bytes
        launches = 1 + self._slot_bytes // PIECE_BYTES
        joined = max(1, len(wave_bytes) + 1 - launches)
        for waves in (range(joined), *(range(i, i + 1) for i in range(joined, len(wave_bytes)))):
            yield from self._cut(waves, pairs, sum(wave_bytes[wave] for wave in waves))

    @staticmethod
    def _cut(waves: WaveRange | None, pairs: NDArray[np.int32], pair_bytes: int) -> Iterator[Slice]:
        step = min(MAX_PAIRS, max(1, SLICE_BYTES // pair_bytes))
        for first in range(0, len(pairs), step):
            yield waves, pairs[first : first + step]

    def queue(self, part: Slice, stream: Stream) -> None:
        """Write the list and launch. Raises `RuntimeError`; nothing is queued then."""
        waves, pairs = part
        table = self._wave_table
        tiles = None if waves is None or table is None else table.tiles(waves)
        entry = self._next_entry
        # Free: slices end in order, and the one that used it last is `RING_ENTRIES` slices back.
        write_list(self._ring[entry], pairs)
        self._kernel.launch(self._direction, self._ring_address + entry * LIST_BYTES, stream, tiles)
        self._next_entry = (entry + 1) % len(self._ring)

    def warm_up(self, stream: Stream) -> None:
        """Launch an empty list; synchronise before anything is queued."""
        write_list(self._ring[0], np.empty((0, 2), np.int32))
        self._kernel.launch(self._direction, self._ring_address, stream)
