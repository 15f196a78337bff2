"""Copies blocks to a rank's host memory from the same rank of other engines in the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from kv_swap.engine import SwapEngine
from kv_swap.tiers.engine import TierDirection, TierEngine
from kv_swap.tiers.mover import Mover, Outcome, Row
from numpy.typing import NDArray

from kv_offload.cache.peers import PeerDirectories, PeerDirectory
from kv_offload.worker.pool import Seat
from kv_offload.worker.sharing import SharingRanks

NUM_THREADS = 4
"""One thread copies 7 to 10 GB/s, and less when it reads a slot for the first time, whose pages are
then mapped."""

CHUNK_BYTES = 8 << 20
"""Bytes that a thread copies before it reads the directory again."""

NUM_SLOTS = 2**31 - 1
"""Peers' slots are found by key, so this only has to exceed the rows of any job."""


@dataclass(frozen=True)
class HostPeers:
    """The other engines of the pool in which this engine has `seat`."""

    seat: Seat

    def open(
        self, rank: int, num_ranks: int, sharing: SharingRanks, pages: str, transfer: SwapEngine
    ) -> PeerEngine:
        """Return the engine that copies from peers' arenas that match this rank's."""
        return PeerEngine(self.seat.arena, rank, transfer.slots())


class PeerEngine(TierEngine):
    """Copies slots of peers into an arena. It only promotes.

    `path` is that of the arena, and also the `file_id`. A row fails without an error or a
    mismatch if no peer has its key or its slot was written meanwhile.
    """

    def __init__(self, path: Path, rank: int, arena: NDArray[np.uint8]) -> None:
        self.file_id = str(path)
        peers = PeerDirectories({rank: path})
        movers = [_Copies(peers, rank, arena) for _ in range(NUM_THREADS)]
        chunk_slots = max(1, CHUNK_BYTES // arena.shape[1])
        super().__init__(
            NUM_SLOTS, arena.shape, {TierDirection.PROMOTE: movers}, chunk_slots, peers.close
        )


class _Copies(Mover):
    """The copies of one thread."""

    def __init__(self, peers: PeerDirectories, rank: int, arena: NDArray[np.uint8]) -> None:
        self._peers, self._rank, self._arena = peers, rank, arena

    def move(self, direction: TierDirection, rows: Sequence[Row]) -> Outcome:
        """See `Mover`."""
        known, left = self._peers.all, rows
        for peer in known:
            left = self._copy(peer, left)
        if left:
            self._peers.refresh()  # the scheduler may have found one before this rank
            for peer in self._peers.all:
                left = left if peer in known else self._copy(peer, left)
        return Outcome([row.number for row in left])

    def _copy(self, peer: PeerDirectory, rows: Sequence[Row]) -> list[Row]:
        """Copy the rows that a peer has; return the others."""
        if not rows:
            return []
        arena = peer.arena(self._rank, *self._arena.shape)
        claim = peer.claim([row.name for row in rows])
        if arena is None or not len(claim.rows):
            return [*rows]
        claimed = [rows[number] for number in claim.rows.tolist()]
        for row, slot in zip(claimed, claim.slots.tolist(), strict=True):
            self._arena[row.arena_slot] = arena[slot]
        good = peer.still_holds(claim)
        if good.any():
            peer.contents.mark(claim.slots[good])
        copied = {row.number for row, ok in zip(claimed, good.tolist(), strict=True) if ok}
        return [row for row in rows if row.number not in copied]
