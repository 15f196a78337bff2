"""Messages between the scheduler and the workers in a step: plans and reports."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

Pairs = NDArray[np.int32]
"""Shape `(n, 2)`: block in the engine's KV cache, slot in host memory."""


class Outcome(enum.IntEnum):
    """How a job ended on a rank. Of several ranks the greatest counts."""

    OK = 0
    FAILED = 1
    """Its destination may hold anything; no forward has read it."""
    LOST = 2
    """A forward read blocks that a synchronous load had not filled: its results are wrong."""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Copy blocks of the KV cache to host memory, at the start of the next step.

    Of ranks that share host memory each copies a part (`Peers.own_part`), and all report the job.
    """

    job_id: int
    pairs: Pairs


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Copy slots of host memory into blocks that were allocated to one waiting request.

    `incomplete`: host memory has nothing for some block. Nothing is copied and the load fails.
    `synchronous`: its request runs in this very step, and the forward must come after the load.
    `whole`: it brings all tokens of its request; the forward computes the last one again, and
    writes its KV over what was loaded.
    """

    job_id: int
    request_id: str
    pairs: Pairs
    incomplete: bool = False
    synchronous: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class MoveJob:
    """Copy slots between host memory and a lower tier: up if it `promotes`, else down.

    `tier` is the name of the tier, `disk` or `remote`. `pairs` has the slot in host memory and the
    slot in the tier. `names` say what each block is: the tier keeps them with the bytes, and a
    promotion brings nothing else.
    """

    job_id: int
    promotes: bool
    tier: str
    pairs: Pairs
    names: Sequence[bytes]


@dataclass(frozen=True)
class OffloadMetadata:
    """One step's plan, from the scheduler to every worker."""

    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    next_job_id: int = 0
    """Every job below this was sent by now: what has not reached a rank never will."""
    known: tuple[int, ...] = ()
    """Jobs that no rank has to report any more: the scheduler knows how they ended."""
    admissions: int = 0
    """How often requests had been given blocks when the step was planned."""
    moves: tuple[MoveJob, ...] = ()


@dataclass(frozen=True, slots=True)
class RankReport:
    """The report of one rank. None stands for a figure that has not changed."""

    jobs: dict[int, Outcome] = field(default_factory=dict)
    """By job id, every job that has ended and is not `known`. Each is reported until it is."""
    failed_rows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By job id of a store or move that has ended: which of its pairs failed, if not all went well.

    Of a store that is `OK` these are the blocks that do not fit packed slots. A move that was never
    begun has failed without them."""
    aborted_step: int | None = None
    """The `admissions` of the last step that an error of the engine cut short: it is unknown which
    blocks it computed."""
    load_bytes_per_second: float | None = None
    """The speed of a load that ran alone."""
    store_bytes_per_second: float | None = None
    promote_bytes_per_second: dict[str, float] | None = None
    """By tier."""
    ready_slots: int | None = None
    """Slots from 0 on whose memory is ready."""
    weight_loads: int | None = None
    """How often the model has been given weights since the start."""


@dataclass(frozen=True)
class OffloadWorkerMetadata:
    """Reports by rank."""

    ranks: dict[int, RankReport] = field(default_factory=dict)

    def merge(self, other: OffloadWorkerMetadata) -> Self:
        """Return what both say together."""
        return type(self)(self.ranks | other.ranks)


@dataclass(frozen=True, slots=True)
class TierCapacity:
    """The capacity of one rank's part of a lower tier."""

    num_slots: int
    file_id: str
    """Identifies the file that has the slots; a file that was begun again has another one."""
    sharing_ranks: int = 1
    """How many ranks share host memory, and so write each slot once between them."""


@dataclass(frozen=True)
class WorkerCapacity:
    """The capacity of one rank's arena; the scheduler plans with the smallest."""

    rank: int
    num_slots: int
    ready_slots: int
    """Slots from 0 on whose memory was ready when this was sent; reports say how it grows."""
    tiers: dict[str, TierCapacity] = field(default_factory=dict)
    """By name."""
    slot_bytes: int = 0
    """Size of one slot of the arena."""
    arena: str = ""
    """The path of the arena's file, with a `host_pool`."""
