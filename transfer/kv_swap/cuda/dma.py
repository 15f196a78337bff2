"""The path of the copy engine: pages as plain copies, queued in batches.

For devices that run no swap kernel, and for who asks for it: it takes no SM from compute. What it
costs:

- The host. `cuMemcpyBatchAsync` blocks its caller for 0.5 us a copy in small batches and 2.7 us in
  large ones, `cudaMemcpyAsync` for longer. So a call of the engine queues one slice, at most
  `SLICE_COPIES` copies of `SLICE_BYTES` in all, in pieces of `PIECE_BYTES`. The rest of a job
  follows with later polls. It does not come from a thread: every call of that thread gives the GIL
  up, and gets it back from a caller that steps in Python only after as much as 5 ms (see
  `kv_swap/host/runs.py`), in which the link moves the bytes of 66 pieces. Between the polls of a
  long step the link therefore idles.
- The copies of others. A copy engine serves a direction first come, first served, over all streams:
  a 2 KiB copy waited 3 to 4 ms behind 256 MiB, be it one batch or pieces on one stream. So pieces
  take turns on two streams, each waiting for the one before: whenever a piece has ended, others'
  copies are as ready as the next piece.

Who may touch what is as for every path (`lane.py`). The arrays of a batch are read before
the call returns.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kv_swap.cuda.copies import Copies, CopyMaker, cut_batches
from kv_swap.cuda.copy_path import CopyPath, Slice
from kv_swap.cuda.device import device_index, import_cupy
from kv_swap.cuda.streams import StreamTurns
from kv_swap.engine import Direction
from kv_swap.layout import KVLayout
from kv_swap.memory.arena import HostArena

if TYPE_CHECKING:
    import torch
    from torch.cuda import Stream

SLICE_COPIES = 64
"""Copies that a call of the engine queues at most: 30 us as one piece on the host of an H200."""

SLICE_BYTES = 64 << 20
"""Bytes that a call of the engine queues at most: 16 pieces, 32 if copies of more than half a piece
do not pair up."""

PIECE_BYTES = 4 << 20
"""Bytes of one batch, 76 us of a PCIe Gen5 x16 link: how long others' copies wait for it."""

_IN_FLIGHT = 8
"""Slices queued at once: 512 copies, with as many waits and events at most, far below the about
1,000 operations of a stream after which CUDA makes the caller wait."""

_PAGES_AT_A_TIME = 256
"""Pages that are turned into copies at a time: about 0.1 ms of NumPy."""


class Copier(ABC):
    """Queues copies. The narrow seam to CUDA; tests put memory of the host behind it.

    Raises `DeviceError` without CuPy.
    """

    call: str
    """What it calls, for errors."""

    def __init__(self, device: torch.device) -> None:
        self._cuda: Any = import_cupy().cuda
        self._index = device_index(device)

    def device(self) -> AbstractContextManager[object]:
        """Make the device current while copies are queued."""
        device: AbstractContextManager[object] = self._cuda.Device(self._index)
        return device

    @abstractmethod
    def copy(self, copies: Copies, first: int, end: int, stream: int) -> None:
        """Queue copies `first` to `end`, in any order, on a CUDA stream.

        `copies` is C-contiguous and may be freed afterwards. Raises `RuntimeError`; some may have
        been queued.
        """


