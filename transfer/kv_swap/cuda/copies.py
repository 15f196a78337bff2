"""What pairs mean as plain copies: destination, source and bytes, merged and cut with NumPy.

Integers only, nothing here touches memory or a device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kv_swap.engine import Direction
from kv_swap.layout import KVLayout

Copies = NDArray[np.int64]
"""Of shape `(3, n)`: a row each of destinations, sources and bytes. No two copies overlap."""


class CopyMaker:
    """Turns pairs of one layout and one arena into copies.

    A copy touches one page-locked registration only, since CUDA looks at where a host range begins
    and refuses one that ends in another registration: the arena, which starts at `arena_address`,
    is registered in pieces of `boundary_bytes`, and one of those boundaries may fall into a slot.
    No copy has more than `max_bytes`.
    """

    def __init__(
        self, layout: KVLayout, arena_address: int, boundary_bytes: int, max_bytes: int
    ) -> None:
        self.layout = layout
        self.arena_address = arena_address
        self.boundary_bytes = boundary_bytes
        self.max_bytes = max_bytes
        self._slot_bytes = layout.slot_bytes
        rows = [
            (r.address, r.page_bytes, r.block_stride_bytes, r.slot_offset_bytes)
            for r in layout.regions
        ]
        self._regions: NDArray[np.int64] = np.array(rows, np.int64).T.copy()

    def copies(self, direction: Direction, pairs: NDArray[np.int32]) -> Copies:
        """Return the copies of `pairs`, `(n, 2)`, in the order of their slots.

        Pages that are adjacent on both sides are one copy, as long as the limits allow.
        """
        pairs = pairs[np.argsort(pairs[:, 1], kind="stable")].astype(np.int64)
        address, page_bytes, stride, slot_offset = self._regions
        # All regions of a slot, then those of the next: the order of the arena.
        device = (address + pairs[:, :1] * stride).reshape(-1)
        host = (slot_offset + pairs[:, 1:] * self._slot_bytes).reshape(-1)
        nbytes = np.tile(page_bytes, len(pairs))
        apart = (device[:-1] + nbytes[:-1] != device[1:]) | (host[:-1] + nbytes[:-1] != host[1:])
        firsts = np.concatenate(([0], np.flatnonzero(apart) + 1))
        device, host, nbytes = device[firsts], host[firsts], np.add.reduceat(nbytes, firsts)
        for step, from_arena in ((self.boundary_bytes, True), (self.max_bytes, False)):
            run, offset, nbytes = _cut(host if from_arena else np.zeros_like(host), nbytes, step)
            device, host = device[run] + offset, host[run] + offset
        host += self.arena_address
        ends = (device, host) if direction is Direction.LOAD else (host, device)
        return np.stack((*ends, nbytes))


def _cut(
    origin: NDArray[np.int64], nbytes: NDArray[np.int64], step: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cut runs where they cross a multiple of `step`, counted from `origin` of each run.

    Returns for each part the index of its run, its offset in that run, and its bytes.
    """
    first = origin // step
    parts = (origin + nbytes - 1) // step - first + 1
    if parts.max() == 1:
        return np.arange(len(origin)), np.zeros_like(origin), nbytes
    run = np.repeat(np.arange(len(origin)), parts)
    part = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = np.maximum((first[run] + part) * step, origin[run])
    end = np.minimum((first[run] + part + 1) * step, (origin + nbytes)[run])
    return run, begin - origin[run], end - begin


def cut_batches(copies: Copies, max_copies: int, max_bytes: int) -> list[tuple[int, int]]:
    """Return `(first, end)` of consecutive copies within both limits, at least one copy each."""
    ends = np.cumsum(copies[2])
    batches = []
    first, before = 0, 0
    while first < len(ends):
        end = int(np.searchsorted(ends, before + max_bytes, side="right"))
        end = max(first + 1, min(end, first + max_copies))
        batches.append((first, end))
        first, before = end, int(ends[end - 1])
    return batches
