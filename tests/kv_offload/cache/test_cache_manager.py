"""What the manager promises by example. `test_cache_manager_model` has any interleaving."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from kv_offload.cache.index import RUN_SLOTS
from kv_offload.cache.manager import CacheManager
from kv_offload.cache.policies import POLICIES, make_policy
from kv_offload.cache.slots import MissingKeyError, MisuseError, Slots
from kv_offload.errors import KVOffloadError

A, B, C, D, E = (bytes([letter]) * 32 for letter in b"abcde")


@pytest.fixture(params=POLICIES)
def make_manager(request: pytest.FixtureRequest) -> Callable[[int], CacheManager]:
    return lambda num_slots: CacheManager(make_policy(request.param, num_slots))


@pytest.fixture
def manager(make_manager: Callable[[int], CacheManager]) -> CacheManager:
    """A manager of 4 slots."""
    return make_manager(4)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def array(*slots: int) -> Slots:
    return np.array(slots, np.int32)


def is_known(manager: CacheManager, *keys: bytes) -> bool:
    """Say whether any of the keys is readable or being stored."""
    return max(manager.slot_numbers(keys)) >= 0


def store(manager: CacheManager, *keys: bytes) -> list[int]:
    prepared = manager.prepare_store(keys)
    assert len(prepared) == len(keys)
    manager.complete_store(prepared)
    manager.check_integrity()
    return prepared.tolist()


def use(manager: CacheManager, *keys: bytes) -> None:
    manager.complete_load(manager.prepare_load(keys))


def eviction_order(manager: CacheManager, keys: Sequence[bytes]) -> list[bytes]:
    """Store newcomers one by one, until all of `keys` are gone."""
    order: list[bytes] = []
    left = list(keys)
    for i in range(manager.num_slots):
        prepared = manager.prepare_store([b"newcomer %d" % i])
        assert len(prepared) == 1
        gone = [key for key in left if not manager.readable([key])[0]]
        left = [key for key in left if manager.readable([key])[0]]
        assert len(gone) <= 1
        order += gone
        manager.check_integrity()
    assert not left
    return order


# -- construction ------------------------------------------------------------------------------


def test_nothing_is_built_for_slots_that_were_never_used(
    make_manager: Callable[[int], CacheManager],
) -> None:
    """A hundred million slots would take gigabytes."""
    before_bytes = resident_bytes()
    manager = make_manager(10**8)
    prepared = manager.prepare_store([A, B])
    manager.complete_store(prepared)
    manager.complete_load(manager.prepare_load([A, B]))
    manager.reset()
    assert manager.prepare_store([A]).tolist() == [0]
    assert resident_bytes() - before_bytes < 100e6


# -- storing -----------------------------------------------------------------------------------


def test_a_stored_key_is_readable_once_its_store_is_completed(manager: CacheManager) -> None:
    prepared = manager.prepare_store([A, B])
    assert prepared.tolist() == [0, 1]
    assert manager.slots_in_use == 2
    assert is_known(manager, A)
    assert not manager.readable([A])[0]
    assert manager.readable_slots() == {}
    manager.complete_store(array(0))
    assert manager.readable([A])[0]
    assert is_known(manager, A)
    assert not manager.readable([B])[0]
    assert manager.readable_slots() == {A: 0}
    manager.check_integrity()


def test_prepare_store_of_nothing(manager: CacheManager) -> None:
    assert not len(manager.prepare_store([]))
    manager.complete_store(array())
    manager.complete_load(array())
    assert manager.prepare_load([]).tolist() == []


def test_prepare_store_evicts_and_counts(manager: CacheManager) -> None:
    slots = dict(zip((A, B, C, D), store(manager, A, B, C, D), strict=True))
    prepared = manager.prepare_store([E, b"f"])
    assert (manager.evictions, manager.slots_in_use) == (2, 4)
    assert sorted(prepared.tolist()) == [slots[C], slots[D]]
    assert [manager.readable([key])[0] for key in (A, B, C, D)] == [True, True, False, False]
    assert not is_known(manager, D)
    manager.complete_store(prepared)
    manager.prepare_store([C])
    assert manager.evictions == 3


# -- loading -----------------------------------------------------------------------------------


def test_prepare_load_is_all_or_nothing(manager: CacheManager) -> None:
    store(manager, A)
    manager.prepare_store([B])
    for keys in ([A, B], [A, C]):
        with pytest.raises(MissingKeyError, match="is not readable") as caught:
            manager.prepare_load(keys)
        assert isinstance(caught.value, KVOffloadError)
        assert isinstance(caught.value, KeyError)
    manager.check_integrity()
    manager.prepare_store([C, D, E])
    assert manager.evictions == 1, "A must not be held"


# -- recency -----------------------------------------------------------------------------------


def test_lookups_do_not_change_recency(manager: CacheManager) -> None:
    for key in (A, B, C, D):
        store(manager, key)
    manager.readable([A])[0]
    manager.slot_numbers([A])
    manager.find([A])
    manager.readable_slots()
    assert eviction_order(manager, [A, B, C, D]) == [A, B, C, D]


@pytest.mark.parametrize("by", ["load", "store"])
def test_known_keys_used_together_are_evicted_tail_first(manager: CacheManager, by: str) -> None:
    store(manager, D, C, B, A)
    if by == "load":
        use(manager, A, B, C, D)
    else:
        manager.prepare_store([], manager.find([A, B, C, D]))
    assert eviction_order(manager, [A, B, C, D]) == [D, C, B, A]


def test_used_keys_outlive_others(manager: CacheManager) -> None:
    for key in (A, B, C, D):
        store(manager, key)
    use(manager, A, B)
    assert eviction_order(manager, [A, B, C, D]) == [C, D, B, A]


def test_a_key_can_be_used_while_it_is_being_stored(manager: CacheManager) -> None:
    a, b, c, d = manager.prepare_store([A, B, C, D]).tolist()
    manager.prepare_store([], manager.find([C]))
    manager.complete_store(array(c, b, a, d))
    assert eviction_order(manager, [A, B, C, D]) == [D, B, A, C]


@pytest.mark.parametrize(
    ("by", "slices"),
    [
        *(("store", slices) for slices in ([4], [1, 3], [2, 1, 1])),
        *(("load", slices) for slices in ([3], [1, 2], [1, 1, 1])),
    ],
)
@pytest.mark.parametrize("head_first", [True, False])
def test_keys_that_complete_in_slices_are_evicted_tail_first(
    manager: CacheManager, by: str, slices: list[int], head_first: bool
) -> None:
    if by == "store":
        slots, complete = manager.prepare_store([A, B, C, D]).tolist(), manager.complete_store
    else:
        for key in (A, B, C, D):
            store(manager, key)
        use(manager, D)
        slots, complete = manager.prepare_load([A, B, C]).tolist(), manager.complete_load
    pieces = [[slots.pop(0) for _ in range(size)] for size in slices]
    for piece in pieces if head_first else reversed(pieces):
        complete(array(*piece))
    assert eviction_order(manager, [A, B, C, D]) == [D, C, B, A]


def test_a_second_load_makes_a_key_recent_again(manager: CacheManager) -> None:
    for key in (A, B, C, D):
        store(manager, key)
    slots = [manager.prepare_load(keys) for keys in ([A], [B, C, D], [A])]
    manager.complete_load(np.concatenate(slots))
    assert eviction_order(manager, [A, B, C, D]) == [D, C, B, A]


def test_a_tail_stored_later_is_evicted_before_its_known_head(manager: CacheManager) -> None:
    store(manager, A)
    store(manager, D)
    prepared = manager.prepare_store([B, C], manager.find([A]))
    manager.complete_store(prepared)
    assert eviction_order(manager, [A, B, C, D]) == [D, C, B, A]


def test_a_prefix_that_was_held_for_long_is_still_evicted_tail_first(
    make_manager: Callable[[int], CacheManager],
) -> None:
    manager = make_manager(4)
    store(manager, A, B, C)
    slots = manager.prepare_load([A, B, C])
    for i in range(6):  # each evicts the one before, past the older prefix
        store(manager, b"%d" % i)
    manager.complete_load(slots)
    assert eviction_order(manager, [A, B, C])[-3:] == [C, B, A]


# -- misuse ------------------------------------------------------------------------------------


def test_complete_store_refuses_slots_without_a_store_and_changes_nothing(
    manager: CacheManager,
) -> None:
    a, b = manager.prepare_store([A, B]).tolist()
    (c,) = store(manager, C)
    manager.prepare_load([C])
    for slots in ([a, 3], [a, c], [a, a], [a, -1], [a, 99]):
        with pytest.raises(MisuseError, match="complete every prepared store once"):
            manager.complete_store(array(*slots))
        assert not manager.readable([A])[0]
        manager.check_integrity()
    manager.complete_store(array(a, b))
    with pytest.raises(MisuseError, match=rf"stores to slots \[{a}\] were completed"):
        manager.complete_store(array(a), ok=False)
    assert manager.readable([A])[0]


def test_a_key_that_one_load_names_twice_is_held_until_it_has_ended_twice(
    manager: CacheManager,
) -> None:
    store(manager, A)
    slots = manager.prepare_load([A, A])
    manager.complete_load(slots[:1])
    manager.reset()
    assert manager.slots_in_use == 1, "a reset frees all slots but those of loads"
    manager.complete_load(slots[1:])
    assert manager.slots_in_use == 0


def test_slots_keep_their_keys_until_an_eviction_or_a_reset(manager: CacheManager) -> None:
    store(manager, A, B, C, D)
    slots, since = manager.find([A, B]), manager.forgotten
    store(manager, E)  # evicts D
    assert manager.keep_their_keys(slots, since)
    assert not manager.keep_their_keys(manager.find([E]), since)
    manager.reset()
    assert not manager.keep_their_keys(slots, since)


def test_complete_load_refuses_slots_without_a_load_and_changes_nothing(
    manager: CacheManager,
) -> None:
    a, b = store(manager, A, B)
    (c,) = manager.prepare_store([C]).tolist()
    manager.prepare_load([A])
    for slots in ([a, b], [a, c], [a, a], [a, 3]):
        with pytest.raises(MisuseError, match="complete every prepared load once"):
            manager.complete_load(array(*slots))
        manager.check_integrity()
    manager.complete_load(array(a))
    with pytest.raises(MisuseError, match=rf"loads of slots \[{a}\] were completed"):
        manager.complete_load(array(a))


# -- reset -------------------------------------------------------------------------------------


def test_reset_keeps_the_slots_of_running_operations_until_they_complete(
    manager: CacheManager,
) -> None:
    (loading,) = store(manager, A)
    manager.prepare_load([A])
    manager.prepare_load([A])
    ok, failed = manager.prepare_store([B, C]).tolist()
    manager.reset()
    manager.check_integrity()
    assert manager.slots_in_use == 3
    assert not is_known(manager, A, B, C)

    prepared = manager.prepare_store([A, B])  # the same names, with new contents
    assert prepared.tolist() == [3]
    manager.complete_store(array(3))

    manager.complete_load(array(loading))
    assert manager.slots_in_use == 4
    manager.complete_load(array(loading))
    assert manager.slots_in_use == 3
    manager.complete_store(array(ok))
    manager.complete_store(array(failed), ok=False)
    manager.check_integrity()
    assert manager.slots_in_use == 1
    assert manager.readable([A])[0]
    assert not is_known(manager, B, C)
    assert sorted(store(manager, B, C, D)) == sorted([loading, ok, failed])


# -- slots that may not be used yet ------------------------------------------------------------


@pytest.mark.parametrize("usable_slots", [-1, 1, 5])
def test_a_limit_that_cannot_be_is_refused(manager: CacheManager, usable_slots: int) -> None:
    store(manager, A, B)
    with pytest.raises(AssertionError, match="2 slots were given out"):
        manager.limit_slots(usable_slots)
    assert manager.usable_slots == 4
    manager.limit_slots(2)


# -- runs of slots -----------------------------------------------------------------------------

LONG = [b"%3d" % i for i in range(5 * RUN_SLOTS + 3)]


def test_a_prefix_in_slots_that_follow_each_other_is_found_whole() -> None:
    manager = CacheManager(make_policy("lru", 200))
    slots = store(manager, *LONG)
    for first in (0, 1, RUN_SLOTS - 1, RUN_SLOTS):
        assert manager.slot_numbers(LONG[first:]) == slots[first:]
    mixed = [*LONG[:20], b"unknown", *LONG[40:20:-1], *LONG[41:]]
    assert manager.slot_numbers(mixed) == [*slots[:20], -1, *slots[40:20:-1], *slots[41:]]


def test_slots_are_found_in_whatever_order_keys_were_given_them() -> None:
    manager = CacheManager(make_policy("arc", 200))
    shuffled = random.Random(0).sample(LONG, len(LONG))
    slot_of = dict(zip(shuffled, store(manager, *shuffled), strict=True))
    assert manager.slot_numbers(LONG) == [slot_of[key] for key in LONG]


def test_a_forgotten_key_is_not_found_by_way_of_its_neighbours() -> None:
    manager = CacheManager(make_policy("lru", 4))
    written = manager.prepare_store([A, B])
    manager.reset()
    assert store(manager, C, D) == [2, 3]
    manager.complete_store(written)
    assert manager.slot_numbers([C, D, A, B]) == [2, 3, -1, -1]
    assert manager.slot_numbers([B, C, D]) == [-1, 2, 3]
    manager.check_integrity()


def test_evicted_slots_are_given_in_order() -> None:
    """So a prefix stays in slots that follow each other however often they are given anew."""
    manager = CacheManager(make_policy("lru", 64))
    for round_ in range(6):
        for prefix in range(4):
            slots = store(manager, *(b"%d %d %d" % (round_, prefix, i) for i in range(16)))
            assert slots == [*range(16 * prefix, 16 * prefix + 16)]


# -- check_integrity ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("running.end_stores(slots(2))", "what the policy ranks or holds is wrong"),
        ("running.start_loads(slots(2))", "a slot is read while it is written"),
        ("running._readers[1] = -1", "a slot has fewer than no readers"),
        ("running.start_loads(slots(3))", "a busy slot has no key and is no orphan"),
        ("running.start_stores(slots(3))", "a busy slot has no key and is no orphan"),
        ("index.clear(np.array([0, 1, 0], bool))", "an orphan has no running operation"),
        ("index.forget(slots(1))", "what the policy ranks or holds is wrong"),
        ("index.usable_slots = 2", "a slot does not exist"),
        ("policy.release(slots(2))", "what the policy ranks or holds is wrong"),
        ("policy.release(slots(0))", "what the policy ranks or holds is wrong"),
        ("policy.hold(slots(1))", "what the policy ranks or holds is wrong"),
        ("policy.capacity = 2", "3 slots exceed capacity 2"),
    ],
)
def test_check_integrity_names_what_contradicts(breakage: str, message: str) -> None:
    policy = make_policy("lru", 4)
    manager = CacheManager(policy)
    store(manager, A, B)
    manager.prepare_load([A])
    manager.prepare_store([C])
    manager.check_integrity()
    parts = {"policy": policy, "index": manager._index, "running": manager._running}
    exec(breakage, parts | {"np": np, "slots": lambda slot: np.array([slot], np.int32)})
    with pytest.raises(AssertionError, match=message):
        manager.check_integrity()
