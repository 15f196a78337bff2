"""Every policy by example."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from kv_offload.cache.policies import POLICIES, make_policy
from kv_offload.cache.policies.base import EvictionPolicy
from kv_offload.cache.slots import Slots
from kv_offload.errors import CapacityError


def slots(*numbers: int) -> Slots:
    return np.array(numbers, np.int32)


class Named:
    """Lets a test name keys where a policy wants slots; gives them slots as the manager does."""

    def __init__(self, policy: EvictionPolicy, *keys: object) -> None:
        self.policy = policy
        self.slot_of: dict[object, int] = {}
        for key in keys:
            self.add(key)
            self.release(key)

    def add(self, key: object) -> None:
        slot = next(slot for slot in itertools.count() if slot not in self.slot_of.values())
        self.policy.add(slots(slot), [key])
        self.slot_of[key] = slot
        self.check()

    def replace(self, key: object) -> object:
        """Return the key that left, `None` if there was none."""
        replaced = self.policy.replace([key])
        if not len(replaced):
            return None
        (slot,) = replaced.tolist()
        victim = next(key for key in self.slot_of if self.slot_of[key] == slot)
        del self.slot_of[victim]
        self.slot_of[key] = slot
        self.check()
        return victim

    def victims(self, count: int) -> list[object]:
        """Evict `count` keys for newcomers that stay held."""
        return [self.replace(f"new {i}") for i in range(count)]

    def use(self, *keys: object) -> None:
        for key in keys:
            self.policy.use(slots(self.slot_of[key]))

    def hold(self, *keys: object) -> None:
        for key in keys:
            self.policy.use(slots(self.slot_of[key]))
            self.policy.keep(slots(self.slot_of[key]))

    def release(self, *keys: object) -> None:
        for key in keys:
            self.policy.release(slots(self.slot_of[key]))
            self.check()

    def discard(self, key: object) -> None:
        self.policy.discard(slots(self.slot_of.pop(key)))
        self.check()

    def check(self) -> None:
        self.policy.check_integrity()
        assert self.policy.resident().keys() == set(self.slot_of.values())


@pytest.fixture(params=POLICIES)
def new(request: pytest.FixtureRequest) -> Callable[..., Named]:
    return lambda capacity, *keys: Named(make_policy(request.param, capacity), *keys)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_policy_needs_capacity(new, capacity):
    with pytest.raises(CapacityError, match="1 or more"):
        new(capacity)


def test_a_held_slot_is_not_evicted_however_old(new):
    policy = new(5, "a", "b", "c", "d")
    policy.add("new and not released")
    policy.hold("a", "b")
    policy.use("c", "d")
    assert policy.victims(3) == ["c", "d", None]
    policy.release("b")
    assert policy.replace("one more") == "b"


def test_held_slots_that_lru_has_passed_return_to_their_place_or_become_recent():
    policy = Named(make_policy("lru", 6), "u", "e", "d", "c", "b", "a")
    policy.hold(*"cbau")  # a prefix whose head is the most recent, older than d and e
    policy.use("d", "e")
    assert policy.replace("one more") == "d"
    policy.use("u")
    policy.release(*"abcu")  # head first, as slices complete
    assert policy.victims(5) == ["c", "b", "a", "e", "u"]


def test_discard_and_clear_forget_slots_held_or_not(new):
    policy = new(4, "a", "b", "c", "d")
    policy.hold("a", "b")
    policy.use("c", "d")
    assert policy.replace("e") == "c", "a and b were passed"
    policy.discard("a")
    policy.discard("d")
    assert policy.victims(1) == [None]
    policy.policy.clear()
    assert policy.policy.resident() == {}
    again = Named(policy.policy, "a")
    assert again.victims(2) == ["a", None]
