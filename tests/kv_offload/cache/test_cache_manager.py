"""What the manager promises by example. `test_cache_manager_model` has any interleaving."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import POLICIES, make_policy
from kv_offload.cache.slot_table import RUN_SLOTS
from kv_offload.cache.slots import MissingKeyError, MisuseError, Slots
from kv_offload.errors import CapacityError, KVOffloadError

A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")

each_policy = pytest.mark.parametrize("policy", POLICIES)


def make_manager(policy: str = "lru", num_slots: int = 4) -> CacheManager:
    return CacheManager(make_policy(policy, num_slots))


def array(*slots: int) -> Slots:
    return np.array(slots, np.int32)


def store(manager: CacheManager, *keys: bytes) -> list[int]:
    prepared = manager.prepare_store(keys)
    assert len(prepared) == len(keys)
    manager.complete_store(prepared)
    manager.check_integrity()
    return prepared.tolist()


def use(manager: CacheManager, *keys: bytes) -> None:
    manager.complete_load(manager.prepare_load(keys))


@each_policy
@pytest.mark.parametrize("num_slots", [0, -1])
def test_a_policy_needs_capacity(policy, num_slots):
    with pytest.raises(CapacityError, match="1 or more"):
        make_manager(policy, num_slots)


def eviction_order(manager: CacheManager, keys: Sequence[bytes]) -> list[bytes]:
    """Store newcomers one by one, until all of `keys` are gone."""
    order: list[bytes] = []
    left = list(keys)
    for i in range(manager.num_slots):
        assert len(manager.prepare_store([b"newcomer %d" % i])) == 1
        gone = [key for key in left if not manager.readable([key])[0]]
        left = [key for key in left if key not in gone]
        assert len(gone) <= 1
        order += gone
        manager.check_integrity()
    assert not left
    return order


def one_after_the_other(manager: CacheManager) -> None:
    for key in (A, B, C, D):
        store(manager, key)


def looked_up(manager: CacheManager) -> None:
    one_after_the_other(manager)
    manager.readable([A])
    manager.slot_numbers([A])
    manager.find([A])
    manager.readable_slots()


def loaded_together(manager: CacheManager) -> None:
    store(manager, D, C, B, A)
    use(manager, A, B, C, D)


def stored_again_together(manager: CacheManager) -> None:
    store(manager, D, C, B, A)
    manager.prepare_store([], manager.find([A, B, C, D]))


def two_of_them_loaded(manager: CacheManager) -> None:
    one_after_the_other(manager)
    use(manager, A, B)


def one_used_while_it_is_being_stored(manager: CacheManager) -> None:
    a, b, c, d = manager.prepare_store([A, B, C, D]).tolist()
    manager.prepare_store([], manager.find([C]))
    manager.complete_store(array(c, b, a, d))


def the_first_loaded_again_while_it_is_loaded(manager: CacheManager) -> None:
    one_after_the_other(manager)
    slots = [manager.prepare_load(keys) for keys in ([A], [B, C, D], [A])]
    manager.complete_load(np.concatenate(slots))


def a_tail_stored_behind_a_known_head(manager: CacheManager) -> None:
    store(manager, A)
    store(manager, D)
    manager.complete_store(manager.prepare_store([B, C], manager.find([A])))


@each_policy
@pytest.mark.parametrize(
    ("happened", "order"),
    [
        (looked_up, [A, B, C, D]),
        (loaded_together, [D, C, B, A]),
        (stored_again_together, [D, C, B, A]),
        (two_of_them_loaded, [C, D, B, A]),
        (one_used_while_it_is_being_stored, [D, B, A, C]),
        (the_first_loaded_again_while_it_is_loaded, [D, C, B, A]),
        (a_tail_stored_behind_a_known_head, [D, C, B, A]),
    ],
)
def test_keys_are_evicted_by_their_last_use_and_tail_first(policy, happened, order):
    manager = make_manager(policy)
    happened(manager)
    assert eviction_order(manager, [A, B, C, D]) == order


@each_policy
def test_what_is_known_of_a_prefix_is_not_evicted_for_its_tail_but_can_be_later(policy):
    manager = make_manager(policy)
    head = store(manager, A, B)
    store(manager, C, D)
    manager.complete_store(manager.prepare_store([b"E", b"F"], array(*head)))
    assert manager.readable([A, B, b"E", b"F"]).all()
    assert {*eviction_order(manager, [A, B, b"E", b"F"])} == {A, B, b"E", b"F"}


@each_policy
def test_what_does_not_run_cannot_be_completed_and_what_is_not_readable_not_loaded(policy):
    manager = make_manager(policy)
    a, b = store(manager, A, B)
    (c,) = manager.prepare_store([C])
    assert manager.readable([A, B, C]).tolist() == [True, True, False]
    assert manager.holds(array(a, c)).tolist() == [True, False]
    with pytest.raises(MisuseError, match=rf"loads of slots \[{c}\] were begun while a store"):
        manager.prepare_copy(array(a, c))
    with pytest.raises(MissingKeyError, match="is not readable") as caught:
        manager.prepare_load([A, C])
    assert isinstance(caught.value, KVOffloadError)
    with pytest.raises(MisuseError, match=rf"stores to slots \[{a}, {b}\] were completed"):
        manager.complete_store(array(a, b))
    manager.prepare_load([A])
    with pytest.raises(MisuseError, match=rf"loads of slots \[{b}\] were completed"):
        manager.complete_load(array(a, b))
    manager.complete_load(array(a))
    with pytest.raises(AssertionError, match="3 slots were given out"):
        manager.limit_slots(1)


@each_policy
def test_a_reset_forgets_every_key_and_gives_out_no_slot_of_a_running_copy(policy):
    manager = make_manager(policy)
    loading = store(manager, A)
    manager.prepare_load([A])
    storing = manager.prepare_store([B]).tolist()
    slots, since = manager.find([A]), manager.forgotten
    manager.reset()
    assert not manager.keep_their_keys(slots, since)
    assert manager.slot_numbers([A, B]) == [-1, -1]
    assert store(manager, A, C) == [2, 3], "the same name, with new contents"
    manager.complete_load(array(*loading))
    manager.complete_store(array(*storing))
    manager.check_integrity()
    assert not manager.readable([B])[0]
    assert sorted(store(manager, B, D)) == [0, 1]


def test_a_key_that_one_load_names_twice_is_held_until_it_has_ended_twice():
    manager = make_manager()
    store(manager, A)
    slots = manager.prepare_load([A, A])
    manager.reset()
    manager.complete_load(slots[:1])
    assert manager.slots_in_use == 1
    manager.complete_load(slots[1:])
    assert manager.slots_in_use == 0


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@each_policy
def test_nothing_is_built_for_slots_that_were_never_used(policy):
    """A hundred million slots would take gigabytes; to look at all of them takes a minute."""
    before_bytes = resident_bytes()
    manager = make_manager(policy, 10**8)
    manager.complete_store(manager.prepare_store([A, B]))
    use(manager, A, B)
    manager.reset()
    assert manager.prepare_store([A]).tolist() == [0]
    assert resident_bytes() - before_bytes < 100e6


LONG = [b"%3d" % i for i in range(5 * RUN_SLOTS + 3)]


@pytest.mark.parametrize("stored", [LONG, random.Random(0).sample(LONG, len(LONG))])
def test_a_long_prefix_is_found_in_whatever_order_its_slots_are(stored):
    manager = make_manager(num_slots=200)
    slot_of = dict(zip(stored, store(manager, *stored), strict=True))
    mixed = [*LONG[:20], b"unknown", *LONG[40:20:-1], *LONG[41:]]
    for asked in (*(LONG[first:] for first in (0, 1, RUN_SLOTS - 1, RUN_SLOTS)), mixed):
        expected = [slot_of.get(key, -1) for key in asked]
        assert manager.slot_numbers(asked) == manager.find(asked).tolist() == expected


def test_evicted_slots_are_given_in_order():
    """So a prefix stays in slots that follow each other however often they are given anew."""
    manager = make_manager(num_slots=64)
    for round_ in range(6):
        for prefix in range(4):
            slots = store(manager, *(b"%d %d %d" % (round_, prefix, i) for i in range(16)))
            assert slots == [*range(16 * prefix, 16 * prefix + 16)]
