"""Decides what is written to a tier below host memory, and when."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kv_offload.cache.slots import Slots
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.tiers.base import Tier

JOB_BYTES = 64 << 20
"""Bytes per job and rank. Slots are let go of at its end, so the sooner the smaller it is; but a
step pays for each end."""

MAX_RUNNING_SHARE = 8
"""One of so many slots of host memory, at most, is held by demotions to a tier at a time."""

BURST_SECONDS = 1.0
"""For how long the rate may be saved up."""

PLAN_SECONDS = 0.05
"""How often writes are planned while requests run. To plan takes 0.3 ms of a step, for one slot as
for a hundred (Xeon at 2.8 GHz, November 2026)."""

MAX_LOOKS = 256
"""How many slots a plan looks at, at most, most of which may be in the tier already."""


class Demoter:
    """Writes what is in host memory to the tier, in the order in which it was stored or loaded.

    So what nobody has used for longest is written first, and what is about to be evicted is mostly
    below by then. All that is worth a write is written in the end, as far as the rate allows.
    What was loaded is looked at again: the tier counts that as a use, or gets it once more.
    """

    def __init__(self, core: Core, tier: Tier, bytes_per_second: float) -> None:
        """Write at most `bytes_per_second` on each rank."""
        self._host = host = core.manager
        self._transfers, self._tell, self._tier = core.transfers, core.tell, tier
        slot_bytes = core.slots.slot_bytes
        self._job_slots = max(1, JOB_BYTES // slot_bytes)
        self._rank_slots_per_second = bytes_per_second / slot_bytes
        self._saved_slots = 0.0
        self._planned = -math.inf
        """When that was, on the monotonic clock. At first as much is saved as may be."""
        # Slots that are to be looked at, each once.
        self._waiting: deque[Slots] = deque()
        self._waits = np.zeros(host.num_slots, bool)
        self.running_slots = 0
        """Slots that are being written."""

    def offer(self, slots: Slots) -> None:
        """Have slots looked at that were stored or loaded."""
        fresh = slots[~self._waits[slots]]
        if len(fresh):
            self._waits[fresh] = True
            self._waiting.append(fresh)

    @property
    def has_more(self) -> bool:
        """True if slots wait to be looked at."""
        return bool(self._waiting) or self._any_newly_demotable

    @property
    def _any_newly_demotable(self) -> bool:
        return not self._tier.is_shared and self._host.has_newly_demotable

    def plan_step(self, *, idle: bool, sharing_ranks: int) -> None:
        """Plan this step's writes; an engine that is `idle` has time for more.

        `sharing_ranks` write each slot once between them.
        """
        now = time.monotonic()
        if self._any_newly_demotable and (now - self._planned >= PLAN_SECONDS or idle):
            self.offer(self._host.take_newly_demotable())
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
        """Take up to `count` slots that wait.

        Decodes offer one at a time. To plan and end a job for each takes as long as for a hundred.
        """
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
        """Plan jobs for those of the slots that hold something that the tier has not.

        Both managers are asked once for all of them: a step that asked for each job took 6 ms where
        a slot has 2 MiB.

        What the policy does not find worth a write comes again once it is used again. It is not
        asked where the tier is shared: what came once here may come next to another engine.
        """
        host, tier = self._host, self._tier
        if not tier.is_shared:
            slots = slots[host.should_demote(slots)]
        found: list[tuple[Any, int]] = [
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
        for tell in self._tell.demotions:
            tell(moves)
        self.running_slots += len(held)
        self._saved_slots -= len(held)

    def ended(self, move: Transfer, failed: NDArray[np.bool_]) -> None:
        """Take in the end of a demotion; `failed` says which slots are not in the tier."""
        self.running_slots -= len(move.slots)
        self._host.complete_load(move.slots)
        self._tier.end_write(move, failed)
