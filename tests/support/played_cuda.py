"""A CUDA device in host memory, for machines without one: nothing runs until a test says so.

A stream holds the work queued on it. A test runs streams in the order that exposes a missing wait:
copies as far ahead of compute as they get, or compute before copies. The kernels of csrc are played
in Python; like a device, they read their lists and tables when they run. The driver reads the
copies of a batch when they are queued.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from kv_swap.cuda import zeroing
from kv_swap.cuda.gate_test import GateReport
from kv_swap.cuda.swap import LIST_HEADER_BYTES, STATUS_OFFSET_BYTES
from kv_swap.layout import Region
from kv_swap.packing.format import (
    KIND_RAW,
    PACKED_TILE_BYTES,
    POOL_ENTRY_BYTES,
    TILE_BYTES,
    TILE_GROUPS,
    TileColumns,
    describe_columns,
)
from kv_swap.packing.tiles import make_raw, pack_tiles, read_headers, read_raw, unpack_tiles

COMPUTE = 0
"""The handle of the current stream, which is compute."""

Operation = Callable[[], bool]
"""Does its work and returns True, or returns False if it has to wait."""


class _Arguments(NamedTuple):
    """A kernel's arguments; kernels that do not pack ignore the last two."""

    list: int
    table: int
    tiles: int
    segments_per_tile: int
    arena: int
    slot_bytes: int
    columns: int
    pool_entries: int

    def slot(self, index: int) -> int:
        """Return the address of a slot."""
        return self.arena + index * self.slot_bytes


_WORDS = (
    *([ctypes.c_uint64] * 2 + [ctypes.c_uint32] * 2 + [ctypes.c_uint64] * 3),
    ctypes.c_uint32,
)
"""The types of `_Arguments`."""


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, cuda: PlayedCuda) -> None:
        self._cuda = cuda
        self.cuda_event = len(cuda.recorded)
        cuda.recorded.append(0)
        cuda.completed.append(0)
        cuda.completed_at.append(0.0)

    def record(self, stream: Stream) -> None:
        self._cuda.event_record(self.cuda_event, stream.cuda_stream)

    def query(self) -> bool:
        if self._cuda.capturing:
            self._cuda.broken_captures += 1
        self._cuda.call("eventQuery")
        return self._cuda.completed[self.cuda_event] == self._cuda.recorded[self.cuda_event]

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        completed_at = self._cuda.completed_at
        return 1.0 + completed_at[end.cuda_event] - completed_at[self.cuda_event]


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, cuda: PlayedCuda) -> None:
        self._cuda = cuda
        self.cuda_stream = len(cuda.queues)
        cuda.queues.append(deque())

    def synchronize(self) -> None:
        self._cuda.call("streamSynchronize")
        self._cuda.synchronize(self.cuda_stream)


