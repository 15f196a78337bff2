from __future__ import annotations

import random

import pytest

from kv_offload.cache.key_map import KeyMap


def test_key_map_is_a_dict() -> None:
    rng = random.Random(0)
    keys, plain = KeyMap(), dict[bytes, int]()
    for value in range(5000):
        key = rng.randbytes(1) * rng.randrange(4)
        if key in plain and rng.random() < 0.5:
            assert keys.pop(key) == plain.pop(key)
        else:
            keys[key] = plain[key] = value
        probe = rng.randbytes(1)
        assert keys.get_all([probe]) == [plain.get(probe, -1)]
    assert dict(keys.items()) == plain
    with pytest.raises(KeyError):
        keys.pop(b"never seen")
