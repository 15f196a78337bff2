"""Which slots are retained, and for how long."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import make_policy
from kv_offload.cache.retention import RELEASED_PER_STEP, SWEPT_PER_STEP, Retention
from kv_offload.cache.slots import NO_SLOTS, Slots
from kv_offload.hints import Keep


class Bed:
    """A manager of `slots` slots, with a clock that stands still."""

    def __init__(self, slots: int = 10, share: float = 0.5, owner_share: float = 0.5) -> None:
        self.now = 100.0
        self.totals: Counter[str] = Counter()
        self.manager = CacheManager(make_policy("lru", slots))
        self.retention = Retention(self.manager, share, owner_share, self._count, lambda: self.now)
        self._stored = 0

    def _count(self, name: str, amount: float) -> None:
        self.totals[name] += int(amount)

    def store(self, count: int, name: bytes = b"key") -> Slots:
        keys = [b"%s %d" % (name, self._stored + index) for index in range(count)]
        self._stored += count
        slots = self.manager.prepare_store(keys)
        self.manager.complete_store(slots)
        return slots

    def keep(self, slots: Slots, seconds: float = 60, owner: str | None = None) -> int:
        """Retain slots; return how many more are retained now."""
        before = self.retention.slots
        self.retention.keep(slots, Keep(owner, seconds))
        self.check()
        return self.retention.slots - before

    def pass_time(self, seconds: float) -> int:
        """Let time pass; return how many slots are retained then."""
        self.now += seconds
        self.retention.expire()
        self.check()
        return self.retention.slots

    def press(self) -> None:
        self.store(3 * self.manager.num_slots, b"scan")

    def left(self, slots: Slots, keys: list[bytes | None]) -> int:
        found = self.manager.readable_keys(slots)
        return sum(one == other for one, other in zip(found, keys, strict=True))

    def check(self) -> None:
        self.retention.check_integrity()
        self.manager.check_integrity()


def test_retained_slots_outlive_pressure_until_their_time_is_over():
    bed = Bed()
    slots = bed.store(3)
    keys = bed.manager.readable_keys(slots)
    assert bed.keep(slots, seconds=60) == 3
    bed.press()
    assert bed.left(slots, keys) == 3
    assert bed.pass_time(59) == 3
    assert bed.pass_time(1) == 0
    bed.press()
    assert bed.left(slots, keys) == 0


def test_an_owner_has_a_quota():
    bed = Bed(share=0.5, owner_share=0.3)
    assert bed.keep(bed.store(5), owner="greedy") == 3
    assert bed.keep(bed.store(3), owner="modest") == 2, "what the others left"
    assert bed.totals["unretained_slots"] == 3


def test_an_empty_salt_is_no_owner():
    """The engine's keys are the same with it and without one."""
    bed = Bed(owner_share=0.3)
    slots = bed.store(2)
    assert bed.keep(slots, owner=None) == 2
    assert bed.keep(slots, seconds=90, owner="") == 0
    assert bed.keep(bed.store(2), owner="") == 1, "what the others left"
    assert bed.pass_time(60) == 2
    assert bed.pass_time(30) == 0


def test_a_slot_that_is_retained_for_an_instant_again_and_again_is_let_go_of_once():
    bed = Bed()
    slots = bed.store(3)
    for _ in range(3):
        bed.keep(slots, seconds=1e-20)
    assert bed.pass_time(1) == 0
    assert bed.manager.idle(slots).all()


def test_slots_that_are_being_stored_are_retained_once_they_are():
    bed = Bed()
    slots = bed.manager.prepare_store([b"a", b"b", b"c"])
    assert bed.keep(slots) == 0
    bed.retention.keep(slots[:1], Keep(None, 600))
    bed.manager.complete_store(slots[:2])
    bed.retention.stored(slots[:2])
    bed.manager.complete_store(slots[2:], ok=False)
    bed.retention.stored(slots[2:])
    assert bed.pass_time(0) == 2
    assert bed.pass_time(60) == 1, "the later of two ends"
    again = bed.store(1)
    assert again == slots[2:]
    bed.retention.stored(again)
    assert bed.pass_time(0) == 1, "whose store failed is forgotten"


def test_a_step_reads_and_lets_go_of_a_bounded_number():
    bed = Bed(slots=2 * SWEPT_PER_STEP)
    bed.keep(bed.store(2 * RELEASED_PER_STEP))
    assert bed.pass_time(60) == 2 * RELEASED_PER_STEP, "it reads the other slots"
    assert bed.pass_time(0) == RELEASED_PER_STEP
    assert bed.pass_time(0) == 0


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events(seed):
    """Limits hold, counts are right, and after the longest time nothing is retained."""
    chance = random.Random(seed)
    bed = Bed(slots=60, share=0.5, owner_share=0.25)
    written: list[Slots] = []
    for _ in range(400):
        event = chance.random()
        owner = chance.choice(["a", "b", "c"])
        if event < 0.3:
            key = b"%s %d" % (owner.encode(), chance.getrandbits(60))
            slots = bed.manager.prepare_store([key])
            written.append(slots)
        elif event < 0.7:
            known = bed.manager.readable_slots()
            own = sorted(slot for key, slot in known.items() if key.startswith(owner.encode()))
            slots = np.array(chance.sample(own, min(len(own), 6)), np.int32)
        else:
            slots = NO_SLOTS
        if len(slots) and chance.random() < 0.8:
            keep = Keep(owner, chance.uniform(1, 90))
            bed.retention.keep(slots, keep)
        if written and event > 0.5:
            ended = written.pop(0)
            bed.manager.complete_store(ended, ok=chance.random() < 0.9)
            bed.retention.stored(ended)
        if event > 0.99:
            bed.retention.drop()
            bed.manager.reset()
        bed.pass_time(chance.random() * 2)
        assert bed.retention.slots <= 30
    for ended in written:
        bed.manager.complete_store(ended)
        bed.retention.stored(ended)
    assert bed.pass_time(91) == 0
    assert bed.manager.idle(np.arange(60, dtype=np.int32)).all()


def test_a_reset_forgets_what_was_to_be_retained():
    """The slot of a store that runs during a reset goes to another key, whose store ends."""
    bed = Bed()
    slots = bed.manager.prepare_store([b"a"])
    bed.keep(slots)
    bed.retention.drop()
    bed.manager.reset()
    bed.manager.complete_store(slots)
    again = bed.manager.prepare_store([b"b"])
    assert again == slots
    bed.manager.complete_store(again)
    bed.retention.stored(again)
    assert bed.retention.slots == 0
