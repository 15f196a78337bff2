"""Decides which blocks are written to a lower tier, and when."""

from __future__ import annotations

import math
import time
from collections import deque

import numpy as np

from kv_offload.cache.slots import Mask, Slots
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.tiers.base import Tier

JOB_BYTES = 64 << 20
"""Bytes per demotion job and rank. A smaller job holds its slots for less time, but the end of each
job costs a step."""

MAX_RUNNING_SHARE = 8
"""At most one in this many slots of host memory is being written to a tier at a time."""

BURST_SECONDS = 1.0
"""Unused rate is saved up for this long."""

PLAN_SECONDS = 0.05
"""Minimum time between two plans while requests run. A plan takes 0.3 ms of a step, for one slot as
for a hundred (Xeon at 2.8 GHz, November 2026)."""

MAX_LOOKS = 256
"""Maximum slots that a plan looks at. Most of them may be in the tier already."""


class Demoter:
    """Writes blocks of host memory to the tier, in the order in which they were stored or loaded.

    The least recently used blocks are thus written first, and most are in the tier before they are
    evicted. Eventually all blocks that are worth it are written, if the rate allows. A loaded block
    is considered again: the tier counts a use of it, or gets it again.
    """

    def __init__(self, core: Core, tier: Tier, bytes_per_second: float) -> None:
        """Write at most `bytes_per_second` on each rank."""
        self._host = host = core.manager
        self._transfers, self._subscribers, self._tier = core.transfers, core.subscribers, tier
        slot_bytes = core.slots.slot_bytes
        self._job_slots = max(1, JOB_BYTES // slot_bytes)
        self._rank_slots_per_second = bytes_per_second / slot_bytes
        self._saved_slots = 0.0
        self._planned = -math.inf  # time of the last plan: the first may use a whole burst
        # Slots to consider, each once.
        self._waiting: deque[Slots] = deque()
        self._waits = np.zeros(host.num_slots, bool)
        self.running_slots = 0
        """Slots that are being written."""
        core.subscribers.store_end.append(lambda store: self._consider(store.slots))
        core.subscribers.load_end.append(lambda load: self._consider(host.owned(load.slots)))

    def _consider(self, slots: Slots) -> None:
        fresh = slots[~self._waits[slots]]
        if len(fresh):
            self._waits[fresh] = True
            self._waiting.append(fresh)

    @property
    def has_more(self) -> bool:
        """True if slots wait to be considered."""
        return bool(self._waiting) or self._any_newly_demotable

    @property
    def _any_newly_demotable(self) -> bool:
        return not self._tier.is_shared and self._host.policy.has_newly_demotable

    def plan_step(self, *, idle: bool, sharing_ranks: int) -> None:
        """Plan the writes of a step, more if the engine is idle; `sharing_ranks` divide them."""
        now = time.monotonic()
        if self._any_newly_demotable and (now - self._planned >= PLAN_SECONDS or idle):
            self._consider(self._host.policy.take_newly_demotable())
        if not self._waiting or (now - self._planned < PLAN_SECONDS and not idle):
            return
        slots_per_second = self._rank_slots_per_second * sharing_ranks
        earned = (now - self._planned) * slots_per_second
        most_saved = max(1.0, slots_per_second * BURST_SECONDS)
        self._saved_slots = min(most_saved, self._saved_slots + earned)
        self._planned = now
        most_running = max(1, self._host.usable_slots // MAX_RUNNING_SHARE)
        looks = MAX_LOOKS
        while self._waiting and looks > 0:
            room = min(int(self._saved_slots), most_running - self.running_slots)
            if room < 1:
                return
            slots = self._take(min(room, looks))
            looks -= len(slots)
            self._demote(slots)

    def _take(self, count: int) -> Slots:
        """Take up to `count` of the waiting slots: decodes offer one at a time."""
        parts: list[Slots] = []
        while count and self._waiting:
            part = self._waiting.popleft()
            if len(part) > count:
                self._waiting.appendleft(part[count:])
                part = part[:count]
            parts.append(part)
            count -= len(part)
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._waits[slots] = False
        return slots

    def _demote(self, slots: Slots) -> None:
        """Plan jobs for the slots whose blocks the tier does not have.

        One call to each manager covers all slots: a call for each job took 6 ms of a step with
        slots of 2 MiB. A block that the policy finds not worth a write is offered again at its next
        use.
        """
        host, tier = self._host, self._tier
        if not tier.is_shared:  # else another engine may use the blocks next
            slots = slots[host.policy.should_demote(slots)]
        found = [
            (key, slot)
            for key, slot in zip(host.readable_keys(slots), slots.tolist(), strict=True)
            if key is not None
        ]
        rows, places = tier.begin_write([key for key, _ in found])
        if not rows:
            return
        keys = [found[row][0] for row in rows]
        held = np.array([found[row][1] for row in rows], np.int32)
        host.prepare_copy(held)
        moves = self._transfers.plan_tier_copy(
            Kind.DEMOTE, tier, keys, held, places, max_slots=self._job_slots
        )
        for notify in self._subscribers.demotions:
            notify(moves)
        self.running_slots += len(held)
        self._saved_slots -= len(held)

    def ended(self, move: Transfer, failed: Mask) -> None:
        """Act on the end of a demotion; `failed` masks the slots that were not written."""
        self.running_slots -= len(move.slots)
        self._host.complete_load(move.slots)
        self._tier.end_write(move, failed)
