"""Bounds the share of host memory, or of a disk, that one tenant takes.

Above its share a tenant loses its own least recently used blocks at once; of blocks stored in the
same step, the end of a prompt goes first. The next stores take the slots that become free, so other
tenants lose at most as many blocks as one step stores. Blocks that a copy holds or a request
retains are kept, and count. Blocks that an earlier process left on a disk count once they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.owners import Owners
from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slots import Slots
from kv_offload.engine import Request
from kv_offload.scheduler.stores.candidates import Span, keys_of_spans
from kv_offload.scheduler.transfers import Transfer


class Quotas:
    """Evicts blocks of owners that are above their share.

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
        self.owners = Owners(manager)
        manager.on_peer_uses = self.owners.use

    def stores_planned(
        self, spans: Iterable[Span], keys: Sequence[SlotKey], new: Sequence[SlotKey], slots: Slots
    ) -> None:
        """Give `slots` to the tenants of the spans; see `Subscribers.stores`."""
        owners: dict[str, list[SlotKey]] = {}
        for cursor, _, _, own_keys in keys_of_spans(spans, keys):
            owners.setdefault(cursor.request.cache_salt or "", []).extend(own_keys)
        if len(owners) == 1:
            self.filled(next(iter(owners)), slots)
            return
        slot_of = dict(zip(new, slots.tolist(), strict=False))
        for owner, its_keys in owners.items():
            # Requests that share a prefix have its keys more than once.
            own = [slot_of.pop(key) for key in its_keys if key in slot_of]
            self.filled(owner, np.array(own, np.int32))

    def filled(self, owner: str, slots: Slots) -> None:
        """Give slots to an owner, and evict its oldest blocks if it is above its share."""
        if not len(slots):
            return
        self.owners.give(owner, slots[::-1])
        surplus = self.owners.slots_of(owner) - int(self._max_share * self._manager.usable_slots)
        if surplus > 0:
            self._manager.count_peer_uses()
            gone = self.owners.take_oldest(owner, surplus)
            self._count("quota_evictions", len(gone))
            named = [key is not None for key in self._manager.readable_keys(gone)]
            self._forget(gone[named])

    def promoted(self, request: Request, _start: int, _end: int, moves: Sequence[Transfer]) -> None:
        """Give the slots that are read for a request to its tenant."""
        for move in moves:
            if not self._tier:
                self.filled(request.cache_salt or "", move.slots)
            elif move.tier == self._tier:
                self.filled(request.cache_salt or "", move.tier_slots)

    def demoted(self, above: Quotas, moves: Sequence[Transfer]) -> None:
        """Give the slots of writes to the owners of their slots of host memory, in `above`."""
        for move in moves:
            if move.tier != self._tier:
                continue
            for share, its in above.owners.split(move.slots):
                if share is None:
                    self.owners.take(move.tier_slots[its])
                else:
                    self.filled(share.owner, move.tier_slots[its])

    def load_ended(self, load: Transfer) -> None:
        """Note that slots were loaded for a request."""
        self.owners.use(self._manager.owned(load.slots)[::-1])
