"""Which requests wait for what is read from the tier below host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.scheduler.events.announcer import Announcer
from kv_offload.scheduler.loads.choice import MARGIN, LoadChoice
from kv_offload.scheduler.loads.lookups import OFFER_SECONDS
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.statistics import Statistics
from kv_offload.scheduler.tiers.shared_tier import Question
from kv_offload.scheduler.tiers.tier import Tier
from kv_offload.scheduler.timing import CopyRate
from kv_offload.scheduler.transfers import Kind, Transfer, TransferTable

JOB_BYTES = 64 << 20
"""Of a job, on each rank: what came of a long prompt before its time was over can be loaded."""

MAX_WAIT_SECONDS = 5.0
MIN_WAIT_SECONDS = 0.2
"""A request waits for twice the time that computing would take, within these bounds."""

MAX_PROMOTING_SHARE = 2
"""One of so many slots of host memory, at most, is being filled from below at a time."""


@dataclass(slots=True, eq=False)
class Wait:
    """What is known of a request that was looked up below.

    - `start_tokens`, `num_tokens`: what the engine had of it, and how many tokens it has.
    - `looked`: when all of it was looked up last, on the monotonic clock; negative where something
      has come since.
    - `until`: when it is computed at the latest; None before anything is read for it.
    - `asked`: whether the tier was asked what it has of it, if it must be; `question` is what it
      may not have answered.
    """

    start_tokens: int
    num_tokens: int
    looked: float
    until: float | None = None
    asked: bool = False
    question: Question | None = None
    moves: set[Transfer] = field(default_factory=set)
    """What is read for it, and has not ended."""


class Promotions:
    """Reads what requests need from the tier into host memory, from where it is loaded as ever.

    The request waits meanwhile, and the engine asks again; others run. Where its time is over it
    gets what has come by then. Reads go on: what they bring is there for the next one.
    """

    def __init__(
        self,
        prefixes: PrefixMap,
        host: CacheManager,
        tier: Tier,
        transfers: TransferTable,
        choice: LoadChoice,
        statistics: Statistics,
        slot_bytes: int,
        announcer: Announcer | None = None,
    ) -> None:
        self._prefixes = prefixes
        self._host = host
        self._tier = tier
        self._transfers = transfers
        self._choice = choice
        self._statistics = statistics
        self._slot_bytes = slot_bytes
        self._announcer = announcer
        self._job_slots = max(1, JOB_BYTES // slot_bytes)
        self._waiting_for: dict[Transfer, list[Wait]] = {}
        self._coming: dict[SlotKey, Transfer] = {}
        self.rate = CopyRate()
        """Of reads."""
        self.running_slots = 0
        """Slots that are being filled."""

    def waits(self, tracked: TrackedRequest, start_tokens: int) -> bool:
        """Whether a request is to wait, and the engine to ask again.

        Begins to read what the request needs beyond its first `start_tokens` tokens, where that is
        worth it. Asked again it looks at every block only where something may have changed.
        """
        now, num_tokens = time.monotonic(), tracked.request.num_tokens
        wait = tracked.tier_wait
        if wait is not None:
            if wait.looked < 0:
                tracked.offer = None  # what has come since is not in it
            if wait.until is not None and now >= wait.until:
                self._give_up(tracked, wait)
                wait.looked = now
                return False
            if wait.moves or self._is_asking(wait):
                return True
            same = (start_tokens, num_tokens) == (wait.start_tokens, wait.num_tokens)
            if same and now - wait.looked < OFFER_SECONDS:
                return False
        if not self._tier.may_read or start_tokens % self._prefixes.alignment_tokens:
            return False
        if wait is None:
            tracked.tier_wait = wait = Wait(start_tokens, num_tokens, now)
        elif not same:
            wait.start_tokens, wait.num_tokens, wait.asked = start_tokens, num_tokens, False
        wait.looked = now
        if self._tier.is_shared and not wait.asked:
            wait.asked = True
            wait.question = self._ask(tracked, wait)
            if self._is_asking(wait):
                return True
        self._look(tracked, wait)
        return bool(wait.moves)

    def _ask(self, tracked: TrackedRequest, wait: Wait) -> Question | None:
        """Ask the tier which blocks it has that host memory lacks and a hit could need."""
        prefixes, hashes = self._prefixes, tracked.request.block_hashes
        end_tokens = tracked.wishes.load_limit(wait.start_tokens, wait.num_tokens)
        keys: list[SlotKey] = []
        for group in prefixes.groups:
            first, last = (at // group.block_tokens for at in (wait.start_tokens, end_tokens))
            # One slot more may be the proof of a draft head's hit.
            keys += prefixes.slot_keys(hashes, group, first, last + 1)
        missing = (self._host.find(keys) < 0).tolist() if keys else []
        return self._tier.ask([key for key, absent in zip(keys, missing, strict=True) if absent])

    def _is_asking(self, wait: Wait) -> bool:
        """Whether the answer to a request's question is to be waited for."""
        if wait.question is None:
            return False
        if wait.question.is_open():
            return True
        self._statistics.count("late_lookups", wait.question.is_late)
        wait.question = None
        wait.looked = -OFFER_SECONDS
        return False

    def _give_up(self, tracked: TrackedRequest, wait: Wait) -> None:
        """Let a request go on with what has come; nothing more is read for it."""
        if wait.moves:
            self._statistics.count("late_promotions", 1)
            tracked.offer = None
        for move in wait.moves:
            self._waiting_for[move].remove(wait)
        wait.moves.clear()

    def _look(self, tracked: TrackedRequest, wait: Wait) -> None:
        """Look a request up in host memory and below, and have it wait for what is worth it."""
        prefixes, request, start = self._prefixes, tracked.request, wait.start_tokens
        hashes = request.block_hashes
        limit = request.num_tokens if prefixes.serves_whole_requests else request.num_tokens - 1
        limit = tracked.wishes.load_limit(start, limit)
        end = prefixes.longest_hit(hashes, self._readable, start, limit)
        if end <= start:
            return
        keys = prefixes.needed_keys(hashes, start, end)
        host_slots = self._host.find(keys)
        unknown = (host_slots < 0).tolist()
        missing = [key for key, absent in zip(keys, unknown, strict=True) if absent]
        under_way = {
            self._coming[key]
            for key, absent in zip(keys, unknown, strict=True)
            if not absent and key in self._coming
        }
        if not missing and not under_way:
            return
        host_end = prefixes.longest_hit(hashes, self._host.readable, start, limit)
        computed = self._choice.compute_seconds(end - host_end)
        if not self._is_worth_it(computed, len(missing), len(keys)):
            return
        readable = host_slots[self._host.readable(keys)]
        promoted = self._promote(missing, readable)
        if self._announcer is not None and promoted:
            pairs = (zip(move.keys, move.slots.tolist(), strict=True) for move in promoted)
            slot_of = dict(chain.from_iterable(pairs))
            self._announcer.remember_prefix(request, start, end, slot_of)
        moves = under_way | promoted
        for move in moves:
            self._waiting_for[move].append(wait)
        wait.moves = moves
        if moves and wait.until is None:
            twice = MAX_WAIT_SECONDS if computed is None else 2 * computed
            wait.until = wait.looked + min(MAX_WAIT_SECONDS, max(MIN_WAIT_SECONDS, twice))

    def _readable(self, keys: Sequence[SlotKey]) -> NDArray[np.bool_]:
        """Say for each key whether host memory has it, or can have it from below."""
        slots = self._host.find(keys)
        readable = self._host.readable(keys)
        if readable.all():
            return readable
        unknown = slots < 0
        readable |= unknown & self._tier.readable(keys)
        for place in np.flatnonzero(~readable & ~unknown).tolist():
            readable[place] = keys[place] in self._coming
        return readable

    def _is_worth_it(self, computed: float | None, missing: int, needed: int) -> bool:
        """Whether to read `missing` slots and load the `needed` ones, or compute instead.

        Without evidence, and where it is close, the answer is to read.
        """
        speed = self.rate.measured_bytes_per_second
        if not self._choice.measured or speed is None or computed is None:
            return True
        read = (self.running_slots + missing) * self._slot_bytes / speed
        read += self._choice.load_seconds(needed)
        # Now and then one is read all the same, to measure the tier again.
        if computed * MARGIN >= read or self.rate.is_to_be_tried:
            self.rate.count_hit(computed=False)
            return True
        self.rate.count_hit(computed=True)
        return False

    def _promote(self, keys: list[SlotKey], along: NDArray[np.int32]) -> set[Transfer]:
        """Begin to read the first of `keys`, as many as host memory has room for."""
        room = self._host.usable_slots // MAX_PROMOTING_SHARE - self.running_slots
        keys = keys[: max(0, room)]
        slots = self._host.prepare_store(keys, along) if keys else along[:0]
        if not len(slots):
            return set()
        keys = keys[: len(slots)]
        moves = self._transfers.plan_tier_copy(
            Kind.PROMOTE,
            keys,
            slots,
            self._tier.begin_read(keys),
            self._tier.generation,
            max_slots=self._job_slots,
        )
        for move in moves:
            self._coming.update(dict.fromkeys(move.keys, move))
            self._waiting_for[move] = []
        self.running_slots += len(slots)
        return set(moves)

    def ended(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """Take in the end of a read; `failed` says which slots hold garbage."""
        self.running_slots -= len(move.slots)
        for wait in self._waiting_for.pop(move):
            wait.moves.discard(move)
            if not wait.moves:
                wait.looked = -OFFER_SECONDS
        for key in move.keys:
            # Once host memory was emptied, another move may bring it.
            if self._coming.get(key) is move:
                del self._coming[key]
        self._host.complete_store(move.slots[failed], ok=False)
        self._host.complete_store(move.slots[~failed])
        self._tier.end_read(move, failed)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a key comes from nowhere, or a request waits for nothing."""
        assert self.running_slots == sum(len(move.slots) for move in self._waiting_for)
        for key, move in self._coming.items():
            assert move in self._waiting_for
            assert key in move.keys
        for move, waits in self._waiting_for.items():
            assert all(move in wait.moves for wait in waits)
