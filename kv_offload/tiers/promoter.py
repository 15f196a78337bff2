"""Which requests wait until blocks have been read from the tiers below host memory."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slot_refcounts import distinct
from kv_offload.engine import Request
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.loads.costs import LoadCosts
from kv_offload.scheduler.loads.decision import MARGIN
from kv_offload.scheduler.loads.lookups import OFFER_SECONDS, Lookups
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.transfers import Transfer
from kv_offload.tiers.base import Tier
from kv_offload.tiers.questions import Question, Questions
from kv_offload.tiers.reads import Read, Reads
from kv_offload.tiers.remote import KNOWN_SECONDS

MAX_WAIT_SECONDS = 5.0
MIN_WAIT_SECONDS = 0.2
"""A request waits for twice the time that computing would take, within these bounds."""

LOOK_KEYS = 32
"""A lookup here costs as much as this many keys, in addition to its own. So a step starts at most
some 250 lookups."""


@dataclass(slots=True, eq=False)
class Wait:
    """What was looked up for a request in the lower tiers, and what it waits for there.

    - `start_tokens`, `num_tokens`: tokens that the GPU had, and tokens of the request.
    - `looked`: time of its last lookup, on the monotonic clock in seconds.
    - `is_ahead`: True while the request is queued and the engine has not asked for it.
    - `is_stale`: True if something has come since that lookup.
    - `until`: its deadline, from the moment in which the engine waits for a read.
    - `asked`: True once all shared tiers were asked for its blocks. Where that was done ahead, also
      none was left out and none answered late.
    - `questions`: those that may be open, also those that other requests have asked.
    - `read`: its read, which it may share. Parts of it may have ended.
    """

    start_tokens: int
    num_tokens: int
    looked: float
    is_ahead: bool
    is_stale: bool = False
    until: float = math.inf
    asked: bool = False
    questions: list[Question] = field(default_factory=list)
    read: Read | None = None

    def goes_on(self) -> bool:
        """Return whether nothing has come and the deadline has not passed; in O(1)."""
        if time.monotonic() >= self.until:
            return False
        if self.read is not None:
            return not self.read.parts[-1][1].has_ended
        return any(question.is_open() for question in self.questions)


class Promoter:
    """Reads the blocks that requests need from lower tiers into host memory.

    A request waits until its blocks are there, and is then served as a hit of host memory. When its
    deadline has passed it is served with what has come. The read goes on, for later requests.

    Each block is read from the fastest tier that has it. What that tier turns out to have lost is
    asked of the shared tiers, and read from there.

    Requests that share a prefix share its read, and the questions about it: for the second one only
    the tokens that differ are looked up. So its lookup takes O(log tokens) while the first waits.
    """

    def __init__(
        self, core: Core, tiers: Mapping[str, Tier], lookups: Lookups, costs: LoadCosts
    ) -> None:
        self._prefixes, self._host = core.prefixes, core.manager
        self._statistics, self._tell = core.statistics, core.tell
        self._tiers, self._lookups, self._costs = tiers, lookups, costs
        self._slot_bytes = core.slots.slot_bytes
        self.reads = Reads(core, tiers)
        self.questions = Questions(core, lookups)

    def waits(self, tracked: TrackedRequest, start_tokens: int) -> bool:
        """Return whether the engine must ask for a request again, since a read or answer is coming.

        Begins to read what the request needs after its first `start_tokens` tokens, unless
        computing it is faster.
        """
        waits, wait = self._waits(tracked, start_tokens, is_ahead=False), tracked.tier_wait
        if waits:
            tracked.still_waits = self._lookups.budget.is_spent
            if wait is not None and wait.goes_on():
                tracked.still_waits = wait.goes_on
        return waits

    def prefetch(self, tracked: TrackedRequest, start_tokens: int) -> list[Transfer] | None:
        """Begin to read what a queued request needs, before the engine asks for it.

        Returns the transfers that it needs, also those of others; None if that is not known yet.
        """
        wait = tracked.tier_wait
        if wait is not None and not wait.is_ahead:
            return []
        waits, wait = self._waits(tracked, start_tokens, is_ahead=True), tracked.tier_wait
        if waits and (wait is None or wait.questions):
            return None
        return [] if wait is None or wait.read is None else wait.read.transfers

    def _waits(self, tracked: TrackedRequest, start_tokens: int, *, is_ahead: bool) -> bool:
        now, num_tokens = time.monotonic(), tracked.request.num_tokens
        wait = tracked.tier_wait
        if wait is not None:
            if wait.is_ahead and not is_ahead:
                wait.is_ahead = False
                wait.asked &= now - wait.looked < KNOWN_SECONDS  # else the answer is forgotten
            is_reading = self._is_reading(wait)
            self._begin_patience(wait, now)
            if wait.is_stale:
                tracked.hit = None  # it lacks what has come
            if now >= wait.until:
                self._give_up(tracked, wait)
                wait.looked, wait.is_stale = now, False
                return False
            if is_reading or self._is_asking(wait):
                return True
            same = (start_tokens, num_tokens) == (wait.start_tokens, wait.num_tokens)
            if same and wait.asked and not wait.is_stale and now - wait.looked < OFFER_SECONDS:
                return False
            if wait.is_stale and self._lookups.loads_beginning_of(tracked, start_tokens):
                return False  # what was read is being loaded already, for another request
        tiers = [tier for tier in self._tiers.values() if tier.may_read]
        if not tiers or start_tokens % self._prefixes.alignment_tokens:
            return False
        if self._lookups.budget.is_spent():
            return True
        self._lookups.budget.spend(LOOK_KEYS)
        if wait is None:
            tracked.tier_wait = wait = Wait(start_tokens, num_tokens, now, is_ahead)
        elif not same:
            wait.start_tokens, wait.num_tokens, wait.asked = start_tokens, num_tokens, False
        if not wait.asked:
            self._ask(tracked, wait, tiers)
            if self._is_asking(wait):
                return True
        wait.looked, wait.is_stale = now, False
        wait.read = self._look(tracked, wait, tiers)
        self._begin_patience(wait, now)
        return wait.read is not None

    def _begin_patience(self, wait: Wait, now: float) -> None:
        """Set the deadline of a read once the engine waits for it: about its time to compute."""
        if wait.read is not None and wait.until == math.inf and not wait.is_ahead:
            computed = self._compute_seconds(wait.read)
            twice = MAX_WAIT_SECONDS if computed is None else 2 * computed
            wait.until = now + min(MAX_WAIT_SECONDS, max(MIN_WAIT_SECONDS, twice))

    def _is_reading(self, wait: Wait) -> bool:
        """Return whether the read for a request runs; forget it at its end."""
        read = wait.read
        if read is None or not all(transfer.has_ended for transfer in read.transfers):
            return read is not None
        if any(one.failed_rows and not self._tiers[one.tier].is_shared for one in read.transfers):
            wait.asked = False  # a shared tier may have what this one has lost
        wait.read, wait.is_stale = None, True
        return False

    def _give_up(self, tracked: TrackedRequest, wait: Wait) -> None:
        """Serve a request with what has come; nothing more is read for it."""
        if wait.read is not None:
            self._statistics.count("late_promotions", 1)
            tracked.hit = wait.read = None

    # -- questions -----------------------------------------------------------------------------

    def _ask(self, tracked: TrackedRequest, wait: Wait, tiers: Sequence[Tier]) -> None:
        """Ask the shared ones of `tiers` which blocks they have of what is not on its way."""
        shared = [tier for tier in self._tiers.values() if tier.is_shared]
        # A tier that may not be asked ahead is asked when the engine asks for the request.
        wait.asked = not wait.is_ahead or all(tier.may_read for tier in shared)
        hashes, start = tracked.request.block_hashes, wait.start_tokens
        end = tracked.hints.load_limit(start, wait.num_tokens)
        for tier in tiers:
            if tier.is_shared:
                first = self._on_its_way(tracked, start, end, tiers).full_tokens
                wait.questions += self.questions.ask(tier, hashes, first, end, tiers)

    def _is_asking(self, wait: Wait) -> bool:
        """Return whether a request waits for an answer; forget its questions after the last."""
        if not wait.questions:
            return False
        if any(question.is_open() for question in wait.questions):
            return True
        is_late = any(question.is_late for question in wait.questions)
        wait.asked &= not (is_late and wait.is_ahead)
        self._statistics.count("late_lookups", is_late)
        wait.questions.clear()
        wait.is_stale = True
        self.questions.drop_closed()
        return False

    # -- lookups -------------------------------------------------------------------------------

    def _look(self, tracked: TrackedRequest, wait: Wait, tiers: Sequence[Tier]) -> Read | None:
        """Look a request up in host memory and `tiers`; return the read that it should wait for."""
        start, hashes = wait.start_tokens, tracked.request.block_hashes
        limit = self._lookups.limit_tokens(tracked, start)
        read = self._on_its_way(tracked, start, limit, tiers)
        if read.end_tokens == start or self._has_more(hashes, read.end_tokens, limit, tiers):
            return self._find(tracked.request, read, limit, tiers)
        return read if read.parts and self._is_worth_it(read, {}) else None

    def _on_its_way(
        self, tracked: TrackedRequest, start: int, limit: int, tiers: Sequence[Tier]
    ) -> Read:
        """Return the part of a request that is being loaded or read for others that share it.

        With windows, states and proofs, where an end is a hit only with what precedes it, that is
        nothing, or all that there is.
        """
        prefixes, hashes = self._prefixes, tracked.request.block_hashes
        nothing = Read(start, start, start, start, [])
        end = prefixes.end_within(self._lookups.arriving, hashes, start, limit)
        if end > start and self._lookups.loads_beginning_of(tracked, start) is not None:
            read = Read(start, end, end, end, [])
        elif (found := self.reads.find(hashes, start, limit)) is not None:
            end, read = found
        else:
            return nothing
        if prefixes.serves_whole_requests:
            read_end = end
        elif end == read.full_tokens and not self._has_more(hashes, end, limit, tiers):
            read_end = read.end_tokens
        else:
            return nothing
        if read_end <= start or prefixes.chain_key(hashes, read_end) not in self._host:
            return nothing  # host memory was emptied since
        parts = [(first, transfer) for first, transfer in read.parts if first < read_end]
        return Read(start, read_end, end, min(read.host_tokens, read_end), parts)

    def _has_more(
        self, hashes: Sequence[bytes], end: int, limit: int, tiers: Sequence[Tier]
    ) -> bool:
        """Return whether groups that read all tokens may have a prefix beyond `end`."""
        prefixes = self._prefixes
        next_end = end + prefixes.alignment_tokens
        if next_end > prefixes.hashed_end(hashes, limit):
            return False
        key = prefixes.chain_key(hashes, next_end)
        self._lookups.budget.spend(1)
        return key in self._host or any(tier.may_have(key) for tier in tiers)

    def _find(
        self, request: Request, known: Read, limit: int, tiers: Sequence[Tier]
    ) -> Read | None:
        """Look up what follows `known`, and begin to read it; None if computing it is faster."""
        prefixes, hashes, start = self._prefixes, request.block_hashes, known.end_tokens
        readable = partial(self._readable, tiers)
        end, full = prefixes.longest_hits(hashes, readable, start, limit)
        keys = prefixes.needed_keys(hashes, start, end) if end > start else []
        host_slots = self._host.find(keys)
        absent = host_slots < 0
        missing = [key for key, gone in zip(keys, absent.tolist(), strict=True) if gone]
        first_tokens = prefixes.needed_tokens(start, end)
        parts = {transfer: first for first, transfer in known.parts}
        for row in np.flatnonzero(~absent).tolist():
            if (coming := self.reads.transfer_of(keys[row])) is not None:
                parts.setdefault(coming, int(first_tokens[row]))
        if not missing and not parts:
            return None
        host_end = known.host_tokens
        if host_end == start:
            host_end = prefixes.longest_hit(hashes, self._host_readable, start, limit)
        read = Read(known.start_tokens, end, full, host_end, [])
        sources = self._locate(missing, tiers)
        read.parts = [(first, transfer) for transfer, first in parts.items()]
        if not self._is_worth_it(read, Counter(sources)):
            return None
        parents = distinct(host_slots[self._host.readable(keys)])
        begun = self.reads.begin(missing, sources, parents)
        self._host.prepare_copy(parents)  # a quota evicts none of what this reads the rest of
        try:
            for tell in self._tell.promotions:
                tell(request, start, end, [transfer for transfer, _ in begun])
        finally:
            self._host.complete_load(parents)
        first_tokens = first_tokens[absent]
        read.parts += [(int(first_tokens[rows].min()), transfer) for transfer, rows in begun]
        num_begun = sum(len(rows) for _, rows in begun)
        if num_begun < len(missing):  # there was no room for the others
            read.end_tokens = read.full_tokens = min(end, int(first_tokens[num_begun:].min()))
        is_complete = prefixes.serves_whole_requests or num_begun == len(missing)
        if read.parts and read.end_tokens > start and is_complete:
            self.reads.share(read, hashes, start)
        return read if read.parts else None

    def _host_readable(self, keys: Sequence[SlotKey]) -> NDArray[np.bool_]:
        self._lookups.budget.spend(len(keys))
        return self._host.readable(keys)

    def _readable(self, tiers: Sequence[Tier], keys: Sequence[SlotKey]) -> NDArray[np.bool_]:
        """Return for each key whether host memory has it, or can have it from below; a mask."""
        self._lookups.budget.spend(len(keys))
        slots = self._host.find(keys)
        readable = self._host.readable(keys)
        if readable.all():
            return readable
        unknown = slots < 0
        for tier in tiers:
            readable |= unknown & tier.readable(keys)
        for row in np.flatnonzero(~readable & ~unknown).tolist():
            coming = self.reads.transfer_of(keys[row])
            readable[row] = coming is not None and self.reads.can_end(coming)
        return readable

    @staticmethod
    def _locate(keys: list[SlotKey], tiers: Sequence[Tier]) -> list[Tier]:
        """Return the first tier that has each of these keys, which one of them had just now."""
        *first, last = tiers
        sources = [last] * len(keys)  # also of what it has forgotten meanwhile: its read fails
        for tier in reversed(first):
            for row in np.flatnonzero(tier.readable(keys)).tolist():
                sources[row] = tier
        return sources

    # -- costs ---------------------------------------------------------------------------------

    def _compute_seconds(self, read: Read) -> float | None:
        return self._costs.compute_seconds(read.end_tokens - read.host_tokens)

    def _is_worth_it(self, read: Read, missing: Mapping[Tier, int]) -> bool:
        """Return whether to read `missing` more slots and load all of `read`, or compute instead.

        Tiers are read at the same time. Without evidence, and where it is close, the answer is to
        read.
        """
        computed = self._compute_seconds(read)
        tiers = {*missing, *(self._tiers[transfer.tier] for transfer in read.transfers)}
        seconds = 0.0
        for tier in tiers:
            speed = tier.rate.measured_bytes_per_second
            if not self._costs.measured or speed is None or computed is None:
                return True
            slots = tier.reading_slots + missing.get(tier, 0)
            seconds = max(seconds, slots * self._slot_bytes / speed)
        needed = self._prefixes.count_slots(read.start_tokens, read.end_tokens)
        seconds += self._costs.load_seconds(needed)
        # Now and then one is read all the same, to measure the tiers again.
        is_tried = any(tier.rate.is_to_be_tried for tier in tiers)
        is_worth_it = computed is None or computed * MARGIN >= seconds or is_tried
        for tier in tiers:
            tier.rate.count_hit(computed=not is_worth_it)
        return is_worth_it
