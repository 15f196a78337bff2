"""The host engine's worker: copies jobs as runs of bytes, slice by slice, on one thread.

Blocks of a packed layout pass through whole slots in the worker's memory, a slice at a time.

Linux's `process_vm_readv` takes a list of runs, even within the same process, so the GIL is
released only once. With a call per run, the worker would wait for the GIL after each, up to 5 ms
while the engine runs Python: loading 32 blocks would take 230 ms, of which 1 ms is copying.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_swap.engine import Completion, Direction, Held
from kv_swap.errors import CopyError
from kv_swap.layout import Region
from kv_swap.packing.format import POOL_ENTRY_BYTES
from kv_swap.packing.slots import SlotPacker

CopyRun = tuple[int, int, int]
"""Destination address, source address, bytes."""

SLICE_BYTES = 4 << 20
"""Bytes of a slice. A load waits for at most one slice of a store: 1 ms at 5 GB/s (a slow core)."""

_MAX_RUNS = 1024
"""Maximum runs per call: Linux's IOV_MAX."""

_read_memory = ctypes.CDLL(None, use_errno=True).process_vm_readv
_read_memory.restype = ctypes.c_ssize_t
_vector = (ctypes.c_void_p, ctypes.c_ulong)
_read_memory.argtypes = (ctypes.c_int, *_vector, *_vector, ctypes.c_ulong)


@dataclass(slots=True)
class Transfer:
    """A running job: its remaining slices, and its results so far.

    Each step of `slices` copies one slice and yields the rows of the job's pairs that it refused.
    """

    job_id: int
    direction: Direction
    nbytes: int
    submitted: float
    slices: Iterator[Sequence[int]]
    refused_rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class WorkerState(Held):
    """The worker's state. `condition` guards everything except the objects held.

    Its lock is reentrant, because `stop` runs as a finaliser, possibly under the lock.
    """

    condition: threading.Condition = field(default_factory=threading.Condition)
    loads: deque[Transfer] = field(default_factory=deque)
    stores: deque[Transfer] = field(default_factory=deque)
    done: list[Completion] = field(default_factory=list)
    stopping: bool = False


def stop(state: WorkerState) -> None:
    """Make the worker end once it has copied everything submitted.

    Does nothing in a forked child, which has no worker, and whose copy of the lock may be taken.
    """
    if os.getpid() != state.process:
        return
    with state.condition:
        state.stopping = True
        state.condition.notify_all()


def work(state: WorkerState) -> None:
    """Run slices, loads first, until stopped and idle; then release the memory."""
    while True:
        with state.condition:
            state.condition.wait_for(lambda: state.loads or state.stores or state.stopping)
            queue = state.loads or state.stores
            if not queue:
                break
            transfer = queue[0]
        completion = _advance(transfer)
        if completion is not None:
            with state.condition:
                # A transfer leaves its queue only here: with empty queues, nothing is running.
                queue.popleft()
                state.done.append(completion)
                state.condition.notify_all()
    state.arena = None
    state.keep_alive = ()


def run(transfer: Transfer) -> Completion:
    """Copy all slices and return the completion."""
    while (completion := _advance(transfer)) is None:
        pass
    return completion


def _advance(transfer: Transfer) -> Completion | None:
    """Copy one slice; return the completion if the job has ended."""
    error = None
    try:
        for refused_rows in transfer.slices:
            transfer.refused_rows.extend(refused_rows)
            return None
    except Exception as cause:  # noqa: BLE001 - a failed job must not end the thread
        error = CopyError(
            f"copying on the host failed with {cause!r}: {transfer.direction.value} job "
            f"{transfer.job_id} of {transfer.nbytes} bytes"
        )
    seconds = time.perf_counter() - transfer.submitted
    refused_rows = tuple(transfer.refused_rows)
    return Completion(
        transfer.job_id, transfer.direction, transfer.nbytes, seconds, error, refused_rows
    )


def copy_slices(runs: Iterable[CopyRun]) -> Iterator[Sequence[int]]:
    """Copy the runs of raw regions, a slice at a time. Refuses nothing."""
    batch: list[CopyRun] = []
    batch_bytes = 0
    for run in runs:
        batch.append(run)
        batch_bytes += run[2]
        if batch_bytes >= SLICE_BYTES:
            copy_runs(batch)
            yield ()
            batch, batch_bytes = [], 0
    if batch:
        copy_runs(batch)


