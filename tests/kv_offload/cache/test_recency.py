"""The lists that ARC is made of: slots by recency, and the keys that were evicted."""

from __future__ import annotations

import tracemalloc

import pytest

from kv_offload.cache.policies.ghosts import GhostList
from kv_offload.cache.policies.recency import RecencyList


def test_recency_list_passes_a_held_slot_once() -> None:
    slots = RecencyList()
    for i in range(100):
        slots.append(i, held=i < 90)
    assert [slots.pop_oldest() for _ in range(3)] == [90, 91, 92]
    assert slots.slots() == [93, 94, 95, 96, 97, 98, 99]
    assert (slots.length, slots.evictable) == (97, 7)
    assert 0 in slots
    assert 90 not in slots
    slots.check_integrity()
    for i in range(89, -1, -1):
        slots.release(i)
    assert [slots.pop_oldest() for _ in range(97)] == [*range(90), *range(93, 100)]
    slots.check_integrity()


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("slots.length += 1", "a slot is lost or linked twice"),
        ("slots._unlink(1)", "a slot is lost or linked twice"),
        ("slots._unlink(1); slots._link(3, 0)", "a slot is linked that is not in the list"),
        ("slots.evictable = 0", "0 slots count as evictable, but 1 are"),
    ],
)
def test_recency_list_check_integrity_names_what_is_broken(breakage: str, message: str) -> None:
    slots = RecencyList()
    for i in range(3):
        slots.append(i, held=i == 1)
    slots.remove(2)
    slots.check_integrity()
    exec(breakage, {"slots": slots})
    with pytest.raises(AssertionError, match=message):
        slots.check_integrity()


def test_ghost_list_keeps_the_order_and_forgets_what_left() -> None:
    ghosts = GhostList()
    for i in range(100):
        ghosts.append(f"{i}")
        if i >= 3:
            ghosts.pop_oldest()
    ghosts.remove("98")
    ghosts.append("again")
    ghosts.check_integrity()
    assert ghosts.keys() == ["97", "99", "again"]
    with pytest.raises(KeyError):
        ghosts.remove("98")


def test_ghost_list_takes_no_memory_for_keys_that_left() -> None:
    ghosts = GhostList()
    tracemalloc.start()
    try:
        for i in range(20_000):
            ghosts.append(i)
            ghosts.pop_oldest()
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 100_000
