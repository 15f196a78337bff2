"""The ways to move blocks that bench/staging.py compares: kernel, copy engine, and both in turn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from transfer.copies import CopyPlan, cut_batches
from transfer.dma import make_copier
from transfer.engine import Direction
from transfer.layout import KVLayout, Region
from transfer.pinned import CudaRegistrar, HostArena
from transfer.streams import StreamTurns
from transfer.swap import LIST_BYTES, SwapKernel, write_list
from transfer.swap_bulk import Ring, bulk_family

MIB = 1 << 20
LAYERS, JOB_BYTES = 32, 256 * MIB

_SCATTER_RING = Ring(ctas=48, stages=6, tile_bytes=16 << 10, drains=2)
"""Between two places in device memory: 48 SMs have 4.5 MiB in flight."""


class Bed:
    """Layers of one page size, an arena, and disjoint scattered jobs for both directions."""

    def __init__(self, page_bytes: int) -> None:
        self.device = torch.device("cuda", 0)
        self.page_bytes = page_bytes
        self.count = JOB_BYTES // (LAYERS * page_bytes)
        self.num_blocks = 4 * self.count
        layer_bytes = self.num_blocks * page_bytes
        self.memory = torch.empty(LAYERS * layer_bytes, dtype=torch.uint8, device=self.device)
        first = self.memory.data_ptr()
        self.layout = KVLayout(
            self.num_blocks,
            tuple(
                Region(first + i * layer_bytes, page_bytes, page_bytes, i * page_bytes)
                for i in range(LAYERS)
            ),
        )
        self.registrar = CudaRegistrar(self.device)
        slot_bytes = self.layout.slot_bytes
        self.arena = HostArena(
            self.num_blocks, slot_bytes, register=self.registrar, piece_bytes=1 << 40
        )
        self.host = torch.from_numpy(self.arena.view())
        rng = np.random.default_rng(0)
        orders = [rng.permutation(self.num_blocks).astype(np.int32) for _ in range(2)]
        self.pairs = {
            way: np.stack([order[part : part + self.count] for order in orders], 1)
            for way, part in zip(Direction, (0, self.count), strict=True)
        }

    def randomize(self) -> None:
        self.memory.random_(0, 256)
        self.host.copy_(torch.empty_like(self.host, device=self.device).random_(0, 256))
        torch.cuda.synchronize()

    def expected(self, direction: Direction) -> tuple[Any, Any]:
        """All memory and all slots, both on the device, as the job must leave them."""
        memory, slots = self.memory.clone(), self.host.cuda()
        block_ids, slot_ids = torch.from_numpy(self.pairs[direction].astype(np.int64)).cuda().T
        pages = memory.view(LAYERS, self.num_blocks, self.page_bytes)
        if direction is Direction.LOAD:
            moved = slots[slot_ids].view(self.count, LAYERS, self.page_bytes)
            pages[:, block_ids] = moved.transpose(0, 1)
        else:
            slots[slot_ids] = pages[:, block_ids].transpose(0, 1).reshape(self.count, -1)
        return memory, slots


class Way(ABC):
    """One way to run the bed's job of one direction, as often as asked, on streams of its own."""

    def __init__(self, bed: Bed, direction: Direction) -> None:
        self.bed = bed
        self.direction = direction
        self.pairs = bed.pairs[direction]
        self.stream = torch.cuda.Stream()

    @abstractmethod
    def submit(self) -> Any:
        """Queue the job behind earlier ones; return the stream on which it ends."""