def cut_runs(
    regions: Iterable[Region],
    slot_bytes: int,
    arena_address: int,
    direction: Direction,
    pairs: NDArray[np.int64],
) -> Iterator[CopyRun]:
    """Yield (destination, source, bytes); pages that are adjacent on both sides are one run.

    A slot of the arena has `slot_bytes` bytes. Runs have at most half of `SLICE_BYTES`, so a slice
    has at most 1.5 times `SLICE_BYTES`.
    """
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    limit = SLICE_BYTES // 2
    for region in regions:
        page_bytes = region.page_bytes
        blocks = region.address + pairs[:, 0] * region.block_stride_bytes
        slots = arena_address + region.slot_offset_bytes + pairs[:, 1] * slot_bytes
        breaks = (np.diff(blocks) != page_bytes) | (np.diff(slots) != page_bytes)
        firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        counts = np.diff(np.append(firsts, len(pairs)))
        for block, slot, count in zip(
            blocks[firsts].tolist(), slots[firsts].tolist(), counts.tolist(), strict=True
        ):
            dst, src = (block, slot) if direction is Direction.LOAD else (slot, block)
            run_bytes = count * page_bytes
            for offset in range(0, run_bytes, limit):
                yield dst + offset, src + offset, min(limit, run_bytes - offset)


def copy_runs(runs: Sequence[CopyRun]) -> None:
    """Copy non-overlapping runs. Raises `OSError` for an unmapped address."""
    for first in range(0, len(runs), _MAX_RUNS):
        _copy_batch(runs[first : first + _MAX_RUNS])


def _copy_batch(runs: Sequence[CopyRun]) -> None:
    table = np.array(runs, np.uint64)
    local = np.ascontiguousarray(table[:, [0, 2]])  # struct iovec: address, bytes
    remote = np.ascontiguousarray(table[:, [1, 2]])
    nbytes = int(table[:, 2].sum())
    copied = _read_memory(
        os.getpid(), local.ctypes.data, len(runs), remote.ctypes.data, len(runs), 0
    )
    if copied == nbytes:
        return
    code = ctypes.get_errno() if copied < 0 else errno.EFAULT
    if code not in (errno.EPERM, errno.ENOSYS):
        raise OSError(code, f"process_vm_readv: {os.strerror(code)}, {copied} of {nbytes} bytes")
    # A container may forbid the call.
    for dst_address, src_address, run_bytes in runs:
        ctypes.memmove(dst_address, src_address, run_bytes)


def copy_packed(
    packer: SlotPacker,
    regions: Sequence[int],
    slot_bytes: int,
    arena_address: int,
    direction: Direction,
    pairs: NDArray[np.int64],
) -> Iterator[Sequence[int]]:
    """Copy some regions of `pairs`, a slice at a time; yield the rows that each slice refused.

    A store copies all regions. Raises `OSError` for an unmapped address, `ValueError` for a slot
    without packed tiles.
    """
    layout = packer.layout
    chosen = {index: layout.regions[index] for index in regions}
    parts = [(0, slot_bytes)]
    if direction is Direction.LOAD:
        parts = [(region.slot_offset_bytes, region.slot_page_bytes) for region in chosen.values()]
        parts.append((layout.pool_offset_bytes, layout.pool_entries * POOL_ENTRY_BYTES))
    step = max(1, SLICE_BYTES // layout.block_bytes)
    for first in range(0, len(pairs), step):
        blocks, numbers = pairs[first : first + step].T
        pages = {i: np.empty((len(blocks), r.page_bytes), np.uint8) for i, r in chosen.items()}
        slots = np.zeros((len(blocks), slot_bytes), np.uint8)
        arena = arena_address + numbers * slot_bytes
        in_cache = [
            run
            for index, region in chosen.items()
            for run in _runs(pages[index], region.address + blocks * region.block_stride_bytes)
        ]
        in_arena = [
            run
            for offset, nbytes in parts
            for run in _runs(slots[:, offset : offset + nbytes], arena + offset)
        ]
        if direction is Direction.STORE:
            copy_runs(in_cache)
            refused = packer.pack(pages, slots)
            copy_runs(_back(in_arena))
            yield (first + np.flatnonzero(refused)).tolist()
        else:
            copy_runs(in_arena)
            packer.unpack(slots, pages)
            copy_runs(_back(in_cache))
            yield ()


def _runs(rows: NDArray[np.uint8], addresses: NDArray[np.int64]) -> list[CopyRun]:
    """Return the runs that copy from `addresses` into the rows of an array."""
    first, stride = rows.ctypes.data, rows.strides[0]
    nbytes = rows.shape[1]
    return [(first + i * stride, a, nbytes) for i, a in enumerate(addresses.tolist())]


def _back(runs: list[CopyRun]) -> list[CopyRun]:
    return [(source, to, nbytes) for to, source, nbytes in runs]
