"""Finds the longest prefix of a request in host memory, or the load that it must wait for."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.cache.slots import Mask
from kv_offload.scheduler.request import Hit, TrackedRequest

MAX_WAIT_SECONDS = 5.0
"""How long a request waits for another's load of its prefix before it is served on its own.

A load takes milliseconds; the bound only keeps a stuck load from holding up those that wait."""

OFFER_SECONDS = 0.5
"""How long a request that the engine cannot admit yet gets the same hit, if it is still valid.

The engine asks in every step, and a lookup of all blocks of 32,768 tokens takes 0.3 ms, or 2 ms if
windows or states are missing. A block stored meanwhile is noticed with at most this delay."""

STEP_KEYS = 2048
"""After this many keys, the remaining requests are looked up in later steps.

In blocks of 16 tokens these are 32,768 tokens, more than a step computes or loads. A key takes
0.25 us in host memory and 1 us with a tier (Xeon at 2.8 GHz, November 2026)."""


MAX_LOOKUPS = 2
"""Lookups of a request in a step: a peer can drop a block between its lookup and its lease."""


class Lookups:
    """Looks requests up in host memory, about `STEP_KEYS` keys in a step.

    The engine asks for its waiting requests in order, so those that a step leaves out come first in
    the next one. A lookup that has begun is never cut short, so each step makes at least one.

    The keys of an asynchronous load count as *arriving* until its request is scheduled with them
    (only then does the engine's own prefix cache know the blocks), is looked up again after a
    failure, or ends. Until then other requests that need these keys wait.
    """

    def __init__(self, prefixes: PrefixMap, manager: CacheManager) -> None:
        self._prefixes = prefixes
        self._manager = manager
        self._keys_left = STEP_KEYS
        # The request that loads each arriving key. Requests are indexed at the next comparison.
        self._owner_of: dict[SlotKey, TrackedRequest] = {}
        self._not_indexed: list[TrackedRequest] = []
        self._arrivals = 0

    def next_step(self) -> None:
        """Begin a step."""
        self._keys_left = STEP_KEYS

    def spend(self, keys: int) -> None:
        """Count keys that are looked up."""
        self._keys_left -= keys

    def is_spent(self) -> bool:
        """Return whether the next lookup must wait for another step."""
        return self._keys_left <= 0

    def find(
        self, tracked: TrackedRequest, start_tokens: int, *, is_spent: bool = False
    ) -> Hit | None:
        """Return the tokens after `start_tokens` that host memory can bring now.

        None if the engine must ask again: another request loads some of them, or the step's keys
        are spent. A hit has all tokens of a request only if the model can recompute the last one,
        to sample from it. If only the last slot is left to load, it is computed. While host memory
        does not change, further calls return the same hit for `OFFER_SECONDS` without looking at
        every block.
        """
        prefixes, num_tokens = self._prefixes, tracked.request.num_tokens
        if start_tokens % prefixes.alignment_tokens:
            # The local hit ends inside a block, which is then the target of a copy-on-write:
            # loading into it as well would race. The engine computes the rest of this prompt.
            tracked.hit = self._hit(start_tokens, num_tokens, start_tokens, [])
            return tracked.hit
        hit = tracked.hit
        if hit is not None and self._still_holds(hit, start_tokens, num_tokens):
            return hit
        tracked.hit = None
        # After its deadline it loads on its own.
        patient = time.monotonic() <= tracked.load_deadline
        if patient and (owner := self.loads_beginning_of(tracked, start_tokens)) is not None:
            self._wait(tracked, owner)
            return None
        if is_spent:
            tracked.still_waits = self.is_spent
            return None
        for _ in range(MAX_LOOKUPS):
            end, keys = self._look_up(tracked, start_tokens, patient=patient)
            owner = self._owner(keys) if patient else None
            if owner is not None:
                self._wait(tracked, owner)
                return None
            if self._manager.reserve(keys):
                break
        else:
            end, keys = start_tokens, []
        tracked.load_deadline = math.inf
        tracked.hit = self._hit(start_tokens, num_tokens, end, keys)
        return tracked.hit

    def _look_up(
        self, tracked: TrackedRequest, start_tokens: int, *, patient: bool
    ) -> tuple[int, list[SlotKey]]:
        """Return the end of the readable prefix, and the keys to load."""
        prefixes, hashes = self._prefixes, tracked.request.block_hashes
        limit = self.limit_tokens(tracked, start_tokens)
        known = start_tokens
        if patient:
            known = prefixes.end_within(self.arriving, hashes, start_tokens, limit)
        end, shared = prefixes.longest_hits(hashes, self.readable, start_tokens, limit, known)
        # Not in an answer: prompts do not diverge there, and each turn would cost a state.
        tracked.shared_tokens = shared if shared - end > end - start_tokens else 0
        keys: list[SlotKey] = []
        if end > start_tokens:
            keys = prefixes.needed_keys(hashes, start_tokens, end)
            if not keys:
                end = start_tokens  # groups that read no earlier token have no slots
        return end, keys

    def _hit(self, start: int, num_tokens: int, end: int, keys: list[SlotKey]) -> Hit:
        now = time.monotonic()
        return Hit(start, num_tokens, end, keys, self._manager.forgotten, self._arrivals, now)

    def limit_tokens(self, tracked: TrackedRequest, start_tokens: int) -> int:
        """Return the token at which a load of this request must end.

        The last slot of a request is not loaded alone: its last token is computed anyway.
        """
        prefixes, num_tokens = self._prefixes, tracked.request.num_tokens
        is_long = num_tokens - start_tokens > prefixes.alignment_tokens
        limit = num_tokens if prefixes.serves_whole_requests and is_long else num_tokens - 1
        return tracked.hints.load_limit(start_tokens, limit)

    @staticmethod
    def _wait(tracked: TrackedRequest, owner: TrackedRequest) -> None:
        """Make a request wait for another's load. Successive waits share one deadline."""
        deadline = min(tracked.load_deadline, time.monotonic() + MAX_WAIT_SECONDS)
        tracked.load_deadline = deadline
        tracked.still_waits = lambda: bool(owner.arriving) and time.monotonic() <= deadline

    def loads_beginning_of(
        self, tracked: TrackedRequest, start_tokens: int
    ) -> TrackedRequest | None:
        """Return the request whose load brings the first slot that this one needs, if any does.

        Takes O(1), since a thousand requests can share a prefix that is loaded for one of them. A
        loaded prefix is a hit for every request that shares it. With windows, states and proofs
        that is certain only for requests that share all of it.
        """
        prefixes, hashes = self._prefixes, tracked.request.block_hashes
        first_end = start_tokens + prefixes.alignment_tokens
        end = prefixes.hashed_tokens(hashes, self.limit_tokens(tracked, start_tokens))
        if prefixes.align(end) < first_end:
            return None
        key = prefixes.chain_key(hashes, first_end)
        owner = self.arriving.get(key)
        if owner is None:
            return None
        if not prefixes.serves_whole_requests:
            loaded_end = 0 if owner.loaded is None else owner.loaded[1]
            last = prefixes.chain_key(owner.request.block_hashes, loaded_end)
            if end < loaded_end or prefixes.chain_key(hashes, loaded_end) != last:
                return None
        return owner

    def expect(self, tracked: TrackedRequest, keys: list[SlotKey]) -> None:
        """Make others wait for the keys that this request's asynchronous load brings."""
        tracked.arriving = keys
        self._not_indexed.append(tracked)
        self._arrivals += 1

    def arrived(self, tracked: TrackedRequest) -> None:
        """End the waits of others for this request's load."""
        keys, tracked.arriving = tracked.arriving, []
        if not keys:
            return
        if tracked in self._not_indexed:
            self._not_indexed.remove(tracked)
            return
        for key in keys:
            # Another request that gave up waiting may load the same key.
            if self._owner_of.get(key) is tracked:
                del self._owner_of[key]

    def emptied(self) -> None:
        """Let no request wait for a load of dropped blocks."""
        for tracked in {*self._owner_of.values(), *self._not_indexed}:
            tracked.arriving = []
        self._owner_of.clear()
        self._not_indexed.clear()

    @property
    def arriving(self) -> dict[SlotKey, TrackedRequest]:
        """The arriving keys, and the requests whose loads bring them."""
        for tracked in self._not_indexed:
            self._owner_of.update(dict.fromkeys(tracked.arriving, tracked))
        self._not_indexed.clear()
        return self._owner_of

    def readable(self, keys: Sequence[SlotKey]) -> Mask:
        """Return a mask of the keys that host memory can serve, and spend the keys."""
        self.spend(len(keys))
        return self._manager.readable(keys)

    def _still_holds(self, hit: Hit, start_tokens: int, num_tokens: int) -> bool:
        """Return whether a hit is still valid; checks only what can have changed."""
        if (start_tokens, num_tokens) != (hit.start_tokens, hit.num_tokens):
            return False
        if not hit.keys and self._prefixes.reads_all:
            return False  # a new lookup reads only a few keys
        if time.monotonic() - hit.found_at > OFFER_SECONDS:
            return False
        if self._manager.forgotten != hit.forgotten and not self._still_readable(hit):
            return False
        if self._arrivals != hit.arrivals:
            hit.arrivals = self._arrivals
            return self._owner(hit.keys) is None
        return True

    def _still_readable(self, hit: Hit) -> bool:
        """Return whether the hit's keys are still readable although some keys were dropped."""
        manager = self._manager
        if any(group.sees_next_token for group in self._prefixes.groups):
            return False  # the proof after the end may be gone
        if hit.slots is None:
            if not manager.readable(hit.keys).all() or not manager.reserve(hit.keys):
                return False
            # -1 for a block that is being written here while a peer has it: the peer can drop it.
            slots = manager.find(hit.keys)
            hit.slots = np.where(manager.holds(slots), slots, np.int32(-1))
        elif not manager.keep_their_keys(hit.slots, hit.forgotten):
            return False
        hit.forgotten = manager.forgotten
        return True

    def _owner(self, needed: Sequence[SlotKey]) -> TrackedRequest | None:
        """Return the request whose load brings the first of these keys that arrives; or None."""
        owner_of = self.arriving
        if owner_of.keys().isdisjoint(needed):
            return None
        return next(owner_of[key] for key in needed if key in owner_of)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a key arrives for a request that does not load it."""
        for key, owner in self._owner_of.items():
            assert key in owner.arriving
        for tracked in self._not_indexed:
            assert tracked.arriving
