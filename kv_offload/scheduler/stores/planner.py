"""Plans stores: follows the blocks that requests fill, chooses, takes slots and pins blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import compress
from typing import Any

import numpy as np

from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slots import NO_SLOTS
from kv_offload.engine import BlockState, RunningRequests, StepOutput
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.observers import StoresPlanned
from kv_offload.scheduler.request import StoreCursor, TrackedRequest
from kv_offload.scheduler.stores.budget import PIN_STEPS, StoreBudget
from kv_offload.scheduler.stores.candidates import Span, StoreCandidates, keys_of_spans
from kv_offload.scheduler.stores.choice import Chosen, StoreChoice
from kv_offload.scheduler.stores.refusals import MAX_SHARE, Refusals
from kv_offload.scheduler.stores.tails import StoreTails, Tail
from kv_offload.scheduler.transfers import Kind

logger = logging.getLogger(__name__)

MAX_STORE_SECONDS = 10.0
"""Maximum time that a store pins its GPU blocks, and that a reset waits for it.

If too few blocks are free, vLLM waits for stores rather than preempt a request. Stores are planned
to end within a few steps, so one that takes this long hangs, or its link is far slower than
measured."""

MANY_RUNNING = 32
"""In a step of at least this many requests, those that filled a block wait for each other."""

WAITING_SHARE = 4
"""At most one in this many of a step's requests waits. Steps of 256 decodes cost 239 us on average
with `lru`, and 342 without waiting; 312 and 493 with `auto` (alternating runs, November 2026)."""


class StorePlanner:
    """Stores blocks of requests that are scheduled in this step or have ended.

    A block is examined in a step that schedules its request and at whose end its tokens are
    computed, or after its request has ended with its tokens computed. If it is chosen it is pinned
    (`TransferTable.plan_store`). The block's own request does not write it either, since only full
    blocks of known tokens are examined.

    A running request is examined when it gets a block, and while it has more to store. A block that
    it filled in an earlier step thus waits until it gets the next one: the request keeps the block
    meanwhile, and most requests of a step of decodes are not touched at all. If there are many
    decodes, those that get a block wait until a quarter of them have, and are examined together.
    """

    def __init__(self, core: Core) -> None:
        config = core.config
        self._pool = pool = core.engine.pool
        self._requests, self._prefixes = core.requests, core.prefixes
        self._manager, self._retention = core.manager, core.retention
        self._transfers, self._statistics = core.transfers, core.statistics
        self._subscribers = core.subscribers
        self.budget = StoreBudget(core)
        prompt_only = config.store_blocks == "prompt"
        max_share = config.max_share_per_salt
        self.candidates = StoreCandidates(
            core.prefixes, core.manager, core.statistics, max_share, prompt_only=prompt_only
        )
        self._refusals = Refusals()
        self._choice = StoreChoice(core.prefixes, pool, self._refusals.keys)
        self._tails = StoreTails(core.prefixes, pool, self.candidates, self._refusals.keys)
        self._grown_blocks = 0
        self._paused_by_refusals = False
        """True if too many blocks did not fit packed slots: then new weights end the pause, too."""
        self._block_state: BlockState | None = None
        self._states: Mapping[str, Sequence[tuple[int, int, int]]] = {}
        """By request, the states that a step names: cache group, block and number of tokens."""
        self._noted: list[Tail] = []
        """The tails of a step's requests."""
        self._waiting: set[str] = set()
        """Decodes that got a block and have not been examined since."""

    def plan_step(self, output: StepOutput, *, load_seconds: float, idle: bool) -> None:
        """Plan the stores of a step's requests and of the backlog.

        Loads under way still need `load_seconds`. `idle`: nothing is computed, now or in the steps
        under way, and nothing is loaded.
        """
        self.budget.next_step(load_seconds=load_seconds, grown_blocks=self._grown_blocks)
        self._give_up_late()
        self.candidates.next_step()
        if self.candidates.waiting_slots:
            free_blocks = self._pool.get_num_free_blocks() - self.budget.reserved_blocks
            self.candidates.examine_backlog(min(self._slots_left(), free_blocks))
        self._grown_blocks = self._follow(output)
        for tail in self._noted:
            self._store_tail(tail)
        self._pin_chosen()
        self._manager.policy.catch_up()
        self.candidates.forget_chosen(resting=idle and not self._transfers.pinned_blocks)

    def _follow(self, output: StepOutput) -> int:
        """Follow the requests of a step; return how many blocks its decodes got."""
        self.budget.prompt_growth, self._noted = 0, []
        unfinished = self.candidates.take_unfinished()
        self._block_state = getattr(output, "kv_connector_block_state", None)  # from vLLM 0.32
        state = self._block_state
        self._states = {} if state is None else state.boundary_state_offloads
        if self._states:
            unfinished.update(self._states)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None and tracked.cursor is not None:
                ids, computed = new.block_ids, new.num_computed_tokens
                self._begin(tracked, tracked.cursor, ids, computed, scheduled[new.req_id])
        return self._follow_running(output.scheduled_cached_reqs, scheduled, unfinished)

    def _begin(
        self,
        tracked: TrackedRequest,
        cursor: StoreCursor,
        block_ids: Sequence[Sequence[int]],
        computed: int,
        scheduled: int,
    ) -> None:
        """Examine a request that runs with these blocks for the first time."""
        self._expect_growth(cursor, computed + scheduled, scheduled)
        loaded = tracked.scheduled(block_ids)
        if self._states:
            self._place_states(cursor, computed + scheduled)
        if loaded is not None:
            # Host memory has the loaded slots, but may have evicted those before them.
            self.candidates.examine(cursor, loaded[0])
            self.candidates.skip(cursor, loaded[1])
        self.candidates.examine(cursor, computed + scheduled)
        if self.paused and cursor.hints.keep is not None:
            self._retain_known(cursor)

    def _expect_growth(self, cursor: StoreCursor, end_tokens: int, scheduled: int) -> None:
        """Count the blocks that a partly computed prompt will take while a pin lasts."""
        tokens = min(cursor.request.num_tokens - end_tokens, PIN_STEPS * scheduled)
        if tokens <= 0:
            return
        for group in self._prefixes.groups:
            blocks = -(-tokens // group.block_tokens)
            step_blocks = -(-scheduled // group.block_tokens)
            # A window takes the blocks of a step before it releases those that it has left.
            self.budget.prompt_growth += min(blocks, group.held_blocks(blocks) + step_blocks)

    def _place_states(self, cursor: StoreCursor, end_tokens: int) -> None:
        """Note the blocks of the states that this step names, which may have moved."""
        request_id, inside = cursor.request.request_id, []
        for state in self._states.get(request_id, ()):
            group_id, block_id, tokens = state
            slot, rest = divmod(tokens, self._prefixes.groups[group_id].block_tokens)
            ids = cursor.block_ids[group_id]
            if rest:
                inside.append(state)
            elif slot <= len(ids):
                ids[slot - 1] = block_id
        if inside:
            assert self._block_state is not None
            block_ids = self._block_state.get_block_ids(request_id)
            self._noted += self._tails.find(cursor, end_tokens, inside, block_ids)

    def _follow_running(
        self, cached: RunningRequests, scheduled: Mapping[str, int], unfinished: set[str]
    ) -> int:
        request_ids, new_block_ids = cached.req_ids, cached.new_block_ids
        computed, resumed = cached.num_computed_tokens, cached.resumed_req_ids
        waiting, running = self._waiting, len(request_ids)
        waits = running >= MANY_RUNNING and len(waiting) < running // WAITING_SHARE
        if not waits:
            unfinished |= waiting
        grown_blocks = 0
        for index in _to_look_at(request_ids, new_block_ids, unfinished):
            request_id, new_ids = request_ids[index], new_block_ids[index]
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.cursor is None:
                continue
            cursor, grown = tracked.cursor, 0
            if request_id in resumed:
                tokens = scheduled[request_id]
                self._begin(tracked, cursor, new_ids or (), computed[index], tokens)
                continue
            if new_ids is not None:
                for position, more in enumerate(new_ids):
                    cursor.block_ids[position] += more
                    grown += len(more)
                if grown > len(new_ids):
                    tokens = scheduled[request_id]
                    self._expect_growth(cursor, computed[index] + tokens, tokens)
                else:
                    grown_blocks += grown
            if self._states:
                self._place_states(cursor, computed[index] + scheduled[request_id])
            if waits and grown == 1 and request_id not in unfinished:
                waiting.add(request_id)
            else:
                self.candidates.examine(cursor, computed[index] + scheduled[request_id])
        if waiting and not waits:
            # The others have ended, or run in the other steps if steps alternate.
            left = waiting - scheduled.keys()
            self._waiting = {request_id for request_id in left if self._requests.get(request_id)}
        return grown_blocks

    def request_ends(self, cursor: StoreCursor, end_tokens: int) -> None:
        """Plan the last stores of a request, just before the engine frees its blocks."""
        if not cursor.hints.store or self.paused:
            left = self.candidates.count_left(cursor, end_tokens)
            self._statistics.skipped("paused" if self.paused else "not_wanted", left)
            return
        # Uses the cursor's blocks: in a window group the engine's are null blocks where the window
        # has moved on, although the blocks may still hold their KV.
        self.candidates.next_step()
        self.candidates.examine(cursor, end_tokens)
        self._pin_chosen()
        self._statistics.count("deferred_slots", self.candidates.keep(cursor, end_tokens))

    def tail_ends(
        self,
        cursor: StoreCursor,
        end_tokens: int,
        states: Sequence[tuple[int, int, int]],
        block_ids: Sequence[Sequence[int]],
    ) -> None:
        """Plan the stores of the blocks inside which a request ends."""
        for tail in self._tails.find(cursor, end_tokens, states, block_ids):
            self._store_tail(tail)

    def _store_tail(self, tail: Tail) -> None:
        """Plan the stores of a tail's blocks that have no slot: all of them, or none."""
        slots = self._manager.slot_numbers(tail.keys)
        missing = [slot < 0 for slot in slots]
        count = sum(missing)
        if count and (self._lacking_blocks or count > self._slots_left()):
            self._statistics.skipped("no_budget", count)
            return
        chosen = Chosen(
            new=dict.fromkeys(compress(tail.keys, missing)),
            blocks=[*compress(tail.blocks, missing)],
            runs=[*compress(tail.spans, missing)],
            along=[slot for slot in slots if slot >= 0],
        )
        self._store(chosen, tail.spans, tail.keys, self._subscribers.tails)
        if tail.cursor.hints.keep is not None:
            self._retain(tail.spans, tail.keys)

    @property
    def paused(self) -> bool:
        """True if no new stores are planned; those that are planned still run."""
        return self.candidates.paused

    def pause(self, *, paused: bool) -> None:
        """Pause stores until an operator resumes them; or resume them, whatever paused them."""
        self.candidates.paused, self._paused_by_refusals = paused, False
        self._refusals.start_over()
        if paused:
            self.candidates.drop_backlog()

    def forget(self, *, weights_changed: bool) -> None:
        """Drop the backlog and the refused keys: the same prefix may have different KV from now on.

        New weights may pack well, so they end a pause that refused blocks caused.
        """
        self.candidates.drop_backlog()
        self._refusals.keys.clear()
        if not weights_changed:
            return
        self._refusals.start_over()
        if self._paused_by_refusals:
            self.candidates.paused = self._paused_by_refusals = False
            logger.info("kv-offload: stores run again: new weights may fit packed slots")

    def stored(self, blocks: int, refused: Sequence[SlotKey | None]) -> None:
        """Count a store that has ended, and pause stores if too many blocks are refused.

        `refused` has the keys of its blocks that did not fit a packed slot on some rank, None where
        host memory has dropped the key.
        """
        refusals = self._refusals
        refusals.count(blocks, refused)
        self._statistics.skipped("unpackable", len(refused))
        if refusals.are_too_many and not self.paused:
            logger.warning(
                "kv-offload: %.1f%% of the recent blocks do not fit packed slots, "
                "where %.0f%% may be: stores are paused. Set pack_kv: false for this model",
                100 * refusals.share,
                100 * MAX_SHARE,
            )
            self.pause(paused=True)
            self._paused_by_refusals = True

    def _slots_left(self) -> int:
        running = self._transfers.running(Kind.STORE).values()
        if any(store.unpinned_early for store in running):  # the next one would wait for it
            return 0
        return self.budget.slots_left(self._transfers.pinned_blocks)

    @property
    def _lacking_blocks(self) -> int:
        return max(0, self.budget.reserved_blocks - self._pool.get_num_free_blocks())

    def _pin_chosen(self) -> None:
        """Choose from the candidates, take slots for new keys and pin the blocks that got one."""
        spans, keys = self.candidates.take()
        if not spans:
            return
        # Lists, not arrays: usually each decode has filled one block, and none of these has a slot.
        slots = self._manager.slot_numbers(keys)
        chosen = self._choice.choose(spans, keys, slots, self._slots_left(), self._lacking_blocks)
        self._statistics.skipped("moved_on", chosen.moved_on)
        for span, passed in chosen.cut:
            self.candidates.rewind(span, passed)
        if chosen.new or chosen.along:
            self._store(chosen, spans, keys, self._subscribers.stores)
        if any(cursor.hints.keep is not None for cursor, _, _, _ in spans):
            self._retain(spans, keys)

    def _store(
        self,
        chosen: Chosen,
        spans: Sequence[Span],
        keys: Sequence[SlotKey],
        subscribers: Iterable[StoresPlanned],
    ) -> None:
        along = np.array(chosen.along, np.int32) if chosen.along else NO_SLOTS
        new, blocks = list(chosen.new), chosen.blocks
        runs = self._choice.runs_of(chosen) if self._manager.reads_runs else ()
        in_pool = -self._manager.left_to_peers
        stored, worth = self._manager.offer(new, runs, along)
        in_pool += self._manager.left_to_peers
        taken = len(stored)
        if not worth.all():
            chosen_ones = worth.tolist()
            new, blocks = [*compress(new, chosen_ones)], [*compress(blocks, chosen_ones)]
            self._statistics.skipped("in_pool", in_pool)
            self._statistics.skipped("not_worth_it", len(worth) - len(blocks) - in_pool)
        self._statistics.skipped("pool_busy", len(blocks) - taken)
        if taken:
            self.budget.count_planned(taken)
            self._transfers.plan_store(stored, blocks[:taken])
            for notify in subscribers:
                notify(spans, keys, new, stored)

    def _retain(self, spans: Sequence[Span], keys: Sequence[SlotKey]) -> None:
        """Retain the examined slots of the requests with this hint."""
        for cursor, _, _, own in keys_of_spans(spans, keys):
            if cursor.hints.keep is not None:
                slots = self._manager.find(own)
                self._retention.keep(slots[slots >= 0], cursor.hints.keep)

    def _retain_known(self, cursor: StoreCursor) -> None:
        """Retain the slots of a request that host memory has, because a pause examines none."""
        assert cursor.hints.keep is not None
        hashes = cursor.request.block_hashes
        for group in self._prefixes.groups:
            slots = self._manager.find(self._prefixes.slot_keys(hashes, group, 0, len(hashes)))
            self._retention.keep(slots[slots >= 0], cursor.hints.keep)

    def _give_up_late(self) -> None:
        """Give up stores that have run for `MAX_STORE_SECONDS`, so that no reset waits longer."""
        late = self._transfers.give_up_stores(self._transfers.step_time.seconds - MAX_STORE_SECONDS)
        if late:
            logger.error(
                "kv-offload: gave up %d stores that did not end in %.0f s, and released their GPU "
                "blocks. Nothing is stored until they have ended",
                late,
                MAX_STORE_SECONDS,
            )


def _to_look_at(
    request_ids: Sequence[str], new_block_ids: Sequence[Any], unfinished: Set[str]
) -> Iterable[int]:
    """Return the indices of the requests that got a block (not None) or are unfinished."""
    places = range(len(request_ids))
    if not unfinished:
        return compress(places, new_block_ids)
    return [i for i in places if new_block_ids[i] is not None or request_ids[i] in unfinished]
