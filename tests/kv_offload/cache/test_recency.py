"""The lists by recency that ARC is made of."""

from __future__ import annotations

import pytest

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
