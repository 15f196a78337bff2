"""A cache manager whose slots outlive the process: a directory records the key of each slot."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.directory import SLOT_BYTES, Directory
from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.slot_refcounts import distinct
from kv_offload.cache.slots import NO_SLOTS, Key, Run, Runs, Slots
from kv_offload.errors import CapacityError

logger = logging.getLogger(__name__)

PeersHave: TypeAlias = Callable[[Sequence[Any]], NDArray[np.bool_]]
"""Returns for each key whether a peer has it; the peer counts this as a use."""


class LastingManager(CacheManager):
    """Keeps a directory, and takes over the blocks that an earlier process left in it.

    `prepare_store` withdraws a slot from the directory before the plan that writes the slot is
    sent. `complete_store` publishes it after every rank has written all of it. So the directory is
    true whenever the process ends. No slot is usable before `open`.

    A pool keeps each block once. A block that a peer has is not stored, unless it must be. A copy
    from a peer is dropped first, once it has been loaded, if a peer still has the block. The copy
    is withdrawn before peers are asked, so two engines never drop the same block because the other
    one has it.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self._directory: Directory | None = None
        self._peers_have: PeersHave = lambda keys: np.zeros(len(keys), bool)
        self._arrived: set[int] = set()
        """Slots copied from peers and not loaded since: a request is waiting for them."""
        self._copies: OrderedDict[int, None] = OrderedDict()
        """Slots copied from peers and loaded since; the first ones are dropped first."""

    def share(self, peers_have: PeersHave) -> None:
        """Store a block only if `peers_have` does not report that a peer has it."""
        self._peers_have = peers_have

    def open(self, arenas: Mapping[int, Path]) -> None:
        """Open the directory of the ranks' arenas, which are in one folder; called once.

        Blocks found in it are taken over as their slots become usable. Raises `CapacityError`.
        """
        assert not self.is_open, "slots may be written already"
        assert not self.usable_slots, "slots may be written already"
        (folder,) = {arena.parent for arena in arenas.values()}
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
        slots, keys = self.directory.read(first, usable_slots)
        # A key that was stored again before its old slot became usable has two slots; the more
        # recently used one counts.
        latest = {key: row for row, key in enumerate(keys)}
        rows = [row for row, key in enumerate(keys) if latest[key] == row and key not in self]
        self.restore([keys[row] for row in rows], slots[rows], usable_slots)
        self.adopted_slots += len(rows)

    def prepare_load(self, keys: Sequence[Key]) -> Slots:
        """See `CacheManager`."""
        slots = super().prepare_load(keys)
        if self._arrived and (loaded := self._arrived.intersection(slots.tolist())):
            self._arrived -= loaded
            # The end of a prompt is dropped first.
            self._copies.update((slot, None) for slot in slots.tolist()[::-1] if slot in loaded)
        self.directory.use(distinct(slots)[::-1])
        return slots

    @property
    def reads_runs(self) -> bool:
        """True: the runs tell which keys must be stored even if a peer has them."""
        return True

    def offer(
        self, keys: Sequence[Key], runs: Runs, along: Slots = NO_SLOTS
    ) -> tuple[Slots, NDArray[np.bool_]]:
        """See `CacheManager`. A key that a peer has is not worth a slot."""
        wanted = ~self._peers_have(keys) if len(keys) else np.ones(0, bool)
        if not wanted.all():
            must = np.repeat([run.must for run in runs], [run.keys for run in runs])
            wanted |= must
            self.left_to_peers += len(keys) - int(wanted.sum())
            keys, runs = [*compress(keys, wanted.tolist())], _runs_of(runs, wanted)
        self._make_room(len(keys), along)
        slots, worth = super().offer(keys, runs, along)
        wanted[wanted] = worth
        return slots, wanted

    def prepare_store(self, keys: Sequence[Key], along: Slots = NO_SLOTS) -> Slots:
        """See `CacheManager`."""
        self._make_room(len(keys), along)
        return super().prepare_store(keys, along)

    def _give_slots(self, keys: Sequence[Key], along: Slots) -> Slots:
        """See `CacheManager`."""
        slots = super()._give_slots(keys, along)
        if len(slots):
            self._no_copies(slots)
            self.directory.withdraw(slots)
            self.directory.use(slots[::-1])
        if len(along):
            self.directory.use(distinct(along)[::-1])
        return slots

    def _make_room(self, wanted: int, along: Slots) -> None:
        """Drop copies if too few slots are free, except those in `along`.

        Before that, the policy counts the peers' uses of slots that no store is writing.
        """
        lacking = wanted - (self.usable_slots - self.slots_in_use)
        if lacking <= 0:
            return
        used = self.directory.take_marks()
        if len(used):
            used = used[used < self._index.given_out]
            named = [key is not None for key in self.readable_keys(used)]
            # The beginnings of prompts, which mostly have lower slots, count as used last.
            self._policy.use(used[np.array(named, bool)][::-1])
        if not self._copies:
            return
        slots = np.fromiter(islice(self._copies, lacking), np.int32)
        idle = self._running.are_idle(slots) & ~np.isin(slots, along)
        self._no_copies(slots)
        self._copies.update(dict.fromkeys(slots[~idle].tolist()))
        slots = slots[idle]
        keys: Sequence[Any] = self.keys_of(slots)
        self.directory.withdraw(slots)
        kept = self._peers_have(keys)
        super().forget(slots[kept])
        if not kept.all():  # no peer has these blocks any more
            self.directory.publish(slots[~kept], [*compress(keys, (~kept).tolist())])

    def are_copies(self, slots: Slots) -> None:
        """Record that slots, as far as they have a key, were just filled from peers."""
        named = [key is not None for key in self.keys_of(slots)]
        self._arrived.update(compress(slots.tolist(), named))

    def _no_copies(self, slots: Slots) -> None:
        if self._arrived or self._copies:
            self._arrived.difference_update(slots.tolist())
            for slot in slots.tolist():
                self._copies.pop(slot, None)

    def complete_store(self, slots: Slots, *, ok: bool = True) -> None:
        """See `CacheManager`."""
        super().complete_store(slots, ok=ok)
        if not ok:
            return
        keys: Sequence[Any] = self.readable_keys(slots)
        named = [row for row, key in enumerate(keys) if key is not None]  # None after a reset
        if named:
            self.directory.publish(slots[named], [keys[row] for row in named])

    def forget(self, slots: Slots) -> None:
        """See `CacheManager`."""
        self._no_copies(slots)
        self.directory.withdraw(slots)
        super().forget(slots)

    def reset(self) -> None:
        """Drop all keys; no later process finds them, or any that this process stores from now on.

        After a reset the model's weights may differ, and another process could not tell which
        weights the later keys belong to.
        """
        if self._directory is not None:
            self._directory.retire()
        self._arrived.clear()
        self._copies.clear()
        super().reset()

    def close(self) -> None:
        """Let another process take over the blocks."""
        if self._directory is not None:
            self._directory.close()


def _runs_of(runs: Runs, wanted: NDArray[np.bool_]) -> list[Run]:
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
