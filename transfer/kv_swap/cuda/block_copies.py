"""Blocks cut into copies for a copy engine, and copies gathered into pieces.

A block is runs: one row of bytes, or rows that are equally far apart in the KV cache and back to
back in the slot, as a layer's pages of one allocation are. A row is a copy, or many rows are one
strided copy. CUDA looks up where a host range begins, and refuses one that ends in another
registration, so a copy ends where a piece of the arena does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.driver import MEMORY_DEVICE, MEMORY_HOST, strided_copies
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region
from kv_swap.memory.arena import HostArena

MOST_COPY_BYTES = 4 << 20
"""Of one copy, so that every piece of 8 MiB is filled by more than half."""

LEAST_ROW_BYTES = 64 << 10
"""Of a row of a strided copy. Shorter ones are slower than the kernels are."""

LEAST_RUN_BYTES = 256 << 10
"""Of a copy, on average: shorter ones cost the host more than 0.5 us for each MiB (H200)."""

MOST_PITCH_BYTES = (1 << 31) - 1
"""CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far."""


@dataclass(frozen=True, slots=True)
class Run:
    """`rows` of `row_bytes`, `row_stride` apart from `address` on in block 0."""

    address: int
    block_stride: int
    slot_offset: int
    row_bytes: int
    rows: int = 1
    row_stride: int = 0

    @property
    def strided(self) -> bool:
        """Whether many rows are one copy: rows as long as a run of its own are copied singly."""
        return self.rows > 1 and LEAST_ROW_BYTES <= self.row_bytes < LEAST_RUN_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.rows * self.row_bytes


def runs_of(regions: Sequence[Region]) -> list[Run]:
    """Return the runs of these raw regions, in the order of their places in the slot."""
    rows = [
        Run(region.address, region.block_stride_bytes, region.slot_offset_bytes, region.page_bytes)
        for region in sorted(regions, key=lambda region: region.slot_offset_bytes)
    ]
    return _joined(_add_row, _joined(_lengthen, rows))


def _joined(join: Callable[[Run, Run], Run | None], runs: Sequence[Run]) -> list[Run]:
    found: list[Run] = []
    for run in runs:
        joined = join(found[-1], run) if found else None
        if joined is None:
            found.append(run)
        else:
            found[-1] = joined
    return found


def _lengthen(row: Run, more: Run) -> Run | None:
    """Join rows of which one begins where the other ends, on both sides."""
    end = row.address + row.row_bytes, row.slot_offset + row.row_bytes, row.block_stride
    if end != (more.address, more.slot_offset, more.block_stride):
        return None
    return replace(row, row_bytes=row.row_bytes + more.row_bytes)


def _add_row(run: Run, row: Run) -> Run | None:
    same = (run.row_bytes, run.block_stride) == (row.row_bytes, row.block_stride)
    step = row.address - run.address - (run.rows - 1) * run.row_stride
    evenly = step == run.row_stride if run.rows > 1 else step >= run.row_bytes
    if not (same and evenly and run.slot_offset + run.nbytes == row.slot_offset):
        return None
    return Run(run.address, run.block_stride, run.slot_offset, run.row_bytes, run.rows + 1, step)


def suits_copy_engine(layout: KVLayout) -> bool:
    """Return whether a copy engine moves blocks of this layout well: few and long copies."""
    if layout.num_tiles:
        return False  # only kernels pack
    runs = runs_of(layout.regions)
    copies = sum(1 if run.strided else run.rows for run in runs)
    return layout.block_bytes >= copies * LEAST_RUN_BYTES


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies in their order: addresses and bytes as int64 of `(n,)`.

    `descriptors` describe all of them, if one is strided.
    """

    destinations: NDArray[np.int64]
    sources: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    descriptors: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.nbytes)

    def pieces(self, piece_bytes: int) -> list[tuple[int, int]]:
        """Return the first copy and the end of pieces of at most `piece_bytes`, or of one copy."""
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
    """Cuts pairs of blocks and slots into copies of `regions`, which are raw.

    Holds numbers only. With `plain` no copy is strided.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        arena: HostArena,
        *,
        plain: bool = False,
        most_pitch_bytes: int = MOST_PITCH_BYTES,
    ) -> None:
        self._arena_address = arena.address
        self._slot_bytes = arena.slot_bytes
        self._border_bytes = arena.piece_bytes
        self._most_pitch_bytes = most_pitch_bytes
        parts = [part for run in runs_of(regions) for part in _parts(run, plain=plain)]
        self.nbytes = sum(part.nbytes for part in parts)
        """Of a block."""
        self._address = _array(part.address for part in parts)
        self._block_stride = _array(part.block_stride for part in parts)
        self._slot_offset = _array(part.slot_offset for part in parts)
        self._nbytes = _array(part.nbytes for part in parts)
        self._rows = _array(part.rows for part in parts)
        self._row_stride = _array(part.row_stride for part in parts)
        self.strided = bool((self._rows > 1).any())
        """Whether copies are described, as strided ones are."""
        self.least_copy_bytes = int(self._nbytes.min())
        """Of a block that is not cut at a border."""
        # Without addresses: of a block that is not cut.
        self._described = {
            load: self._describe(self._nbytes, self._rows, self._row_stride, load=load)
            for load in (False, True)
            if self.strided
        }

    def cut(self, pairs: NDArray[np.int32], direction: Direction) -> Copies:
        """Return the copies of `pairs`, `(n, 2)`, pair by pair."""
        wide = pairs.astype(np.int64)
        load = direction is Direction.LOAD
        device = (self._address + wide[:, :1] * self._block_stride).ravel()
        offset = (self._slot_offset + wide[:, 1:] * self._slot_bytes).ravel()
        nbytes = np.tile(self._nbytes, len(pairs))
        crosses = offset // self._border_bytes != (offset + nbytes - 1) // self._border_bytes
        descriptors = None
        if crosses.any():
            rows, row_stride = (
                np.tile(values, len(pairs)) for values in (self._rows, self._row_stride)
            )
            if self.strided:
                device, offset, nbytes, rows, row_stride = _single_rows(
                    crosses & (rows > 1), device, offset, nbytes, rows, row_stride
                )
            device, offset, nbytes, rows, row_stride = _cut_at_borders(
                self._border_bytes, device, offset, nbytes, rows, row_stride
            )
            if self.strided:
                descriptors = self._describe(nbytes, rows, row_stride, load=load)
        elif self.strided:
            descriptors = np.tile(self._described[load], len(pairs))
        host = self._arena_address + offset
        if descriptors is not None:
            kv, slot = ("dst", "src") if load else ("src", "dst")
            descriptors[f"{kv}_device"] = device
            descriptors[f"{slot}_host"] = host
        to, of = (device, host) if load else (host, device)
        return Copies(to, of, nbytes, descriptors)

    def _describe(
        self,
        nbytes: NDArray[np.int64],
        rows: NDArray[np.int64],
        row_stride: NDArray[np.int64],
        *,
        load: bool,
    ) -> NDArray[Any]:
        """Describe copies without addresses; as slices of some rows where a pitch is too long.

        Of a slice only the first row is copied then: a slice is as high as makes its pitch fit.
        """
        found = strided_copies(len(rows))
        kv, slot = ("dst", "src") if load else ("src", "dst")
        width = nbytes // rows
        row_stride = np.where(rows > 1, row_stride, width)
        long = row_stride > self._most_pitch_bytes
        height = np.ones_like(row_stride)
        while (too_long := row_stride // height > self._most_pitch_bytes).any():
            height[too_long] *= 2  # strides are multiples of 16
        found[f"{kv}_type"] = MEMORY_DEVICE
        found[f"{kv}_pitch"] = row_stride // height
        found[f"{kv}_height"] = np.where(long, height, rows)
        found[f"{slot}_type"] = MEMORY_HOST
        found[f"{slot}_pitch"] = width
        found[f"{slot}_height"] = np.where(long, 1, rows)
        found["width"] = width
        found["height"] = np.where(long, 1, rows)
        found["depth"] = np.where(long, rows, 1)
        return found


def _array(values: Any) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64)


def _parts(run: Run, *, plain: bool) -> list[Run]:
    """Cut a run into equal parts, each a copy."""
    if run.strided and not plain:
        return _shares(run, run.rows, run.row_bytes, run.row_stride)
    rows = [
        Run(
            run.address + row * run.row_stride,
            run.block_stride,
            run.slot_offset + row * run.row_bytes,
            run.row_bytes,
        )
        for row in range(run.rows)
    ]
    return [part for row in rows for part in _cut_row(row)]


def _shares(run: Run, rows: int, row_bytes: int, row_stride: int) -> list[Run]:
    count = -(-run.nbytes // MOST_COPY_BYTES)
    bounds = [rows * index // count for index in range(count + 1)]
    return [
        Run(
            run.address + first * row_stride,
            run.block_stride,
            run.slot_offset + first * row_bytes,
            row_bytes,
            end - first,
            row_stride if end - first > 1 else 0,
        )
        for first, end in pairwise(bounds)
    ]


def _cut_row(row: Run) -> list[Run]:
    count = -(-row.row_bytes // MOST_COPY_BYTES)
    bounds = [row.row_bytes * index // count // 16 * 16 for index in range(count)]
    return [
        Run(row.address + first, row.block_stride, row.slot_offset + first, end - first)
        for first, end in zip(bounds, [*bounds[1:], row.row_bytes], strict=True)
    ]


def _single_rows(
    chosen: NDArray[np.bool_],
    device: NDArray[np.int64],
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    rows: NDArray[np.int64],
    row_stride: NDArray[np.int64],
) -> tuple[NDArray[np.int64], ...]:
    """Make every row of the chosen copies a copy of its own."""
    width = nbytes // rows
    counts = np.where(chosen, rows, 1)
    index = np.repeat(np.arange(len(rows)), counts)
    row = _places(counts)
    single = chosen[index]
    return (
        device[index] + row * row_stride[index],
        offset[index] + row * width[index],
        np.where(single, width[index], nbytes[index]),
        np.where(single, 1, rows[index]),
        row_stride[index],
    )


def _cut_at_borders(
    border_bytes: int,
    device: NDArray[np.int64],
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    rows: NDArray[np.int64],
    row_stride: NDArray[np.int64],
) -> tuple[NDArray[np.int64], ...]:
    """Cut copies of one row where a multiple of `border_bytes` lies inside."""
    first = offset // border_bytes
    counts = (offset + nbytes - 1) // border_bytes - first + 1
    index = np.repeat(np.arange(len(counts)), counts)
    begin = (first[index] + _places(counts)) * border_bytes
    end = np.minimum(begin + border_bytes, (offset + nbytes)[index])
    begin = np.maximum(begin, offset[index])
    moved = device[index] + begin - offset[index]
    return moved, begin, end - begin, rows[index], row_stride[index]


def _places(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return 0 to n - 1 for every count n, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
