"""Cuts blocks into copies for the copy engine, and groups copies into pieces.

A block consists of runs, which are contiguous in both the KV cache and the slot. CUDA refuses a
host range that begins in one registration and ends in another, so no copy crosses the border of a
registered piece of the arena.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region
from kv_swap.memory.arena import HostArena

MOST_COPY_BYTES = 4 << 20
"""Maximum bytes of one copy, so that every piece of 8 MiB is more than half full."""

LEAST_RUN_BYTES = 1 << 20
"""Minimum average bytes of a run.

A copy takes 2 to 3 us of the step's thread, because CUDA looks up the registration of its host
address. With shorter runs, 1 GiB would take more than 4 ms (H200, 28 Nov 2026)."""


def runs_of(regions: Sequence[Region]) -> list[Region]:
    """Return the runs of raw regions in slot order; adjacent regions are merged."""
    runs: list[Region] = []
    for region in sorted(regions, key=lambda region: region.slot_offset_bytes):
        last = runs[-1] if runs else None
        if last and region == replace(
            region,
            address=last.address + last.page_bytes,
            slot_offset_bytes=last.slot_offset_bytes + last.page_bytes,
            block_stride_bytes=last.block_stride_bytes,
        ):
            runs[-1] = replace(last, page_bytes=last.page_bytes + region.page_bytes)
        else:
            runs.append(region)
    return runs


def suits_copy_engine(layout: KVLayout) -> bool:
    """Return whether blocks of this layout suit the copy engine: they need few, long copies."""
    if layout.num_tiles:
        return False  # only kernels pack
    return layout.block_bytes >= len(runs_of(layout.regions)) * LEAST_RUN_BYTES


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies in order: destination, source and bytes, each int64 of shape `(n,)`."""

    destinations: NDArray[np.int64]
    sources: NDArray[np.int64]
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nbytes)

    def pieces(self, piece_bytes: int) -> list[tuple[int, int]]:
        """Return the (first, end) copies of pieces of at most `piece_bytes`, or of one copy."""
        longest = int(self.nbytes.max())
        if longest == self.nbytes.min():
            step, count = max(1, piece_bytes // longest), len(self)
            return [(first, min(first + step, count)) for first in range(0, count, step)]
        ends = np.cumsum(self.nbytes).tolist()
        pieces = []
        first = done = 0
        while first < len(ends):
            end = max(bisect_right(ends, done + piece_bytes, first), first + 1)
            pieces.append((first, end))
            first, done = end, ends[end - 1]
        return pieces


class BlockCutter:
    """Cuts (block, slot) pairs into copies of raw `regions`. Keeps no memory alive."""

    def __init__(self, regions: Sequence[Region], arena: HostArena) -> None:
        self._arena_address = arena.address
        self._slot_bytes = arena.slot_bytes
        self._border_bytes = arena.piece_bytes
        parts = [part for run in runs_of(regions) for part in _cut_run(run)]
        self.nbytes = sum(part.page_bytes for part in parts)
        """Bytes of a block."""
        self._address = _array(part.address for part in parts)
        self._block_stride = _array(part.block_stride_bytes for part in parts)
        self._slot_offset = _array(part.slot_offset_bytes for part in parts)
        self._nbytes = _array(part.page_bytes for part in parts)
        self.least_copy_bytes = int(self._nbytes.min())
        """Minimum bytes of a copy in a block that is not cut at a border."""

    def cut(self, pairs: NDArray[np.int32], direction: Direction) -> Copies:
        """Return the copies for `pairs`, int32 of shape `(n, 2)`, pair by pair."""
        wide = pairs.astype(np.int64)
        device = (self._address + wide[:, :1] * self._block_stride).ravel()
        offset = (self._slot_offset + wide[:, 1:] * self._slot_bytes).ravel()
        nbytes = np.tile(self._nbytes, len(pairs))
        if (offset // self._border_bytes != (offset + nbytes - 1) // self._border_bytes).any():
            device, offset, nbytes = _cut_at_borders(self._border_bytes, device, offset, nbytes)
        host = self._arena_address + offset
        to, of = (device, host) if direction is Direction.LOAD else (host, device)
        return Copies(to, of, nbytes)


def _array(values: Any) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _cut_run(run: Region) -> list[Region]:
    """Cut a run into copies of roughly equal size."""
    count = -(-run.page_bytes // MOST_COPY_BYTES)
    bounds = [run.page_bytes * index // count // 16 * 16 for index in range(count)]
    return [
        replace(
            run,
            address=run.address + first,
            page_bytes=end - first,
            slot_offset_bytes=run.slot_offset_bytes + first,
        )
        for first, end in pairwise([*bounds, run.page_bytes])
    ]


def _cut_at_borders(
    border_bytes: int,
    device: NDArray[np.int64],
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
) -> tuple[NDArray[np.int64], ...]:
    """Cut copies that cross a multiple of `border_bytes`."""
    first = offset // border_bytes
    counts = (offset + nbytes - 1) // border_bytes - first + 1
    index = np.repeat(np.arange(len(counts)), counts)
    part = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = (first[index] + part) * border_bytes
    end = np.minimum(begin + border_bytes, (offset + nbytes)[index])
    begin = np.maximum(begin, offset[index])
    return device[index] + begin - offset[index], begin, end - begin
