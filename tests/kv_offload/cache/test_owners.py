"""The slots of each owner, in the order in which it used them."""

from __future__ import annotations

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.owners import Owners
from kv_offload.cache.policies import make_policy
from kv_offload.cache.slots import Slots


def make_owners(slots: int) -> tuple[Owners, Slots]:
    """Return the owners of a full cache, and all of its slots."""
    manager = CacheManager(make_policy("lru", slots))
    stored = manager.prepare_store([b"%d" % number for number in range(slots)])
    manager.complete_store(stored)
    return Owners(manager), stored


def test_the_least_recently_used_slots_of_an_owner_come_first():
    owners, slots = make_owners(10)
    owners.give("a", slots[:6])
    owners.give("b", slots[4:])
    owners.use(slots[[0, 9, 2]])
    assert owners.take_oldest("a", 3).tolist() == [1, 3, 0]
    assert owners.take_oldest("b", 9).tolist() == [4, 5, 6, 7, 8, 9]
    assert [owners.slots_of(owner) for owner in "ab"] == [1, 0]
    owners.give("b", slots[:2])
    owners.check_integrity()
    assert owners.take_oldest("b", 9).tolist() == [0, 1]


def test_a_slot_that_changed_hands_is_of_no_use_to_its_former_owner():
    owners, slots = make_owners(4)
    owners.give("a", slots)
    owners.give("b", slots[:2])
    owners.check_integrity()
    assert owners.take_oldest("a", 4).tolist() == [2, 3]


def test_slots_that_are_used_again_and_again_take_no_more_memory():
    owners, slots = make_owners(100)
    owners.give("a", slots)
    for _ in range(1000):
        owners.use(slots)
    owners.check_integrity()
    assert len(owners._shares["a"].log) < 1000
