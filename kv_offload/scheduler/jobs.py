"""All copies on their way: one record each, from its plan until every rank has ended it.

Stores and loads copy between GPU blocks and slots of host memory; moves between host memory and a
tier below it.

A store pins its blocks in the engine's block pool: a reference, so that nobody can reallocate, zero
or overwrite them while a copy may read them. A load holds its slots against eviction. Its blocks
belong to its request, whatever becomes of that: the engine keeps them until it hears of the end.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.slots import NO_SLOTS, Slots
from kv_offload.engine import BlockPool
from kv_offload.messages import LoadJob, MoveJob, Outcome, Pairs, RankReport, StoreJob
from kv_offload.scheduler.request import StoreCursor, TrackedRequest
from kv_offload.scheduler.timing import LoadQueue, StepTime


@dataclass(slots=True, eq=False)
class Job:
    """A copy between GPU blocks and slots: a load if it has a request, else a store."""

    blocks: list[int]
    """The GPU blocks that it pins, or fills."""
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    """What it holds in host memory."""
    request: TrackedRequest | None = None
    cursor: StoreCursor | None = None
    """Of a load: the request's blocks as they were when it was planned."""
    synchronous: bool = False
    """Of a load: whether the forward of its step waits for it."""
    job_id: int = -1
    sent: float = 0.0
    """On the monotonic clock, in seconds."""
    sent_after: float = 0.0
    """What `Jobs.step_time` said then."""
    ranks_left: set[int] = field(default_factory=set)
    outcome: Outcome = Outcome.OK
    """The worst of the ranks that have ended it."""
    given_up: bool = False
    """Of a store: whether its blocks were released before all ranks had ended it."""
    failed_rows: set[int] = field(default_factory=set)
    """Places of the slots whose copy has failed on some rank."""

    @property
    def is_store(self) -> bool:
        """Whether it copies to host memory what a forward computed."""
        return self.request is None

    @property
    def pins(self) -> bool:
        """Whether it is a store that pins its blocks."""
        return self.is_store and not self.given_up

    @property
    def failed(self) -> NDArray[np.bool_]:
        """Say for each slot whether its copy has failed on some rank."""
        failed = np.zeros(len(self.slots), bool)
        failed[list(self.failed_rows)] = True
        return failed


@dataclass(slots=True, eq=False)
class Move(Job):
    """A copy between slots of host memory and of the tier below: up, or else down."""

    promotes: bool = False
    keys: list[bytes] = field(default_factory=list)
    """What each slot holds, or is to hold."""
    tier_slots: Slots = field(default_factory=lambda: NO_SLOTS)
    generation: bytes = b""
    """Of the tier, when it was planned: begins the names of its blocks there."""

    @property
    def is_store(self) -> bool:
        """False: what it copies has been readable."""
        return False


