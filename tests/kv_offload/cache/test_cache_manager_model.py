"""Random interleavings of all operations, against a model that knows nothing of policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import POLICIES, make_policy
from kv_offload.cache.slots import MissingKeyError, MisuseError, Slots
from tests.support.slow import rest_is_slow

KEYS = [bytes([letter]) for letter in b"abcdefghij"]
key_lists = st.lists(st.sampled_from(KEYS), min_size=1, max_size=6)
MIN_STEPS_BETWEEN_RESETS = 15
"""Else resets come so often that the pool is never full and hardly anything is evicted."""


def array(slots: Iterable[int]) -> Slots:
    return np.array([*slots], np.int32)


@dataclass
class Load:
    slots: list[int]
    orphan: bool = False


class CacheManagerMachine(RuleBasedStateMachine):
    """`readable` and `writes` say what is in each slot; `None` is a key that a reset forgot."""

    policy_name: str

    @initialize(num_slots=st.integers(1, 8), unusable=st.integers(0, 8), full=st.booleans())
    def start(self, num_slots: int, unusable: int, full: bool) -> None:
        self.manager = CacheManager(make_policy(self.policy_name, num_slots))
        self.usable = max(0, num_slots - unusable)
        self.manager.limit_slots(self.usable)
        self.readable: dict[bytes, int] = {}
        self.writes: dict[int, bytes | None] = {}
        self.loads: list[Load] = []
        self.evictions = self.stored_slots = 0
        self.steps_since_reset = 0
        self.remembered: dict[bytes, int] = {}
        self.remembered_at = 0
        self.gone: set[bytes] = set()
        if full:
            self.store(KEYS[:num_slots])

    def slots_read(self) -> set[int]:
        return {slot for load in self.loads for slot in load.slots}

    def orphans(self) -> set[int]:
        writes = {slot for slot, key in self.writes.items() if key is None}
        return writes | {slot for load in self.loads if load.orphan for slot in load.slots}

    def known(self) -> set[bytes]:
        return {*self.readable, *(key for key in self.writes.values() if key is not None)}

    def in_use(self) -> set[int]:
        return {*self.readable.values(), *self.writes, *self.orphans()}

    @rule(keys=key_lists)
    def prepare_store(self, keys: list[bytes]) -> None:
        new = list(dict.fromkeys(key for key in keys if key not in self.known()))
        evictable = {
            slot: key
            for key, slot in self.readable.items()
            if key not in keys and slot not in self.slots_read()
        }
        free = self.usable - len(self.in_use())

        along = self.manager.find([key for key in keys if key in self.known()])
        prepared = self.manager.prepare_store(new, along)

        room = free + len(evictable)
        assert len(prepared) == len(new[:room])
        self.evictions += max(0, len(prepared) - free)
        for key, slot in zip(new[:room], prepared.tolist(), strict=True):
            assert 0 <= slot < self.usable
            if slot in self.in_use():
                assert slot in evictable, "a slot was taken that is held or was given out twice"
                del self.readable[evictable.pop(slot)]
            self.writes[slot] = key

    @precondition(lambda self: self.usable < self.manager.num_slots)
    @rule(more=st.integers(1, 8))
    def more_slots_become_usable(self, more: int) -> None:
        self.usable = min(self.usable + more, self.manager.num_slots)
        self.manager.limit_slots(self.usable)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), ok=st.booleans())
    def complete_store(self, data: st.DataObject, ok: bool) -> None:
        writing = st.sampled_from(sorted(self.writes))
        self.finish_stores(data.draw(st.lists(writing, min_size=1, unique=True)), ok)

    @rule(keys=key_lists)
    def store(self, keys: list[bytes]) -> None:
        """Store keys as fast as can be, so that the pool is often full of readable ones."""
        writes_before = set(self.writes)
        self.prepare_store(keys)
        self.finish_stores([slot for slot in self.writes if slot not in writes_before], ok=True)

    def finish_stores(self, slots: list[int], ok: bool) -> None:
        self.manager.complete_store(array(slots), ok=ok)
        for slot in slots:
            key = self.writes.pop(slot)
            if key is not None and ok:
                self.readable[key] = slot
                self.stored_slots += 1

    @rule(keys=key_lists)
    def prepare_load(self, keys: list[bytes]) -> None:
        if all(key in self.readable for key in keys):
            slots = self.manager.prepare_load(keys).tolist()
            assert slots == [self.readable[key] for key in keys]
            self.loads.append(Load(slots))
        else:
            with pytest.raises(MissingKeyError):
                self.manager.prepare_load(keys)

    @precondition(lambda self: self.readable)
    @rule(data=st.data())
    def prepare_load_of_readable_keys(self, data: st.DataObject) -> None:
        keys = st.sampled_from(sorted(self.readable))
        self.prepare_load(data.draw(st.lists(keys, min_size=1, max_size=4)))

    @precondition(lambda self: self.loads)
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.loads) - 1))
        load = self.loads[index]
        count = data.draw(st.integers(0, len(load.slots)))
        self.manager.complete_load(array(load.slots[:count]))
        del load.slots[:count]
        if not load.slots:
            del self.loads[index]

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """Complete what is not running; the invariants find out whether that changed anything."""
        any_slot = st.integers(0, self.manager.num_slots - 1)
        slots = data.draw(st.lists(any_slot, min_size=1, max_size=3))
        if len(set(slots)) < len(slots) or not self.writes.keys() >= set(slots):
            with pytest.raises(MisuseError):
                self.manager.complete_store(array(slots))
        if Counter(slots) - Counter(slot for load in self.loads for slot in load.slots):
            with pytest.raises(MisuseError):
                self.manager.complete_load(array(slots))

    @precondition(lambda self: self.steps_since_reset >= MIN_STEPS_BETWEEN_RESETS)
    @rule()
    def reset(self) -> None:
        self.steps_since_reset = 0
        self.manager.reset()
        self.readable.clear()
        self.writes = dict.fromkeys(self.writes)
        for load in self.loads:
            load.orphan = True

    @rule()
    def remember(self) -> None:
        """Note who is where, to be asked about after every later step."""
        self.remembered, self.remembered_at = dict(self.readable), self.manager.forgotten
        self.gone = set()

    @invariant()
    def who_was_remembered_is_there_or_known_to_be_gone(self) -> None:
        # A key that comes back to its slot was gone all the same.
        self.gone |= {k for k, slot in self.remembered.items() if self.readable.get(k) != slot}
        since = self.remembered_at
        for key, slot in self.remembered.items():
            kept = self.manager.keep_their_keys(array([slot]), since)
            assert kept == (key not in self.gone)
        if self.remembered:
            slots = array(self.remembered.values())
            assert self.manager.keep_their_keys(slots, since) == (not self.gone)

    @invariant()
    def manager_and_model_agree(self) -> None:
        self.steps_since_reset += 1
        self.manager.check_integrity()
        known = {key: slot for slot, key in self.writes.items()} | self.readable
        slots = [known.get(key, -1) for key in KEYS]
        assert self.manager.slot_numbers(KEYS) == self.manager.find(KEYS).tolist() == slots
        assert self.manager.readable(KEYS).tolist() == [key in self.readable for key in KEYS]
        assert self.manager.readable_slots() == self.readable
        assert self.manager.slots_in_use == len(self.in_use())
        assert self.manager.evictions == self.evictions
        assert self.manager.stored_slots == self.stored_slots

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.complete_store(array(self.writes))
        for load in self.loads:
            self.manager.complete_load(array(load.slots))
        self.manager.check_integrity()
        self.manager.reset()
        assert self.manager.slots_in_use == 0
        prepared = self.manager.prepare_store([b"%d" % i for i in range(self.manager.num_slots)])
        assert {*prepared.tolist()} == set(range(self.usable))


@pytest.mark.parametrize("policy_name", POLICIES)
@pytest.mark.parametrize("examples", rest_is_slow([30, 100]))
def test_any_interleaving(policy_name, examples):
    case = type("Machine", (CacheManagerMachine,), {"policy_name": policy_name}).TestCase()
    case.settings = settings(deadline=None, max_examples=examples, stateful_step_count=50)
    case.runTest()
