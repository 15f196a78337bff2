"""The disk: a tier whose slots belong to this engine alone."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from kv_offload.cache.disk_index import DiskIndex
from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.slots import NO_SLOTS, Mask, Slots
from kv_offload.messages import Outcome, TierCapacity
from kv_offload.scheduler.transfers import Transfer
from kv_offload.tiers.base import Tier

logger = logging.getLogger(__name__)

SET_ASIDE_SHARE = 100
"""At most one in this many slots is set aside; above that, the slots set aside first are used
again. A disk that failed as a whole for a while thus recovers."""


IndexOpener = Callable[[Mapping[str, str], int], DiskIndex]
"""Opens the index of a tier. Takes the ids of the ranks' files, by rank, and the slot count."""


class DiskTier(Tier):
    """A cache manager for the slots, and an index that outlives the process. Empty until opened.

    A slot that could not be written or read is set aside until the next start. Otherwise the
    manager would give it out again before all others, and every write would fail.
    """

    name = what = "disk"
    manager: CacheManager

    def __init__(self, num_slots: int, open_index: IndexOpener, *, outlives: bool = True) -> None:
        """`outlives`: a later process may use the blocks."""
        super().__init__()
        self.manager = CacheManager(make_policy("lru", num_slots))
        self.manager.limit_slots(0)
        self._open_index = open_index
        self._index: DiskIndex | None = None
        self._ends_with_process = not outlives
        self._reset_is_reported = False
        self._set_aside: deque[int] = deque()
        self._bad_places_are_reported = False

    @property
    def is_open(self) -> bool:
        return self._index is not None

    def open(self, ranks: Mapping[int, TierCapacity]) -> None:
        """Adopt the blocks that an earlier process left."""
        if self.is_open:
            return
        num_slots = min(self.manager.num_slots, *(rank.num_slots for rank in ranks.values()))
        files = {str(rank): ranks[rank].file_id for rank in sorted(ranks)}
        self._index = index = self._open_index(files, num_slots)
        self.manager.limit_slots(num_slots)
        self.manager.restore(index.keys, index.slots, int(index.slots.max(initial=-1)) + 1)
        if index.reason:
            logger.info("kv-offload: the disk begins empty: %s", index.reason)
        else:
            logger.info("kv-offload: the disk has %d of %d slots", len(index.keys), num_slots)

    @property
    def index(self) -> DiskIndex:
        """The index, once the tier is open."""
        assert self._index is not None, "the tier is not open"
        return self._index

    def close(self, timeout_seconds: float) -> None:
        """Write the rest of the index."""
        if self._index is not None:
            if not self.is_settled:
                self._reset_is_reported = False  # an operator who restarts should see it again
                self._report_reset([])
            self._index.close(timeout_seconds)

    @property
    def generation(self) -> bytes:
        return self.index.generation

    def readable(self, keys: Sequence[bytes]) -> Mask:
        return self.manager.readable(keys)

    def may_have(self, key: bytes) -> bool:
        """See `Tier`; True also for keys that are being written."""
        return key in self.manager

    def begin_write(self, keys: Sequence[bytes]) -> tuple[list[int], Slots]:
        """Give slots to keys that have none: free ones first, then the least recently used."""
        if not keys:
            return [], NO_SLOTS
        slots = self.manager.find(keys)
        below = slots[slots >= 0]
        if len(below):
            self.manager.policy.use(below)
            self.index.use(below)
        new = np.flatnonzero(slots < 0).tolist()
        given = self.manager.prepare_store([keys[row] for row in new]) if new else NO_SLOTS
        if len(given):
            # The old content may be overwritten even if this write fails or never ends.
            self.index.remove(given)
        return new[: len(given)], given

    def end_write(self, move: Transfer, failed: Mask) -> None:
        # After a reset the manager does not know these keys, or has them in other slots.
        known = self.manager.find(move.keys) == move.tier_slots
        bad = known & failed & (move.outcome is Outcome.FAILED)
        self.manager.complete_store(move.tier_slots[failed & ~bad], ok=False)
        self.manager.complete_store(move.tier_slots[~failed | bad])
        self._put_aside(move.tier_slots[bad])
        kept = known & ~failed
        if kept.any():
            keys = [key for key, ok in zip(move.keys, kept.tolist(), strict=True) if ok]
            self.index.put(keys, move.tier_slots[kept])

    def begin_read(self, keys: Sequence[bytes]) -> Slots:
        """Pin the slots of keys against eviction."""
        return self.manager.prepare_load(keys)

    def end_read(self, move: Transfer, failed: Mask) -> None:
        """Drop blocks that did not match their names or could not be read."""
        self.manager.complete_load(move.tier_slots)
        # After a reset the manager does not know these keys, or has them in other slots.
        known = self.manager.find(move.keys) == move.tier_slots
        if (lost := move.tier_slots[known & failed]).size:
            # A record that does not match its name is not a disk error.
            if move.outcome is Outcome.FAILED:
                self.index.remove(lost)
                self._put_aside(lost)
            else:
                self.evict(lost)
        if (good := move.tier_slots[known & ~failed]).size:
            self.index.use(good)

    def evict(self, slots: Slots) -> None:
        self.index.remove(slots)
        self.manager.forget(slots)

    def _put_aside(self, slots: Slots) -> None:
        """Drop the keys of slots, and keep these slots out of use."""
        if not slots.size:
            return
        self.manager.prepare_copy(slots)  # holds them, across resets too, until they are given back
        self.manager.forget(slots)
        self._set_aside.extend(slots.tolist())
        surplus = len(self._set_aside) - self.manager.usable_slots // SET_ASIDE_SHARE
        back = [self._set_aside.popleft() for _ in range(surplus)]
        self.manager.complete_load(np.array(back, np.int32))
        if self._set_aside and not self._bad_places_are_reported:
            self._bad_places_are_reported = True
            logger.warning(
                "kv-offload: slots of the disk that could not be written or read are set aside "
                "until the next start, at most one of %d; tier_slots_set_aside counts them",
                SET_ASIDE_SHARE,
            )

    @property
    def _slots_in_use(self) -> int:
        return self.manager.slots_in_use - len(self._set_aside)

    def forget_all(self) -> bool:
        held = self._slots_in_use > 0
        self.manager.reset()
        if self._index is not None:
            self._index.clear()
            self.is_settled = self._ends_with_process
        return held

    def settle(self, problems: Sequence[str], timeout_seconds: float) -> bool:
        """See `Tier`. Revoking one rank's file is enough, and so is removing the index.

        A restart ignores an index of files with other ids, and cannot name a block without one.
        """
        if self.is_settled:
            return True
        if "" not in problems and not self.index.wait_ended(timeout_seconds):
            self._report_reset(problems)
            return False
        self.is_settled = self._ends_with_process = True
        if self._reset_is_reported:
            logger.info("kv-offload: the disk has been emptied for a restart, too")
        return True

    def next_step(self, oldest: Iterable[Transfer], now: float) -> None:
        super().next_step(oldest, now)
        # No call waits for the disk after new weights that a rank reported in a step.
        if not self.is_settled and self.index.problem:
            self._report_reset([])

    def _report_reset(self, problems: Sequence[str]) -> None:
        if self._reset_is_reported:
            return
        self._reset_is_reported = True
        logger.error(
            "kv-offload: the disk could not be emptied for a restart: %s. This process serves "
            "nothing older than the reset, but an engine started with this disk may. Remove its "
            "folder before the next start, or repair the disk and call reset_prefix_cache until it "
            "returns True",
            "; ".join(filter(None, [self.index.problem, *problems])) or "it has not answered",
        )

    def gauges(self) -> dict[str, float]:
        return {
            "tier_slots": self.manager.usable_slots,
            "tier_slots_in_use": self._slots_in_use,
            "tier_slots_set_aside": len(self._set_aside),
        }

    def check_integrity(self) -> None:
        self.manager.check_integrity()
