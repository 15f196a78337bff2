"""The interface of a transfer engine: jobs, completions and guarantees."""

from __future__ import annotations

import enum
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import JobError, LayoutError, TransferError
from kv_swap.layout import KVLayout
from kv_swap.memory.windows import Windows, readable

if TYPE_CHECKING:
    from kv_swap.memory.arena import HostArena


CopiesWith = Literal["host", "kernels", "gates"]
"""Host threads, swap kernels on a GPU, or the GPU's copy engine with a gate after each piece."""


class Direction(enum.Enum):
    """The direction of a job."""

    LOAD = "load"
    """Host memory to the KV cache."""
    STORE = "store"
    """The KV cache to host memory."""


@dataclass(frozen=True, slots=True)
class SwapJob:
    """A job that copies whole blocks in one direction.

    `pairs` is int32 of shape `(n, 2)`, n >= 1: the block in the KV cache and the slot in the arena
    or, for loads, in one of its windows. The engine does not keep it after `submit`.

    The flags are for loads only. With `before_compute`, the copies do not queue after other loads,
    and compute waits for them in `SwapEngine.await_loads` or, with `in_waves`, wave by wave in
    `await_wave`. Without `after_compute`, a load can start while compute queued earlier is still
    running; the caller ensures that none of it touches the blocks.
    """

    job_id: int
    direction: Direction
    pairs: NDArray[np.int32]
    before_compute: bool = False
    in_waves: bool = False
    after_compute: bool = True


@dataclass(frozen=True, slots=True)
class Completion:
    """A job that has ended. `seconds` is the time from when its copies could start to their end.

    On the host, a load in waves counts only the time of its copies, because compute runs between
    them. `nbytes` is the size of its blocks in the KV cache, packed or not. `refused_rows` are the
    rows of a store's pairs whose blocks do not fit a packed slot: their slots hold garbage, the
    others are valid. If `error` is set, the destination (slots of a store, blocks of a load) holds
    garbage.
    """

    job_id: int
    direction: Direction
    nbytes: int
    seconds: float
    error: TransferError | None = None
    refused_rows: tuple[int, ...] = ()


@dataclass(slots=True)
class Held:
    """Resources of copies that may still be running. Must not be freed in a forked process."""

    arena: HostArena | None
    keep_alive: Sequence[object]
    process: int = field(default_factory=os.getpid)


def slots_for(layout: KVLayout, arena: HostArena) -> int:
    """Return the number of slots in an arena. Raises `LayoutError` if they do not fit."""
    if arena.slot_bytes != layout.slot_bytes:
        raise LayoutError(
            f"slots of the arena have {arena.slot_bytes} bytes, a block has {layout.slot_bytes}"
        )
    return arena.num_slots