class Jobs:
    """The table of them. `queue` counts the slots of loads."""

    def __init__(self, manager: CacheManager, pool: BlockPool, num_ranks: int) -> None:
        self._manager = manager
        self._pool = pool
        self._ranks = frozenset(range(num_ranks))
        self.queue = LoadQueue()
        self.step_time = StepTime()
        # Planned, and not sent yet. What is pinned since the last step goes into one store.
        self._loads: list[tuple[Job, LoadJob]] = []
        self._store = Job([])
        self._store_slots: list[Slots] = []
        self._moves: list[tuple[Move, MoveJob]] = []
        # In the order in which they were sent.
        self._running: dict[int, Job] = {}
        self._running_moves: dict[bool, dict[int, Move]] = {True: {}, False: {}}  # if they promote
        self._known: set[int] = set()
        self.next_job_id = 0
        self.running_loads = 0
        """Loads that were planned and that some rank has not ended."""
        self.running_stores = 0
        """Stores that were sent and that some rank has not ended, given up or not."""
        self.stores_given_up = 0
        """How many of these were given up."""
        self.pinned_blocks = 0
        """Blocks that stores pin, be these planned or running."""

    # -- plans ---------------------------------------------------------------------------------

    def plan_load(
        self,
        tracked: TrackedRequest,
        blocks: list[int],
        slots: Slots,
        *,
        synchronous: bool,
        whole: bool = False,
    ) -> None:
        """Plan a load into blocks of a request, that holds `slots`; see `LoadJob`.

        Where there are fewer slots than blocks it is incomplete, and will fail.
        """
        job = Job(blocks, slots, tracked, tracked.cursor, synchronous)
        incomplete = len(slots) < len(blocks)
        pairs = _pairs(blocks, 0 if incomplete else slots)
        load = LoadJob(job.job_id, tracked.request_id, pairs, incomplete, synchronous, whole)
        self._loads.append((job, load))
        self.running_loads += 1
        self.queue.add(len(slots), time.monotonic())

    @property
    def plans_synchronous(self) -> bool:
        """Whether `send_loads` has a synchronous load to return."""
        return any(job.synchronous for job, _ in self._loads)

    def has_planned_load(self, tracked: TrackedRequest) -> bool:
        """Whether `send_loads` has a load of this request to return."""
        return any(job.request is tracked for job, _ in self._loads)

    def pin(self, slots: Slots, blocks: list[int]) -> None:
        """Plan the store of each block into its slot, and pin the block."""
        self._store_slots.append(slots)
        self._store.blocks += blocks
        pool_blocks = self._pool.blocks
        self._pool.touch([pool_blocks[block] for block in blocks])
        self.pinned_blocks += len(blocks)

    def send_stores(self) -> tuple[StoreJob, ...]:
        """Return what was pinned since the last call as one job."""
        if not self._store_slots:
            return ()
        parts, self._store_slots = self._store_slots, []
        job, self._store = self._store, Job([])
        job.slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self.running_stores += 1
        return (StoreJob(self._send(job), _pairs(job.blocks, job.slots)),)

    def send_loads(self) -> tuple[LoadJob, ...]:
        """Return the loads planned since the last call."""
        if not self._loads:
            return ()
        planned, self._loads = self._loads, []
        return tuple(replace(load, job_id=self._send(job)) for job, load in planned)

    def plan_moves(
        self,
        keys: list[bytes],
        slots: Slots,
        tier_slots: Slots,
        generation: bytes,
        *,
        promotes: bool,
        job_slots: int,
    ) -> list[Move]:
        """Plan to move what both managers hold; return the jobs, of `job_slots` at most each."""
        moves = []
        for first in range(0, len(keys), job_slots):
            part = slice(first, first + job_slots)
            move = Move(
                [],
                slots[part],
                promotes=promotes,
                keys=keys[part],
                tier_slots=tier_slots[part],
                generation=generation,
            )
            pairs = np.stack((move.slots, move.tier_slots), axis=1)
            names = [generation + key for key in move.keys]
            self._moves.append((move, MoveJob(move.job_id, promotes, pairs, names)))
            moves.append(move)
        return moves

    def send_moves(self) -> tuple[MoveJob, ...]:
        """Return the moves planned since the last call."""
        if not self._moves:
            return ()
        planned, self._moves = self._moves, []
        return tuple(replace(sent, job_id=self._send(move)) for move, sent in planned)

    def _send(self, job: Job) -> int:
        job.job_id, self.next_job_id = self.next_job_id, self.next_job_id + 1
        job.sent, job.sent_after = time.monotonic(), self.step_time.seconds
        job.ranks_left = set(self._ranks)
        self._running[job.job_id] = job
        if isinstance(job, Move):
            self._running_moves[job.promotes][job.job_id] = job
        return job.job_id

    # -- ends ----------------------------------------------------------------------------------

    def hear(self, ranks: Mapping[int, RankReport]) -> tuple[list[Job], list[Job]]:
        """Take in what ended on ranks; return the jobs that all have ended, and the loads lost.

        To hear of a job again changes nothing. A rank that names no slot of a job that failed has
        copied none of them.
        """
        ended: list[Job] = []
        lost: list[Job] = []
        for rank, report in ranks.items():
            for job_id, outcome in report.jobs.items():
                job = self._running.get(job_id)
                if job is None:
                    self._known.add(job_id)
                    continue
                rows = report.failed_rows.get(job_id, ())
                some = outcome is Outcome.OK or len(rows)
                job.failed_rows.update(rows if some else range(len(job.slots)))
                if outcome is Outcome.LOST and job.outcome is not Outcome.LOST:
                    lost.append(job)
                job.outcome = max(job.outcome, outcome)
                job.ranks_left.discard(rank)
                if not job.ranks_left:
                    del self._running[job_id]
                    if isinstance(job, Move):
                        del self._running_moves[job.promotes][job_id]
                    self._known.add(job_id)
                    ended.append(job)
        return ended, lost

    def take_known(self) -> tuple[int, ...]:
        """Return the jobs that ranks have told of and that are not in the table any more."""
        known, self._known = tuple(self._known), set()
        return known

    def release(self, job: Job) -> None:
        """Let go of what a job held that every rank has ended.

        Those slots of a store become readable that went well everywhere.
        """
        if job.request is not None:
            self.running_loads -= 1
            self.queue.remove(len(job.slots), time.monotonic())
            self._manager.complete_load(job.slots)
            return
        self.running_stores -= 1
        if job.pins:
            self._unpin(job)
        else:
            self.stores_given_up -= 1
        went_well = job.outcome is Outcome.OK
        if went_well and job.failed_rows:
            failed = job.failed
            self._manager.complete_store(job.slots[failed], ok=False)
            self._manager.complete_store(job.slots[~failed])
        else:
            self._manager.complete_store(job.slots, ok=went_well)

    def distrust_stores(self, ended: Iterable[Job] = ()) -> None:
        """Let nothing that is pinned by now become readable: some of it was computed wrongly.

        Nor what has `ended`, and was not released.
        """
        for job in (*self._pinning(), *ended):
            if job.is_store:
                job.outcome = Outcome.FAILED

    def give_up_stores(self, sent_before: float = math.inf) -> int:
        """Unpin stores that still run and were sent before `step_time` was that.

        What they copy from now on may be garbage, so it is dropped. Their slots stay taken until
        the ranks report the end of the copies. Returns how many stores were given up.
        """
        running = self._running.values()
        late = [job for job in running if job.pins and job.sent_after < sent_before]
        for job in late:
            job.outcome = Outcome.FAILED
            self._unpin(job)
            job.given_up = True
        self.stores_given_up += len(late)
        return len(late)

    def _unpin(self, store: Job) -> None:
        # The pool puts the last of these at the most recent end: a prefix' head should leave last.
        pool_blocks = self._pool.blocks
        self._pool.free_blocks([pool_blocks[block] for block in reversed(store.blocks)])
        self.pinned_blocks -= len(store.blocks)

    # -- what there is -------------------------------------------------------------------------

    def _pinning(self) -> Iterator[Job]:
        """Yield the stores that pin blocks, be they planned or running."""
        if self._store.blocks:
            yield self._store
        yield from (job for job in self._running.values() if job.pins)

    @property
    def oldest_sent(self) -> float | None:
        """When the oldest load or store that some rank has not ended was sent.

        On the monotonic clock.
        """
        copies = (job for job in self._running.values() if not isinstance(job, Move))
        return next((job.sent for job in copies), None)

    @property
    def oldest_moves(self) -> list[Move]:
        """Of each direction the oldest move that some rank has not ended, if there is one."""
        return [next(iter(moves.values())) for moves in self._running_moves.values() if moves]

    @property
    def oldest_move_sent(self) -> float | None:
        """When the oldest move that some rank has not ended was sent, on the monotonic clock."""
        return min((move.sent for move in self.oldest_moves), default=None)

    @property
    def any_running(self) -> bool:
        """Whether some rank has not ended a job that was sent."""
        return bool(self._running)

    @property
    def awaits_synchronous(self) -> bool:
        """Whether some rank has not reported a synchronous load, as only a step can."""
        return any(job.synchronous for job in self._running.values())

    @property
    def holds_idle_blocks(self) -> bool:
        """Whether a pin alone keeps some block from being free."""
        blocks = self._pool.blocks
        return any(blocks[block].ref_cnt == 1 for block in self.pinned())

    def pinned(self) -> Iterator[int]:
        """Yield every block that is pinned, as often as it is."""
        for job in self._pinning():
            yield from job.blocks

    def loading_requests(self) -> set[str]:
        """Return the requests, also ended ones, of asynchronous loads that have not ended."""
        return {
            job.request.request_id
            for job in self._running.values()
            if job.request is not None and not job.synchronous
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a pin is no reference on a block, or a count is wrong."""
        pins = Counter(self.pinned())
        assert self.pinned_blocks == pins.total()
        for block, count in pins.items():
            assert self._pool.blocks[block].ref_cnt >= count
        stores = [job for job in self._running.values() if job.is_store]
        loads = [job for job in self._running.values() if job.request is not None]
        moves = {i: job for i, job in self._running.items() if isinstance(job, Move)}
        assert moves == self._running_moves[True] | self._running_moves[False]
        assert self.running_stores == len(stores)
        assert self.running_loads == len(loads) + len(self._loads)
        assert self.stores_given_up == sum(job.given_up for job in stores)


def _pairs(blocks: list[int], slots: Slots | int) -> Pairs:
    pairs = np.empty((len(blocks), 2), np.int32)
    pairs[:, 0] = blocks
    pairs[:, 1] = slots
    return pairs