class DmaPath(CopyPath):
    """Copies of one direction, by the copy engine."""

    max_in_flight = _IN_FLIGHT
    slices_per_call = 1

    def __init__(
        self, direction: Direction, maker: CopyMaker, copier: Copier, turns: StreamTurns
    ) -> None:
        self.call = copier.call
        self._direction = direction
        self._maker = maker
        self._copier = copier
        self._turns = turns
        self._pairs_at_a_time = max(1, _PAGES_AT_A_TIME // len(maker.layout.regions))

    def slices(self, pairs: NDArray[np.int32], *, in_waves: bool) -> Iterator[Slice]:
        """Yield copies, `(3, n)` with n <= SLICE_COPIES; merged within 256 pages."""
        assert not in_waves, "the copy engine does not copy in waves"
        for first in range(0, len(pairs), self._pairs_at_a_time):
            some = pairs[first : first + self._pairs_at_a_time]
            copies = self._maker.copies(self._direction, some)
            for begin, end in cut_batches(copies, SLICE_COPIES, SLICE_BYTES):
                yield None, np.ascontiguousarray(copies[:, begin:end])

    def queue(self, part: Slice, stream: Stream) -> None:
        """Queue the pieces of a slice, in turns on `stream` and on a stream of this path."""
        _, copies = part
        pieces = cut_batches(copies, SLICE_COPIES, PIECE_BYTES)
        with self._copier.device(), closing(self._turns.take(stream)) as streams:
            for (first, end), turn in zip(pieces, streams, strict=False):
                self._copier.copy(copies, first, end, turn.cuda_stream)

    def warm_up(self, stream: Stream) -> None:
        """Do nothing: copies need no code on the device."""


def make_dma_path(
    direction: Direction, layout: KVLayout, arena: HostArena, device: torch.device
) -> DmaPath:
    """Return the path between a layout and a registered arena. Raises `DeviceError`."""
    maker = CopyMaker(layout, arena.address, arena.piece_bytes, PIECE_BYTES)
    return DmaPath(direction, maker, make_copier(device), StreamTurns(device))


def make_copier(device: torch.device) -> Copier:
    """Return the copier with the fewest calls that the driver and what is installed allow."""
    try:
        return BatchCopier(device)
    except LookupError:
        return SingleCopier(device)


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes` of the CUDA driver API: how a copy may read its source."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("destination_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


_IN_STREAM_ORDER = 1
"""`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`: a source is read when the copy runs, not at the call."""

_BATCH_VERSION = 12080
"""The CUDA version whose `cuMemcpyBatchAsync` is asked for, the first that has it. Drivers of 13.x
keep it for those who ask, beside one without the index of the copy that failed."""

_NO_COPY = 2**64 - 1
"""What the driver says where no single copy is to blame."""

_BatchFunction = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # destinations
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # bytes
    ctypes.c_size_t,  # copies
    ctypes.c_void_p,  # attributes
    ctypes.c_void_p,  # for each attribute, the first copy that it holds for
    ctypes.c_size_t,  # attributes
    ctypes.c_void_p,  # set to the copy that failed
    ctypes.c_void_p,  # stream
)


class BatchCopier(Copier):
    """One `cuMemcpyBatchAsync` for all copies of a batch; needs a driver of CUDA 12.8 or newer.

    cuda-bindings finds the function; it is called past them, since they take a Python object for
    every address, where the function itself takes the arrays that are there. Raises `LookupError`
    where either is missing.
    """

    call = "cuMemcpyBatchAsync"

    def __init__(self, device: torch.device) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise LookupError(f"cuda-bindings cannot be imported: {error}") from error
        try:
            status, address, *_ = driver.cuGetProcAddress(self.call.encode(), _BATCH_VERSION, 0)
        except RuntimeError as error:  # the driver lacks cuGetProcAddress itself
            raise LookupError(
                f"the CUDA driver cannot be asked for {self.call}: {error}"
            ) from error
        if int(status) != 0 or not int(address):
            raise LookupError(
                f"the CUDA driver has no {self.call}: cuGetProcAddress returned {status}"
            )
        super().__init__(device)
        self._function = _BatchFunction(int(address))
        self._attributes = _Attributes(_IN_STREAM_ORDER)
        self._first_copy = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(_NO_COPY)

    def copy(self, copies: Copies, first: int, end: int, stream: int) -> None:
        """See `Copier`."""
        row, column = copies.strides
        begin = copies.ctypes.data + first * column
        status = self._function(
            begin,
            begin + row,
            begin + 2 * row,
            end - first,
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._first_copy),
            1,
            ctypes.addressof(self._failed),
            stream,
        )
        if status:
            failed, self._failed.value = self._failed.value, _NO_COPY
            at = f"at copy {failed} of {end - first}" if failed < end - first else "for all copies"
            error = self._cuda.driver.CUDADriverError(status)
            raise RuntimeError(f"{error} ({at}, {copies[2, first:end].sum()} bytes)")


class SingleCopier(Copier):
    """One `cudaMemcpyAsync` a copy, through CuPy."""

    call = "cudaMemcpyAsync"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        runtime = self._cuda.runtime
        self._copy: Any = runtime.memcpyAsync
        self._kind: int = runtime.memcpyDefault

    def copy(self, copies: Copies, first: int, end: int, stream: int) -> None:
        """See `Copier`."""
        for destination, source, nbytes in copies[:, first:end].T.tolist():
            try:
                self._copy(destination, source, nbytes, self._kind, stream)
            except RuntimeError as error:
                raise RuntimeError(f"{error} (one copy of {nbytes} bytes)") from error
