"""A cache manager whose slots outlive the process: a directory says which key each holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_offload.cache.directory import SLOT_BYTES, Directory
from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.slot_refcounts import distinct
from kv_offload.cache.slots import NO_SLOTS, Key, Slots
from kv_offload.errors import CapacityError

logger = logging.getLogger(__name__)


class LastingManager(CacheManager):
    """Keeps a directory, and takes over what a process that has ended left in it.

    A slot is withdrawn from the directory in `prepare_store`, before the plan is sent by which it
    is written, and named there in `complete_store`, after every rank has written all of it. So the
    directory is true whenever the process ends. No slot is usable before it is open.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self._directory: Directory | None = None

    def open(self, arenas: Mapping[int, Path]) -> None:
        """Open the directory of the ranks' arenas, which are in one folder; called once.

        What it says is taken over as slots become usable. Raises `CapacityError`.
        """
        assert not self.is_open, "slots may be written already"
        assert not self.usable_slots, "slots may be written already"
        (folder,) = {arena.parent for arena in arenas.values()}
        files = {rank: arena.name for rank, arena in arenas.items()}
        try:
            self._directory = Directory(folder, files, self.num_slots)
        except OSError as error:
            raise CapacityError(
                f"host_pool: a directory of {self.num_slots} slots cannot be made in {folder}: "
                f"{error.strerror}. It takes {SLOT_BYTES} bytes a slot there: make room, or lower "
                "cpu_bytes"
            ) from error
        found = "an engine before this one left it" if self._directory.is_continued else "it is new"
        logger.info("kv-offload: this engine's seat in the host pool is %s; %s", folder, found)

    @property
    def directory(self) -> Directory:
        """The directory, once it is open."""
        assert self._directory is not None, "the directory is not open"
        return self._directory

    @property
    def is_open(self) -> bool:
        """True once there is a directory."""
        return self._directory is not None

    def limit_slots(self, usable_slots: int) -> None:
        """Do as `CacheManager`; take over what is in the slots that become usable."""
        first = self.usable_slots
        super().limit_slots(usable_slots)
        if usable_slots <= first:
            return
        slots, keys = self.directory.read(first, usable_slots)
        # A key that came again before its slot was usable has two, one of them later on here.
        latest = {key: row for row, key in enumerate(keys)}
        rows = [row for row, key in enumerate(keys) if latest[key] == row and key not in self]
        self.restore([keys[row] for row in rows], slots[rows], usable_slots)
        self.adopted_slots += len(rows)

    def prepare_load(self, keys: Sequence[Key]) -> Slots:
        """See `CacheManager`."""
        slots = super().prepare_load(keys)
        self.directory.use(distinct(slots)[::-1])
        return slots

    def prepare_store(self, keys: Sequence[Key], along: Slots = NO_SLOTS) -> Slots:
        """See `CacheManager`."""
        slots = super().prepare_store(keys, along)
        if len(slots):
            self.directory.withdraw(slots)
            self.directory.use(slots[::-1])
        if len(along):
            self.directory.use(distinct(along)[::-1])
        return slots

    def complete_store(self, slots: Slots, *, ok: bool = True) -> None:
        """See `CacheManager`."""
        super().complete_store(slots, ok=ok)
        if not ok:
            return
        keys: Sequence[Any] = self.readable_keys(slots)
        named = [row for row, key in enumerate(keys) if key is not None]  # none after a reset
        if named:
            self.directory.publish(slots[named], [keys[row] for row in named])

    def forget(self, slots: Slots) -> None:
        """See `CacheManager`."""
        self.directory.withdraw(slots)
        super().forget(slots)

    def reset(self) -> None:
        """Forget all keys; no later process finds these, or any that this one stores from now on.

        A reset does not say what the weights of later keys are, which another process needs.
        """
        if self._directory is not None:
            self._directory.retire()
        super().reset()

    def close(self) -> None:
        """Let another process take over what is there."""
        if self._directory is not None:
            self._directory.close()
