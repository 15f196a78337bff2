"""Plans stores: which blocks of a step to keep, and which GPU blocks are pinned for it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import CacheGroup, PrefixMap, SlotKey
from kv_offload.cache.slots import NO_SLOTS
from kv_offload.engine import BlockPool
from kv_offload.messages import JobResult, StoreJob
from kv_offload.metrics import SkipReason
from kv_offload.scheduler.budget import StoreBudget
from kv_offload.scheduler.request import StoreCursor
from kv_offload.scheduler.store_jobs import StoreJobs
from kv_offload.scheduler.uses import UseCounter

MAX_SLOTS_PER_STEP = 1024
"""Slots examined in one step over all requests; the rest follows in the next steps.

It bounds the planner's time on the scheduler's thread whatever the length of a prompt."""


_Span: TypeAlias = tuple[StoreCursor, CacheGroup, int, Sequence[bytes], Sequence[int], int, int]
"""Slots of one request to look at: cursor, cache group and its position, the request's hashes, its
blocks in this group, first slot, last slot (exclusive)."""


@dataclass(slots=True)
class _Choice:
    """New keys with their blocks, and slots of the same prefixes that are known."""

    slots_left: int
    new: dict[SlotKey, None] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    along: list[int] = field(default_factory=list)


class StorePlanner:
    """Chooses blocks to store.

    A block is chosen only while the pool knows it under exactly the key it is expected to have, in
    a step that schedules its request and at whose end its tokens are computed, or after its request
    has ended with its tokens computed: hashes are set before the KV exists, and remembered ids go
    stale when a window moves on or a request is preempted. From then on it is pinned (`StoreJobs`).
    The block's own request does not write it either, since only full blocks of known tokens are
    chosen.

    What a step has is examined in one go, since a step of decodes has a block of each of many
    requests: `examine` only notes what to look at and moves the cursor behind it, `pin_chosen`
    looks, and moves the cursor back to where a budget ended.
    """

    def __init__(
        self,
        prefixes: PrefixMap,
        manager: CacheManager,
        pool: BlockPool,
        num_ranks: int,
        budget: StoreBudget,
        max_pinned_share: float,
        store_after_uses: int,
    ) -> None:
        self._prefixes = prefixes
        self._manager = manager
        self._pool = pool
        self._budget = budget
        self._max_pinned_share = max_pinned_share
        self._store_after_uses = store_after_uses
        self._uses = UseCounter()
        self.jobs = StoreJobs(manager, pool, num_ranks)
        self._places = tuple(
            (position, group, group.block_tokens, prefixes.block_hashes[position])
            for position, group in enumerate(prefixes.groups)
        )
        self.examinable = MAX_SLOTS_PER_STEP
        """Slots that may still be examined in this step."""
        self.behind: set[str] = set()
        """Requests of this step that have more to store than was planned."""
        self._spans: list[_Span] = []
        self._keys: list[SlotKey] = []  # of all spans
        self.skipped: Counter[SkipReason] = Counter()
        """Slots not stored since `take_skipped`, by reason."""

    def next_step(self) -> None:
        """Give the planner a new budget of slots to examine; no request is behind."""
        self.examinable = MAX_SLOTS_PER_STEP
        self.behind = set()

    def examine(
        self, cursor: StoreCursor, end_tokens: int, known_tokens: int | None = None
    ) -> None:
        """Have one request's blocks examined whose tokens end at or below `end_tokens`.

        Only the first `known_tokens` are final, if that is given. `pin_chosen` must be called
        before the blocks can be freed. A request that does not get as far as `end_tokens`, for
        whatever reason, is `behind`.
        """
        hashes, block_ids = cursor.request.block_hashes, cursor.block_ids
        next_slot, known = cursor.next_slot, end_tokens
        if known_tokens is not None and known_tokens < known:
            known = known_tokens
        if len(next_slot) > 1:
            known = self._prefixes.named_tokens(known)
        for position, group, tokens, slot_hashes in self._places:
            at, last = next_slot[position], known // tokens
            if at < last:
                ids = block_ids[position]
                last = self._end(last, slot_hashes, hashes, ids)
                examinable = self.examinable
                if last > at + examinable:
                    last = at + examinable
                if at < last:
                    self.examinable = examinable - last + at
                    if last - at == 1 and not group.group_id:
                        self._keys.append(hashes[last * slot_hashes - 1])
                    else:
                        self._keys += self._prefixes.slot_keys(hashes, group, at, last)
                    self._spans.append((cursor, group, position, hashes, ids, at, last))
                    next_slot[position] = at = last
            if end_tokens >= (at + 1) * tokens:
                self.behind.add(cursor.request.request_id)

    def _end(self, full: int, slot_hashes: int, hashes: Sequence[bytes], ids: Sequence[int]) -> int:
        """Return how many of the first `full` slots have blocks and names."""
        return min(full, len(ids), len(hashes) // slot_hashes)

    def skip(self, cursor: StoreCursor, end_tokens: int) -> None:
        """Move a cursor to `end_tokens`: host memory has what lies before."""
        cursor.next_slot = [
            max(at, end_tokens // tokens)
            for at, (_, _, tokens, _) in zip(cursor.next_slot, self._places, strict=True)
        ]

    def is_behind(self, cursor: StoreCursor, end_tokens: int) -> bool:
        """Say whether `end_tokens` completes a slot beyond those that were planned or skipped."""
        return any(
            end_tokens >= (at + 1) * tokens
            for at, (_, _, tokens, _) in zip(cursor.next_slot, self._places, strict=True)
        )

    def end_slots(self, cursor: StoreCursor, end_tokens: int) -> list[int]:
        """Return by cache group how many slots have blocks and names by `end_tokens`."""
        hashes = cursor.request.block_hashes
        named = self._prefixes.named_tokens(end_tokens)
        return [
            self._end(named // tokens, spanned, hashes, ids)
            for (_, _, tokens, spanned), ids in zip(self._places, cursor.block_ids, strict=True)
        ]

    @contextlib.contextmanager
    def examining_at_most(self, slots: int) -> Iterator[None]:
        """Examine no more than so many slots within, of those that this step may examine."""
        left = self.examinable
        self.examinable = room = max(0, min(left, slots))
        yield
        self.examinable += left - room

    # -- the choice ----------------------------------------------------------------------------

    def slots_left(self, soon_free_blocks: int = 0) -> int:
        """Return how many more slots may be chosen.

        `max_pinned_share` is of what would be free if no store held anything and the requests whose
        blocks are pinned had ended. While nothing is pinned it is at least one slot, or a GPU cache
        with few free blocks would never store anything.
        """
        pinned = self.jobs.pinned_blocks
        free: int = self._pool.get_num_free_blocks() + soon_free_blocks
        share = int(self._max_pinned_share * (free + pinned)) - pinned
        if not pinned:
            share = max(share, 1)
        blocks = min(share, free - self._budget.reserved_blocks)
        slots = self._budget.slots_left(pinned)
        return min(blocks, slots)

    def pin_chosen(self, soon_free_blocks: int = 0) -> None:
        """Choose among what `examine` noted, take slots for it and pin the blocks that got one.

        `soon_free_blocks` counts blocks that the engine frees right after this call.

        What is known of the same prefixes goes along: it is used again, and must not be evicted for
        its own tail.
        """
        spans, keys = self._spans, self._keys
        if not spans:
            return
        self._spans, self._keys = [], []
        # Lists, not arrays: mostly decodes have filled a block each, and nothing is known of them.
        slots = self._manager.slot_numbers(keys)
        choice = _Choice(self.slots_left(soon_free_blocks))
        new, pool_blocks = choice.new, self._pool.blocks
        behind_key = self._prefixes.behind_slot_key
        # A span of one slot is what decodes have; most of these are chosen without further ado.
        single = self._store_after_uses == 1
        at = 0
        for span in spans:
            cursor, _, position, _, ids, first, last = span
            if single and last - first == 1 and slots[at] < 0 < choice.slots_left:
                key, block = keys[at], ids[first]
                if key not in new and pool_blocks[block].block_hash == key + behind_key[position]:
                    choice.slots_left -= 1
                    new[key] = None
                    choice.blocks.append(block)
                    at += 1
                    continue
            end = at + last - first
            passed = self._choose(choice, span, keys[at:end], slots[at:end])
            if passed < end - at:
                cursor.next_slot[position] = min(cursor.next_slot[position], first + passed)
                self.behind.add(cursor.request.request_id)
            at = end
        if not choice.new and not choice.along:
            return
        along = np.array(choice.along, np.int32) if choice.along else NO_SLOTS
        stored = self._manager.prepare_store(list(choice.new), along)
        taken = len(stored)
        if taken < len(choice.new):
            self.skipped["pool_busy"] += len(choice.new) - taken
        if taken:
            self._budget.count_planned(taken)
            self.jobs.pin(stored, choice.blocks[:taken])

    def _choose(
        self, choice: _Choice, span: _Span, keys: Sequence[SlotKey], slots: Sequence[int]
    ) -> int:
        """Choose those of a span that are new, valid now and within the budget.

        `slots` has what the cache manager says of `keys`. Returns how many slots were passed.
        """
        cursor, group, _, hashes, group_blocks, first, last = span
        unknown: Sequence[int] = [index for index, slot in enumerate(slots) if slot < 0]
        passed = len(keys)
        gone: list[int] = []
        if unknown:
            start = first + unknown[0]
            expected = self._prefixes.pool_keys(hashes, group, start, last)
            blocks = group_blocks[start:last]
            pool_blocks = self._pool.blocks
            null = self._pool.null_block.block_id  # stands for a block that the request never had
            found = [pool_blocks[block].block_hash for block in blocks]
            all_valid = found == expected
            new = keys[unknown[0] :]
            if (
                all_valid
                and len(new) == len(unknown)
                and self._store_after_uses == 1
                and choice.new.keys().isdisjoint(new)
            ):
                # What is mostly met: of the rest of a prompt nothing is known, and all is valid.
                taken = max(0, min(len(new), choice.slots_left))
                choice.slots_left -= taken
                choice.new.update(dict.fromkeys(new[:taken]))
                choice.blocks += blocks[:taken]
                passed = unknown[0] + taken
                unknown = ()
        for index in unknown:
            key = keys[index]
            if key in choice.new:
                continue  # another request of this step has the same prefix
            at = index - unknown[0]
            if not all_valid and found[at] != expected[at]:
                if blocks[at] != null:
                    gone.append(first + index)
            elif not choice.slots_left > 0:
                passed = index
                break
            elif self._store_after_uses > 1 and self._uses.count(key) < self._store_after_uses:
                self.skipped["used_too_little"] += 1
            else:
                choice.slots_left -= 1
                choice.new[key] = None
                choice.blocks.append(blocks[at])
        if gone:  # what the engine never names was not lost
            prompt_tokens = cursor.request.num_prompt_tokens
            self.skipped["moved_on"] += self._prefixes.count_named(group, gone, prompt_tokens)
        choice.along += [slot for slot in slots[:passed] if slot >= 0]
        return passed

    def take_planned(self) -> tuple[StoreJob, ...]:
        """Pin what was chosen, and return what was pinned since the last call as one job."""
        self.pin_chosen()
        return self.jobs.take_planned()

    def complete(self, results: Mapping[int, JobResult]) -> None:
        """Take the ranks' reports of stores."""
        failed_slots = self.jobs.complete(results)
        if failed_slots:
            self.skipped["copy_failed"] += failed_slots

    def take_skipped(self) -> Counter[SkipReason]:
        """Return how many slots were not stored since the last call, by reason."""
        skipped, self.skipped = self.skipped, Counter()
        return skipped
