"""Plans loads: which prefix a waiting request gets from host memory, and who waits for whom."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.manager import NO_SLOTS, CacheManager, MissingKeyError
from kv_offload.cache.policies import Slots
from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.messages import LoadJob
from kv_offload.scheduler.rates import LoadQueue

MAX_WAIT_SECONDS = 5.0
"""How long a request waits for another's load of its prefix before it is served on its own.

A load takes milliseconds; the bound only keeps one stuck load from holding up its followers."""


OFFER_SECONDS = 0.5
"""How long a request that the engine cannot admit yet is answered as before, if that still holds.

It is asked in every step, and to look at all blocks of a prompt of 32,768 tokens takes 0.3 ms. So
what is stored of its prefix meanwhile is noticed this much later, at most."""


class _Waiting(NamedTuple):
    """For whose load a request waits, and since when, on the monotonic clock in seconds."""

    owner: str
    since: float


@dataclass(slots=True)
class _Offer:
    """What a request was told: `keys` bring its tokens from `start` to `end`; it has `num` in all.

    `forgotten` and `arrivals` are the counts at which the keys were last seen to be readable and
    not to be on their way for another request; `since` is on the monotonic clock, in seconds.
    """

    start_tokens: int
    num_tokens: int
    end_tokens: int
    keys: list[SlotKey]
    forgotten: int
    arrivals: int
    since: float
    slots: Slots | None = None
    """Those of `keys`, once host memory has forgotten others."""


class _SynchronousLoad(NamedTuple):
    request_id: str
    slots: Slots
    ranks_left: set[int]
    blocks: Sequence[int] | NDArray[np.int32]


class LoadPlanner:
    """Matches prefixes and holds the slots of running loads against eviction.

    Two lifetimes are kept apart. A load runs until every rank has copied it: its slots are held
    that long, also when the request is gone. Its keys count as *arriving* until the request that
    asked for them is scheduled with them (only then does the engine's own prefix cache know the
    blocks), is asked again after a failure, or ends: until then other requests for them wait.
    `queue` counts the slots of running loads.
    """

    def __init__(self, prefixes: PrefixMap, manager: CacheManager, num_ranks: int = 1) -> None:
        self._prefixes = prefixes
        self._manager = manager
        self._num_ranks = num_ranks
        self.queue = LoadQueue()
        self._next_job_id = 0
        self._planned: list[LoadJob] = []
        self._running: dict[str, Slots] = {}
        self._synchronous: dict[int, _SynchronousLoad] = {}
        self._arriving: dict[str, list[SlotKey]] = {}
        # Of every arriving key, who loads it; not of those whom nobody has been compared with yet.
        self._owner_of: dict[SlotKey, str] = {}
        self._not_indexed: set[str] = set()
        self._arrivals = 0
        self._offers: dict[str, _Offer] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._matched_from: dict[str, int] = {}

    @property
    def running(self) -> int:
        """Loads that some rank has not completed."""
        return len(self._running) + len(self._synchronous)

    @property
    def awaits_report(self) -> bool:
        """Whether some rank has not reported a synchronous load, as only a step can."""
        return bool(self._synchronous)

    def running_requests(self) -> Set[str]:
        """Return the requests whose loads some rank has not completed, also those that ended."""
        return self._running.keys()

    def is_loading(self, request_id: str) -> bool:
        """Tell whether this request's load has been planned and not completed by every rank."""
        return request_id in self._running

    def match(
        self, request_id: str, hashes: Sequence[bytes], start_tokens: int, num_tokens: int
    ) -> int | None:
        """Return how many tokens beyond `start_tokens` can be loaded; None to be asked again later.

        That may be all that are left of the request: the engine has to compute the last one again
        then, to have something to sample from. Where nothing but the last slot is missing it is
        computed. Asked again for the same request it answers the same, unless host memory changed;
        then without another look at every block, for `OFFER_SECONDS`.
        """
        self.settle(request_id)
        self._matched_from[request_id] = start_tokens
        if start_tokens % self._prefixes.alignment_tokens:
            # The local hit ends inside a block, which is then the target of a copy-on-write:
            # loading into it as well would race. The engine computes the rest of this prompt.
            return 0
        waiting = self._waiting.get(request_id)
        patient = waiting is None or time.monotonic() - waiting.since <= MAX_WAIT_SECONDS
        if waiting is not None and patient and waiting.owner in self._arriving:
            return None  # asked in every step: not worth another look at every block
        offer = self._offers.get(request_id)
        if offer is not None and self._still_holds(offer, start_tokens, num_tokens):
            return offer.end_tokens - start_tokens
        self._offers.pop(request_id, None)
        prefixes = self._prefixes
        limit = num_tokens if prefixes.serves_whole_requests else num_tokens - 1
        end = prefixes.longest_hit(hashes, self._manager.readable, start_tokens, limit)
        if end == num_tokens and end - start_tokens <= prefixes.alignment_tokens:
            end = start_tokens
        if end > start_tokens:
            now = time.monotonic()
            keys = prefixes.needed_keys(hashes, start_tokens, end)
            owner = self._owner(keys) if self._arriving and patient else None
            if owner is not None:
                self._waiting[request_id] = _Waiting(
                    owner, now if waiting is None else waiting.since
                )
                return None
            self._offers[request_id] = _Offer(
                start_tokens, num_tokens, end, keys, self._manager.forgotten, self._arrivals, now
            )
        self._waiting.pop(request_id, None)
        return end - start_tokens

    def _still_holds(self, offer: _Offer, start_tokens: int, num_tokens: int) -> bool:
        """Whether a request may be told the same again; what did not change is not looked at."""
        if (start_tokens, num_tokens) != (offer.start_tokens, offer.num_tokens):
            return False
        if time.monotonic() - offer.since > OFFER_SECONDS:
            return False
        if self._manager.forgotten != offer.forgotten and not self._still_readable(offer):
            return False
        if self._arrivals != offer.arrivals:
            offer.arrivals = self._arrivals
            return self._owner(offer.keys) is None
        return True

    def _still_readable(self, offer: _Offer) -> bool:
        """Whether the keys are still readable although some keys have been forgotten."""
        manager = self._manager
        if any(group.sees_next_token for group in self._prefixes.groups):
            return False  # the proof behind the end may be gone
        if offer.slots is None:
            if not manager.readable(offer.keys).all():
                return False
            offer.slots = manager.find(offer.keys)
        elif not manager.keep_their_keys(offer.slots, offer.forgotten):
            return False
        offer.forgotten = manager.forgotten
        return True

    def _owner(self, needed: Sequence[SlotKey]) -> str | None:
        """Return the request whose load brings the first of these keys that arrives; or None."""
        owner_of = self._owner_of
        for request_id in self._not_indexed:
            owner_of.update(dict.fromkeys(self._arriving[request_id], request_id))
        self._not_indexed.clear()
        if owner_of.keys().isdisjoint(needed):
            return None
        return next(owner_of[key] for key in needed if key in owner_of)

    def take_matched_from(self, request_id: str) -> int | None:
        """Return the local hit that `match` was last asked with; None if it was not asked since."""
        self._offers.pop(request_id, None)
        return self._matched_from.pop(request_id, None)

    def plan(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        start_tokens: int,
        end_tokens: int,
        block_ids: Sequence[Sequence[int]],
        null_block_id: int,
        *,
        synchronous: bool = False,
        whole: bool = False,
    ) -> None:
        """Queue the load that fills a request's blocks from `start_tokens` to `end_tokens`.

        `block_ids` has one list per group, from the request's first block on. The engine may ask
        for less than `match` offered: then a window group can lack blocks, and the load is marked
        incomplete, which fails it and has it recomputed.
        """
        keys: list[SlotKey] = []
        parts: list[NDArray[np.int64]] = []
        for group, group_blocks in zip(self._prefixes.groups, block_ids, strict=True):
            first, last = start_tokens // group.block_tokens, end_tokens // group.block_tokens
            blocks = np.array(group_blocks[first:last], np.int64)
            wanted = np.flatnonzero(blocks != null_block_id)
            if len(wanted):
                # A window group has null blocks in front of the window, never behind.
                blocks = blocks[wanted[0] :]
                keys += self._prefixes.slot_keys(hashes, group, last - len(blocks), last)
                parts.append(blocks)
        try:
            slots = self._manager.prepare_load(keys)
        except MissingKeyError:
            slots = NO_SLOTS
        incomplete = len(slots) < len(keys)
        places = np.zeros(len(keys), np.int32) if incomplete else slots
        filled = np.concatenate(parts)
        pairs = np.stack((filled, places), axis=1)[filled != null_block_id].astype(np.int32)
        job = LoadJob(
            self._next_job_id,
            request_id,
            pairs,
            incomplete=incomplete,
            synchronous=synchronous,
            whole=whole,
        )
        self._queue(job, slots, job.pairs[:, 0])
        if not synchronous:
            self._arriving[request_id] = keys
            self._not_indexed.add(request_id)
            self._arrivals += 1

    def plan_failure(self, request_id: str, block_ids: Sequence[int], *, synchronous: bool) -> None:
        """Queue a load that brings nothing, for a request whose load could not be planned.

        The engine counts on a load into `block_ids`, so the ranks report one that failed.
        """
        if not any(job.request_id == request_id for job in self._planned):
            nothing = np.empty((0, 2), np.int32)
            job = LoadJob(
                self._next_job_id, request_id, nothing, incomplete=True, synchronous=synchronous
            )
            self._queue(job, NO_SLOTS, block_ids)

    def _queue(self, job: LoadJob, slots: Slots, blocks: Sequence[int] | NDArray[np.int32]) -> None:
        self._next_job_id += 1
        self._planned.append(job)
        self.queue.add(len(slots), time.monotonic())
        if job.synchronous:
            # The engine's own prefix cache knows its blocks from this step on: nobody waits.
            ranks = set(range(self._num_ranks))
            self._synchronous[job.job_id] = _SynchronousLoad(job.request_id, slots, ranks, blocks)
        else:
            self._running[job.request_id] = slots

    @property
    def plans_synchronous(self) -> bool:
        """Whether `take_planned` has a synchronous load to return."""
        return any(job.synchronous for job in self._planned)

    def take_planned(self) -> tuple[LoadJob, ...]:
        """Return the loads planned since the last call, for this step's metadata."""
        planned = tuple(self._planned)
        self._planned.clear()
        return planned

    def complete(self, request_ids: Iterable[str]) -> int:
        """Let go of the slots of loads that every rank has ended; return how many there were."""
        ended = 0
        for request_id in request_ids:
            slots = self._running.pop(request_id, None)
            if slots is not None:
                self._let_go(slots)
                ended += 1
        return ended

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

    def filled_by(self, job_ids: Iterable[int]) -> tuple[set[str], set[int]]:
        """Return whose synchronous loads these are, and the GPU blocks that they fill.

        Of those only that some rank has not reported.
        """
        loads = [load for job in job_ids if (load := self._synchronous.get(job)) is not None]
        blocks = {int(block) for load in loads for block in load.blocks}
        return {load.request_id for load in loads}, blocks

    def _let_go(self, slots: Slots) -> None:
        self._manager.complete_load(slots)
        self.queue.remove(len(slots), time.monotonic())

    def settle(self, request_id: str) -> None:
        """Stop others from waiting for this request's load."""
        keys, owner_of = self._arriving.pop(request_id, ()), self._owner_of
        if request_id in self._not_indexed:
            self._not_indexed.discard(request_id)
            return
        for key in keys:
            # Where the wait for a load was given up, the key may arrive for another request too.
            if owner_of.get(key) == request_id:
                del owner_of[key]

    def forget(self, request_id: str) -> None:
        """Drop a request that ended. Its load, if one runs, is still completed by the ranks."""
        self.settle(request_id)
        self._waiting.pop(request_id, None)
        self._offers.pop(request_id, None)
        self._matched_from.pop(request_id, None)
