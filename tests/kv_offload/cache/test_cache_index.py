"""What a slot index refuses to believe. What it does is tested through the cache manager."""

from __future__ import annotations

import numpy as np
import pytest

from kv_offload.cache.index import SlotIndex


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        ("index.num_orphans = 2", "orphans are not counted right"),
        ("index._key_of[1] = None; index.num_orphans = 2", "slot 1 of 'b' is None's"),
        ("index._free.remove(3)", "orphans are not counted right"),
        ("index._slot_of['d'] = 4", "slot 4 is used that was never given out"),
        ("index._slot_of['d'] = -1", "slot -1 is used that was never given out"),
        ("index._slot_of['c'] = 1", "slot 1 of 'c' is 'b''s"),
        ("index.num_slots = 3", "a slot does not exist"),
        ("index.usable_slots = 3", "a slot does not exist"),
        ("index.usable_slots = 6", "a slot does not exist"),
        ("index._free.append(1)", "a slot is lost or has two owners"),
        ("index._slot_of.pop('b')", "a slot is lost or has two owners"),
        ("index._slot_of.pop('b'); index._free.append(1)", "a slot without a key has a name"),
    ],
)
def test_check_integrity_names_what_is_broken(breakage: str, message: str) -> None:
    index = SlotIndex(5)
    index.take_free(["a"])
    index.clear(np.ones(1, bool))
    index.take_free(["b", "c", "x"])
    index.forget(np.array([3], np.int32))
    index.check_integrity()
    assert (index.given_out, index.slots_in_use, index.orphans()) == (4, 3, {0})
    exec(breakage, {"index": index})
    with pytest.raises(AssertionError, match=message):
        index.check_integrity()
