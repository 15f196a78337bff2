"""Follows a waiting request from its first lookup to its admission, and plans its load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from kv_offload.cache.prefix import CacheGroup, SlotKey
from kv_offload.cache.slots import NO_SLOTS, MissingKeyError
from kv_offload.engine import AllocatedBlocks, Request
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.loads import decision
from kv_offload.scheduler.loads.decision import Decision
from kv_offload.scheduler.loads.lookups import MAX_WAIT_SECONDS
from kv_offload.scheduler.request import Hit, Phase, TrackedRequest
from kv_offload.scheduler.transfers import Kind
from kv_offload.tiers.lower import LowerTiers

MAX_LOADS = 128
"""With this many asynchronous loads under way, the next request waits without GPU blocks.

Its load would only wait for the link, and vLLM iterates over all loading requests whenever it
admits one: with 500 of them a step took 0.2 s (November 2026)."""


def may_be_synchronous(groups: Sequence[CacheGroup]) -> bool:
    """Return whether a forward can wait for loads into blocks of these cache groups.

    False with several groups: vLLM may use less of a hit than it was offered, and then a window
    lacks blocks. False with states: vLLM moves them between blocks before the forward would wait.
    """
    return len(groups) == 1 and not groups[0].holds_state


class Match(NamedTuple):
    """The answer to the engine's lookup of a waiting request."""

    tokens: int | None
    """Number of tokens to load after its local hit; None if the engine must ask again."""
    asynchronous: bool = False
    """True if other steps run during the load."""
    shared_tokens: int = 0
    """Prefix length at which windows and states should be kept for other requests; or 0."""


