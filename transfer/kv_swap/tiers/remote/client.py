"""The interface of a remote store: named objects that are written once and read whole."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_swap.errors import TierError

Parts = Sequence[tuple[int, int]]
"""Memory of one object, in order: address and bytes of each part."""


class Fate(enum.Enum):
    """The result of a call for one key."""

    DONE = "done"
    """The object is stored, by any process, or all its bytes have been read."""
    MISSING = "missing"
    """A read found no such object, or the object was evicted during the read."""
    OTHER = "other"
    """A read found an object of another size."""
    FULL = "full"
    """The store had no room for the object, but may have room soon."""


class RemoteClient(ABC):
    """A connection to a store. Any thread may call any method; calls run concurrently.

    Calls block. They raise `TierError`, with the remedy, if the store as a whole is unavailable,
    and reconnect automatically once it is back. Each call has its own time limit, which may be a
    minute.
    """

    threads = 2
    """Number of threads in each direction. With two, one computes checksums while the other's bytes
    are on the network; a store with high latency per object has more."""

    probes: int | None = None
    """Best number of keys to look up at a time if each key is a separate request; None if one call
    can look up any number of keys."""

    @abstractmethod
    def connect(self) -> None:
        """Connect; any other call does so if necessary. May take seconds.

        Raises `TierError`; the call can then be repeated.
        """

    @abstractmethod
    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its object exists; it may be gone a moment later."""

    @abstractmethod
    def put(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        """Write objects. An existing object stays unchanged, even if two calls write it at once.

        An object appears whole or not at all.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        """Read whole objects into memory, which holds garbage for each key that is not `DONE`.

        After the call has returned, nothing writes to that memory, even after a failure.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, as far as the store allows."""

    @abstractmethod
    def close(self) -> None:
        """Wait for calls in other threads, then disconnect for good. Idempotent.

        The memory that this process gave to the store is withdrawn.
        """
