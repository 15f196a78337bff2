"""Messages between the scheduler and the workers in a step: plans and reports."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Pairs = NDArray[np.int32]
"""Shape `(n, 2)`: block in the engine's KV cache, slot in host memory.

In loads, a slot may be a peer's (`peer_slots`)."""

WINDOW_BITS = 24
"""Bits of a slot's number in a peer's arena. Larger arenas are not shared."""


def peer_slots(seat: int, slots: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the numbers by which loads name slots of the engine at a seat.

    They are the same on all ranks, even if the ranks' arenas have different numbers of slots.
    """
    return slots | np.int32((seat + 1) << WINDOW_BITS)


class Outcome(enum.IntEnum):
    """How a job ended on a rank. The greatest value of all ranks counts."""

    OK = 0
    FAILED = 1
    """The destination may hold anything; no forward pass has read it."""
    LOST = 2
    """A forward pass read blocks that a synchronous load had not filled: its results are wrong."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy blocks of the KV cache to host memory, at the start of the next step.

    Ranks that share host memory each copy a part (`SharingRanks.own_part`), and all report the job.
    """

    job_id: int
    pairs: Pairs


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy slots of host memory into blocks that are allocated to one waiting request.

    - `incomplete`: host memory lacks data for some block. Nothing is copied and the load fails.
    - `synchronous`: the request runs in this step, whose forward pass must wait for the load.
    - `whole`: the load covers all tokens of its request; the forward pass recomputes the last one
      and overwrites its loaded KV.
    """

    job_id: int
    request_id: str
    pairs: Pairs
    incomplete: bool = False
    synchronous: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class MoveJob:
    """Copy slots between host memory and a lower tier: up if it `promotes`, otherwise down.

    `tier` is the name of the tier, `disk` or `remote`. `pairs` holds the slot in host memory and
    the slot in the tier. `names` identify the blocks: the tier keeps them with the bytes, and a
    promotion refuses a slot with another name.
    """

    job_id: int
    promotes: bool
    tier: str
    pairs: Pairs
    names: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Window:
    """Map or unmap the arenas of the engine at a seat.

    Ranks ignore a file that they have mapped. For another file, or none, they first unmap the old
    one, which no load may still read. The message may be repeated until all ranks report it.
    """

    seat: int
    files: dict[int, str]
    """Path of the arena by rank; empty to unmap."""
    num_slots: int = 0
    """Number of slots from 0 on that the owner has allocated; the others are not touched."""


@dataclass(frozen=True)
class OffloadMetadata:
    """One step's plan, from the scheduler to every worker."""

    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    next_job_id: int = 0
    """All jobs below this id have been sent; one that has not reached a rank by now never will."""
    acknowledged: tuple[int, ...] = ()
    """Jobs that ranks can stop reporting, because the scheduler knows how they ended."""
    admissions: int = 0
    """How many times requests had been given blocks when the step was planned."""
    moves: tuple[MoveJob, ...] = ()
    windows: tuple[Window, ...] = ()
    """Changes since the last plan, taken in order."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank. A field that is None has not changed."""

    jobs: dict[int, Outcome] = field(default_factory=dict)
    """By job id: all ended jobs that are not `acknowledged`. Each is reported until it is."""
    failed_rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By job id of an ended store or move: the indices of its pairs that failed, unless all
    succeeded.

    For a store that is `OK`, these blocks do not fit packed slots. A move that failed before it
    began has none."""
    aborted_step: int | None = None
    """The `admissions` of the last step that an engine error aborted: it is unknown which blocks it
    computed."""
    bytes_per_second: dict[str, float] | None = None
    """Measured speeds of a `load`, a `store`, and a read of each tier, by its name."""
    ready_slots: int | None = None
    """The number of slots from 0 on whose memory is ready."""
    weight_loads: int | None = None
    """How often the model has received weights since the start."""
    windows: dict[int, tuple[str, int]] | None = None
    """By seat: the path of the mapped arena, and the number of its slots from 0 on that loads may
    name. That is 0 at first, and stays so if the arena cannot be mapped."""


@dataclass(frozen=True)
class OffloadWorkerMetadata:
    """Reports by rank."""

    ranks: dict[int, RankReport] = field(default_factory=dict)

    def aggregate(self, other: OffloadWorkerMetadata) -> OffloadWorkerMetadata:
        """Return the reports of both. vLLM merges those of all ranks by this name."""
        return OffloadWorkerMetadata(self.ranks | other.ranks)


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """The capacity of one rank's part of a lower tier."""

    num_slots: int
    file_id: str
    """Identifies the file that holds the slots; a recreated file has a different id."""
    sharing_ranks: int = 1
    """The number of ranks that share host memory and divide the slots to write among them."""


@dataclass(frozen=True)
class WorkerCapacity:
    """The capacity of one rank's arena; the scheduler plans with the smallest."""

    rank: int
    num_slots: int
    ready_slots: int
    """The number of slots from 0 on whose memory was ready when sent; reports update it."""
    tiers: dict[str, TierCapacity] = field(default_factory=dict)
    """By name."""
    slot_bytes: int = 0
    """Size of one slot of the arena in bytes."""
    arena: str = ""
    """The path of the arena's file; only with a `host_pool`."""
