"""The index of keys: finds all that are there, and says of nearly all others that they are not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kv_offload.cache.key_index import KEY_BYTES, WAYS, KeyIndex, Names, candidates

NUM_SLOTS = 3000


def make(num_slots: int = NUM_SLOTS) -> KeyIndex:
    shape = num_slots, WAYS
    return KeyIndex(np.zeros(shape, np.uint16), np.zeros(shape, np.uint32))


def draw(count: int, seed: int, lengths: tuple[int, ...] = (36,)) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(lengths[row % len(lengths)]) for row in range(count)]


def hashes_of(keys: list[bytes]) -> np.ndarray:
    return Names.of(keys).hashes


def found(index: KeyIndex, keys: list[bytes]) -> list[bool]:
    """Return for each key whether it may be in some slot."""
    ((_, rows),) = candidates([index], hashes_of(keys))
    return [row in rows for row in range(len(keys))]


@pytest.mark.parametrize("lengths", [(0,), (20,), (36,), (32, 36), (36, 32), (KEY_BYTES + 1, 20)])
def test_names_are_those_of_each_key(lengths: tuple[int, ...]) -> None:
    for count in (0, 1, 2, 7, 300):
        keys = draw(count, 1, lengths)
        names = Names.of(keys)
        assert names.keys() == [key if len(key) <= KEY_BYTES else b"" for key in keys]
        assert names.hashes.tolist() == [Names.of([key]).hashes[0] for key in keys]


def test_all_keys_of_several_indices_may_be_there_and_hardly_any_others() -> None:
    """Some have another number of slots."""
    indices = [make(), make(1000), make()]
    own = [draw(1000, seed) for seed in range(3)]
    for index, keys in zip(indices, own, strict=True):
        index.add(np.arange(1000, dtype=np.int32), hashes_of(keys))
    for number, keys in enumerate(own):
        of_all = [*candidates(indices, hashes_of(keys))]
        assert len(of_all) == 3
        slots, rows = of_all[number]
        assert {*zip(slots.tolist(), rows.tolist(), strict=True)} >= {(n, n) for n in range(1000)}
        assert sum(len(rows) for _, rows in of_all) <= 1000 + 2
    others = candidates(indices, hashes_of(draw(5000, 9)))
    assert sum(len(rows) for _, rows in others) <= 3
    assert [*candidates([], hashes_of(own[0]))] == []


def test_what_was_removed_or_cleared_is_not_found() -> None:
    index = make()
    keys = draw(2000, 1)
    hashes, slots = hashes_of(keys), np.arange(2000, dtype=np.int32)
    index.add(slots, hashes)
    index.remove(slots[::2], hashes[::2])
    left = found(index, keys)
    assert all(left[1::2])
    assert sum(left[::2]) <= 1
    index.add(slots[::2] + 1, hashes[::2])
    assert all(found(index, keys))
    index.clear()
    assert not any(found(index, keys))


def test_a_bucket_with_more_keys_than_ways_keeps_as_many() -> None:
    index = make(1)
    keys = draw(WAYS + 3, 1)
    for key in keys:
        index.add(np.zeros(1, np.int32), hashes_of([key]))
    assert sum(found(index, keys)) == WAYS
    assert found(index, keys)[-1]


def test_slot_numbers_that_are_none_are_not_returned() -> None:
    index = make()
    key = draw(1, 1)
    index.add(np.array([NUM_SLOTS], np.int32), hashes_of(key))
    assert not any(found(index, key))
    index.add(np.array([NUM_SLOTS - 1], np.int32), hashes_of(key))
    assert all(found(index, key))
