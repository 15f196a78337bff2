"""Loads on their way: the slots that they hold against eviction, and the reports that end them.

A load runs until every rank has ended it, whatever becomes of the request that it serves.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.cache.slots import NO_SLOTS, MissingKeyError, Slots
from kv_offload.messages import LoadJob, Pairs
from kv_offload.scheduler.rates import LoadQueue
from kv_offload.scheduler.request import StoreCursor, TrackedRequest


class SynchronousLoad(NamedTuple):
    """A synchronous load that some rank has not reported: it fills `blocks`, those of `cursor`."""

    tracked: TrackedRequest
    cursor: StoreCursor
    slots: Slots
    blocks: NDArray[np.int32]
    ranks_left: set[int]
    sent: float
    """On the monotonic clock, in seconds."""


class LoadJobs:
    """Holds the slots of running loads against eviction. `queue` counts these slots."""

    def __init__(
        self, prefixes: PrefixMap, manager: CacheManager, null_block_id: int, num_ranks: int
    ) -> None:
        self._prefixes = prefixes
        self._manager = manager
        self._null_block_id = null_block_id
        self._num_ranks = num_ranks
        self.queue = LoadQueue()
        self._next_job_id = 0
        self._planned: list[LoadJob] = []
        self._synchronous: dict[int, SynchronousLoad] = {}
        # When the load of each request with `held` was sent, on the monotonic clock, in seconds.
        self._asynchronous: dict[TrackedRequest, float] = {}

    @property
    def running(self) -> int:
        """Loads that some rank has not completed."""
        return self.running_asynchronous + len(self._synchronous)

    @property
    def running_asynchronous(self) -> int:
        """Asynchronous loads that some rank has not completed: those of requests with `held`."""
        return len(self._asynchronous)

    @property
    def oldest_sent(self) -> float | None:
        """When the oldest of the running loads was sent, on the monotonic clock, in seconds."""
        # Each dict has its loads in the order in which they were sent.
        synchronous = (load.sent for load in self._synchronous.values())
        oldest = (next(iter(self._asynchronous.values()), None), next(synchronous, None))
        return min((sent for sent in oldest if sent is not None), default=None)

    @property
    def awaits_report(self) -> bool:
        """Whether some rank has not reported a synchronous load, as only a step can."""
        return bool(self._synchronous)

    @property
    def plans_synchronous(self) -> bool:
        """Whether `take_planned` has a synchronous load to return."""
        return any(job.synchronous for job in self._planned)

    def add(
        self, tracked: TrackedRequest, start_tokens: int, end_tokens: int, *, synchronous: bool
    ) -> list[SlotKey]:
        """Queue the load that fills a request's blocks from `start_tokens` to `end_tokens`.

        Returns the keys that it brings. The engine may ask for less than it was offered: then a
        window group can lack blocks, and the load is marked incomplete, which fails it and has it
        recomputed.
        """
        assert tracked.cursor is not None, "a load for a request that has no blocks"
        keys: list[SlotKey] = []
        parts: list[NDArray[np.int64]] = []
        for group, group_blocks in zip(
            self._prefixes.groups, tracked.cursor.block_ids, strict=True
        ):
            first, last = start_tokens // group.block_tokens, end_tokens // group.block_tokens
            blocks = np.array(group_blocks[first:last], np.int64)
            wanted = np.flatnonzero(blocks != self._null_block_id)
            if len(wanted):
                # A window group has null blocks in front of the window, never behind.
                parts.append(blocks[wanted[0] :])
                keys += self._prefixes.slot_keys(
                    tracked.request.block_hashes, group, first + int(wanted[0]), last
                )
        try:
            slots = self._manager.prepare_load(keys)
        except MissingKeyError:
            slots = NO_SLOTS
        incomplete = len(slots) < len(keys)
        places = np.zeros(len(keys), np.int32) if incomplete else slots
        blocks = np.concatenate(parts)
        pairs = np.stack((blocks, places), axis=1)[blocks != self._null_block_id].astype(np.int32)
        self._queue(
            tracked,
            pairs,
            slots,
            incomplete=incomplete,
            synchronous=synchronous,
            whole=end_tokens == tracked.request.num_tokens,
        )
        return keys

    def add_failure(self, tracked: TrackedRequest, start_tokens: int, *, synchronous: bool) -> None:
        """Queue a load that brings nothing, for a request whose load could not be planned.

        The engine counts on a load into the request's blocks from `start_tokens` on. So the ranks
        report that it failed, for every one of these blocks, and leave none with old content.
        """
        if any(job.request_id == tracked.request_id for job in self._planned):
            return
        assert tracked.cursor is not None, "a load for a request that has no blocks"
        blocks = [
            block
            for group, ids in zip(self._prefixes.groups, tracked.cursor.block_ids, strict=True)
            for block in ids[start_tokens // group.block_tokens :]
            if block != self._null_block_id
        ]
        pairs = np.zeros((len(blocks), 2), np.int32)
        pairs[:, 0] = blocks
        self._queue(tracked, pairs, NO_SLOTS, incomplete=True, synchronous=synchronous, whole=False)

    def _queue(
        self,
        tracked: TrackedRequest,
        pairs: Pairs,
        slots: Slots,
        *,
        incomplete: bool,
        synchronous: bool,
        whole: bool,
    ) -> None:
        job_id, self._next_job_id = self._next_job_id, self._next_job_id + 1
        self._planned.append(
            LoadJob(job_id, tracked.request_id, pairs, incomplete, synchronous, whole)
        )
        # The step that is being planned sends it: `take_planned` follows in a moment.
        sent = time.monotonic()
        self.queue.add(len(slots), sent)
        if synchronous:
            assert tracked.cursor is not None
            ranks = set(range(self._num_ranks))
            self._synchronous[job_id] = SynchronousLoad(
                tracked, tracked.cursor, slots, pairs[:, 0], ranks, sent
            )
        else:
            tracked.held = slots
            self._asynchronous[tracked] = sent

    def take_planned(self) -> tuple[LoadJob, ...]:
        """Return the loads added since the last call, for this step's metadata."""
        planned = tuple(self._planned)
        self._planned.clear()
        return planned

    def complete(self, tracked: TrackedRequest) -> None:
        """Let go of the slots of an asynchronous load that every rank has ended."""
        slots, tracked.held = tracked.held, None
        if slots is not None:
            del self._asynchronous[tracked]
            self._let_go(slots)

    def complete_synchronous(self, ended: Mapping[int, Set[int]]) -> None:
        """Take the ranks on which synchronous loads ended, failed ones included."""
        for job_id, ranks in ended.items():
            load = self._synchronous.get(job_id)
            if load is None:
                continue  # read already, before an error
            load.ranks_left.difference_update(ranks)
            if not load.ranks_left:
                del self._synchronous[job_id]
                self._let_go(load.slots)

    def running_synchronous(self, job_ids: Iterable[int]) -> list[SynchronousLoad]:
        """Return these synchronous loads, without those that every rank has reported."""
        return [load for job in job_ids if (load := self._synchronous.get(job)) is not None]

    def _let_go(self, slots: Slots) -> None:
        self._manager.complete_load(slots)
        self.queue.remove(len(slots), time.monotonic())