class SwapEngine(ABC):
    """Copies blocks between a KV cache and a host arena, asynchronously. A context manager.

    Ordering. A job runs after everything that was queued on the compute stream when it was
    submitted; a store also runs after everything queued on the output-copy stream, if there is one.
    A load that is not `after_compute` runs after everything that was queued at the last
    `fence_loads` or `zero_blocks`. There is no other order: the caller must not let one job write a
    block or slot while another job that uses it is in flight. Loads wait for at most one slice of a
    store.

    On a device `submit`, `poll`, `fence_loads` and `zero_blocks` neither block nor synchronise.
    One thread calls all methods.

    If a load `before_compute` fails, `await_loads` or `await_wave` raises before the forward that
    reads it is queued, and `load_now` repeats it.
    """

    _state: Held

    def __init__(self, layout: KVLayout, num_slots: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self._undelivered = 0
        self._num_waves = 0
        self._closed = False
        # For `check_pairs`: row numbers, and the last row that named each block or slot.
        self._rows = np.arange(max(layout.num_blocks, num_slots), dtype=np.int32)
        self._row_of = np.empty_like(self._rows)

    @abstractmethod
    def submit(self, job: SwapJob) -> None:
        """Start a job. Raises `JobError`, and copies nothing, if `check_job` refuses it."""

    @property
    def copies_with(self) -> CopiesWith:
        """Name of the mechanism that copies the blocks of this layout."""
        return "host"

    @abstractmethod
    def await_loads(self) -> None:
        """Make compute that is queued later wait for all loads `before_compute` submitted so far.

        Applies to the current stream. Raises `CopyError` if the last submitted load has failed, or
        if compute cannot wait for it: compute must then not continue before `load_now`.
        """

    @abstractmethod
    def load_now(self, pairs: NDArray[np.int32]) -> None:
        """Repeat a load `before_compute` that was refused or failed, at any cost.

        `pairs` are those of the load, int32 of shape `(n, 2)`. Uses plain copies on the current
        stream. Blocks the host until the bytes have arrived and nothing else copies to these
        blocks. Ignore the completion of the failed load. Raises `JobError` or `CopyError`; the
        blocks may then hold anything.
        """

    def set_waves(self, waves: Sequence[Sequence[int]]) -> None:
        """Define the waves of loads with `in_waves`. Call once, before the first such load.

        A wave is a list of indices of `layout.regions`; each region is in exactly one. Raises
        `JobError`.
        """
        raise JobError("this engine does not load in waves")

    def await_wave(self, wave: int) -> None:
        """Make compute that is queued later wait for a wave of the last load, and earlier waves.

        The caller must await the last wave of a job before it submits another job that uses its
        blocks or slots. Raises `CopyError` like `await_loads`.
        """
        raise JobError("this engine does not load in waves")

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Return jobs that ended since the last call, each exactly once. Never blocks."""

    @abstractmethod
    def wait(self, timeout_seconds: float) -> bool:
        """Block until every submitted copy has ended; False on timeout. Consumes no completion."""

    @abstractmethod
    def fence_loads(self) -> None:
        """Order every load submitted later after all compute that is already queued.

        Includes loads without `after_compute`. Raises `CopyError`; then nothing is ordered.
        """

    @abstractmethod
    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Zero every page of `blocks` before later compute reads or later loads write them.

        No job that uses one of the blocks may be in flight. Raises `JobError` for a block out of
        range or on a closed engine, `CopyError` if zeroing fails: the blocks may then hold
        anything.
        """

    @abstractmethod
    def close(self, timeout_seconds: float = 30.0) -> None:
        """Wait for copies in flight, then drop every reference to KV tensors and the arena.

        Idempotent. On timeout the memory stays alive until the last copy has ended.
        """

    def keep_alive(self, objects: Sequence[object]) -> Sequence[object]:
        """Keep these objects alive instead, and return the old ones. No copy may be in flight."""
        held, self._state.keep_alive = self._state.keep_alive, tuple(objects)
        return held

    def slots(self) -> NDArray[np.uint8]:
        """Return the slots of the arena, uint8 of shape `(num_slots, slot_bytes)`.

        The array keeps the arena's memory alive. Raises `JobError` on a closed engine.
        """
        if self._state.arena is None:
            raise JobError("the slots were asked of an engine that is closed")
        return self._state.arena.view()

    @property
    def windows(self) -> Windows | None:
        """The arena's windows, whose slots loads may also name; None once closed."""
        return None if self._state.arena is None else self._state.arena.windows

    @property
    def in_flight(self) -> int:
        """Number of submitted jobs whose completion `poll` has not returned yet."""
        return self._undelivered

    @property
    def ready_slots(self) -> int:
        """Number of slots, from slot 0, that jobs may use now. Grows as memory is page-locked."""
        return self.num_slots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def check_waves(self, waves: Sequence[Sequence[int]]) -> None:
        """Raise `JobError` if waves are already set, or if a region is not in exactly one."""
        if self._num_waves:
            raise JobError("waves are set once")
        named = sorted(region for wave in waves for region in wave)
        if named != list(range(len(self.layout.regions))) or not all(waves):
            raise JobError(
                f"waves must name each of {len(self.layout.regions)} regions once, and none may be "
                f"empty, got {[list(wave) for wave in waves]}"
            )

    def check_blocks(self, blocks: Sequence[int]) -> None:
        """Raise `JobError` if a block does not exist, or the engine is closed."""
        if self._closed:
            raise JobError(f"zeroing {len(blocks)} blocks was asked of an engine that is closed")
        for block in blocks:
            if not 0 <= block < self.layout.num_blocks:
                raise JobError(
                    f"block {block} does not exist, valid are 0 to {self.layout.num_blocks - 1}"
                )

    def check_job(self, job: SwapJob) -> None:
        """Raise `JobError` for a job that `submit` cannot run."""
        self.check_pairs(job)
        if job.in_waves and not (job.before_compute and self._num_waves):
            raise JobError(
                f"job {job.job_id}: only loads before compute come in waves, and only once those "
                f"were set"
            )

    def check_pairs(self, job: SwapJob) -> None:
        """Raise `JobError` if pairs are out of bounds or repeat a destination, or once closed."""
        pairs = job.pairs
        if self._closed:
            raise JobError(f"job {job.job_id} was submitted to an engine that is closed")
        if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype != np.int32 or len(pairs) == 0:
            raise JobError(
                f"job {job.job_id}: pairs must be a non-empty int32 array of shape (n, 2), "
                f"got {pairs.dtype} of shape {pairs.shape}"
            )
        if job.direction is Direction.STORE and not job.after_compute:
            raise JobError(f"job {job.job_id}: a store reads what compute wrote, so it comes after")
        limits = (self.layout.num_blocks, self.ready_slots)
        # Every copy waits for this, so it makes few NumPy calls, with indices of NumPy's own type.
        # Negative numbers, read as unsigned, are out of range as well.
        unsigned = pairs.view(np.uint32)
        written = 1 if job.direction is Direction.STORE else 0
        places = unsigned[:, written].astype(np.intp)
        others = unsigned[:, 1 - written].astype(np.intp)
        rows = self._rows[: len(pairs)]
        row_of = self._row_of[: limits[written]]
        try:
            try:
                self._row_of[: limits[1 - written]].take(others)
            except IndexError:
                if written or not self._readable(others).all():
                    raise
            # Faster than sorting: a repeated destination keeps only the last row that named it.
            row_of[places] = rows
            refused = row_of.take(places).tobytes() != rows.tobytes()
        except (IndexError, ValueError):  # out of range; more pairs than destinations
            refused = True
        if refused:
            raise self._refusal(job, limits)

    def _readable(self, slots: NDArray[np.signedinteger]) -> NDArray[np.bool_]:
        return readable(slots, self.ready_slots, self.windows)

    def _refusal(self, job: SwapJob, limits: tuple[int, int]) -> JobError:
        """Return the error that describes the invalid pairs of a job."""
        pairs = job.pairs
        inside = (pairs >= 0) & (pairs < limits)
        if job.direction is Direction.LOAD:
            inside[:, 1] = self._readable(pairs[:, 1])
        outside = np.argwhere(~inside)
        if len(outside):
            row, column = outside[0].tolist()
            locking = f" until more of {self.num_slots} are page-locked"
            return JobError(
                f"job {job.job_id}: pair {row} names {('block', 'slot')[column]} "
                f"{pairs[row, column]}, valid are 0 to {limits[column] - 1}"
                f"{locking if column and limits[1] < self.num_slots else ''}"
            )
        what = "slot" if job.direction is Direction.STORE else "block"
        return JobError(f"job {job.job_id}: a {job.direction.value} writes one {what} twice")
