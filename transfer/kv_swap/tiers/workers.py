"""The threads of a tier: jobs arrive in one queue, completions leave through another.

Each direction has separate threads, so a promotion never waits for demotions. The caller's thread
appends to a queue and takes from a deque; it never waits for a lock that is held while bytes are
moved. A thread that takes a job cuts it into chunks, which all threads of the direction share.

Threads hold the movers, with tier and arena, but not the engine. The last thread releases both. So
while a call hangs, its memory stays mapped, its descriptor is not reused for another file, and the
file stays locked: no other process writes where the call may still write.

A call to a store that is gone takes seconds to fail. Jobs queued before it fails then fail, too,
without another attempt; later jobs are tried.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from kv_swap.errors import TierError

if TYPE_CHECKING:
    from kv_swap.tiers.engine import TierDirection, TierJob

Item = TypeVar("Item")
Result = TypeVar("Result")


class Row(NamedTuple):
    """One row of a job, with its number in the job."""

    number: int
    arena_slot: int
    tier_slot: int
    name: bytes


@dataclass(slots=True)
class MoveResult:
    """The result of some rows: those that failed, the number of mismatches, and the first error.

    `unmoved` rows were already in the tier, so no bytes were moved. `rejection` is an error of
    single rows, which becomes the job's error only if all its rows failed. `gone` means that the
    tier as a whole did not answer: jobs queued earlier then fail in the same way.
    """

    failed: list[int] = field(default_factory=list)
    mismatches: int = 0
    unmoved: int = 0
    error: TierError | None = None
    rejection: TierError | None = None
    gone: bool = False

    def fail(self, row: Row, error: TierError) -> None:
        """Record that a row could not be moved."""
        self.failed.append(row.number)
        self.error = self.error or error

    def add(self, other: MoveResult) -> None:
        """Add the result of other rows of the same job."""
        self.failed += other.failed
        self.mismatches += other.mismatches
        self.unmoved += other.unmoved
        self.error = self.error or other.error
        self.rejection = self.rejection or other.rejection


class Mover(ABC):
    """Moves rows on one thread. Holds the tier and the arena."""

    @abstractmethod
    def move(self, direction: TierDirection, rows: Sequence[Row]) -> MoveResult:
        """Move at most a chunk of rows, in ascending order of tier slots."""


@dataclass(slots=True)
class Task:
    """A running job. The lock of `WorkerState.ended` guards the fields after `submitted`."""

    job: TierJob
    submitted: float = field(default_factory=time.perf_counter)
    chunks_left: int = 0
    started: float = 0.0
    seconds: float = 0.0
    outcome: MoveResult = field(default_factory=MoveResult)


@dataclass(slots=True)
class TierLane:
    """The jobs of one direction. `turn` guards all but `queue`; its holder can wait for a job."""

    num_threads: int
    chunk_slots: int
    # None ends the threads; a finaliser can queue it at any moment.
    queue: SimpleQueue[Task | None] = field(default_factory=SimpleQueue)
    turn: threading.Lock = field(default_factory=threading.Lock)
    task: Task | None = None
    chunks: deque[list[Row]] = field(default_factory=deque)

    def next(self) -> tuple[Task, list[Row]] | None:
        """Block until there is a chunk, and return it; None if the thread should end."""
        with self.turn:
            if not self.chunks:
                self.task = self.queue.get()
                if self.task is None:
                    self.queue.put(None)  # for the other threads
                    return None
                self.chunks.extend(self._cut(self.task.job))
                self.task.chunks_left = len(self.chunks)
                self.task.started = time.perf_counter()
            assert self.task is not None
            return self.task, self.chunks.popleft()

    def _cut(self, job: TierJob) -> list[list[Row]]:
        """Cut a job so that all threads get a share, in the order of the tier's slots."""
        order = np.argsort(job.pairs[:, 1], kind="stable")
        pairs = job.pairs[order].tolist()
        rows = [
            Row(number, arena_slot, tier_slot, job.names[number])
            for number, (arena_slot, tier_slot) in zip(order.tolist(), pairs, strict=True)
        ]
        share = min(self.chunk_slots, -(-len(rows) // self.num_threads))
        return [rows[first : first + share] for first in range(0, len(rows), share)]


@dataclass(slots=True)
class WorkerState:
    """The threads' state. `ended` guards `running` and `gone`, and is notified when a job ends.

    `gone` is the last time at which the tier did not answer, and the error.
    """

    lanes: dict[TierDirection, TierLane]
    release: Callable[[], None]
    ended: threading.Condition = field(default_factory=threading.Condition)
    done: deque[Task] = field(default_factory=deque)
    running: int = 0
    stopping: bool = False
    gone: tuple[float, TierError] | None = None


def start(
    movers: Mapping[TierDirection, Sequence[Mover]],
    chunk_slots: int,
    release: Callable[[], None],
) -> tuple[WorkerState, list[threading.Thread]]:
    """Start a thread for each mover. The last thread to end calls `release`."""
    lanes = {way: TierLane(len(own), chunk_slots) for way, own in movers.items()}
    state = WorkerState(lanes, release)
    threads = [
        threading.Thread(
            target=_work, args=(state, lanes[way], mover), name=f"kv-swap-{way.value}", daemon=True
        )
        for way, own in movers.items()
        for mover in own
    ]
    state.running = len(threads)
    for thread in threads:
        thread.start()
    return state, threads


def stop(state: WorkerState) -> None:
    """Make the threads end, and drop jobs that have not begun.

    Takes no lock, because it can run as a finaliser anywhere, even in a forked child, which has no
    threads.
    """
    state.stopping = True
    for lane in state.lanes.values():
        lane.queue.put(None)


def _work(state: WorkerState, lane: TierLane, mover: Mover) -> None:
    while (chunk := lane.next()) is not None:
        task, rows = chunk
        _note(state, task, _run(state, mover, task, rows))
    with state.ended:
        state.running -= 1
        is_last = state.running == 0
    if is_last:
        state.release()


def _run(state: WorkerState, mover: Mover, task: Task, rows: list[Row]) -> MoveResult:
    # The errors are not raised: a traceback would hold the arena as long as the job's user holds
    # the error.
    if state.stopping:
        error = TierError("the tier was closed before this was moved")
    elif state.gone is not None and task.submitted < state.gone[0]:
        error = state.gone[1]
    else:
        direction = task.job.direction
        try:
            return mover.move(direction, rows)
        except Exception as cause:  # noqa: BLE001 - a failed job must not end the thread
            error = TierError(f"a {direction.value} failed with {cause!r}")
    return MoveResult([row.number for row in rows], error=error)


def _note(state: WorkerState, task: Task, outcome: MoveResult) -> None:
    """Add a chunk's result to its job, which ends after its last chunk."""
    with state.ended:
        if outcome.gone and outcome.error is not None:
            state.gone = time.perf_counter(), outcome.error
        task.outcome.add(outcome)
        task.chunks_left -= 1
        if task.chunks_left:
            return
        task.seconds = time.perf_counter() - task.started
        state.done.append(task)
        state.ended.notify_all()


def in_parallel(
    call: Callable[[Item], Result], items: Sequence[Item], num_threads: int
) -> list[Result]:
    """Call once per item, on up to `num_threads` new threads; return the results in order.

    Raises the error of one of the calls after all of them have ended.
    """
    results: dict[int, Result] = {}
    rows = iter(range(len(items)))
    turn = threading.Lock()
    errors: list[Exception] = []

    def work() -> None:
        while not errors:
            with turn:
                row = next(rows, None)
            if row is None:
                return
            try:
                results[row] = call(items[row])
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)

    num_threads = min(num_threads, len(items))
    if num_threads <= 1:
        work()
    else:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return [results[row] for row in range(len(items))]
