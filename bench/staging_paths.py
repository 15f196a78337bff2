"""The ways to move blocks that bench/staging.py compares: kernel, copy engine, and both in turn."""

from __future__ import annotations

import ctypes
import weakref
from abc import ABC, abstractmethod
from contextlib import closing
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver
from cupy.cuda import runtime
from kv_swap.cuda.copies import CopyMaker, cut_batches
from kv_swap.cuda.dma import make_copier
from kv_swap.cuda.registrar import CudaRegistrar
from kv_swap.cuda.streams import StreamTurns
from kv_swap.cuda.swap import LIST_BYTES, SwapKernel, write_list
from kv_swap.cuda.swap_bulk import Ring, bulk_family
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout, Region
from kv_swap.memory import registration
from kv_swap.memory.arena import HostArena
from numpy.typing import NDArray

MIB = 1 << 20
LAYERS, JOB_BYTES = 32, 256 * MIB

_PitchedBatch = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_size_t,  # operations
    ctypes.c_void_p,
    ctypes.c_void_p,  # set to the operation that failed
    ctypes.c_ulonglong,  # flags
    ctypes.c_void_p,  # stream
)


def new_stream(priority: int = 0) -> Any:
    """Return a stream of its own: torch hands out the same 32 again and again."""
    status, handle = driver.cuStreamCreateWithPriority(1, priority)
    if int(status):
        raise RuntimeError(f"cuStreamCreateWithPriority returned {status}")
    stream: Any = torch.cuda.ExternalStream(int(handle))
    # Not at exit: the CUDA context may be gone before.
    weakref.finalize(stream, driver.cuStreamDestroy, handle).atexit = False
    return stream


class Turns(StreamTurns):
    """Turns with a second stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._other = new_stream()


class Bed:
    """Layers of one page size, an arena, and jobs for both directions that share no block or slot.

    Blocks are scattered. `pairs(direction, run)` has its slots in runs of `run` adjacent ones, with
    gaps between; 0 is one run.
    """

    def __init__(self, page_bytes: int) -> None:
        self.device = torch.device("cuda", 0)
        self.page_bytes = page_bytes
        self.count = JOB_BYTES // (LAYERS * page_bytes)
        self.num_blocks = 4 * self.count
        self.layer_bytes = self.num_blocks * page_bytes
        self.memory = torch.empty(LAYERS * self.layer_bytes, dtype=torch.uint8, device=self.device)
        first = self.memory.data_ptr()
        self.layout = KVLayout(
            self.num_blocks,
            tuple(
                Region(first + i * self.layer_bytes, page_bytes, page_bytes, i * page_bytes)
                for i in range(LAYERS)
            ),
        )
        self.registrar = CudaRegistrar(self.device)
        registration.PIECE_BYTES = 1 << 40
        # One registration, so that no copy of these ways crosses from one to the next.
        self.arena = HostArena(self.num_blocks, self.layout.slot_bytes, register=self.registrar)
        self.host = torch.from_numpy(self.arena.view())

    def pairs(self, direction: Direction, run: int) -> NDArray[np.int32]:
        """Return the job, `(count, 2)`, in the order of its slots."""
        part = list(Direction).index(direction)
        order = np.random.default_rng(0).permutation(self.num_blocks)
        blocks = order[part * self.count : (part + 1) * self.count]
        length = min(run or self.count, self.count)
        # Every other place, so that two runs never become one.
        first = 2 * (part * self.count + length * np.arange(self.count // length))
        slots = (first[:, None] + np.arange(length)).reshape(-1)
        return np.stack([blocks, slots], 1).astype(np.int32)

    def randomize(self) -> None:
        self.memory.random_(0, 256)
        self.host.copy_(torch.empty_like(self.host, device=self.device).random_(0, 256))
        torch.cuda.synchronize()

    def expected(self, way: Way) -> tuple[Any, Any]:
        """All memory and all slots, both on the device, as the job must leave them."""
        memory, slots = self.memory.clone(), self.host.cuda()
        block_ids, slot_ids = torch.from_numpy(way.pairs.astype(np.int64)).cuda().T
        pages = memory.view(LAYERS, self.num_blocks, self.page_bytes)
        if way.direction is Direction.LOAD:
            moved = slots[slot_ids].view(self.count, LAYERS, self.page_bytes)
            pages[:, block_ids] = moved.transpose(0, 1)
        else:
            slots[slot_ids] = pages[:, block_ids].transpose(0, 1).reshape(self.count, -1)
        return memory, slots


class Way(ABC):
    """One way to run the bed's job of one direction, as often as asked, on streams of its own."""

    def __init__(self, bed: Bed, direction: Direction, run: int = 1, priority: int = 0) -> None:
        self.bed = bed
        self.direction = direction
        self.pairs = bed.pairs(direction, run)
        self.stream = new_stream(priority)

    @abstractmethod
    def submit(self) -> Any:
        """Queue the job behind earlier ones; return the stream on which it ends."""


