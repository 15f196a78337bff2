"""Which requests wait for what is read from the tiers below host memory."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.tiers.base import Tier
from kv_offload.tiers.remote import KNOWN_SECONDS, Question

JOB_BYTES = 64 << 20
"""Bytes per promotion job and rank: the part of a prompt that arrives in time can be loaded."""

MAX_WAIT_SECONDS = 5.0
MIN_WAIT_SECONDS = 0.2
"""A request waits for twice the time that computing would take, within these bounds."""

LOOK_KEYS = 32
"""To look a request up here takes as long as so many keys, however few it has of its own. So a step
begins with some 250 of them at most."""

MAX_PROMOTING_SHARE = 2
"""One of so many slots of host memory, at most, is being filled from below at a time, beside what a
tier that hangs may never fill."""


@dataclass(slots=True, eq=False)
class Read:
    """A prefix that is being read, from `start_tokens` to `end_tokens`, for all that share it.

    - `full_tokens`: how far the groups that read all tokens could extend it.
    - `host_tokens`: how far host memory had it when it was looked up.
    - `parts`: what reads it, and from which token on each move brings something.
    """

    start_tokens: int
    end_tokens: int
    full_tokens: int
    host_tokens: int
    parts: list[tuple[int, Transfer]]
    keys: list[SlotKey] = field(default_factory=list)
    """By which others find it, from where they find other reads on."""


@dataclass(slots=True, eq=False)
class Wait:
    """A request's wait for blocks that were looked up below.

    - `start_tokens`, `num_tokens`: what the engine had of it, and how many tokens it has.
    - `looked`: when all of it was looked up last, on the monotonic clock.
    - `is_stale`: True if something has come since then.
    - `is_ahead`: True while the engine has not looked it up: then it does not really wait.
    - `patience_seconds`: how long the engine lets it wait for what is read for it.
    - `until`: when it is computed at the latest, once it waits for a read.
    - `asked`: whether the tiers that must be asked what they have of it were; if ahead, also that
      none was left out or late. `questions` are those that may not have been answered, those
      of others too.
    - `moves`: what is read for it; may have ended.
    """

    start_tokens: int
    num_tokens: int
    looked: float
    is_ahead: bool
    is_stale: bool = False
    patience_seconds: float = 0.0
    until: float = math.inf
    asked: bool = False
    questions: list[Question] = field(default_factory=list)
    moves: list[Transfer] = field(default_factory=list)

    def goes_on(self) -> bool:
        """Return whether what it waits for has not come, and its time is not over; in O(1)."""
        if time.monotonic() >= self.until:
            return False
        if self.moves:
            return not self.moves[-1].has_ended
        return any(question.is_open() for question in self.questions)


class Promoter:
    """Reads what requests need from the tiers into host memory, from where it is loaded as ever.

    Each block is read from the first tier that has it. What that tier has lost is asked of those
    that are shared, and read from there.

    The request waits meanwhile, and the engine asks again; others run. Where its time is over it
    gets what has come by then. Reads go on: what they bring is there for the next one.

    Requests that share a prefix share its read and what a tier was asked of it: of the second
    only the tokens are looked up in which it differs. So it costs O(log tokens) while the first
    waits, and a request that waits costs O(1) a step.
    """

    def __init__(
        self, core: Core, tiers: Mapping[str, Tier], lookups: Lookups, costs: LoadCosts
    ) -> None:
        self._prefixes, self._host = core.prefixes, core.manager
        self._transfers, self._statistics = core.transfers, core.statistics
        self._tell = core.tell
        self._tiers, self._lookups, self._costs = tiers, lookups, costs
        self._readable_tiers: list[Tier] = []
        """Those that may be read, the fastest first, as of when a request was looked up last."""
        self._slot_bytes = core.slots.slot_bytes
        self._job_slots = max(1, JOB_BYTES // self._slot_bytes)
        self._running: dict[Transfer, list[Read]] = {}
        """Moves that have not ended, and the reads that they are parts of."""
        self._coming: dict[SlotKey, Transfer] = {}
        self._reads: dict[SlotKey, Read] = {}
        """By the `chain_keys` of their prefixes."""
        self._asked: dict[SlotKey, Question] = {}
        self._questions: deque[tuple[Question, list[SlotKey]]] = deque()
        """Those in `_asked`, and under which keys, in the order in which they were asked."""

    @property
    def running_slots(self) -> int:
        """Slots that are being filled."""
        return sum(tier.reading_slots for tier in self._tiers.values())

    @property
    def is_asking(self) -> bool:
        """True while a tier is asked something, and the answer is waited for."""
        self._drop_answered()
        return bool(self._questions)

    def waits(self, tracked: TrackedRequest, start_tokens: int) -> bool:
        """Return whether a request is to wait, and the engine to ask again.

        Begins to read what the request needs beyond its first `start_tokens` tokens, where that is
        worth it. Asked again it looks at every block only where something may have changed.
        """
        waits, wait = self._waits(tracked, start_tokens, is_ahead=False), tracked.tier_wait
        if waits:
            tracked.still_waits = self._lookups.budget.is_spent
            if wait is not None and wait.goes_on():
                tracked.still_waits = wait.goes_on
        return waits

    def prefetch(self, tracked: TrackedRequest, start_tokens: int) -> list[Transfer] | None:
        """Begin to read what a queued request needs, before the engine looks it up.

        Returns what is read for it, also for others; None if it must be called again to know.
        """
        wait = tracked.tier_wait
        if wait is not None and not wait.is_ahead:
            return []
        waits, wait = self._waits(tracked, start_tokens, is_ahead=True), tracked.tier_wait
        if waits and (wait is None or wait.questions):
            return None
        return [] if wait is None else [*wait.moves]

    def _waits(self, tracked: TrackedRequest, start_tokens: int, *, is_ahead: bool) -> bool:
        now, num_tokens = time.monotonic(), tracked.request.num_tokens
        wait = tracked.tier_wait
        if wait is not None:
            if wait.is_ahead and not is_ahead:
                wait.is_ahead = False
                wait.asked &= now - wait.looked < KNOWN_SECONDS  # else that is forgotten
            is_reading = self._is_reading(wait)
            self._begin_patience(wait, now)
            if wait.is_stale:
                tracked.hit = None  # what has come since is not in it
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
        self._readable_tiers = [tier for tier in self._tiers.values() if tier.may_read]
        if not self._readable_tiers or start_tokens % self._prefixes.alignment_tokens:
            return False
        if self._lookups.budget.is_spent():
            return True
        self._lookups.budget.spend(LOOK_KEYS)
        if wait is None:
            tracked.tier_wait = wait = Wait(start_tokens, num_tokens, now, is_ahead)
        elif not same:
            wait.start_tokens, wait.num_tokens, wait.asked = start_tokens, num_tokens, False
        if not wait.asked:
            # What is left out ahead is asked when the engine looks it up.
            wait.asked = not is_ahead or all(
                tier.may_read for tier in self._tiers.values() if tier.is_shared
            )
            for tier in self._readable_tiers:
                if tier.is_shared:
                    self._ask(tier, tracked, wait)
            if self._is_asking(wait):
                return True
        wait.looked, wait.is_stale = now, False
        self._look(tracked, wait)
        self._begin_patience(wait, now)
        return bool(wait.moves)

    @staticmethod
    def _begin_patience(wait: Wait, now: float) -> None:
        """Bound the wait for what is read, once the engine waits for it."""
        if wait.moves and wait.until == math.inf and not wait.is_ahead:
            wait.until = now + wait.patience_seconds

    # -- what the tiers have -------------------------------------------------------------------

    def _ask(self, tier: Tier, tracked: TrackedRequest, wait: Wait) -> None:
        """Ask a tier which blocks it has that a hit could need and nothing above has.

        What it was asked of the same prefix is not asked again while the answer is awaited, nor is
        what is being read or loaded.
        """
        prefixes, hashes, start = self._prefixes, tracked.request.block_hashes, wait.start_tokens
        end = tracked.hints.load_limit(start, wait.num_tokens)
        first = self._on_its_way(tracked, start, end).full_tokens
        self._drop_answered()
        asked_end = prefixes.end_within(self._asked, hashes, first, end)
        if asked_end > first:
            wait.questions.append(self._asked[prefixes.chain_key(hashes, asked_end)])
        keys: list[SlotKey] = []
        for group in prefixes.groups:
            slots = range(asked_end // group.block_tokens, end // group.block_tokens)
            # One slot more may be the proof of a draft head's hit.
            keys += prefixes.slot_keys(hashes, group, slots.start, slots.stop + 1)
        self._lookups.budget.spend(len(keys))
        missing = self._host.find(keys) < 0 if keys else np.zeros(0, bool)
        for other in self._readable_tiers:
            if not other.is_shared and missing.any():
                missing &= ~other.readable(keys)
        question = tier.ask(
            [key for key, absent in zip(keys, missing.tolist(), strict=True) if absent],
            are_chained=len(prefixes.groups) == 1 and prefixes.reads_all,
        )
        if question is not None:
            wait.questions.append(question)
            chain_keys = prefixes.chain_keys(hashes, asked_end, end)
            self._asked.update(dict.fromkeys(chain_keys, question))
            self._questions.append((question, chain_keys))

    def _drop_answered(self) -> None:
        """Drop what was answered, or is not waited for any longer; answers come in order."""
        while self._questions and not self._questions[0][0].is_open():
            question, keys = self._questions.popleft()
            _remove(self._asked, keys, question)

    def _is_asking(self, wait: Wait) -> bool:
        """Return whether the answer to a question about a request is to be waited for."""
        if not wait.questions:
            return False
        if any(question.is_open() for question in wait.questions):
            return True
        is_late = any(question.is_late for question in wait.questions)
        wait.asked &= not (is_late and wait.is_ahead)
        self._statistics.count("late_lookups", is_late)
        wait.questions.clear()
        wait.is_stale = True
        self._drop_answered()
        return False

    # -- what is read --------------------------------------------------------------------------

    def _is_reading(self, wait: Wait) -> bool:
        """Return whether a read for a request has not ended. The last read ends last."""
        moves = wait.moves
        if not moves:
            return False
        while moves and moves[-1].has_ended:
            move = moves.pop()
            if move.failed_rows and not self._tiers[move.tier].is_shared:
                wait.asked = False  # a shared tier may have what this one has lost
        if not moves:
            wait.is_stale = True
        return bool(moves)

    def _give_up(self, tracked: TrackedRequest, wait: Wait) -> None:
        """Let a request go on with what has come; nothing more is read for it."""
        if wait.moves:
            self._statistics.count("late_promotions", 1)
            tracked.hit = None
            wait.moves.clear()

    def _on_its_way(self, tracked: TrackedRequest, start: int, limit: int) -> Read:
        """Return how much of a request is loaded or read already for others that share it.

        With windows, states and proofs, where an end is a hit only with what is before it, that is
        nothing, or all that there is.
        """
        prefixes, hashes = self._prefixes, tracked.request.block_hashes
        nothing = Read(start, start, start, start, [])
        end = prefixes.end_within(self._lookups.arriving, hashes, start, limit)
        if end > start and self._lookups.loads_beginning_of(tracked, start) is not None:
            read = Read(start, end, end, end, [])
        else:
            end = prefixes.end_within(self._reads, hashes, start, limit)
            if end <= start:
                return nothing
            read = self._reads[prefixes.chain_key(hashes, end)]
            if read.start_tokens > start or not all(self._ends(move) for _, move in read.parts):
                return nothing
        if prefixes.serves_whole_requests:
            read_end = end
        elif end == read.full_tokens and not self._has_more(hashes, end, limit):
            read_end = read.end_tokens
        else:
            return nothing
        if read_end <= start or prefixes.chain_key(hashes, read_end) not in self._host:
            return nothing  # host memory was emptied since
        parts = [(first, move) for first, move in read.parts if first < read_end]
        return Read(start, read_end, end, min(read.host_tokens, read_end), parts)

    def _ends(self, move: Transfer) -> bool:
        """Return whether a read has ended, or can be expected to."""
        return move not in self._running or not self._tiers[move.tier].is_stuck

    def _has_more(self, hashes: Sequence[bytes], end: int, limit: int) -> bool:
        """Return whether a prefix may go beyond `end`, in groups that read all."""
        prefixes = self._prefixes
        next_end = end + prefixes.alignment_tokens
        if next_end > prefixes.hashed_end(hashes, limit):
            return False
        key = prefixes.chain_key(hashes, next_end)
        self._lookups.budget.spend(1)
        return key in self._host or any(tier.may_have(key) for tier in self._readable_tiers)

    def _look(self, tracked: TrackedRequest, wait: Wait) -> None:
        """Look a request up in host memory and below, and have it wait for what is worth it."""
        start, hashes = wait.start_tokens, tracked.request.block_hashes
        limit = self._lookups.limit_tokens(tracked, start)
        read = self._on_its_way(tracked, start, limit)
        known = read.end_tokens
        if known > start and not self._has_more(hashes, known, limit):
            if read.parts and self._is_worth_it(read, {}):
                self._wait_for(wait, read)
        elif (found := self._find(tracked.request, read, limit)) is not None:
            self._wait_for(wait, found)

    def _find(self, request: Request, known: Read, limit: int) -> Read | None:
        """Look up what is beyond `known`, and begin to read it; None if that is not worth it."""
        prefixes, hashes, start = self._prefixes, request.block_hashes, known.end_tokens
        end, full = prefixes.longest_hits(hashes, self._readable, start, limit)
        keys = prefixes.needed_keys(hashes, start, end) if end > start else []
        host_slots = self._host.find(keys)
        absent = host_slots < 0
        missing = [key for key, gone in zip(keys, absent.tolist(), strict=True) if gone]
        first_tokens = prefixes.needed_tokens(start, end)
        parts = {move: at for at, move in known.parts}
        for row in np.flatnonzero(~absent).tolist():
            if (move := self._coming.get(keys[row])) is not None:
                parts.setdefault(move, int(first_tokens[row]))
        if not missing and not parts:
            return None
        host_end = known.host_tokens
        if host_end == start:
            host_end = prefixes.longest_hit(hashes, self._host_readable, start, limit)
        read = Read(known.start_tokens, end, full, host_end, [])
        sources = self._locate(missing)
        read.parts = [(at, move) for move, at in parts.items()]
        if not self._is_worth_it(read, Counter(sources)):
            return None
        along = distinct(host_slots[self._host.readable(keys)])
        promoted = self._promote(missing, sources, along)
        self._host.prepare_copy(along)  # a quota evicts none of what this reads the rest of
        try:
            for tell in self._tell.promotions:
                tell(request, start, end, [move for move, _ in promoted])
        finally:
            self._host.complete_load(along)
        first_tokens = first_tokens[absent]
        read.parts += [(int(first_tokens[rows].min()), move) for move, rows in promoted]
        begun = sum(len(rows) for _, rows in promoted)
        if begun < len(missing):  # there was no room for the others
            read.end_tokens = read.full_tokens = min(end, int(first_tokens[begun:].min()))
        complete = prefixes.serves_whole_requests or begun == len(missing)
        if read.parts and read.end_tokens > start and complete:
            read.keys = prefixes.chain_keys(hashes, start, read.full_tokens)
            self._reads.update(dict.fromkeys(read.keys, read))
            for _, move in read.parts:
                self._running[move].append(read)
        return read

    def _wait_for(self, wait: Wait, read: Read) -> None:
        """Have a request wait for a read, for about as long as it would take to compute."""
        wait.moves = [move for _, move in read.parts]
        computed = self._compute_seconds(read)
        twice = MAX_WAIT_SECONDS if computed is None else 2 * computed
        wait.patience_seconds = min(MAX_WAIT_SECONDS, max(MIN_WAIT_SECONDS, twice))

    def _compute_seconds(self, read: Read) -> float | None:
        return self._costs.compute_seconds(read.end_tokens - read.host_tokens)

    def _host_readable(self, keys: Sequence[SlotKey]) -> NDArray[np.bool_]:
        self._lookups.budget.spend(len(keys))
        return self._host.readable(keys)

    def _readable(self, keys: Sequence[SlotKey]) -> NDArray[np.bool_]:
        """Say for each key whether host memory has it, or can have it from below."""
        self._lookups.budget.spend(len(keys))
        slots = self._host.find(keys)
        readable = self._host.readable(keys)
        if readable.all():
            return readable
        unknown = slots < 0
        for tier in self._readable_tiers:
            readable |= unknown & tier.readable(keys)
        for place in np.flatnonzero(~readable & ~unknown).tolist():
            move = self._coming.get(keys[place])
            readable[place] = move is not None and self._ends(move)
        return readable

    def _locate(self, keys: list[SlotKey]) -> list[Tier]:
        """Return the first tier that has each of these keys, which one of them had just now."""
        tiers = self._readable_tiers
        # What peers have forgotten meanwhile is read from where that may fail: no disk holds it.
        last = next((tier for tier in reversed(tiers) if tier.manager is None), tiers[-1])
        sources = [last] * len(keys)
        for tier in reversed(tiers):
            for row in np.flatnonzero(tier.readable(keys)).tolist():
                sources[row] = tier
        return sources

    def _is_worth_it(self, read: Read, missing: Mapping[Tier, int]) -> bool:
        """Return whether to read `missing` slots more and load all of `read`, or compute instead.

        Tiers are read at the same time. Without evidence, and where it is close, the answer is to
        read.
        """
        computed = self._compute_seconds(read)
        tiers = {*missing, *(self._tiers[move.tier] for _, move in read.parts)}
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

    def _promote(
        self, keys: list[SlotKey], sources: list[Tier], along: NDArray[np.int32]
    ) -> list[tuple[Transfer, NDArray[np.intp]]]:
        """Begin to read the first of `keys`, as many as host memory has room for.

        Each comes from its tier in `sources`. Returns the moves, and which of the keys each reads.
        """
        filling = sum(tier.reading_slots for tier in self._tiers.values() if not tier.is_stuck)
        room = self._host.usable_slots // MAX_PROMOTING_SHARE - filling
        keys = keys[: max(0, room)]
        slots = self._host.prepare_store(keys, along) if keys else along[:0]
        begun: list[tuple[Transfer, NDArray[np.intp]]] = []
        for tier in self._readable_tiers:
            rows = np.array([row for row in range(len(slots)) if sources[row] is tier], np.intp)
            if not len(rows):
                continue
            tier.reading_slots += len(rows)
            own = [keys[row] for row in rows.tolist()]
            places, most = tier.begin_read(own), self._job_slots
            for move in self._transfers.plan_tier_copy(
                Kind.PROMOTE, tier, own, slots[rows], places, max_slots=most
            ):
                self._coming.update(dict.fromkeys(move.keys, move))
                self._running[move] = []
                begun.append((move, rows[: len(move.keys)]))
                rows = rows[len(move.keys) :]
        return begun

    def ended(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """Take in the end of a read; `failed` says which slots hold garbage."""
        tier = self._tiers[move.tier]
        tier.reading_slots -= len(move.slots)
        for read in self._running.pop(move):
            # Promoted blocks may be evicted: requests that share them from now on look them up.
            _remove(self._reads, read.keys, read)
        for key in move.keys:
            # Once host memory was emptied, another move may bring it.
            if self._coming.get(key) is move:
                del self._coming[key]
        self._host.complete_store(move.slots[failed], ok=False)
        self._host.complete_store(move.slots[~failed])
        tier.end_read(move, failed)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a key comes from nowhere, or a request waits for nothing."""
        for name, tier in self._tiers.items():
            running = [len(move.slots) for move in self._running if move.tier == name]
            assert tier.reading_slots == sum(running)
        for key, move in self._coming.items():
            assert move in self._running
            assert key in move.keys
        for key, read in self._reads.items():
            assert key in read.keys
            assert any(read in self._running.get(move, ()) for _, move in read.parts)
        asked = [key for _, keys in self._questions for key in keys]
        assert self._asked.keys() <= {*asked}


def _remove(table: dict[SlotKey, Any], keys: Sequence[SlotKey], value: Any) -> None:
    """Remove the keys that still have this value."""
    for key in keys:
        if table.get(key) is value:
            del table[key]
