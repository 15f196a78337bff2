"""The log that LRU is made of, against a plain list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_offload.cache.policies import lru
from kv_offload.cache.policies.lru import LRUPolicy
from kv_offload.cache.slots import Readers, Slots
from tests.support.slow import rest_is_slow

NUM_SLOTS = 12


def array(numbers: list[int]) -> Slots:
    return np.array(numbers, np.int32)


class LRUMachine(RuleBasedStateMachine):
    """`order` goes from the least to the most recent; parked slots are listed apart."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LRUPolicy(NUM_SLOTS)
        self.held: set[int] = set()
        self.order: list[int] = []
        self.parked: list[int] = []

    def some(self, data: st.DataObject, slots: set[int]) -> list[int]:
        chosen = st.lists(st.sampled_from(sorted(slots)), unique=True) if slots else st.just([])
        return data.draw(chosen)

    def known(self) -> set[int]:
        return {*self.order, *self.parked}

    def readers(self) -> Readers:
        """Return the readers by slot, 1 for each held slot."""
        return np.isin(np.arange(NUM_SLOTS), [*self.held]).astype(np.int32)

    def take_out(self, slots: list[int]) -> None:
        self.order = [slot for slot in self.order if slot not in slots]
        self.parked = [slot for slot in self.parked if slot not in slots]

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        slots = self.some(data, {*range(NUM_SLOTS)} - self.known())
        self.policy.add(array(slots), slots)
        self.order += slots[::-1]
        self.held |= {*slots}

    @rule(count=st.integers(0, NUM_SLOTS))
    def replace(self, count: int) -> None:
        victims = [slot for slot in self.order if slot not in self.held][:count]
        keys = [*range(count)]
        assert self.policy.replace(keys, self.readers()).tolist() == sorted(victims)
        last = self.order.index(victims[-1]) if len(victims) == count > 0 else len(self.order)
        met = self.order[:last] if count else []
        parked = [slot for slot in met if slot in self.held]
        self.take_out([*parked, *victims])
        self.parked += parked
        self.order += sorted(victims, reverse=True)
        self.held |= {*victims}

    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        slots = self.some(data, self.known())
        self.policy.use(array(slots))
        self.take_out(slots)
        self.order += slots

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        slots = self.some(data, self.known() - self.held)
        """Slots keep their place."""
        self.held |= {*slots}

    @precondition(lambda self: self.held)
    @rule(data=st.data(), everything=st.booleans())
    def release(self, data: st.DataObject, everything: bool) -> None:
        slots = sorted(self.held) if everything else self.some(data, self.held)
        self.policy.release(array(slots))
        self.held -= {*slots}
        back = [slot for slot in self.parked if slot in slots]
        self.take_out(back)
        self.order = back + self.order

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        slots = self.some(data, self.known())
        self.policy.discard(array(slots))
        self.take_out(slots)
        self.held -= {*slots}

    @invariant()
    def both_agree(self) -> None:
        self.policy.check_integrity(self.readers())
        assert self.policy.order().tolist() == self.order
        assert self.policy.resident() == sorted(self.known())


@pytest.mark.parametrize("slack", [0, 10, lru.SLACK_ENTRIES])
@pytest.mark.parametrize("window", rest_is_slow([lru.WINDOW_ENTRIES, 1]))
def test_any_interleaving(monkeypatch, slack, window):
    monkeypatch.setattr(lru, "SLACK_ENTRIES", slack)
    monkeypatch.setattr(lru, "WINDOW_ENTRIES", window)
    case = LRUMachine.TestCase()
    case.settings = settings(deadline=None, max_examples=50, stateful_step_count=50)
    case.runTest()


@pytest.mark.parametrize("step", [1, 5, 12])
def test_the_log_does_not_grow_however_often_a_slot_is_used(step):
    policy = LRUPolicy(NUM_SLOTS)
    order = [*range(NUM_SLOTS)]
    policy.add(array(order[::-1]), order)
    for _ in range(20_000):
        policy.use(array(order[:step]))
        order = [*order[step:], *order[:step]]
    policy.check_integrity(np.zeros(NUM_SLOTS, np.int32))
    assert policy.order().tolist() == order