class KernelWay(Way):
    """Today's swap kernel, straight between page and slot."""

    def __init__(self, bed: Bed, direction: Direction, priority: int = 0) -> None:
        super().__init__(bed, direction, priority=priority)
        self._kernel = SwapKernel(bed.layout, bed.arena, bed.device)
        self._lists = HostArena(-(-bed.count // 2048), LIST_BYTES, register=bed.registrar)

    def submit(self) -> Any:
        for entry, view in enumerate(self._lists.view()):
            write_list(view, self.pairs[2048 * entry : 2048 * (entry + 1)])
            address = self._lists.address + entry * LIST_BYTES
            self._kernel.launch(self.direction, address, self.stream)
        return self.stream


class DirectWay(Way):
    """Batches of the copy engine between page and slot; pieces of `piece_bytes` take turns."""

    def __init__(self, bed: Bed, direction: Direction, piece_bytes: int, run: int = 1) -> None:
        super().__init__(bed, direction, run)
        self._piece_bytes = piece_bytes
        self._plan = CopyMaker(bed.layout, bed.arena.address, 1 << 40, piece_bytes)
        self._copier = make_copier(bed.device)
        self._turns = Turns(bed.device)

    def submit(self) -> Any:
        copies = self._plan.copies(self.direction, self.pairs)
        pieces = cut_batches(copies, 1 << 40, self._piece_bytes)
        with closing(self._turns.take(self.stream)) as streams:
            for (first, end), stream in zip(pieces, streams, strict=False):
                self._copier.copy(copies, first, end, stream.cuda_stream)
        return self.stream


class PitchedWay(Way):
    """A `cudaMemcpy2DAsync` for each slot: a row a layer; pieces take turns if they have bytes."""

    def __init__(self, bed: Bed, direction: Direction, piece_bytes: int = 0, run: int = 1) -> None:
        super().__init__(bed, direction, run)
        self._piece_slots = piece_bytes // bed.layout.slot_bytes or bed.count
        self._turns = Turns(bed.device)

    def submit(self) -> Any:
        bed = self.bed
        page, pitch = bed.page_bytes, bed.layer_bytes
        device = (bed.memory.data_ptr() + self.pairs[:, 0].astype(np.int64) * page).tolist()
        slots = self.pairs[:, 1].astype(np.int64) * bed.layout.slot_bytes
        host = (bed.arena.address + slots).tolist()
        copy, kind = runtime.memcpy2DAsync, runtime.memcpyDefault
        load = self.direction is Direction.LOAD
        pieces = range(0, bed.count, self._piece_slots)
        with closing(self._turns.take(self.stream)) as streams:
            for first, stream in zip(pieces, streams, strict=False):
                some = slice(first, first + self._piece_slots)
                handle = stream.cuda_stream
                for page_address, slot_address in zip(device[some], host[some], strict=True):
                    if load:
                        ends = (page_address, pitch, slot_address, page)
                    else:
                        ends = (slot_address, page, page_address, pitch)
                    copy(*ends, page, LAYERS, kind, handle)
        return self.stream


class PitchedBatchWay(Way):
    """`cuMemcpy3DBatchAsync` over what `PitchedWay` copies; pieces take turns, 0 is one batch."""

    def __init__(self, bed: Bed, direction: Direction, piece_bytes: int = 0) -> None:
        super().__init__(bed, direction)
        status, address, *_ = driver.cuGetProcAddress(b"cuMemcpy3DBatchAsync", 12080, 0)
        if int(status) or not int(address):
            raise RuntimeError(f"the driver has no cuMemcpy3DBatchAsync: {status}")
        self._function = _PitchedBatch(int(address))
        self._piece_slots = piece_bytes // bed.layout.slot_bytes or bed.count
        self._turns = Turns(bed.device)
        self._failed = ctypes.c_size_t()

    def submit(self) -> Any:
        bed = self.bed
        page, pitch = bed.page_bytes, bed.layer_bytes
        blocks, slots = self.pairs.astype(np.uint64).T
        # Words of CUDA_MEMCPY3D_BATCH_OP: two operands of 5, the extent, the order of access.
        operations = np.zeros((len(blocks), 14), np.uint64)
        paged, packed = (5, 0) if self.direction is Direction.LOAD else (0, 5)
        operations[:, [0, 5]] = 1
        operations[:, paged + 1] = bed.memory.data_ptr() + blocks * page
        operations[:, paged + 2] = pitch
        operations[:, packed + 1] = bed.arena.address + slots * bed.layout.slot_bytes
        operations[:, packed + 2] = page
        operations[:, [3, 8]] = LAYERS
        operations[:, 10:13] = page, LAYERS, 1
        operations[:, 13] = 1
        first_address, step = operations.ctypes.data, operations.strides[0]
        pieces = range(0, len(blocks), self._piece_slots)
        with closing(self._turns.take(self.stream)) as streams:
            for first, stream in zip(pieces, streams, strict=False):
                count = min(self._piece_slots, len(blocks) - first)
                status = self._function(
                    count,
                    first_address + first * step,
                    ctypes.addressof(self._failed),
                    0,
                    stream.cuda_stream,
                )
                if status:
                    raise RuntimeError(f"cuMemcpy3DBatchAsync returned {status}")
        return self.stream


class ContiguousWay(Way):
    """Copies of as many bytes without any pages: the roofline, or what pieces leave of it."""

    def __init__(self, bed: Bed, direction: Direction, piece_bytes: int = 0, turns: bool = False):
        super().__init__(bed, direction)
        self._turns = Turns(bed.device) if turns else None
        first = len(bed.memory) // 2 if direction is Direction.STORE else 0
        step = piece_bytes or JOB_BYTES
        self._pieces = [
            (bed.memory.data_ptr() + first + at, bed.arena.address + first + at, step)
            for at in range(0, JOB_BYTES, step)
        ]

    def submit(self) -> Any:
        if self._turns is None:
            for piece in self._pieces:
                self._copy(piece, self.stream)
        else:
            with closing(self._turns.take(self.stream)) as streams:
                for piece, stream in zip(self._pieces, streams, strict=False):
                    self._copy(piece, stream)
        return self.stream

    def _copy(self, piece: tuple[int, int, int], stream: Any) -> None:
        device, host, nbytes = piece
        ends = (device, host) if self.direction is Direction.LOAD else (host, device)
        runtime.memcpyAsync(*ends, nbytes, runtime.memcpyDefault, stream.cuda_stream)


class _Staging:
    """Stands for an arena that lies in device memory."""

    def __init__(self, memory: Any, slot_bytes: int) -> None:
        self.address = memory.data_ptr()
        self.slot_bytes = slot_bytes


class StagedWay(Way):
    """The copy engine between slots and a ring in device memory, a kernel between that and pages.

    The ring has `chunks` of `chunk_bytes`; a run of slots is one copy, as far as a chunk reaches.
    The kernel has `ctas` CTAs with 96 KiB in flight each and reads its list of pairs from host
    memory, or with `device_lists` from device memory, to where a copy takes it. Copies run on one
    stream, or with `turns` on two, each chunk's copies waiting for those of the chunk before.
    """

    def __init__(
        self,
        bed: Bed,
        direction: Direction,
        chunk_bytes: int,
        chunks: int,
        ctas: int,
        *,
        turns: bool = False,
        run: int = 0,
        priority: int = 0,
        device_lists: bool = False,
    ) -> None:
        super().__init__(bed, direction, run, priority)
        slot_bytes = bed.layout.slot_bytes
        self._chunk_slots = chunk_bytes // slot_bytes
        self._chunks = chunks
        self._memory = torch.empty(chunks * chunk_bytes, dtype=torch.uint8, device=bed.device)
        ring = Ring(ctas=ctas, stages=6, tile_bytes=16 << 10, drains=2)
        staging: Any = _Staging(self._memory, slot_bytes)
        self._kernel = SwapKernel(bed.layout, staging, bed.device, bulk_family(ring, ring))
        self._streams = [new_stream() for _ in range(2 if turns else 1)]
        entries = -(-bed.count // self._chunk_slots) * chunks
        self._lists = HostArena(entries, LIST_BYTES, register=bed.registrar)
        self._list_views = self._lists.view()
        nbytes = entries * LIST_BYTES if device_lists else 0
        self._device_lists = torch.empty(nbytes, dtype=torch.uint8, device=bed.device)
        # Of each chunk of the ring: when it was copied, and when it was moved.
        self._copied = [torch.cuda.Event() for _ in range(chunks)]
        self._moved = [torch.cuda.Event() for _ in range(chunks)]
        self._queued = 0

    def submit(self) -> Any:
        blocks, slots = self.pairs.T
        starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1)
        borders = np.arange(0, len(slots), self._chunk_slots)
        firsts = np.union1d(starts, borders)
        lengths = np.diff(np.append(firsts, len(slots)))
        slot_bytes = self.bed.layout.slot_bytes
        host = self.bed.arena.address + slots[firsts].astype(np.int64) * slot_bytes
        offset = (firsts % self._chunk_slots) * slot_bytes
        rows = np.stack([host, offset, lengths * slot_bytes], 1).tolist()
        ends = np.append(np.searchsorted(firsts, borders), len(firsts)).tolist()
        for index, first in enumerate(borders.tolist()):
            copies = rows[ends[index] : ends[index + 1]]
            self._chunk(index, blocks[first : first + self._chunk_slots], copies)
        if self.direction is Direction.LOAD:
            return self.stream
        return self._streams[(self._queued - 1) % len(self._streams)]

    def _chunk(self, index: int, blocks: NDArray[np.int32], copies: list[list[int]]) -> None:
        number = self._queued % self._chunks
        stream = self._streams[self._queued % len(self._streams)]
        places = np.arange(number * self._chunk_slots, number * self._chunk_slots + len(blocks))
        entry = index * self._chunks + number
        write_list(self._list_views[entry], np.stack([blocks, places], 1).astype(np.int32))
        address = self._lists.address + entry * LIST_BYTES
        if len(self._device_lists):
            address = self._device_lists.data_ptr() + entry * LIST_BYTES
            runtime.memcpyAsync(
                address,
                self._list_views[entry].ctypes.data,
                16 + 8 * len(blocks),
                runtime.memcpyDefault,
                self.stream.cuda_stream,
            )
        load = self.direction is Direction.LOAD
        if load:
            stream.wait_event(self._moved[number])
        else:
            self.stream.wait_event(self._copied[number])
            self._kernel.launch(self.direction, address, self.stream)
            self._moved[number].record(self.stream)
            stream.wait_event(self._moved[number])
        if len(self._streams) > 1:
            stream.wait_event(self._copied[number - 1])
        base = self._memory.data_ptr() + number * self._chunk_slots * self.bed.layout.slot_bytes
        for host, offset, nbytes in copies:
            ends = (base + offset, host) if load else (host, base + offset)
            runtime.memcpyAsync(*ends, nbytes, runtime.memcpyDefault, stream.cuda_stream)
        self._copied[number].record(stream)
        if load:
            self.stream.wait_event(self._copied[number])
            self._kernel.launch(self.direction, address, self.stream)
            self._moved[number].record(self.stream)
        self._queued += 1
