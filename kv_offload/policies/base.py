"""What an eviction policy is: it ranks the keys of the host cache and names the next to leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TypeAlias

from kv_offload.errors import CapacityError

Key: TypeAlias = Hashable
"""The name of a block's contents: opaque, hashable, never `None`."""


class EvictionPolicy(ABC):
    """Ranks at most `capacity` resident keys; knows neither slots nor readers.

    A key becomes resident through `add` or `replace`, at the moment its store is planned, and is
    held from then on: the policy sees every admission at the time of the access that caused it, and
    a key that is still being written is no victim. `release` makes it a candidate. A key that is
    being read is held again. All operations take O(1) amortised time.

    Of several keys the one used last is the most recent; `release` does not change that order.

    Raises `CapacityError` for a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise CapacityError(f"an eviction policy for {capacity} keys: give it 1 or more")
        self.capacity = capacity

    @abstractmethod
    def add(self, key: Key) -> None:
        """Make a key resident, held and the most recent, where no other key has to leave for it.

        The key must not be resident, and fewer than `capacity` keys may be.
        """

    @abstractmethod
    def replace(self, key: Key) -> Key | None:
        """Evict one key to make another resident, held and the most recent; return the evicted one.

        One call, because the choice of the victim may depend on the key that comes in. Returns
        `None` and changes nothing where all resident keys are held. The key must not be resident.
        """

    @abstractmethod
    def use(self, key: Key) -> None:
        """Count an access to a resident key, held or not, and make it the most recent.

        Until its first `release` that access is the one that added it, and is not counted again.

        Raises `KeyError` for a key that is not resident.
        """

    @abstractmethod
    def hold(self, key: Key) -> None:
        """Do as `use`, and keep the key from being evicted until `release`. It must not be held.

        Raises `KeyError` for a key that is not resident.
        """

    @abstractmethod
    def release(self, key: Key) -> None:
        """Let a held key be evicted again. This is not an access.

        Raises `KeyError` for a key that is not resident.
        """

    @abstractmethod
    def discard(self, key: Key) -> None:
        """Forget a resident key, held or not, as if it had never been added.

        Raises `KeyError` for a key that is not resident.
        """

    @abstractmethod
    def clear(self) -> None:
        """Forget all keys, held ones included, and everything learnt from them."""

    @abstractmethod
    def is_held(self, key: Key) -> bool:
        """Say whether a resident key is held.

        Raises `KeyError` for a key that is not resident.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Count the resident keys, held ones included."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Check all invariants, in O(capacity). Raises `AssertionError` naming the first broken."""
