"""Finds, leases and releases the slots of a host pool's other engines that this engine loads.

A lookup finds keys (`find`). A hit leases its slots (`reserve`) before it is offered, and its load
holds the leases (`hold`) until its end (`release`). Leases that no load holds when the step ends
are dropped (`drop`), so a request that waits keeps no slot from its owner.

Not thread safe: the scheduler owns it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.key_index import NAME_WORDS, Names, candidates
from kv_offload.cache.peers import PeerDirectories, PeerDirectory
from kv_offload.cache.slots import NO_SLOTS, Mask, MissingKeyError, Slots
from kv_offload.messages import WINDOW_BITS, peer_slots

LOST_SECONDS = 30.0
"""A key whose slot was written before it could be leased is not found for up to this long."""


class Found:
    """Keys that lookups of this step have found in peers, one per row. A key can have several rows.

    Callers nearly always ask for keys in the order in which successive lookups found them.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._begins: dict[bytes, int] = {}
        """By first key of a lookup, the row in which the lookup began."""
        self.slots = NO_SLOTS
        """-1 for a key that was lost."""
        self.words = np.empty((0, NAME_WORDS), np.uint64)
        """The keys' names."""
        self.are_leased = np.empty(0, bool)

    def add(self, keys: Sequence[bytes], slots: Slots, words: NDArray[np.uint64]) -> None:
        """Add the results of a lookup."""
        self._begins.setdefault(keys[0], len(self._keys))
        self._keys += keys
        self.slots = np.concatenate((self.slots, slots))
        self.words = np.concatenate((self.words, words))
        self.are_leased = np.append(self.are_leased, np.zeros(len(keys), bool))

    def rows_of(self, keys: Sequence[bytes], allowed: Mask) -> NDArray[np.intp]:
        """Return for each key one of its `allowed` rows, -1 if it has none."""
        first = self._begins.get(keys[0], 0)
        end = first + len(keys)
        if self._keys[first:end] == keys and allowed[first:end].all():
            return np.arange(first, end)
        row_of = {self._keys[row]: row for row in np.flatnonzero(allowed)[::-1].tolist()}
        return np.fromiter(map(row_of.get, keys, repeat(-1)), np.intp, len(keys))

    def lose(self, rows: NDArray[np.intp]) -> list[bytes]:
        """Give up the slots of rows, and return the keys."""
        self.slots[rows] = -1
        return [self._keys[row] for row in rows.tolist()]


