"""Stores on their way: the GPU blocks that they pin, and the reports that end them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, takewhile

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.slots import Slots
from kv_offload.engine import BlockPool
from kv_offload.messages import JobResult, StoreJob


@dataclass(slots=True)
class _Store:
    slots: Slots
    blocks: list[int]
    ranks_left: set[int]
    sent: float
    """On the monotonic clock, in seconds."""
    ok: bool = True


class StoreJobs:
    """Pins blocks in the engine's block pool until every rank has them.

    The pin is a reference: nobody can reallocate, zero or overwrite the block while a copy may read
    it.
    """

    def __init__(self, manager: CacheManager, pool: BlockPool, num_ranks: int) -> None:
        self._manager = manager
        self._pool = pool
        self._ranks = frozenset(range(num_ranks))
        self._next_job_id = 0
        # Pinned and not sent yet, in the same order.
        self._planned_slots: list[Slots] = []
        self._planned_blocks: list[int] = []
        self._trusted = True  # of what is planned
        self._running: dict[int, _Store] = {}
        self._abandoned: dict[int, _Store] = {}
        self.pinned_blocks = 0

    @property
    def running(self) -> int:
        """Stores sent to the ranks and not completed by all of them."""
        return len(self._running)

    @property
    def oldest_sent(self) -> float | None:
        """When the oldest store that some rank has not ended was sent, on the monotonic clock."""
        # What was given up is older than all that runs.
        stores = chain(self._abandoned.values(), self._running.values())
        return next((store.sent for store in stores), None)

    @property
    def pending(self) -> bool:
        """Whether any block is pinned, be its store planned or running."""
        return bool(self._planned_slots or self._running)

    @property
    def holds_idle_blocks(self) -> bool:
        """Whether a pin alone keeps some block from being free."""
        blocks = self._pool.blocks
        return any(blocks[block].ref_cnt == 1 for block in self.pinned())

    def pinned(self) -> Iterator[int]:
        """Return every block that is pinned, as often as it is."""
        yield from self._planned_blocks
        for store in self._running.values():
            yield from store.blocks

    def pin(self, slots: Slots, blocks: list[int]) -> None:
        """Pin the block of each slot for the next job."""
        self._planned_slots.append(slots)
        self._planned_blocks += blocks
        pool_blocks = self._pool.blocks
        self._pool.touch([pool_blocks[block] for block in blocks])
        self.pinned_blocks += len(blocks)

    def take_planned(self) -> tuple[StoreJob, ...]:
        """Return what was pinned since the last call as one job."""
        if not self._planned_slots:
            return ()
        parts, blocks = self._planned_slots, self._planned_blocks
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        pairs = np.empty((len(blocks), 2), np.int32)
        pairs[:, 0] = blocks
        pairs[:, 1] = slots
        job = StoreJob(self._next_job_id, pairs)
        self._next_job_id += 1
        ranks_left, sent = set(self._ranks), time.monotonic()
        self._running[job.job_id] = _Store(slots, blocks, ranks_left, sent, self._trusted)
        self._trusted = True
        self._planned_slots = []
        self._planned_blocks = []
        return (job,)

    def complete(self, results: Mapping[int, JobResult]) -> int:
        """Take the ranks' reports; what all ranks have ended becomes readable and is unpinned.

        Returns the number of slots that did not become readable because a rank failed, or because
        the store was given up or is not trusted.
        """
        failed_slots = 0
        for job_id, result in results.items():
            store = self._running.get(job_id) or self._abandoned.get(job_id)
            if store is None:
                continue  # a drain has delivered it already
            store.ranks_left -= result.ranks
            store.ok = store.ok and result.ok
            if store.ranks_left:
                continue
            if self._running.pop(job_id, None) is not None:
                self._unpin(store)
            else:
                del self._abandoned[job_id]
            self._manager.complete_store(store.slots, ok=store.ok)
            if not store.ok:
                failed_slots += len(store.slots)
        return failed_slots

    def running_jobs(self) -> tuple[int, ...]:
        """Return the ids of the stores that were sent and have not ended everywhere."""
        return tuple(self._running)

    def distrust(self) -> None:
        """Let nothing that is pinned by now become readable: some of it was computed wrongly."""
        self._trusted = not self._planned_slots
        for store in self._running.values():
            store.ok = False

    @property
    def abandoned(self) -> int:
        """Stores that were given up and that some rank has not ended."""
        return len(self._abandoned)

    def abandon(self, sent_before: float = math.inf) -> int:
        """Unpin stores that still run and were sent before a time of the monotonic clock.

        What they copy from now on may be garbage, so it is dropped. Their slots stay taken until
        the ranks report the end of the copies. Returns how many stores were given up.
        """
        late = list(takewhile(lambda job: job[1].sent < sent_before, self._running.items()))
        for job_id, store in late:
            store.ok = False
            self._unpin(store)
            self._abandoned[job_id] = self._running.pop(job_id)
        return len(late)

    def _unpin(self, store: _Store) -> None:
        # The pool puts the last of these at the most recent end: a prefix' head should leave last.
        pool_blocks = self._pool.blocks
        self._pool.free_blocks([pool_blocks[block] for block in reversed(store.blocks)])
        self.pinned_blocks -= len(store.blocks)
        store.blocks = []