class Admissions:
    """Answers lookups of waiting requests, and plans their loads when they get blocks."""

    def __init__(self, core: Core, tiers: LowerTiers) -> None:
        self._requests, self._prefixes, self._manager = core.requests, core.prefixes, core.manager
        self._transfers, self._statistics = core.transfers, core.statistics
        self._retention = core.retention
        self._lookups, self._costs, self._tiers = core.lookups, core.costs, tiers
        self._null_block_id = core.engine.pool.null_block.block_id
        self._may_be_synchronous = may_be_synchronous(self._prefixes.groups)

    def match(self, tracked: TrackedRequest, start: int) -> Match:
        """Look a request up after its first `start` tokens, and decide how to serve the hit."""
        tokens: int | None = None
        asynchronous = False
        if not self.still_waits(tracked):
            tracked.looked_up()
            self._lookups.arrived(tracked)
            # Read first: keys spent on the tiers must not prevent the lookup in host memory.
            is_spent = self._lookups.is_spent()
            if not tracked.may_load:
                tokens = 0
            elif not self._tiers.waits(tracked, start):
                hit = self._lookups.find(tracked, start, is_spent=is_spent)
                if hit is not None:
                    hit.decision = self._decide(tracked, hit)
                    tokens, asynchronous = self._take_turn(tracked, hit, hit.decision)
        return Match(tokens, asynchronous, tracked.shared_tokens)

    def _take_turn(
        self, tracked: TrackedRequest, hit: Hit, chosen: Decision
    ) -> tuple[int | None, bool]:
        """Return how many tokens to load, None if not yet, and whether asynchronously."""
        asynchronous = chosen.tokens > 0 and not chosen.synchronous
        if not asynchronous or self._transfers.num_loads < MAX_LOADS:
            return chosen.tokens, asynchronous
        if self._line_is_full():
            tracked.still_waits = self._line_is_full
            return None, False
        # The earlier loads hang, so the prompt is computed instead.
        hit.decision = Decision(0, hit.end_tokens, synchronous=False)
        return 0, False

    @staticmethod
    def still_waits(tracked: TrackedRequest) -> bool:
        """Return whether the last lookup's reason to wait still holds; in O(1).

        The engine's own cache may have more of the request by now. It waits all the same until the
        engine has all that it waits for: else every waiting request would be looked up in every
        step.
        """
        return tracked.may_load and tracked.still_waits()

    def _line_is_full(self) -> bool:
        """Return whether another asynchronous load must wait for an earlier one to end.

        False if the oldest has taken so long that it seems to hang.
        """
        loads = self._transfers.running(Kind.LOAD)
        if self._transfers.num_loads < MAX_LOADS:
            return False
        oldest = next(iter(loads.values()), None)
        return oldest is None or time.monotonic() - oldest.sent <= MAX_WAIT_SECONDS

    def _decide(self, tracked: TrackedRequest, hit: Hit) -> Decision:
        start, end, num_tokens = hit.start_tokens, hit.end_tokens, hit.num_tokens
        if start == end:
            return Decision(0, end, synchronous=False)
        slots = self._prefixes.count_slots(start, end)
        idle = self._requests.admitted == (tracked.cursor is not None)
        costs = self._costs.of(start, end, num_tokens, slots, idle=idle)
        synchronous = self._may_be_synchronous and decision.is_synchronous(costs)
        if self._costs.computes(costs, synchronous=synchronous):
            return Decision(0, end, synchronous)
        alignment = self._prefixes.alignment_tokens
        return decision.loaded_part(
            start, end, num_tokens, alignment, costs, synchronous=synchronous
        )

    def allocated(
        self, tracked: TrackedRequest, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Record the blocks that the engine gave a waiting request, and plan its load, if any.

        The engine calls this again, without external tokens, when it schedules a loaded request;
        the step's plan then has its blocks.
        """
        self._lookups.arrived(tracked)
        if tracked.phase is not Phase.WAITING and tracked.loaded is not None:
            return
        request, hit = tracked.request, tracked.hit
        self._requests.admit(tracked, blocks.get_block_ids())
        chosen = None if hit is None else hit.decision
        start = request.num_computed_tokens if hit is None else hit.start_tokens
        end, slots = start, 0
        self._costs.admitted(tracked, start + num_external_tokens)
        if hit is not None and chosen is not None:
            self._count(request, hit, chosen, num_external_tokens)
            if num_external_tokens:
                # The engine may use less than it was offered.
                end = chosen.end_tokens - (chosen.tokens - num_external_tokens)
                slots = self._prefixes.count_slots(start, end)
                self._plan_load(tracked, start, end, synchronous=chosen.synchronous)
        if tracked.phase is Phase.READY:
            self._costs.count(slots, request.num_tokens - end)
        tracked.hit = None

    def _count(self, request: Request, hit: Hit, chosen: Decision, loaded_tokens: int) -> None:
        self._statistics.count("lookup_tokens", request.num_tokens - hit.start_tokens)
        if hit.declined_tokens:
            self._statistics.count("recomputed_tokens", hit.declined_tokens)
            self._costs.rate.count_hit(computed=True)
        if loaded_tokens:
            self._statistics.count("hit_tokens", loaded_tokens)
            self._statistics.count("synchronous_loads", chosen.synchronous)
            self._statistics.observe("request_hit_tokens", loaded_tokens)
            self._costs.rate.count_hit(computed=False)

    def _plan_load(
        self, tracked: TrackedRequest, start_tokens: int, end_tokens: int, *, synchronous: bool
    ) -> None:
        """Plan the load that fills a request's blocks from `start_tokens` to `end_tokens`.

        The engine may ask for less than it was offered. If a window group then lacks blocks, the
        load is marked incomplete: it fails, and its tokens are recomputed.
        """
        assert tracked.cursor is not None
        keys: list[SlotKey] = []
        blocks: list[int] = []
        for group, ids in zip(self._prefixes.groups, tracked.cursor.block_ids, strict=True):
            if group.is_scratch:
                continue
            first, last = start_tokens // group.block_tokens, -(-end_tokens // group.block_tokens)
            # A window group has null blocks before its window, never after it.
            skipped = ids[first:last].count(self._null_block_id)
            blocks += ids[first + skipped : last]
            hashes = tracked.request.block_hashes
            whole = end_tokens // group.block_tokens
            keys += self._prefixes.slot_keys(hashes, group, first + skipped, whole)
            keys += self._prefixes.tail_keys(hashes, group, end_tokens)
        try:
            slots = self._manager.prepare_load(keys)
        except MissingKeyError:
            slots = NO_SLOTS
        if tracked.hints.keep is not None:
            self._retention.keep(self._manager.owned(slots), tracked.hints.keep)
        tracked.load_planned(start_tokens, end_tokens, synchronous=synchronous)
        self._transfers.plan_load(
            tracked,
            blocks,
            slots,
            synchronous=synchronous,
            whole=end_tokens == tracked.request.num_tokens,
        )
        if not synchronous:  # else the engine's own prefix cache knows its blocks from this step on
            self._lookups.expect(tracked, keys)

    def allocation_failed(
        self, tracked: TrackedRequest, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """Plan a load that fails, in place of the one that `allocated` could not plan.

        The engine counts on a load, so ranks report a failed one, and no block keeps old content.
        """
        hit, tracked.hit = tracked.hit, None
        if tracked.phase is Phase.WAITING:
            # Recovery must know its blocks, whatever failed.
            self._requests.admit(tracked, blocks.get_block_ids())
        chosen = None if hit is None else hit.decision
        if not num_external_tokens or hit is None or chosen is None:
            return
        if self._transfers.plans_load_of(tracked):
            return
        start = hit.start_tokens
        ids = [
            block
            for group, ids in zip(self._prefixes.groups, blocks.get_block_ids(), strict=True)
            for block in ids[start // group.block_tokens :]
        ]
        synchronous = chosen.synchronous
        tracked.load_planned(start, start + num_external_tokens, synchronous=synchronous)
        self._transfers.plan_load(tracked, ids, NO_SLOTS, synchronous=synchronous)
