"""Bounds the share of host memory, or of a disk, that one tenant takes.

A tenant is the requests of one `cache_salt`, or those without one. Above its share it loses its own
least recently used blocks at once; of blocks stored in the same step, the end of a prompt goes
first. The next stores take the slots that become free, so other tenants lose at most as many blocks
as one step stores. Blocks that a copy holds or a request retains are kept, and count. Blocks that
an earlier process left on a disk count once they are read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slots import Slots, distinct
from kv_offload.engine import Request
from kv_offload.scheduler.stores.candidates import Span, keys_of_spans
from kv_offload.scheduler.transfers import Transfer

SMALL_BATCH = 64
"""A batch with fewer slots is extended by the next one: decodes store one slot at a time."""

MAX_LOOKS = 16
"""Maximum batches that one call looks at. If all of them are held, later calls look at the rest."""

Owner = str | None
Batch = tuple[int, Slots]
"""A number, and slots that were stored or loaded together, the end of a prompt first. A slot
belongs to its latest batch."""


@dataclass(slots=True, eq=False)
class Share:
    """The slots of one owner, the least recently used batch first."""

    owner: Owner
    number: int
    slots: int = 0
    named: int = 0
    """Slots listed in `batches`, including those that now belong to a later batch."""
    batches: deque[Batch] = field(default_factory=deque)


class Quotas:
    """Knows the owner of each slot. All operations take O(1) amortised time per slot.

    `max_share` is a share of the manager's usable slots. `count` adds to a counter. For a `tier`,
    `evict` evicts the blocks in slots.
    """

    def __init__(
        self,
        manager: CacheManager,
        max_share: float,
        count: Callable[[str, float], None],
        tier: str = "",
        evict: Callable[[Slots], None] | None = None,
    ) -> None:
        self._manager, self._max_share, self._count = manager, max_share, count
        self._tier, self._forget = tier, evict or manager.forget
        # By slot, 0 for none; zeros from the system take no memory until they are written.
        self._share_of = np.zeros(manager.num_slots, np.int64)
        self._batch_of = np.zeros(manager.num_slots, np.int64)
        self._shares: dict[Owner, Share] = {}
        self._by_number: dict[int, Share] = {}
        self._next_share = self._next_batch = 1
        manager.on_peer_uses = self._used_by_peers

    def stores_planned(
        self, spans: Iterable[Span], keys: Sequence[SlotKey], new: Sequence[SlotKey], slots: Slots
    ) -> None:
        """Give `slots` to the tenants of the spans; see `Subscribers.stores`."""
        owners: dict[Owner, list[SlotKey]] = {}
        for cursor, _, _, own_keys in keys_of_spans(spans, keys):
            owners.setdefault(cursor.request.cache_salt or None, []).extend(own_keys)
        if len(owners) == 1:
            self.filled(next(iter(owners)), slots)
            return
        slot_of = dict(zip(new, slots.tolist(), strict=False))
        for owner, its_keys in owners.items():
            # Requests that share a prefix have its keys more than once.
            own = [slot_of.pop(key) for key in its_keys if key in slot_of]
            self.filled(owner, np.array(own, np.int32))

    def filled(self, owner: Owner, slots: Slots) -> None:
        """Give slots to an owner, and evict its oldest blocks if it is above its share."""
        if not len(slots):
            return
        self._take_away(slots)
        share = self._shares.get(owner)
        if share is None:
            share = Share(owner, self._next_share)
            self._shares[owner] = self._by_number[share.number] = share
            self._next_share += 1
        self._share_of[slots] = share.number
        share.slots += len(slots)
        self._add(share, slots[::-1])
        surplus = share.slots - int(self._max_share * self._manager.usable_slots)
        if surplus > 0:
            self._evict(share, surplus)

    def promoted(self, request: Request, _start: int, _end: int, moves: Sequence[Transfer]) -> None:
        """Give the slots that are read for a request to its tenant."""
        for move in moves:
            if not self._tier:
                self.filled(request.cache_salt or None, move.slots)
            elif move.tier == self._tier:
                self.filled(request.cache_salt or None, move.tier_slots)

    def demoted(self, above: Quotas, moves: Sequence[Transfer]) -> None:
        """Give the slots of writes to the owners of their slots of host memory, in `above`."""
        for move in moves:
            if move.tier != self._tier:
                continue
            numbers = above._share_of[move.slots]
            for number in np.unique(numbers).tolist():
                part = move.tier_slots[numbers == number]
                if number:
                    self.filled(above._by_number[number].owner, part)
                else:
                    self._take_away(part)

    def load_ended(self, load: Transfer) -> None:
        """Note that slots were loaded for a request."""
        if load.request is not None:
            self.used(load.request.request.cache_salt or None, self._manager.owned(load.slots))

    def used(self, owner: Owner, slots: Slots) -> None:
        """Note that slots were loaded for an owner."""
        share = self._shares.get(owner)
        if share is not None:
            own = slots[self._share_of[slots] == share.number]
            self._add(share, distinct(own)[::-1])

    def _used_by_peers(self, slots: Slots) -> None:
        numbers = self._share_of[slots]
        for number in np.unique(numbers[numbers > 0]).tolist():
            self._add(self._by_number[number], slots[numbers == number])

    def _add(self, share: Share, slots: Slots) -> None:
        if not len(slots):
            return
        share.named += len(slots)
        number, last = share.batches[-1] if share.batches else (0, slots)
        if number and len(last) < SMALL_BATCH and not (self._batch_of[slots] == number).any():
            own = self._own(number, last)  # slots of later batches leave it
            share.named -= len(last) - len(own)
            share.batches[-1] = number, np.concatenate([own, slots])
        else:
            number, self._next_batch = self._next_batch, self._next_batch + 1
            share.batches.append((number, slots))
        self._batch_of[slots] = number
        if share.named > 2 * share.slots + 64:
            parts = [(number, self._own(number, part)) for number, part in share.batches]
            share.batches = deque(batch for batch in parts if len(batch[1]))
            share.named = sum(len(part) for _, part in share.batches)

    def _own(self, number: int, slots: Slots) -> Slots:
        own: Slots = slots[self._batch_of[slots] == number]
        return own

    def _evict(self, share: Share, surplus: int) -> None:
        """Evict up to `surplus` blocks of an owner."""
        self._manager.count_peer_uses()
        evicted = 0
        for _ in range(min(MAX_LOOKS, len(share.batches))):
            if evicted >= surplus:
                break
            number, named = share.batches.popleft()
            own = self._own(number, named)
            share.named -= len(named) - len(own)
            gone = own[self._manager.idle(own)][: surplus - evicted]
            if len(gone):
                evicted += len(gone)
                known = [key is not None for key in self._manager.readable_keys(gone)]
                self._take_away(gone)  # including empty ones
                self._forget(gone[known])
                share.named -= len(gone)
            left = number, self._own(number, own)
            if evicted >= surplus:
                share.batches.appendleft(left)
            elif len(left[1]):  # held: look at it again after all others
                share.batches.append(left)
        self._count("quota_evictions", evicted)

    def _take_away(self, slots: Slots) -> None:
        """Take slots from their owners."""
        numbers, counts = np.unique(self._share_of[slots], return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            if number:
                share = self._by_number[number]
                share.slots -= count
                if not share.slots:
                    del self._shares[share.owner], self._by_number[number]
        self._share_of[slots] = self._batch_of[slots] = 0

    def clear(self) -> None:
        """Take all slots from their owners, since they are empty."""
        self._share_of[:] = self._batch_of[:] = 0
        self._shares.clear()
        self._by_number.clear()

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a count is wrong or a slot is in no batch of its owner."""
        numbers, counts = np.unique(self._share_of[self._share_of > 0], return_counts=True)
        found = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        assert found == {n: share.slots for n, share in self._by_number.items()}
        assert self._shares == {share.owner: share for share in self._by_number.values()}
        for share in self._shares.values():
            own: list[NDArray[np.int32]] = [self._own(n, part) for n, part in share.batches]
            assert sum(map(len, own)) == share.slots, "a slot is in no batch"
            assert share.named == sum(len(part) for _, part in share.batches)
