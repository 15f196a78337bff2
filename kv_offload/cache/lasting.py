"""A cache manager whose slots outlive the process: a directory records the key of each slot."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path

import numpy as np

from kv_offload.cache.directory import SLOT_BYTES, Directory
from kv_offload.cache.manager import CacheManager
from kv_offload.cache.peer_slots import PeerSlots
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.seats import READER, lock_file
from kv_offload.cache.slots import NO_SLOTS, Key, Mask, Run, Runs, Slots, distinct
from kv_offload.errors import CapacityError
from kv_offload.messages import WINDOW_BITS

logger = logging.getLogger(__name__)

READERS_SECONDS = 1.0
"""Interval at which an owner checks whether readers that lease the slots it wants have ended."""


class LastingManager(CacheManager):
    """Keeps a directory, takes over the blocks that an earlier process left, and loads from peers.

    `prepare_store` withdraws a slot from the directory before the plan that writes the slot is
    sent. `complete_store` publishes it after every rank has written all of it. So the directory is
    correct whenever the process ends. No slot is usable before `open`.

    A key that only a peer has is readable too: once it is reserved, a load reads it from the peer's
    slot, whose number is above all slots of this engine. A pool keeps each block once: a block that
    a peer has is not stored, unless it must be.

    A slot that would be written while a peer leases it is set aside until the lease ends.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self.reads_runs = True  # runs tell which keys must be stored even if a peer has them
        self._directory: Directory | None = None
        self.peers: PeerSlots | None = None
        self._leased: Slots = NO_SLOTS
        """Slots without a key on which peers have leases."""
        self._readers_due = 0.0

    def share(self, changed: Callable[[], None] | None = None) -> None:
        """Load from peers; `changed` is called on another thread when the set of peers changes."""
        if self.num_slots <= 1 << WINDOW_BITS:
            self.peers = PeerSlots(self._arenas, changed)

    def open(self, arenas: Mapping[int, Path]) -> None:
        """Open the directory of the ranks' arenas, which are in one folder; called once.

        Blocks found in it are taken over as their slots become usable. Raises `CapacityError`.
        """
        assert not self.is_open, "slots may be written already"
        assert not self.usable_slots, "slots may be written already"
        (folder,) = {arena.parent for arena in arenas.values()}
        self._folder, self._arenas = folder, arenas
        files = {rank: arena.name for rank, arena in arenas.items()}
        try:
            self._directory = Directory(folder, files, self.num_slots)
        except OSError as error:
            raise CapacityError(
                f"host_pool: a directory of {self.num_slots} slots cannot be created in {folder}: "
                f"{error.strerror}. It needs {SLOT_BYTES} bytes per slot: make room, or lower "
                "cpu_bytes"
            ) from error
        found = "an earlier engine left it" if self._directory.is_continued else "it is new"
        logger.info("kv-offload: this engine's seat in the host pool is %s; %s", folder, found)

    @property
    def directory(self) -> Directory:
        """The open directory."""
        assert self._directory is not None, "the directory is not open"
        return self._directory

    @property
    def is_open(self) -> bool:
        """True once the directory is open."""
        return self._directory is not None

    def limit_slots(self, usable_slots: int) -> None:
        """Limit the usable slots, and take over the blocks in slots that become usable."""
        first = self.usable_slots
        super().limit_slots(usable_slots)
        if usable_slots <= first:
            return
        self.directory.allow(usable_slots)
        slots, keys = self.directory.read(first, usable_slots)
        # A key that was stored again before its old slot became usable has two slots; the more
        # recently used one counts.
        latest = {key: row for row, key in enumerate(keys)}
        rows = [row for row, key in enumerate(keys) if latest[key] == row and key not in self]
        self.restore([keys[row] for row in rows], slots[rows], usable_slots)
        self.adopted_slots += len(rows)

    def readable(self, keys: Sequence[Key]) -> Mask:
        """See `CacheManager`. A key that a peer seems to have must be reserved before its load."""
        ask: list[Callable[[Sequence[Key]], Mask]] = [super().readable]
        if self.peers is not None and self.peers.opened and len(keys):
            # Ask first where the first key is: most others are there, too.
            ask.insert(keys[0] in self, self.peers.look_up)
        found = ask[0](keys)
        for other in ask[1:]:
            if not found.all():
                found[~found] = other(_of(keys, ~found))
        return found

    def lacks(self, keys: Sequence[Key]) -> Mask:
        """See `CacheManager`. A key that a peer seems to have is not lacking."""
        lacking = super().lacks(keys)
        if self.peers is not None and lacking.any():
            lacking[lacking] = self.peers.find(_of(keys, lacking)) < 0
        return lacking

    def reserve(self, keys: Sequence[Key]) -> bool:
        return self.peers is None or self.peers.reserve(keys)

    def end_step(self) -> None:
        """Release the keys that this step reserved but did not load."""
        if self.peers is not None and self.peers.drop():
            self.forgotten += 1

    def prepare_load(self, keys: Sequence[Key]) -> Slots:
        """See `CacheManager`. Keys without a slot here must be reserved at a peer."""
        own = super().readable(keys)
        if self.peers is None or own.all():
            slots = super().prepare_load(keys)
            self.directory.use(distinct(slots)[::-1])
            return slots
        slots = np.empty(len(keys), np.int32)
        slots[~own] = self.peers.hold(_of(keys, ~own))
        slots[own] = local = super().prepare_load(_of(keys, own))
        self.directory.use(distinct(local)[::-1])
        return slots

    def owned(self, slots: Slots) -> Slots:
        own: Slots = slots[slots < self.num_slots]
        return own

    def complete_load(self, slots: Slots) -> None:
        own = self.owned(slots)
        super().complete_load(own)
        if len(own) < len(slots) and self.peers is not None:
            self.peers.release(slots[slots >= self.num_slots])

    def keep_their_keys(self, slots: Slots, since: int) -> bool:
        """See `CacheManager`. A key of a peer, whose slot here is -1, can be gone at any time."""
        return bool((slots >= 0).all()) and super().keep_their_keys(slots, since)

    def offer(self, keys: Sequence[Key], runs: Runs, along: Slots = NO_SLOTS) -> tuple[Slots, Mask]:
        """See `CacheManager`. A key that a peer has is not worth a slot."""
        wanted = np.ones(len(keys), bool)
        if self.peers is not None:
            wanted = self.peers.find(keys, uses=True) < 0
        if not wanted.all():
            must = np.repeat([run.must for run in runs], [run.keys for run in runs])
            wanted |= must
            self.left_to_peers += len(keys) - int(wanted.sum())
            keys, runs = _of(keys, wanted), _runs_of(runs, wanted)
        slots, worth = super().offer(keys, runs, along)
        wanted[wanted] = worth
        return slots, wanted

    def _give_slots(self, keys: Sequence[Key], along: Slots) -> Slots:
        self._take_back()
        slots = super()._give_slots(keys, along)
        if len(slots):
            self.directory.withdraw(slots)
            leased = self.directory.are_leased(slots)
            if leased.any():
                slots = self._set_apart(slots, leased)
            self.directory.use(slots[::-1])
        if len(along):
            self.directory.use(distinct(along)[::-1])
        return slots

    def _set_apart(self, slots: Slots, leased: Mask) -> Slots:
        """Set aside leased slots, which were just given to keys, until no peer reads them.

        Returns the slots before the first leased one; the keys of the others get none.
        """
        first = int(leased.argmax())
        leased, others = leased[first:], slots[first:]
        super().complete_store(others[~leased], ok=False)
        apart = others[leased]
        self._table.end_stores(apart)
        self._table.start_loads(apart)
        self.policy.discard(apart)
        self._table.forget(apart)
        self._leased = np.concatenate((self._leased, apart))
        return slots[:first]

    def _take_back(self) -> None:
        """Free the slots whose leases have ended, or whose readers have."""
        if not len(self._leased):
            return
        leased, now = self.directory.are_leased(self._leased), time.monotonic()
        if leased.any() and now >= self._readers_due:
            self._readers_due = now + READERS_SECONDS
            for reader in self.directory.readers_of(self._leased):
                seat = self._folder.with_name(f"seat-{reader}")
                with contextlib.suppress(OSError):
                    lock = lock_file(seat / READER, creates=False)
                    if lock is not None:  # while it is locked, no other process begins to read
                        self.directory.end_leases(self._leased, reader)
                        os.close(lock)
            leased = self.directory.are_leased(self._leased)
        free, self._leased = self._leased[~leased], self._leased[leased]
        super().complete_load(free)

    def count_peer_uses(self) -> None:
        """See `CacheManager`. Slots that a store writes, or that have no key, do not count."""
        used = self.directory.take_marks()
        if len(used):
            used = used[used < self._table.given_out]
            named = [key is not None for key in self.readable_keys(used)]
            # The beginnings of prompts, which usually have lower slots, count as used last.
            used = used[np.array(named, bool)][::-1]
            self.policy.use(used)
            if self.on_peer_uses is not None:
                self.on_peer_uses(used)

    def complete_store(self, slots: Slots, *, ok: bool = True) -> None:
        super().complete_store(slots, ok=ok)
        keys = self.readable_keys(slots)  # None if the store failed, and after a reset
        named = [key is not None for key in keys]
        if any(named):
            self.directory.publish(slots[named], [key for key in keys if key is not None])

    def forget(self, slots: Slots) -> None:
        self.directory.withdraw(slots)
        super().forget(slots)

    def reset(self) -> None:
        """Drop all keys; no other process finds them, or any that this process stores from now on.

        Nothing more is loaded from peers, which may have KV computed before the reset. After a
        reset the model's weights may differ, and another process could not tell which weights the
        later keys belong to.
        """
        if self._directory is not None:
            self._directory.retire()
        if self.peers is not None:
            self.peers.cut_off()
        super().reset()

    def close(self) -> None:
        """Let another process take over the blocks."""
        if self.peers is not None:
            self.peers.close()
        if self._directory is not None:
            self._directory.close()


def _of(keys: Sequence[Key], wanted: Mask) -> list[Key]:
    return [*keys] if wanted.all() else [*compress(keys, wanted.tolist())]


def _runs_of(runs: Runs, wanted: Mask) -> list[Run]:
    """Return the runs of the wanted keys; a run that contains other keys is split."""
    parts, first = [], 0
    for run in runs:
        its = wanted[first : first + run.keys]
        first += run.keys
        if its.all():
            parts.append(run)
            continue
        edges = np.flatnonzero(np.diff(its, prepend=False, append=False)).tolist()
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            parts.append(run._replace(keys=end - begin, parent=None if begin else run.parent))
    return parts