class KernelWay(Way):
    """Today's swap kernel, straight between page and slot."""

    def __init__(self, bed: Bed, direction: Direction) -> None:
        super().__init__(bed, direction)
        self._kernel = SwapKernel(bed.layout, bed.arena, bed.device)
        self._lists = HostArena(-(-bed.count // 2048), LIST_BYTES, register=bed.registrar)
        for entry, view in enumerate(self._lists.view()):
            write_list(view, self.pairs[2048 * entry : 2048 * (entry + 1)])

    def submit(self) -> Any:
        for entry in range(self._lists.num_slots):
            address = self._lists.address + entry * LIST_BYTES
            self._kernel.launch(self.direction, address, self.stream)
        return self.stream


class DirectWay(Way):
    """The copy engine between page and slot; pieces of `piece_bytes` take turns, 0 is one batch."""

    def __init__(self, bed: Bed, direction: Direction, piece_bytes: int) -> None:
        super().__init__(bed, direction)
        self._piece_bytes = piece_bytes or 1 << 40
        self._plan = CopyPlan(bed.layout, bed.arena.address, 1 << 40, self._piece_bytes)
        self._copier = make_copier(bed.device)
        self._turns = StreamTurns(bed.device)

    def submit(self) -> Any:
        copies = self._plan.copies(self.direction, self.pairs)
        pieces = cut_batches(copies, 1 << 40, self._piece_bytes)
        with closing(self._turns.take(self.stream)) as streams:
            for (first, end), stream in zip(pieces, streams, strict=False):
                self._copier.copy(copies, first, end, stream.cuda_stream)
        return self.stream


class ContiguousWay(Way):
    """One copy of as many bytes without any pages: the roofline."""

    def __init__(self, bed: Bed, direction: Direction) -> None:
        super().__init__(bed, direction)
        half = len(bed.memory) // 2
        part = slice(0, JOB_BYTES) if direction is Direction.LOAD else slice(half, half + JOB_BYTES)
        self._device = bed.memory[part]
        self._host = bed.host.view(-1)[part]

    def submit(self) -> Any:
        load = self.direction is Direction.LOAD
        target, source = (self._device, self._host) if load else (self._host, self._device)
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        return self.stream


@dataclass
class _Group:
    """Regions whose bytes fit into a chunk: the whole slot, or part of a large one."""

    offset_bytes: int
    nbytes: int
    kernel: SwapKernel


@dataclass
class _Staging:
    """Stands for an arena that lies in device memory."""

    address: int
    slot_bytes: int


class StagedWay(Way):
    """The copy engine between slots and a ring in device memory, a kernel between that and pages.

    A chunk is as many slots as fit, or a part of one; its buffer is used again once it has left.
    Copies alternate over two streams. With `chained` each copy also waits for the one before, so
    that there is never more than one that could run; without, the next is ready when one ends.
    """

    def __init__(
        self, bed: Bed, direction: Direction, chunk_bytes: int, chunks: int, chained: bool
    ) -> None:
        super().__init__(bed, direction)
        self._chunk_bytes = chunk_bytes
        self._chained = chained
        self._buffers = [
            torch.empty(chunk_bytes, dtype=torch.uint8, device=bed.device) for _ in range(chunks)
        ]
        self._copy_streams = [torch.cuda.Stream() for _ in range(2)]
        self._copier = make_copier(bed.device)
        self._groups = [self._make_groups(buffer) for buffer in self._buffers]
        sizes = [group.nbytes for group in self._groups[0]]
        self._work = [
            (index, first, min(first + chunk_bytes // size, bed.count))
            for index, size in enumerate(sizes)
            for first in range(0, bed.count, chunk_bytes // size)
        ]
        self._lists = HostArena(len(self._work), LIST_BYTES, register=bed.registrar)
        self._list_views = self._lists.view()
        self._copied = [torch.cuda.Event() for _ in self._work]
        self._moved = [torch.cuda.Event() for _ in self._work]
        # In the order of the arena, so that adjacent slots are one copy.
        self._sorted = self.pairs[np.argsort(self.pairs[:, 1])]

    def _make_groups(self, buffer: Any) -> list[_Group]:
        groups, regions, offset = [], list(self.bed.layout.regions), 0
        fitting = max(1, self._chunk_bytes // self.bed.page_bytes)
        family = bulk_family(_SCATTER_RING, _SCATTER_RING)
        for first in range(0, len(regions), fitting):
            some = regions[first : first + fitting]
            begin = some[0].slot_offset_bytes
            moved = [replace(r, slot_offset_bytes=r.slot_offset_bytes - begin) for r in some]
            layout = KVLayout(self.bed.num_blocks, tuple(moved))
            staging: Any = _Staging(buffer.data_ptr(), layout.slot_bytes)
            kernel = SwapKernel(layout, staging, self.bed.device, family)
            groups.append(_Group(offset, layout.slot_bytes, kernel))
            offset += layout.slot_bytes
        return groups

    def _copies(self, buffer: int, group: _Group, first: int, end: int) -> NDArray[np.int64]:
        slots = self._sorted[first:end, 1].astype(np.int64)
        host = self.bed.arena.address + slots * self.bed.arena.slot_bytes + group.offset_bytes
        device = buffer + np.arange(end - first) * group.nbytes
        firsts = np.flatnonzero(np.diff(host, prepend=-1) != group.nbytes)
        nbytes = np.diff(np.append(firsts, end - first)) * group.nbytes
        ends = (device, host) if self.direction is Direction.LOAD else (host, device)
        return np.stack([ends[0][firsts], ends[1][firsts], nbytes])

    def submit(self) -> Any:
        load = self.direction is Direction.LOAD
        for index, (number, first, end) in enumerate(self._work):
            ring = index % len(self._buffers)
            group = self._groups[ring][number]
            stream = self._copy_streams[index % 2]
            # The buffer's last use; at first, all of the job before.
            before = max(-1, index - len(self._buffers))
            copies = self._copies(self._buffers[ring].data_ptr(), group, first, end)
            # The job before may still read this list, but it is the same list.
            listed = np.stack([self._sorted[first:end, 0], np.arange(end - first)], 1)
            write_list(self._list_views[index], listed.astype(np.int32))
            if load:
                stream.wait_event(self._moved[before])
                self._copy(stream, index, copies)
                self.stream.wait_event(self._copied[index])
                self._move(group, index)
            else:
                self.stream.wait_event(self._copied[before])
                self._move(group, index)
                stream.wait_event(self._moved[index])
                self._copy(stream, index, copies)
        if not load:
            for event in self._copied[-2:]:
                self.stream.wait_event(event)
        return self.stream

    def _copy(self, stream: Any, index: int, copies: NDArray[np.int64]) -> None:
        if self._chained:
            stream.wait_event(self._copied[index - 1])
        self._copier.copy(copies, 0, copies.shape[1], stream.cuda_stream)
        self._copied[index].record(stream)

    def _move(self, group: _Group, index: int) -> None:
        group.kernel.launch(self.direction, self._lists.address + index * LIST_BYTES, self.stream)
        self._moved[index].record(self.stream)
