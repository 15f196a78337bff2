"""A cache manager whose slots outlive the process: a directory records the key of each slot."""

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
    """Keeps a directory, and takes over the blocks that an earlier process left in it.

    `prepare_store` withdraws a slot from the directory before the plan that writes the slot is
    sent. `complete_store` publishes it after every rank has written all of it. So the directory is
    true whenever the process ends. No slot is usable before `open`.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self._directory: Directory | None = None

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
        named = [row for row, key in enumerate(keys) if key is not None]  # None after a reset
        if named:
            self.directory.publish(slots[named], [keys[row] for row in named])

    def forget(self, slots: Slots) -> None:
        """See `CacheManager`."""
        self.directory.withdraw(slots)
        super().forget(slots)

    def reset(self) -> None:
        """Drop all keys; no later process finds them, or any that this process stores from now on.

        After a reset the model's weights may differ, and another process could not tell which
        weights the later keys belong to.
        """
        if self._directory is not None:
            self._directory.retire()
        super().reset()

    def close(self) -> None:
        """Let another process take over the blocks."""
        if self._directory is not None:
            self._directory.close()
