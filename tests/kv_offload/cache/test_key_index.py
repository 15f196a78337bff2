"""The index of keys: finds all that are there, and says of nearly all others that they are not."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kv_offload.cache.key_index import KEY_BYTES, WAYS, KeyIndex, Names, hash_keys, may_have

NUM_SLOTS = 3000


def make(num_slots: int = NUM_SLOTS) -> KeyIndex:
    shape = num_slots, WAYS
    return KeyIndex(np.zeros(shape, np.uint16), np.zeros(shape, np.uint32))


def draw(count: int, seed: int, lengths: tuple[int, ...] = (36,)) -> list[bytes]:
    chance = random.Random(seed)
    return [chance.randbytes(lengths[row % len(lengths)]) for row in range(count)]


@pytest.mark.parametrize("lengths", [(0,), (20,), (36,), (32, 36), (36, 32), (KEY_BYTES + 1, 20)])
def test_hashes_are_those_of_the_names(lengths: tuple[int, ...]) -> None:
    for count in (0, 1, 2, 7, 300):
        keys = draw(count, 1, lengths)
        names = Names.of(keys)
        assert hash_keys(keys).tolist() == names.hashes.tolist()
        assert names.keys() == [key if len(key) <= KEY_BYTES else b"" for key in keys]


def test_all_keys_of_several_indices_may_be_there_and_hardly_any_others() -> None:
    """Some have another number of slots."""
    indices = [make(), make(1000), make()]
    own = [draw(1000, seed) for seed in range(3)]
    for index, keys in zip(indices, own, strict=True):
        index.add(np.arange(1000, dtype=np.int32), hash_keys(keys))
    for number, keys in enumerate(own):
        maybe = may_have(indices, hash_keys(keys))
        assert maybe.shape == (3, 1000)
        assert maybe[number].all()
        assert maybe.sum() <= 1000 + 2
        slots, rows = indices[number].slots(hash_keys(keys))
        assert {*zip(slots.tolist(), rows.tolist(), strict=True)} >= {(n, n) for n in range(1000)}
    assert may_have(indices, hash_keys(draw(5000, 9))).sum() <= 3
    assert not may_have([], hash_keys(own[0])).any()


def test_what_was_removed_or_cleared_is_not_found() -> None:
    index = make()
    keys = draw(2000, 1)
    hashes, slots = hash_keys(keys), np.arange(2000, dtype=np.int32)
    index.add(slots, hashes)
    index.remove(slots[::2], hashes[::2])
    found = may_have([index], hashes)[0]
    assert found[1::2].all()
    assert found[::2].sum() <= 1
    index.add(slots[::2] + 1, hashes[::2])
    assert may_have([index], hashes).all()
    index.clear()
    assert not may_have([index], hashes).any()


def test_a_bucket_with_more_keys_than_ways_keeps_as_many() -> None:
    index = make(1)
    keys = draw(WAYS + 3, 1)
    index.add(np.zeros(1, np.int32), hash_keys(keys[:1]))
    for key in keys[1:]:
        index.add(np.zeros(1, np.int32), hash_keys([key]))
    assert may_have([index], hash_keys(keys)).sum() == WAYS
    assert may_have([index], hash_keys(keys[-1:])).all()


def test_slot_numbers_that_are_none_are_not_returned() -> None:
    index = make()
    hashes = hash_keys(draw(1, 1))
    index.add(np.array([NUM_SLOTS], np.int32), hashes)
    assert may_have([index], hashes).all()
    assert index.slots(hashes)[0].tolist() == []
