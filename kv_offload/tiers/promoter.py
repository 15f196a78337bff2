"""Lets requests wait for blocks that are read from the tiers below host memory."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kv_offload.scheduler.core import Core
from kv_offload.scheduler.loads.lookups import OFFER_SECONDS
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.transfers import Transfer
from kv_offload.tiers.base import Tier
from kv_offload.tiers.directory import Question
from kv_offload.tiers.questions import Questions
from kv_offload.tiers.reads import Read, Reads
from kv_offload.tiers.remote import KNOWN_SECONDS
from kv_offload.tiers.search import Search

MAX_WAIT_SECONDS = 5.0
MIN_WAIT_SECONDS = 0.2
"""A request waits for twice the time that computing would take, within these bounds."""

LOOK_KEYS = 32
"""A lookup in lower tiers costs as much as this many keys, in addition to its own. This limits a
step to some 250 lookups."""


@dataclass(slots=True, eq=False)
class Wait:
    """The lookup of a request in the lower tiers, and the read that it waits for.

    - `start_tokens`, `num_tokens`: tokens that the GPU had, and tokens of the request.
    - `looked`: time of its last lookup, on the monotonic clock in seconds.
    - `is_ahead`: True while the request is queued and the engine has not looked it up.
    - `is_stale`: True if blocks or answers have arrived since that lookup.
    - `until`: its deadline, set when the engine begins to wait for a read.
    - `asked`: True once all shared tiers were asked for its blocks. If they were asked ahead, also
      none was left out and none answered late.
    - `questions`: questions that may be open, including those that other requests asked.
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
        """Return whether its read or a question is pending, before the deadline; in O(1)."""
        if time.monotonic() >= self.until:
            return False
        if self.read is not None:
            return any(not transfer.has_ended for _, transfer in reversed(self.read.parts))
        return any(question.is_open() for question in self.questions)


class Promoter:
    """Decides which requests wait for lower tiers.

    A request waits until its blocks are in host memory, and is then served as a hit. After its
    deadline it is served with the blocks that have arrived, and the read continues for later
    requests. Requests that share a prefix share its read and questions, so the second one's lookup
    takes O(log tokens).
    """

    def __init__(self, core: Core, tiers: Mapping[str, Tier]) -> None:
        self._statistics, self._alignment = core.statistics, core.prefixes.alignment_tokens
        self._tiers, self._lookups = tiers, core.lookups
        self.reads = Reads(core, tiers)
        self.questions = Questions(core)
        self._search = Search(core, tiers, self.reads)

    def waits(self, tracked: TrackedRequest, start_tokens: int) -> bool:
        """Return whether the engine must look a request up again, as a read or answer is pending.

        Begins to read its blocks after the first `start_tokens`, unless computing is faster.
        """
        waits, wait = self._waits(tracked, start_tokens, is_ahead=False), tracked.tier_wait
        if waits:
            tracked.still_waits = self._lookups.is_spent
            if wait is not None and wait.goes_on():
                tracked.still_waits = wait.goes_on
                if (read := wait.read) is not None:
                    # Another request may compute them. What the engine has now is not enough.
                    find = self._search.in_engine(tracked.request, read.end_tokens)
                    if find() is None:
                        tracked.still_waits = lambda: wait.goes_on() and find() is None
        return waits

    def prefetch(self, tracked: TrackedRequest, start_tokens: int) -> list[Transfer] | None:
        """Begin to read the blocks of a queued request before the engine looks it up.

        Returns the transfers that it needs, including others' transfers; None if not known yet.
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
                wait.asked &= now - wait.looked < KNOWN_SECONDS  # else the answer has expired
            is_reading = self._is_reading(tracked, wait, start_tokens)
            self._begin_patience(wait, now)
            if wait.is_stale:
                tracked.hit = None  # it lacks the blocks that have arrived
            if now >= wait.until:  # it gets the blocks that have arrived, and no more are read
                if wait.read is not None:
                    self._statistics.count("late_promotions", 1)
                    tracked.hit = wait.read = None
                wait.looked, wait.is_stale = now, False
                return False
            if is_reading or self._is_asking(wait):
                return True
            same = (start_tokens, num_tokens) == (wait.start_tokens, wait.num_tokens)
            if same and wait.asked and not wait.is_stale and now - wait.looked < OFFER_SECONDS:
                return False
            if wait.is_stale and self._lookups.loads_beginning_of(tracked, start_tokens):
                return False  # another request is already loading the blocks that were read
        tiers = [tier for tier in self._tiers.values() if tier.may_read]
        if not tiers or start_tokens % self._alignment:
            return False
        if self._lookups.is_spent():
            return True
        self._lookups.spend(LOOK_KEYS)
        if wait is None:
            tracked.tier_wait = wait = Wait(start_tokens, num_tokens, now, is_ahead)
        elif not same:
            wait.start_tokens, wait.num_tokens, wait.asked = start_tokens, num_tokens, False
        if not wait.asked:
            self._ask(tracked, wait, tiers)
            if self._is_asking(wait):
                return True
        wait.looked, wait.is_stale = now, False
        wait.read = self._search.find(tracked, start_tokens, tiers)
        self._begin_patience(wait, now)
        return wait.read is not None

    def _begin_patience(self, wait: Wait, now: float) -> None:
        """Set the deadline of a read once the engine waits for it: twice the time to compute it."""
        if wait.read is not None and wait.until == math.inf and not wait.is_ahead:
            computed = self._search.compute_seconds(wait.read)
            twice = MAX_WAIT_SECONDS if computed is None else 2 * computed
            wait.until = now + min(MAX_WAIT_SECONDS, max(MIN_WAIT_SECONDS, twice))

    def _is_reading(self, tracked: TrackedRequest, wait: Wait, start_tokens: int) -> bool:
        """Return whether the read for a request runs and is needed; forget it if not."""
        read, hashes = wait.read, tracked.request.block_hashes
        limit = self._lookups.limit_tokens(tracked, start_tokens)
        if read is None or not self._search.exceeds_engine(
            hashes, start_tokens, min(read.end_tokens, limit)
        ):
            wait.read = None
            return False
        if not all(transfer.has_ended for transfer in read.transfers):
            return True
        if any(one.failed_rows and not self._tiers[one.tier].is_shared for one in read.transfers):
            wait.asked = False  # a shared tier may have the blocks that this one has lost
        wait.read, wait.is_stale = None, True
        return False

    def _ask(self, tracked: TrackedRequest, wait: Wait, tiers: Sequence[Tier]) -> None:
        """Ask the shared tiers among `tiers` for the blocks that are not on their way."""
        shared = [tier for tier in self._tiers.values() if tier.is_shared]
        # A tier that cannot be asked ahead is asked when the engine looks the request up.
        wait.asked = not wait.is_ahead or all(tier.may_read for tier in shared)
        hashes, start = tracked.request.block_hashes, wait.start_tokens
        end = tracked.hints.load_limit(start, wait.num_tokens)
        for tier in tiers:
            if tier.is_shared:
                first = self._search.on_its_way(tracked, start, end, tiers).full_tokens
                wait.questions += self.questions.ask(tier, hashes, first, end, tiers)

    def _is_asking(self, wait: Wait) -> bool:
        """Return whether a request waits for an answer; drop its questions after the last."""
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
