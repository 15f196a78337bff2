"""Plans stores: which blocks of a step to keep, and which GPU blocks are pinned for it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np

from kv_offload.cache_manager import CacheManager
from kv_offload.metadata import JobResult, StoreJob
from kv_offload.policies import Key, Slots
from kv_offload.prefix import CacheGroup, PrefixMap, SlotKey

MAX_SLOTS_PER_STEP = 1024
"""Slots examined in one step over all requests; the rest follows in the next steps.

It bounds the planner's time on the scheduler's thread whatever the length of a prompt."""

TRACKED_PREFIXES = 1 << 20
"""Keys whose uses are counted for `store_after_uses`; the least recently used are forgotten."""

SkipReason = Literal["moved_on", "used_too_little", "no_budget", "pool_busy", "copy_failed"]
"""Why a full slot was not stored.

moved_on: the engine gave a block to somebody else before its store was planned.
used_too_little: `store_after_uses` is not reached.
no_budget: the request ended before pins or planning time were left for it.
pool_busy: every slot of the pool is being read or written.
copy_failed: a rank reported an error.
"""
SKIP_REASONS: tuple[SkipReason, ...] = get_args(SkipReason)


@dataclass(slots=True)
class StoreCursor:
    """How far the stores of one request have been planned: one slot index per group.

    Below `next_end_tokens` of computed tokens there is nothing new to plan.
    """

    next_slot: list[int]
    next_end_tokens: int = 0


@dataclass(slots=True)
class _Store:
    slots: Slots
    blocks: list[int]
    ranks_left: set[int]
    ok: bool = True


class UseCounter:
    """Counts how often a key was computed or reused, for a bounded number of keys."""

    def __init__(self, capacity: int = TRACKED_PREFIXES) -> None:
        self._capacity = capacity
        self._uses: OrderedDict[SlotKey, int] = OrderedDict()

    def count(self, key: SlotKey) -> int:
        """Add one use and return the new number of uses."""
        uses = self._uses.pop(key, 0) + 1
        self._uses[key] = uses
        if len(self._uses) > self._capacity:
            self._uses.popitem(last=False)
        return uses


class StorePlanner:
    """Chooses blocks to store and pins them in the engine's block pool until every rank has them.

    A block is chosen only while the pool knows it under exactly the key it is expected to have, in
    a step that schedules its request and at whose end its tokens are computed: hashes are set
    before the KV exists, and remembered ids go stale when a window moves on or a request is
    preempted. The pin is a reference: nobody can reallocate, zero or overwrite the block while a
    copy may read it. The block's own request does not write it either, since only full blocks of
    known tokens are chosen.
    """

    def __init__(
        self,
        prefixes: PrefixMap,
        manager: CacheManager,
        num_ranks: int,
        max_pinned_share: float,
        store_after_uses: int,
    ) -> None:
        self._prefixes = prefixes
        self._manager = manager
        self._num_ranks = num_ranks
        self._max_pinned_share = max_pinned_share
        self._store_after_uses = store_after_uses
        self._uses = UseCounter()
        self._pool: Any = None
        self._next_job_id = 0
        # Chosen and not pinned yet: new keys with their blocks, and slots of the same prefixes.
        self._new: dict[Key, Sequence[int]] = {}
        self._along: list[int] = []
        # Pinned and not sent yet, in the same order.
        self._planned_slots: list[Slots] = []
        self._planned_blocks: list[int] = []
        self._running: dict[int, _Store] = {}
        self._abandoned: dict[int, _Store] = {}
        self._slots_per_step = MAX_SLOTS_PER_STEP
        self._examined = 0
        self.pinned_blocks = 0
        self._skipped: Counter[SkipReason] = Counter()

    def bind_pool(self, pool: Any) -> None:
        """Take the engine's block pool. Called once, before any request."""
        self._pool = pool

    @property
    def running(self) -> int:
        """Stores sent to the ranks and not completed by all of them."""
        return len(self._running)

    @property
    def pending(self) -> bool:
        """Whether any block is pinned, be its store planned or running."""
        return bool(self._planned_slots or self._running)

    @property
    def holds_idle_blocks(self) -> bool:
        """Whether a pin alone keeps some block from being free."""
        blocks = self._pool.blocks
        return any(blocks[block].ref_cnt == 1 for block in self._pinned())

    def _pinned(self) -> Iterator[int]:
        yield from self._planned_blocks
        for store in self._running.values():
            yield from store.blocks

    def begin_step(self, factor: float = 1.0) -> None:
        """Give the planner a new budget of slots to examine, of which it may use `factor`."""
        self._slots_per_step = int(MAX_SLOTS_PER_STEP * factor)
        self._examined = 0

    def new_cursor(self) -> StoreCursor:
        """Return the cursor of a request of which nothing has been planned."""
        return StoreCursor([0] * len(self._prefixes.groups))

    def plan(
        self,
        cursor: StoreCursor,
        hashes: Sequence[bytes],
        block_ids: Sequence[Sequence[int]],
        end_tokens: int,
        soon_free_blocks: int = 0,
    ) -> None:
        """Choose among one request's blocks whose tokens end at or below `end_tokens`.

        `soon_free_blocks` counts blocks that the engine frees right after this call. The blocks are
        pinned by `pin_chosen`, which must be called before anybody can free them.
        """
        if self._examined >= self._slots_per_step:
            return  # many requests come here while stores are throttled
        end_tokens = self._prefixes.named_tokens(end_tokens)
        # Once for all groups: what one of them chose is neither free nor about to be.
        pins_left = None
        slot_tokens = self._prefixes.slot_tokens
        for position, group in enumerate(self._prefixes.groups):
            first = cursor.next_slot[position]
            last = min(
                end_tokens // slot_tokens[position],
                len(block_ids[position]) // self._prefixes.blocks_per_slot,
                first + self._slots_per_step - self._examined,
            )
            if first < last:
                if pins_left is None:
                    pins_left = self._pins_left(soon_free_blocks)
                chosen_before = len(self._new)
                passed = self._choose(group, hashes, block_ids[position], first, last, pins_left)
                pins_left -= (len(self._new) - chosen_before) * self._prefixes.blocks_per_slot
                self._examined += passed
                cursor.next_slot[position] = first + passed
        cursor.next_end_tokens = min(
            (next_slot + 1) * tokens
            for next_slot, tokens in zip(cursor.next_slot, slot_tokens, strict=True)
        )

    def _pins_left(self, soon_free_blocks: int) -> int:
        """Return how many more blocks may be chosen.

        The share is of what would be free if no store held anything and the requests whose blocks
        are pinned had ended.
        """
        free = self._pool.get_num_free_blocks() + soon_free_blocks + self.pinned_blocks
        chosen = len(self._new) * self._prefixes.blocks_per_slot
        return int(self._max_pinned_share * free) - self.pinned_blocks - chosen

    def _choose(
        self,
        group: CacheGroup,
        hashes: Sequence[bytes],
        group_blocks: Sequence[int],
        first: int,
        last: int,
        pins_left: int,
    ) -> int:
        """Choose slots from `first` to `last` (exclusive); return how many were passed.

        Those are chosen that are new, valid now and within the budgets.
        """
        keys = self._prefixes.slot_keys(hashes, group, first, last)
        # Lists, not arrays: mostly a decode has filled one block, and nothing is known of it.
        slots = self._manager.slot_numbers(keys)
        unknown = [index for index, slot in enumerate(slots) if slot < 0]
        passed = len(keys)
        if unknown:
            per_slot, new = self._prefixes.blocks_per_slot, self._new
            start = (first + unknown[0]) * per_slot
            expected = self._prefixes.pool_keys(hashes, group, start, last * per_slot)
            blocks = group_blocks[start : start + len(expected)]
            pool_blocks = self._pool.blocks
            # Null blocks have no hash, so they are caught here too.
            found = [pool_blocks[block].block_hash for block in blocks]
            all_valid = found == expected
        for index in unknown:
            key = keys[index]
            if key in new:
                continue  # another request of this step has the same prefix
            at = (index - unknown[0]) * per_slot
            end = at + per_slot
            if not all_valid and found[at:end] != expected[at:end]:
                # Of states, only those at the ends of prefill chunks and those that a decode
                # passed were ever made: what is missing was not lost.
                self._skipped["moved_on"] += not group.holds_state
            elif per_slot > pins_left:
                passed = index
                break
            elif self._store_after_uses > 1 and self._uses.count(key) < self._store_after_uses:
                self._skipped["used_too_little"] += 1
            else:
                pins_left -= per_slot
                new[key] = blocks[at:end]
        self._along += [slot for slot in slots[:passed] if slot >= 0]
        return passed

    def pin_chosen(self) -> None:
        """Take slots for what was chosen and pin the blocks of those that got one.

        What is known of the same prefixes goes along: it is used again, and must not be evicted for
        its own tail.
        """
        if not self._new and not self._along:
            return
        plan = self._manager.prepare_store(list(self._new), np.array(self._along, np.int32))
        self._skipped["pool_busy"] += plan.no_room
        if plan.keys:
            blocks = list(chain.from_iterable([self._new[key] for key in plan.keys]))
            self._planned_slots.append(plan.slots)
            self._planned_blocks += blocks
            pool_blocks = self._pool.blocks
            self._pool.touch([pool_blocks[block] for block in blocks])
            self.pinned_blocks += len(blocks)
        self._new = {}
        self._along = []

    def count_leftovers(self, cursor: StoreCursor, end_tokens: int) -> None:
        """Count the slots of an ending request that no budget was left for."""
        end_tokens = self._prefixes.named_tokens(end_tokens)
        for slot_tokens, next_slot in zip(
            self._prefixes.slot_tokens, cursor.next_slot, strict=True
        ):
            self._skipped["no_budget"] += max(0, end_tokens // slot_tokens - next_slot)

    def take_planned(self) -> tuple[StoreJob, ...]:
        """Pin what was chosen, and return what was pinned since the last call as one job."""
        self.pin_chosen()
        if not self._planned_slots:
            return ()
        per_slot = self._prefixes.blocks_per_slot
        slots, blocks = np.concatenate(self._planned_slots), self._planned_blocks
        places = slots[:, None] * per_slot + np.arange(per_slot, dtype=np.int32)
        pairs = np.stack((np.array(blocks, np.int32), places.reshape(-1)), axis=1)
        job = StoreJob(self._next_job_id, pairs)
        self._next_job_id += 1
        ranks = set(range(self._num_ranks))
        self._running[job.job_id] = _Store(slots, blocks, ranks)
        self._planned_slots = []
        self._planned_blocks = []
        return (job,)

    def complete(self, results: Mapping[int, JobResult]) -> None:
        """Take the ranks' reports; what all ranks have ended becomes readable and is unpinned."""
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
                self._skipped["copy_failed"] += len(store.slots)

    def take_skipped(self) -> Counter[SkipReason]:
        """Return how many slots were not stored since the last call, by reason."""
        skipped, self._skipped = self._skipped, Counter()
        return skipped

    def running_jobs(self) -> tuple[int, ...]:
        """Return the ids of the stores that were sent and have not ended everywhere."""
        return tuple(self._running)

    def abandon(self) -> None:
        """Unpin what is still running: what it copies from now on may be garbage, so it is dropped.

        The slots stay taken until the ranks report the end of the copies.
        """
        for job_id, store in self._running.items():
            store.ok = False
            self._unpin(store)
            self._abandoned[job_id] = store
        self._running.clear()

    def _unpin(self, store: _Store) -> None:
        # The pool puts the last of these at the most recent end: a prefix' head should leave last.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(store.blocks)])
        self.pinned_blocks -= len(store.blocks)
        store.blocks = []