class PlayedCuda:
    """One device; `install` has `kv_swap.cuda` use it."""

    def __init__(self) -> None:
        self.queues: list[deque[Operation]] = []
        """Queued work, by the handle of the stream."""
        self.recorded: list[int] = []
        self.completed: list[int] = []
        self.completed_at: list[float] = []
        self.now = 0.0
        """Milliseconds, which the test advances. The interval between two events takes one more."""
        self.compute = Stream(self)
        self.failing: set[str] = set()
        """Calls that raise, such as `launchKernel` and `streamWaitEvent`."""
        self.calls: list[tuple[str, int]] = []
        """Calls made, each with the device that was current."""
        self.device = 0
        self.capability = (9, 0)
        self.shared_bytes = 227 << 10
        """Shared memory available to a CTA."""
        self.registrations: list[tuple[str | int, ...]] = []
        """Calls that page-lock or unlock memory: name, device, capture mode, arguments."""
        self.capture_mode = 0
        self.gates: dict[int, list[int]] = {}
        """Bytes queued on a stream before each of its gates, and after the last."""
        self.has_batches = True
        self.yields = True
        """The result of the self-test of gates."""
        self.capturing = False
        self.broken_captures = 0
        self._kernels: list[Callable[[_Arguments], None]] = []
        runtime = SimpleNamespace(
            cudaDevAttrCanUseHostPointerForRegisteredMem=91,
            memcpyDefault=4,
            memcpyHostToDevice=1,
            getDevice=lambda: self.device,
            cudaDevAttrMaxSharedMemoryPerBlockOptin=97,
            deviceGetAttribute=self._attribute,
            deviceGetPCIBusId=lambda index: f"0000:0{index}:00.0",
            deviceSynchronize=lambda: None,
            hostRegister=lambda *arguments: self._register("hostRegister", *arguments),
            hostUnregister=lambda *arguments: self._register("hostUnregister", *arguments),
            memcpy=lambda target, source, nbytes, kind: ctypes.memmove(target, source, nbytes),
            memcpyAsync=self._memcpy,
            eventRecord=self.event_record,
            streamWaitEvent=self._wait_event,
        )
        self.cupy: Any = SimpleNamespace(
            RawModule=lambda code, options: SimpleNamespace(
                get_function=lambda name: self._function(name, packs="PackedTile" in code)
            ),
            cuda=SimpleNamespace(
                runtime=runtime,
                driver=SimpleNamespace(launchKernel=self._launch),
                compiler=SimpleNamespace(CompileException=SyntaxError),
                Device=self._current,
                Memory=_Memory,
            ),
        )

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for CuPy, the driver and torch's streams until the patch is undone."""
        patch.setitem(sys.modules, "cupy", self.cupy)
        patch.setattr("kv_swap.cuda.device._exchange_capture_mode", self._exchange)
        patch.setattr("kv_swap.cuda.gated.load_driver", lambda: _Driver(self))
        patch.setattr("kv_swap.cuda.state.check_gates", self._check_gates)
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: Event(self))
        patch.setattr(torch.cuda, "Stream", lambda device=None: Stream(self))
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.compute)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        patch.setattr(torch.cuda, "get_device_capability", lambda index: self.capability)
        zero = zeroing.BlockZeroer.zero
        patch.setattr(zeroing, "pages_of", _pages_of)
        patch.setattr(zeroing, "send", lambda blocks, device: torch.tensor(blocks))
        patch.setattr(zeroing.BlockZeroer, "zero", lambda *what: self._zero(partial(zero, *what)))
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: COMPUTE, raising=False)

    # -- what a test does --------------------------------------------------------------------------

    def queue(self, work: Callable[[], object], stream: int = COMPUTE) -> None:
        """Queue work of the test on the compute stream or another."""
        self._queue(stream, work)

    def run(self, *streams: int) -> None:
        """Run these streams, or all, until each is empty or waits for another."""
        handles = streams or range(len(self.queues))
        while any(self._run_one(handle) for handle in handles):
            pass

    def run_copies(self) -> None:
        """Run everything but compute, as far ahead of it as waits allow."""
        self.run(*range(COMPUTE + 1, len(self.queues)))

    def step_copies(self) -> None:
        """Run the next operation of each of these streams that does not have to wait."""
        for queue in self.queues[COMPUTE + 1 :]:
            if queue and queue[0]():
                queue.popleft()

    def synchronize(self, stream: int) -> None:
        """Run a stream to its end, and others only if it waits for them."""
        self.run(stream)
        if self.queues[stream]:
            self.run()
        assert not self.queues[stream], "a wait that never ends"

    def _run_one(self, stream: int) -> bool:
        queue, ran = self.queues[stream], False
        while queue and queue[0]():
            queue.popleft()
            ran = True
        return ran

    # -- what CUDA does ----------------------------------------------------------------------------

    def _queue(self, stream: int, work: Callable[[], object]) -> None:
        def run() -> bool:
            work()
            return True

        self.queues[stream].append(run)

    @contextmanager
    def _current(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        try:
            yield
        finally:
            self.device = before

    def call(self, name: str) -> None:
        """Record a call, and raise if it is to fail."""
        self.calls.append((name, self.device))
        if name in self.failing:
            raise RuntimeError(f"{name}: injected fault")

    def event_record(self, event: int, stream: int) -> None:
        self.call("eventRecord")
        self.recorded[event] += 1
        recording = self.recorded[event]
        self._queue(stream, lambda: self._complete(event, recording))

    def _complete(self, event: int, recording: int) -> None:
        self.completed[event] = max(self.completed[event], recording)
        self.completed_at[event] = self.now

    def _wait_event(self, stream: int, event: int) -> None:
        self.call("streamWaitEvent")
        recording = self.recorded[event]
        self.queues[stream].append(lambda: self.completed[event] >= recording)

    def _check_gates(self, device: object) -> GateReport:
        return GateReport(yields=self.yields, found="as a test says")

    def _memcpy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.call("memcpyAsync")
        self._queue(stream, lambda: ctypes.memmove(target, source, nbytes))

    def _register(self, name: str, *arguments: int) -> None:
        self.registrations.append((name, self.device, self.capture_mode, *arguments))
        self.call(name)

    def _exchange(self, mode: ctypes.c_int) -> None:
        self.capture_mode, mode.value = mode.value, self.capture_mode

    def _zero(self, zeroing: Callable[[], object]) -> None:
        self._queue(COMPUTE, zeroing)
        self.call("zeroing")  # refused after a part of it was queued

    def _function(self, name: str, *, packs: bool) -> Any:
        packing = {"swap_store": _pack, "swap_load": _unpack}
        self._kernels.append(packing[name] if packs else partial(_swap, name))
        kernel = SimpleNamespace(ptr=len(self._kernels) - 1)
        return _Function(kernel, self.shared_bytes)

    def _attribute(self, attribute: int, index: int) -> int:
        return self.shared_bytes if attribute == 97 else int((attribute, index) != (91, 3))

    def _launch(self, function: int, *shape_and_more: int) -> None:
        self.call("launchKernel")
        stream, parameters, _ = shape_and_more[-3:]
        pointers = (ctypes.c_void_p * len(_WORDS)).from_address(parameters)
        # CUDA copies the arguments during the call.
        values = [w.from_address(p or 0).value for w, p in zip(_WORDS, pointers, strict=True)]
        self._queue(stream, partial(self._kernels[function], _Arguments(*values)))


class _Driver:
    """Stands in for `kv_swap.cuda.driver.Driver`."""

    def __init__(self, cuda: PlayedCuda) -> None:
        self._cuda = cuda

    @property
    def has_batches(self) -> bool:
        return self._cuda.has_batches

    def write_one(self, stream: int, address: int) -> None:
        self._cuda.call("cuStreamWriteValue32")
        self._cuda.gates.setdefault(stream, [0]).append(0)
        word = ctypes.c_uint32.from_address(address)
        self._cuda._queue(stream, lambda: setattr(word, "value", 1))

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._cuda.call("cuMemcpyAsync")
        self._move(destination, source, nbytes, stream)

    def copy_batch(
        self, destinations: int, sources: int, sizes: int, count: int, stream: int
    ) -> None:
        self._cuda.call("cuMemcpyBatchAsync")
        listed = (_words(address, count, np.int64) for address in (destinations, sources, sizes))
        for destination, source, nbytes in zip(*listed, strict=True):
            self._move(int(destination), int(source), int(nbytes), stream)

    def _move(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._cuda.gates.setdefault(stream, [0])[-1] += nbytes
        self._cuda._queue(stream, lambda: ctypes.memmove(destination, source, nbytes))


def _pages_of(region: Region, num_blocks: int, device: torch.device) -> torch.Tensor:
    size = (num_blocks - 1) * region.block_stride_bytes + region.page_bytes
    words = torch.frombuffer((ctypes.c_char * size).from_address(region.address), dtype=torch.int64)
    return words.as_strided(
        (num_blocks, region.page_bytes // 8), (region.block_stride_bytes // 8, 1)
    )


class _Function:
    """A function of a module; CUDA refuses it more shared memory than a CTA can have."""

    def __init__(self, kernel: Any, limit_bytes: int) -> None:
        self.kernel = kernel
        self._limit_bytes = limit_bytes

    def compile(self) -> None: ...

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "max_dynamic_shared_size_bytes" and value > self._limit_bytes:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        super().__setattr__(name, value)


class _Memory:
    """Device memory, zeroed: a table that is read before it was written copies nothing."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes, np.uint8)
        self.ptr: int = self._bytes.ctypes.data


def _words(address: int, count: int, dtype: type) -> np.ndarray:
    return np.frombuffer(ctypes.string_at(address, count * np.dtype(dtype).itemsize), dtype)


def _listed(address: int) -> list[list[int]]:
    count = int(_words(address, 1, np.int32)[0])
    listed: list[list[int]] = (
        _words(address + LIST_HEADER_BYTES, 2 * count, np.int32).reshape(-1, 2).tolist()
    )
    return listed


def _swap(name: str, given: _Arguments) -> None:
    rows = given.tiles * given.segments_per_tile
    segments = _words(given.table, 4 * rows, np.uint64).reshape(-1, 4).tolist()
    for block, slot in _listed(given.list):
        for address, stride, offset, lengths in segments:
            page, place = address + block * stride, given.slot(slot) + offset
            target, source = (place, page) if name == "swap_store" else (page, place)
            ctypes.memmove(target, source, lengths & 0xFFFFFFFF)


def _memory(address: int, nbytes: int) -> np.ndarray:
    """Return memory as a writable view."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


def _columns(table: int, described: int) -> TileColumns:
    """Read columns as the kernel's threads do: 4 each, which lie 256 groups of values apart."""
    found = np.empty(TILE_GROUPS, np.uint8)
    bytes_ = _words(table + (described & 0xFFFFFFFF) * TILE_GROUPS, TILE_GROUPS, np.uint8)
    for thread in range(TILE_GROUPS // 4):
        found[thread::256] = bytes_[4 * thread : 4 * thread + 4]
    columns = describe_columns(found.tobytes())
    assert columns.count == described >> 32
    return columns


def _packed(given: _Arguments) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the blocks of a list, each with its slot and the slot's pool."""
    for block, slot in _listed(given.list):
        whole = _memory(given.slot(slot), given.slot_bytes)
        pool = whole[given.slot_bytes - given.pool_entries * POOL_ENTRY_BYTES :]
        yield block, whole, pool.reshape(-1, POOL_ENTRY_BYTES)


def _pack(given: _Arguments) -> None:
    rows = _words(given.table, 4 * given.tiles, np.uint64).reshape(-1, 4).tolist()
    for index, (block, whole, pool) in enumerate(_packed(given)):
        pool[:] = 0
        used = 0
        for address, stride, offset, described in rows:
            tile = _memory(address + block * stride, TILE_BYTES)
            packed, (fits,) = pack_tiles(tile[None], _columns(given.columns, described))
            place = whole[offset : offset + PACKED_TILE_BYTES]
            if fits:
                place[:] = packed[0]
            elif (used := used + 1) <= given.pool_entries:
                make_raw(tile, place, pool[used - 1], used - 1)
        status = given.list + STATUS_OFFSET_BYTES + index
        _memory(status, 1)[:] = used > given.pool_entries


def _unpack(given: _Arguments) -> None:
    rows = _words(given.table, 4 * given.tiles, np.uint64).reshape(-1, 4).tolist()
    for block, whole, pool in _packed(given):
        for address, stride, offset, described in rows:
            packed = whole[offset : offset + PACKED_TILE_BYTES]
            (header,) = read_headers(packed[None])
            if header["kind"] == KIND_RAW:
                tile = read_raw(packed, pool[int(header["zeros_or_entry"])])
            else:
                (tile,) = unpack_tiles(packed[None], _columns(given.columns, described))
            _memory(address + block * stride, TILE_BYTES)[:] = tile
