"""What the scheduler tells the workers in a step, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

Pairs = NDArray[np.int32]
"""Shape `(n, 2)`: block in the engine's KV cache, slot in host memory."""


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


@dataclass(frozen=True)
class OffloadMetadata:
    """One step's plan, from the scheduler to every worker."""

    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    admissions: int = 0
    """How often requests had been given blocks when the step was planned."""


@dataclass(frozen=True, slots=True)
class JobResult:
    """Which ranks have ended a store, and whether all of them copied it without an error.

    Ranks are named, not counted: a drain and a report under way can both tell of one rank.
    """

    ranks: frozenset[int]
    ok: bool

    def merge(self, other: JobResult) -> JobResult:
        """Return what both say together."""
        return JobResult(self.ranks | other.ranks, self.ok and other.ok)


@dataclass(frozen=True)
class OffloadWorkerMetadata:
    """What ended on a rank since its last report; or on several, merged."""

    stores: dict[int, JobResult] = field(default_factory=dict)
    """By job id."""
    failed_loads: frozenset[str] = frozenset()
    """Requests whose asynchronous loads failed. They are reported as received too."""
    loads: dict[int, frozenset[int]] = field(default_factory=dict)
    """Synchronous loads that ended, well or not, by job id: on which ranks.

    Asynchronous loads are reported to the engine, by request."""
    lost_loads: frozenset[int] = frozenset()
    """Synchronous loads that were not there when a forward read them, by job id: what was computed
    with them is wrong. Named in the report of that very step; in `loads` when the copies end."""
    cut_short: int | None = None
    """The `admissions` of the last step that an error of the engine cut short: nobody knows which
    blocks it computed. Named in the report of the step after it."""
    load_bytes_per_second: float | None = None
    """The speed of a load that ran alone, of the slowest rank."""
    ready_slots: dict[int, int] = field(default_factory=dict)
    """By rank, where it has grown: slots from 0 on whose memory is ready."""
    store_bytes_per_second: dict[int, float] = field(default_factory=dict)
    """By rank, where it has changed: how fast its stores are."""
    weight_loads: dict[int, int] = field(default_factory=dict)
    """By rank, where it has grown: how often its model has been given weights since the start."""

    def merge(self, other: OffloadWorkerMetadata) -> Self:
        """Return what two ranks report together."""
        return type(self)(
            _merge(self.stores, other.stores),
            self.failed_loads | other.failed_loads,
            {
                job_id: self.loads.get(job_id, frozenset()) | other.loads.get(job_id, frozenset())
                for job_id in self.loads | other.loads
            },
            self.lost_loads | other.lost_loads,
            max((n for n in (self.cut_short, other.cut_short) if n is not None), default=None),
            _slower(self.load_bytes_per_second, other.load_bytes_per_second),
            self.ready_slots | other.ready_slots,
            self.store_bytes_per_second | other.store_bytes_per_second,
            self.weight_loads | other.weight_loads,
        )


def _slower(mine: float | None, others: float | None) -> float | None:
    return min((speed for speed in (mine, others) if speed is not None), default=None)


def _merge(mine: dict[int, JobResult], others: dict[int, JobResult]) -> dict[int, JobResult]:
    both = {job_id: mine[job_id].merge(others[job_id]) for job_id in mine.keys() & others.keys()}
    return mine | others | both


@dataclass(frozen=True, slots=True)
class DrainAnswer:
    """What a rank says when it has drained its copies between two steps."""

    stores: dict[int, JobResult]
    """All that have ended."""
    loading: frozenset[str]
    """Requests whose loads run on."""
    lost_loads: frozenset[int]
    """Those that it named lately; a report of them may still be under way."""

    def merge(self, other: DrainAnswer) -> DrainAnswer:
        """Return what two ranks say together."""
        return DrainAnswer(
            _merge(self.stores, other.stores),
            self.loading | other.loading,
            self.lost_loads | other.lost_loads,
        )


@dataclass(frozen=True)
class WorkerCapacity:
    """What one rank's arena holds; the scheduler plans with the smallest."""

    rank: int
    num_slots: int
    ready_slots: int
    """Slots from 0 on whose memory was ready when this was sent; reports say how it grows."""
    synchronous_loads: bool = True
    """Whether the forward can be made to wait for a load on the device."""
