"""Reads from lower tiers into host memory, each for all requests that share its prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.prefix import SlotKey
from kv_offload.cache.slots import Mask
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.tiers.base import Tier

JOB_BYTES = 64 << 20
"""Bytes per promotion job and rank. Small enough that the part of a long prompt that arrives before
the deadline can already be loaded."""

MAX_PROMOTING_SHARE = 2
"""At most one in this many slots of host memory is being filled from lower tiers at a time. Slots
of a tier on which a copy hangs do not count: it may never fill them."""


@dataclass(slots=True, eq=False)
class Read:
    """A prefix being read, from `start_tokens` to `end_tokens`, for all requests that share it.

    - `full_tokens`: how far the groups that read all tokens could extend it.
    - `host_tokens`: how far host memory had it when it was looked up.
    - `parts`: its transfers, each with the first token that it brings. The last usually ends last.
    - `keys`: the chain keys by which later requests find it.
    """

    start_tokens: int
    end_tokens: int
    full_tokens: int
    host_tokens: int
    parts: list[tuple[int, Transfer]]
    keys: list[SlotKey] = field(default_factory=list)

    @property
    def transfers(self) -> list[Transfer]:
        """Its transfers, in the order in which they were begun."""
        return [transfer for _, transfer in self.parts]


class Reads:
    """Begins reads, and finds those that another request has begun."""

    def __init__(self, core: Core, tiers: Mapping[str, Tier]) -> None:
        self._prefixes, self._host, self._transfers = core.prefixes, core.manager, core.transfers
        self._tiers = tiers
        self._job_slots = max(1, JOB_BYTES // core.slots.slot_bytes)
        # Transfers that have not ended, and the reads that they are parts of.
        self._running: dict[Transfer, list[Read]] = {}
        self._coming: dict[SlotKey, Transfer] = {}
        self._by_key: dict[SlotKey, Read] = {}

    @property
    def running_slots(self) -> int:
        """Slots that are being filled."""
        return sum(tier.reading_slots for tier in self._tiers.values())

    def transfer_of(self, key: SlotKey) -> Transfer | None:
        """Return the transfer that brings a key to host memory, if one does."""
        return self._coming.get(key)

    def can_end(self, transfer: Transfer) -> bool:
        """Return whether a transfer has ended or is expected to, because its tier does not hang."""
        return transfer.has_ended or not self._tiers[transfer.tier].is_stuck

    def find(self, hashes: Sequence[bytes], start: int, limit: int) -> tuple[int, Read] | None:
        """Return the furthest token to which a read brings a prefix from `start`, and that read."""
        end = self._prefixes.end_within(self._by_key, hashes, start, limit)
        if end <= start:
            return None
        read = self._by_key[self._prefixes.chain_key(hashes, end)]
        if read.start_tokens > start or not all(map(self.can_end, read.transfers)):
            return None
        return end, read

    def begin(
        self, keys: list[SlotKey], sources: list[Tier], parents: NDArray[np.int32]
    ) -> list[tuple[Transfer, NDArray[np.intp]]]:
        """Begin to read the first of `keys`, each from its tier in `sources`, while there is room.

        `parents` are slots of the same prefix in host memory; they are not evicted to make room.
        Returns the transfers, and the positions in `keys` that each of them reads.
        """
        filling = sum(tier.reading_slots for tier in self._tiers.values() if not tier.is_stuck)
        room = self._host.usable_slots // MAX_PROMOTING_SHARE - filling
        keys = keys[: max(0, room)]
        slots = self._host.prepare_store(keys, parents) if keys else parents[:0]
        begun: list[tuple[Transfer, NDArray[np.intp]]] = []
        for tier in self._tiers.values():
            rows = np.array([row for row in range(len(slots)) if sources[row] is tier], np.intp)
            if not len(rows):
                continue
            tier.reading_slots += len(rows)
            own = [keys[row] for row in rows.tolist()]
            places, most = tier.begin_read(own), self._job_slots
            for transfer in self._transfers.plan_tier_copy(
                Kind.PROMOTE, tier, own, slots[rows], places, max_slots=most
            ):
                self._coming.update(dict.fromkeys(transfer.keys, transfer))
                self._running[transfer] = []
                begun.append((transfer, rows[: len(transfer.keys)]))
                rows = rows[len(transfer.keys) :]
        return begun

    def share(self, read: Read, hashes: Sequence[bytes], start: int) -> None:
        """Share a read with later requests that have the same tokens, until a part of it ends."""
        read.keys = self._prefixes.chain_keys(hashes, start, read.full_tokens)
        self._by_key.update(dict.fromkeys(read.keys, read))
        for transfer in read.transfers:
            self._running[transfer].append(read)

    def ended(self, transfer: Transfer, failed: Mask) -> None:
        """Act on the end of a transfer on all ranks; `failed` masks the slots that hold garbage."""
        tier = self._tiers[transfer.tier]
        tier.reading_slots -= len(transfer.slots)
        for read in self._running.pop(transfer):
            # Promoted blocks can be evicted, so requests that share them must now look them up.
            for key in read.keys:
                if self._by_key.get(key) is read:
                    del self._by_key[key]
            read.keys = []  # the ends of its other transfers need not go through them again
        for key in transfer.keys:
            # After host memory was emptied, another transfer may bring the key.
            if self._coming.get(key) is transfer:
                del self._coming[key]
        self._host.complete_store(transfer.slots[failed], ok=False)
        self._host.complete_store(transfer.slots[~failed])
        tier.end_read(transfer, failed)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a key comes from nowhere, or a read has no transfer."""
        for name, tier in self._tiers.items():
            running = [len(one.slots) for one in self._running if one.tier == name]
            assert tier.reading_slots == sum(running)
        for key, transfer in self._coming.items():
            assert transfer in self._running
            assert key in transfer.keys
        for transfer in self._running:
            filled = self._host.find(transfer.keys) == transfer.slots
            keys = compress(transfer.keys, filled.tolist())
            assert all(self._coming.get(key) is transfer for key in keys)
        for key, read in self._by_key.items():
            assert key in read.keys
            assert any(read in self._running.get(transfer, ()) for transfer in read.transfers)
