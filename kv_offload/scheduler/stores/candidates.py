"""The blocks that a step examines for storing, and how far each request was examined."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.scheduler.request import StoreCursor
from kv_offload.scheduler.statistics import Statistics

MAX_SLOTS_PER_STEP = 1024
"""Maximum slots examined for the running requests of a step, and for each request that ends.

It bounds the planner's time on the scheduler's thread however long a prompt is; the rest follows in
later steps."""

MAX_BACKLOG_SLOTS = 1 << 16
"""Maximum waiting slots. Above it the oldest are dropped: the engine reuses their blocks first."""

Span: TypeAlias = tuple[StoreCursor, int, int, int]
"""Slots of one request to examine: cursor, position of the cache group, first slot and end
(exclusive)."""


def keys_of_spans(
    spans: Iterable[Span], keys: Sequence[SlotKey]
) -> Iterator[tuple[StoreCursor, int, int, Sequence[SlotKey]]]:
    """Yield cursor, group position, first slot and keys of each span; `keys` has those of all."""
    at = 0
    for cursor, position, first, last in spans:
        end = at + last - first
        yield cursor, position, first, keys[at:end]
        at = end


@dataclass(slots=True)
class EndedRequest:
    """An ended request with blocks that wait, from its cursor to `end_tokens`.

    Nothing pins these blocks: each is stored only if the engine's pool still knows it under its
    key. `slots` is how many were left at the last count.
    """

    cursor: StoreCursor
    end_tokens: int
    slots: int


class StoreCandidates:
    """Collects the slots that a step examines, up to a limit.

    `examine` only notes slots and moves the request's cursor past them. The choice is made from all
    of them together, since a step of decodes has one block from each of many requests. If a budget
    cuts it short, `rewind` moves the cursor back. What is left of a request that ends waits in the
    backlog.
    """

    def __init__(
        self,
        prefixes: PrefixMap,
        manager: CacheManager,
        statistics: Statistics,
        max_share: float,
        *,
        prompt_only: bool,
    ) -> None:
        """Examine at most `max_share` of the manager's slots for one request.

        More would evict its beginning, without which the rest cannot be hit.
        """
        self._prefixes, self._manager, self._statistics = prefixes, manager, statistics
        self._max_share, self._prompt_only = max_share, prompt_only
        self._groups = tuple(
            (position, group, group.block_tokens, prefixes.block_hashes[position])
            for position, group in enumerate(prefixes.groups)
            if not group.is_scratch
        )
        self._slots_per_token = sum(1 / tokens for _, _, tokens, _ in self._groups)
        # With one group vLLM names each block once its tokens are known, and hashes end there.
        self._names_follow = len(prefixes.groups) == 1 and not prefixes.unnamed_tokens
        self._spans: list[Span] = []
        self._keys: list[SlotKey] = []  # of all spans
        self._unfinished: set[str] = set()
        self.paused = False
        """True while stores are paused."""
        self._examinable = MAX_SLOTS_PER_STEP
        """Slots that may still be examined in this step."""
        self._backlog: deque[EndedRequest] = deque()  # the oldest first
        self._examined = 0  # of the backlog, in this step
        self.waiting_slots = 0
        """Slots that wait in the backlog."""

    def next_step(self) -> None:
        """Begin a step, which may examine `MAX_SLOTS_PER_STEP` slots."""
        self._examinable = MAX_SLOTS_PER_STEP
        self._examined = 0

    def examine(self, cursor: StoreCursor, end_tokens: int) -> None:
        """Note a request's slots that end at or below `end_tokens`, from its cursor on.

        A request that does not get that far, whatever the reason, is unfinished.
        """
        request, block_ids, next_slot = cursor.request, cursor.block_ids, cursor.next_slot
        hashes = request.block_hashes
        end_tokens = self.wanted(cursor, end_tokens)
        known = end_tokens if self._names_follow else self._named(cursor, end_tokens)
        for position, group, tokens, slot_hashes in self._groups:
            at = next_slot[position]
            # Up to where slots are full, have blocks and names, and may be examined.
            last = min(
                known // tokens,
                len(block_ids[position]),
                len(hashes) // slot_hashes,
                at + self._examinable,
            )
            if at < last:
                self._examinable -= last - at
                if last - at == 1 and not group.group_id:
                    self._keys.append(hashes[last * slot_hashes - 1])
                else:
                    self._keys += self._prefixes.slot_keys(hashes, group, at, last)
                self._spans.append((cursor, position, at, last))
                next_slot[position] = at = last
            if end_tokens >= (at + 1) * tokens:
                self._unfinished.add(request.request_id)

    def take(self) -> tuple[list[Span], list[SlotKey]]:
        """Return the spans noted since the last call, with the keys of all in order."""
        noted = self._spans, self._keys
        self._spans, self._keys = [], []
        return noted

    def rewind(self, span: Span, passed: int) -> None:
        """Examine a span again in a later step, except for its first `passed` slots."""
        cursor, position, first, _ = span
        cursor.next_slot[position] = min(cursor.next_slot[position], first + passed)
        self._unfinished.add(cursor.request.request_id)

    def take_unfinished(self) -> set[str]:
        """Return the requests that have more to store than was examined and chosen since."""
        unfinished, self._unfinished = self._unfinished, set()
        return unfinished

    def skip(self, cursor: StoreCursor, end_tokens: int) -> None:
        """Move a cursor to `end_tokens`: host memory has the slots before it."""
        next_slot = cursor.next_slot
        for position, _, tokens, _ in self._groups:
            next_slot[position] = max(next_slot[position], end_tokens // tokens)

    def count_left(self, cursor: StoreCursor, end_tokens: int) -> int:
        """Return how many named slots below `end_tokens` are after a cursor, wanted or not."""
        prompt_tokens = cursor.request.num_prompt_tokens
        if self._prompt_only:
            end_tokens = min(end_tokens, prompt_tokens)
        next_slot = cursor.next_slot
        return sum(
            self._prefixes.count_named(
                group, range(next_slot[position], end_tokens // tokens), prompt_tokens
            )
            for position, group, tokens, _ in self._groups
        )

    def _count_waiting(self, cursor: StoreCursor, end_tokens: int) -> int:
        """Return how many slots after a cursor have blocks and names by `end_tokens`."""
        named = self._named(cursor, self.wanted(cursor, end_tokens))
        num_hashes, waiting = len(cursor.request.block_hashes), 0
        for position, _, tokens, slot_hashes in self._groups:
            blocks = len(cursor.block_ids[position])
            end = min(named // tokens, blocks, num_hashes // slot_hashes)
            waiting += max(0, end - cursor.next_slot[position])
        return waiting

    def _named(self, cursor: StoreCursor, end_tokens: int) -> int:
        """Return the token up to which blocks will be named once `end_tokens` are computed."""
        if self._names_follow:
            return end_tokens
        prefixes = self._prefixes
        # Drafts and placeholders have no hashes. With several groups vLLM hashes only up to a
        # multiple of the alignment; later blocks get their hash in a later step, or never.
        known = max(0, min(end_tokens, cursor.request.num_tokens) - prefixes.unnamed_tokens)
        return prefixes.align(known) if len(prefixes.groups) > 1 else known

    def wanted(self, cursor: StoreCursor, end_tokens: int) -> int:
        """Return the token up to which a request should be stored."""
        if self.paused or not cursor.hints.store:
            return 0
        if self._prompt_only:
            end_tokens = min(end_tokens, cursor.request.num_prompt_tokens)
        if self._max_share < 1:
            slots = int(self._max_share * self._manager.usable_slots)
            end_tokens = min(end_tokens, self._prefixes.align(int(slots / self._slots_per_token)))
        return end_tokens

    # -- the backlog ---------------------------------------------------------------------------

    def keep(self, cursor: StoreCursor, end_tokens: int) -> int:
        """Take over the cursor of an ended request; return how many of its slots wait."""
        slots = self._count_waiting(cursor, end_tokens)
        if slots:
            self._backlog.append(EndedRequest(cursor, end_tokens, slots))
            self.waiting_slots += slots
        while self.waiting_slots > MAX_BACKLOG_SLOTS:
            oldest = self._backlog.popleft().slots
            self.waiting_slots -= oldest
            self._statistics.skipped("no_budget", oldest)
        return slots

    def examine_backlog(self, slots_left: int) -> None:
        """Examine at most `slots_left` slots, the oldest first, before running requests."""
        withheld = max(0, self._examinable - max(0, slots_left))
        self._examinable -= withheld
        for ended in self._backlog:
            if not self._examinable:
                break
            self._examined += 1
            self.examine(ended.cursor, ended.end_tokens)
        self._examinable += withheld

    def forget_chosen(self, *, resting: bool) -> None:
        """Remove the chosen slots from the examined part of the backlog.

        `resting`: nothing is computed, loaded or stored, so no GPU block will become free by
        itself. If nothing could be planned then, the backlog is dropped, so that the engine rests.
        """
        if not self._backlog:
            return
        before = self.waiting_slots
        examined = [self._backlog.popleft() for _ in range(self._examined)]
        for ended in reversed(examined):
            counted, ended.slots = ended.slots, self._count_waiting(ended.cursor, ended.end_tokens)
            self.waiting_slots += ended.slots - counted
            if ended.slots:
                self._backlog.appendleft(ended)
        if self.waiting_slots == before and resting:
            self.drop_backlog()

    def drop_backlog(self) -> None:
        """Drop the backlog, and count its slots as skipped."""
        self._statistics.skipped("no_budget", self.waiting_slots)
        self.waiting_slots = 0
        self._backlog.clear()
