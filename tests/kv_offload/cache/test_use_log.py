from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_offload.cache.policies import use_log
from kv_offload.cache.policies.use_log import UseLog
from kv_offload.cache.slots import Slots

NUM_SLOTS = 12
slot_lists = st.lists(st.integers(0, NUM_SLOTS - 1), max_size=8)


def array(numbers: list[int]) -> Slots:
    return np.array(numbers, np.int32)


class UseLogMachine(RuleBasedStateMachine):
    """Against a plain list, from the least to the most recent; parked ones are listed apart."""

    def __init__(self) -> None:
        super().__init__()
        self.log = UseLog(NUM_SLOTS)
        self.held = np.zeros(NUM_SLOTS, bool)
        self.order: list[int] = []
        self.parked: list[int] = []

    def take_out(self, slots: list[int]) -> None:
        self.order = [slot for slot in self.order if slot not in slots]
        self.parked = [slot for slot in self.parked if slot not in slots]

    @rule(slots=slot_lists)
    def append(self, slots: list[int]) -> None:
        self.log.append(array(slots))
        self.take_out(slots)
        self.order += list(dict.fromkeys(reversed(slots)))[::-1]

    @rule(slots=slot_lists)
    def remove(self, slots: list[int]) -> None:
        known = list(dict.fromkeys(slot for slot in slots if slot in self.order + self.parked))
        self.log.remove(array(known))
        self.take_out(known)

    @rule(slots=slot_lists)
    def hold(self, slots: list[int]) -> None:
        self.held[slots] = True

    @rule(count=st.integers(0, NUM_SLOTS))
    def pop_oldest(self, count: int) -> None:
        victims = [slot for slot in self.order if not self.held[slot]][:count]
        assert self.log.pop_oldest(count, self.held).tolist() == victims
        last = self.order.index(victims[-1]) if len(victims) == count > 0 else len(self.order)
        met = self.order[:last] if count else []
        self.parked += [slot for slot in met if self.held[slot]]
        self.order = [slot for slot in self.order if slot not in [*met, *victims]]

    @rule()
    def release_all(self) -> None:
        self.held[:] = False
        self.log.put_back(array(sorted(self.parked + self.order)))
        self.order = self.parked + self.order
        self.parked = []

    @invariant()
    def both_agree(self) -> None:
        self.log.check_integrity()
        assert self.log.slots().tolist() == self.order
        assert self.log.length == len(self.order) + len(self.parked)


@pytest.mark.parametrize("slack", [0, use_log.SLACK_ENTRIES])
@pytest.mark.parametrize("chunk", [1, 5, use_log.CHUNK_ENTRIES])
def test_any_interleaving(monkeypatch: pytest.MonkeyPatch, slack: int, chunk: int) -> None:
    monkeypatch.setattr(use_log, "SLACK_ENTRIES", slack)
    monkeypatch.setattr(use_log, "CHUNK_ENTRIES", chunk)
    case = UseLogMachine.TestCase()
    case.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
    case.runTest()


def test_memory_does_not_grow_however_often_a_slot_is_used() -> None:
    log = UseLog(NUM_SLOTS)
    log.append(array(list(range(NUM_SLOTS))))
    tracemalloc.start()
    try:
        for _ in range(20_000):
            log.append(array([3]))
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    entry_bytes = 12  # a slot and a time
    bound_bytes = (2 * NUM_SLOTS + use_log.SLACK_ENTRIES + use_log.CHUNK_ENTRIES) * entry_bytes
    assert grown_bytes < 1.5 * bound_bytes < 20_000 * entry_bytes
    assert log.slots().tolist()[-1] == 3
    log.check_integrity()
