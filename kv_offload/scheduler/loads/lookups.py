"""Which prefix of a waiting request host memory has, and which request waits for another's load."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import PrefixMap, SlotKey
from kv_offload.scheduler.request import Offer, TrackedRequest

MAX_WAIT_SECONDS = 5.0
"""How long a request waits for another's load of its prefix before it is served on its own.

A load takes milliseconds; the bound only keeps one stuck load from holding up its followers."""

OFFER_SECONDS = 0.5
"""How long a request that the engine cannot admit yet is answered as before, if that still holds.

The engine asks in every step, and to look at all blocks of a prompt of 32,768 tokens takes 0.3 ms,
and 2 ms where windows or states are missing. So what is stored of its prefix meanwhile is noticed
this much later, at most."""


STEP_KEYS = 8192
"""Keys looked up in one step, after which requests that were not looked up yet wait for the next.

That is the whole of a prompt of 131,072 tokens in blocks of 16. A key takes 0.25 us in host memory
and up to 1 us with a tier (Xeon at 2.8 GHz, November 2026)."""


class LookupBudget:
    """Bounds the look-ups of one step, in keys.

    The engine asks for its waiting requests in their order. So those that a step leaves out come
    first in the next one, and a look-up that has begun is never cut: a step makes at least one.
    """

    def __init__(self) -> None:
        self.next_step()

    def next_step(self) -> None:
        """Begin a step."""
        self._left = STEP_KEYS

    def spend(self, keys: int) -> None:
        """Count keys that are looked up."""
        self._left -= keys

    @property
    def is_spent(self) -> bool:
        """Whether no other look-up is to begin in this step."""
        return self._left <= 0


class Lookups:
    """Looks requests up.

    The keys of an asynchronous load count as *arriving* until its request is scheduled with them
    (only then does the engine's own prefix cache know the blocks), is looked up again after a
    failure, or ends. Until then other requests that need these keys wait.
    """

    def __init__(self, prefixes: PrefixMap, manager: CacheManager) -> None:
        self._prefixes = prefixes
        self._manager = manager
        self.budget = LookupBudget()
        # Who loads an arriving key. Requests are indexed when another one is compared with them.
        self._owner_of: dict[SlotKey, TrackedRequest] = {}
        self._not_indexed: list[TrackedRequest] = []
        self._arrivals = 0

    def match(self, tracked: TrackedRequest, start_tokens: int) -> int | None:
        """Return how many tokens beyond `start_tokens` host memory can bring now.

        None says to ask again: another request loads a part of them, or this step has made enough
        look-ups. All tokens of a request are brought only where the model can compute the last one
        again, to have something to sample from. Where nothing but the last slot is missing it is
        computed. Asked again for the same request it answers the same, unless host memory changed;
        then without another look at every block, for `OFFER_SECONDS`.
        """
        prefixes, request = self._prefixes, tracked.request
        if start_tokens % prefixes.alignment_tokens:
            # The local hit ends inside a block, which is then the target of a copy-on-write:
            # loading into it as well would race. The engine computes the rest of this prompt.
            return 0
        if self.waits_for_load(tracked):
            return None
        num_tokens = request.num_tokens
        offer = tracked.offer
        if offer is not None and self._still_holds(offer, start_tokens, num_tokens):
            return offer.end_tokens - start_tokens
        tracked.offer = None
        # Else it has waited for long enough, and loads on its own.
        patient = tracked.waits_for is None or self._is_patient(tracked)
        if patient and (owner := self.loads_beginning_of(tracked, start_tokens)) is not None:
            self._wait(tracked, owner)
            return None
        if self.budget.is_spent:
            return None
        hashes = request.block_hashes
        limit = self.limit_tokens(tracked, start_tokens)
        known = prefixes.end_within(self.arriving, hashes, start_tokens, limit)
        if known > start_tokens and prefixes.chain_key(hashes, known) not in self._manager:
            known = start_tokens  # host memory was emptied
        end, shared = prefixes.longest_hits(hashes, self._readable, start_tokens, limit, known)
        # Not for an answer, behind which no other prompt parts: that would cost a state a turn.
        tracked.shared_tokens = shared if shared - end > end - start_tokens else 0
        if end == num_tokens and end - start_tokens <= prefixes.alignment_tokens:
            end = start_tokens
        keys: list[SlotKey] = []
        if end > start_tokens:
            keys = prefixes.needed_keys(hashes, start_tokens, end)
            if not keys:
                end = start_tokens  # what reads no token before itself is not looked up: compute it
            owner = self._owner(keys) if patient else None
            if owner is not None:
                self._wait(tracked, owner)
                return None
        if keys or not all(group.reads_all for group in prefixes.stored_groups):
            # Also that there is none: windows and states were looked for in all of the prompt.
            tracked.offer = Offer(
                start_tokens,
                num_tokens,
                end,
                keys,
                self._manager.forgotten,
                self._arrivals,
                time.monotonic(),
            )
        tracked.waits_for = None
        return end - start_tokens

    def limit_tokens(self, tracked: TrackedRequest, start_tokens: int) -> int:
        """Return up to which token a load of this request may bring."""
        num_tokens = tracked.request.num_tokens
        limit = num_tokens if self._prefixes.serves_whole_requests else num_tokens - 1
        return tracked.wishes.load_limit(start_tokens, limit)

    def waits_for_load(self, tracked: TrackedRequest) -> bool:
        """Whether the load that a request was seen to wait for is still awaited; in O(1)."""
        waits_for = tracked.waits_for
        if waits_for is None or not waits_for.arriving:
            return False
        return self._is_patient(tracked)

    @staticmethod
    def _is_patient(tracked: TrackedRequest) -> bool:
        """Whether a request that waits for another's load has not done so for too long."""
        return time.monotonic() - tracked.waits_since <= MAX_WAIT_SECONDS

    @staticmethod
    def _wait(tracked: TrackedRequest, owner: TrackedRequest) -> None:
        if tracked.waits_for is None:
            tracked.waits_since = time.monotonic()
        tracked.waits_for = owner

    def loads_beginning_of(
        self, tracked: TrackedRequest, start_tokens: int
    ) -> TrackedRequest | None:
        """Return the request whose load brings what this one needs first; None says: look it up.

        Takes O(1): a thousand requests may share a prefix that is loaded for one of them. What a
        load brings is readable, so it is a hit of whoever shares it. With windows, states and
        proofs that is certain only for those that share all of it.
        """
        prefixes, hashes = self._prefixes, tracked.request.block_hashes
        first_end = start_tokens + prefixes.alignment_tokens
        end = prefixes.hashed_end(hashes, self.limit_tokens(tracked, start_tokens))
        # Where one slot is left, it may be the last of the request, which is not loaded alone.
        if end <= first_end:
            return None
        key = prefixes.chain_key(hashes, first_end)
        owner = self.arriving.get(key)
        if owner is None or key not in self._manager:  # else host memory was emptied
            return None
        if not prefixes.serves_whole_requests:
            loaded_end = 0 if owner.loaded is None else owner.loaded[1]
            last = prefixes.chain_key(owner.request.block_hashes, loaded_end)
            if end < loaded_end or prefixes.chain_key(hashes, loaded_end) != last:
                return None
        return owner

    def expect(self, tracked: TrackedRequest, keys: list[SlotKey]) -> None:
        """Have others wait for the keys that this request's asynchronous load brings."""
        tracked.arriving = keys
        self._not_indexed.append(tracked)
        self._arrivals += 1

    def arrived(self, tracked: TrackedRequest) -> None:
        """Let no request wait for this request's load any more."""
        keys, tracked.arriving = tracked.arriving, []
        if not keys:
            return
        if tracked in self._not_indexed:
            self._not_indexed.remove(tracked)
            return
        for key in keys:
            # Where the wait for a load was given up, the key may arrive for another request too.
            if self._owner_of.get(key) is tracked:
                del self._owner_of[key]

    @property
    def arriving(self) -> dict[SlotKey, TrackedRequest]:
        """The keys that arrive, and the requests whose loads bring them."""
        for tracked in self._not_indexed:
            self._owner_of.update(dict.fromkeys(tracked.arriving, tracked))
        self._not_indexed.clear()
        return self._owner_of

    def _readable(self, keys: Sequence[SlotKey]) -> NDArray[np.bool_]:
        self.budget.spend(len(keys))
        return self._manager.readable(keys)

    def _still_holds(self, offer: Offer, start_tokens: int, num_tokens: int) -> bool:
        """Whether a request may be told the same again; what did not change is not looked at."""
        if (start_tokens, num_tokens) != (offer.start_tokens, offer.num_tokens):
            return False
        if time.monotonic() - offer.since > OFFER_SECONDS:
            return False
        if self._manager.forgotten != offer.forgotten and not self._still_readable(offer):
            return False
        if self._arrivals != offer.arrivals:
            offer.arrivals = self._arrivals
            return self._owner(offer.keys) is None
        return True

    def _still_readable(self, offer: Offer) -> bool:
        """Whether the keys are still readable although some keys have been forgotten."""
        manager = self._manager
        if any(group.sees_next_token for group in self._prefixes.groups):
            return False  # the proof behind the end may be gone
        if offer.slots is None:
            if not manager.readable(offer.keys).all():
                return False
            offer.slots = manager.find(offer.keys)
        elif not manager.keep_their_keys(offer.slots, offer.forgotten):
            return False
        offer.forgotten = manager.forgotten
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