class PeerSlots:
    """Slots of the peers of the engine whose `arenas` are given by rank.

    `kv_offload.messages.peer_slots` numbers them. Only slots of `opened` peers are found.
    """

    def __init__(
        self, arenas: Mapping[int, Path], changed: Callable[[], None] | None = None
    ) -> None:
        self.directories = PeerDirectories(arenas, changed)
        self.is_cut_off = False
        """True once this engine was reset: peers may have KV that was computed before."""
        self.opened: dict[PeerDirectory, int] = {}
        """Peers, most recently used first, each with the slot below which all ranks can load."""
        # By seat, only peers with leases, opened or not. Others would stay mapped once removed.
        self._leased: dict[int, PeerDirectory] = {}
        self._lost: set[bytes] = set()
        self._lost_until = 0.0
        self._found = Found()

    def open(self, peer: PeerDirectory, num_slots: int) -> None:
        """Find slots of a peer below `num_slots` from now on; 0 closes it."""
        self.opened.pop(peer, None)
        if num_slots:
            self.opened[peer] = num_slots

    def find(self, keys: Sequence[bytes], *, uses: bool = False) -> Slots:
        """Return for each key the slot of a peer that seems to have it, -1 if there is none.

        With `uses`, each key found counts as a use for its owner. See `Names.of` for the keys.
        """
        if not self.opened or not len(keys):
            return np.full(len(keys), -1, np.int32)
        return self._find(keys, Names.of(keys), uses=uses)

    def _find(self, keys: Sequence[bytes], names: Names, *, uses: bool = False) -> Slots:
        found = np.full(len(keys), -1, np.int32)
        indices = [peer.contents.index for peer in self.opened]
        asked = zip(self.opened.items(), candidates(indices, names.hashes), strict=True)
        for (peer, num_slots), (slots, rows) in asked:
            if not len(rows):
                continue
            contents = peer.contents
            has = contents.have(slots, names.words.take(rows, axis=0))
            has &= (slots < num_slots) & (found[rows] < 0)
            own = slots[has].astype(np.int32)
            if uses and len(own):
                contents.mark(own)
            found[rows[has]] = peer_slots(peer.number, own)
            if (found >= 0).all():
                # The rest of the prompt is likely there too: ask this peer first.
                self.opened = {peer: num_slots, **self.opened}
                break
        if self._lost:
            if time.monotonic() >= self._lost_until:
                self._lost.clear()
            found[[key in self._lost for key in keys]] = -1
        return found

    def look_up(self, keys: Sequence[bytes]) -> Mask:
        """Return for each key whether a peer seems to have it; `reserve` may be called for it."""
        if not self.opened:
            return np.zeros(len(keys), bool)
        names = Names.of(keys)
        slots = self._find(keys, names)
        has: Mask = slots >= 0
        if has.all():
            self._found.add(keys, slots, names.words)
        elif has.any():
            self._found.add([*compress(keys, has.tolist())], slots[has], names.words[has])
        return has

    def reserve(self, keys: Sequence[bytes]) -> bool:
        """Lease the slots that this step's lookups found for distinct keys, until `drop`.

        Returns False if a key was lost meanwhile; that key is not found again for a while.
        """
        found = self._found
        if not len(found.slots) or not len(keys):
            return True
        rows = found.rows_of(keys, found.slots >= 0)
        rows = rows[rows >= 0]
        rows = rows[~found.are_leased[rows]]
        slots, words, good = found.slots[rows], found.words[rows], np.zeros(len(rows), bool)
        seats = (slots >> WINDOW_BITS) - 1
        for peer in self.opened:
            its = seats == peer.number
            if its.any():
                good[its] = peer.lease(_own(slots[its]), words[its])
                if good[its].any():
                    before = self._leased.setdefault(peer.number, peer)
                    assert before is peer, "another engine's leases"
        found.are_leased[rows[good]] = True
        if good.all():
            return True
        if not self._lost:
            self._lost_until = time.monotonic() + LOST_SECONDS
        self._lost.update(found.lose(rows[~good]))
        return False

    def hold(self, keys: Sequence[bytes]) -> Slots:
        """Return the slots of reserved keys, and hold them until `release`.

        They count as used. Raises `MissingKeyError`; then nothing is held.
        """
        rows = self._found.rows_of(keys, self._found.are_leased)
        if (rows < 0).any():
            key = keys[int(rows.argmin())]
            raise MissingKeyError(f"{key!r} is not reserved: look it up in the same step")
        slots = self._found.slots[rows]
        for peer, own in self._by_peer(slots):
            peer.hold(own)
            peer.contents.mark(own)
        return slots

    def release(self, slots: Slots) -> None:
        """End a load of slots, successful or not."""
        for peer, own in self._by_peer(slots):
            peer.release(own)
            if not peer.num_leases:
                del self._leased[peer.number]

    def drop(self) -> bool:
        """End this step's reservations; return whether there were any."""
        if not len(self._found.slots):
            return False
        found, self._found = self._found, Found()
        reserved = found.slots[found.are_leased]
        self.release(reserved)
        return len(reserved) > 0

    def _by_peer(self, slots: Slots) -> list[tuple[PeerDirectory, Slots]]:
        if not len(slots):
            return []
        seats = (slots >> WINDOW_BITS) - 1
        return [
            (self._leased[seat], _own(slots[seats == seat])) for seat in np.unique(seats).tolist()
        ]

    @property
    def num_leases(self) -> int:
        """Number of this engine's leases; a slot can have several."""
        return sum(peer.num_leases for peer in self._leased.values())

    def has_leases(self, peer: PeerDirectory) -> bool:
        """Return whether loads may read slots of a peer."""
        return self._leased.get(peer.number) is peer

    def cut_off(self) -> None:
        """Find nothing from now on. Loads under way continue."""
        self.is_cut_off, self.opened = True, {}
        self.drop()

    def close(self) -> None:
        """End the thread of the directories, and all leases."""
        self.cut_off()
        self.directories.close()


def _own(slots: Slots) -> Slots:
    """Return the numbers that slots have in their own arena."""
    own: Slots = slots & np.int32((1 << WINDOW_BITS) - 1)
    return own
