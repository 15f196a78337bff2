"""The interface of a remote store: named objects that are written once and read whole."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

from kv_swap.errors import TierError

Parts = Sequence[tuple[int, int]]
"""Memory of one object, in order: address and bytes of each part."""


class Fate(enum.Enum):
    """How one key of a call fared."""

    DONE = "done"
    """It is stored, by whomever, or all its bytes have come."""
    MISSING = "missing"
    """A read found no such object, or it was evicted meanwhile."""
    OTHER = "other"
    """A read found an object of another size."""
    FULL = "full"
    """The store had no room for it, and may have some soon."""


class RemoteClient(ABC):
    """A connection to a store. Any thread may call any method; calls run at the same time.

    Calls block. They raise `TierError`, with the remedy, if the store as a whole cannot be asked,
    and reconnect by themselves once it can. Each has a limit of its own, which may
    be a minute.
    """

    threads = 2
    """In each direction. With two, one computes checksums while the other's bytes are on the
    network; a store that takes long for each object has more."""

    probes: int | None = None
    """Keys that it is best asked for at a time, where each is a request of its own; None where one
    call asks for any number of them."""

    @abstractmethod
    def connect(self) -> None:
        """Connect, as any other call does if that has not been done. May take seconds.

        Raises `TierError`; then it can be called again.
        """

    @abstractmethod
    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Say of each key whether its object is there; it may be gone a moment later."""

    @abstractmethod
    def put(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        """Write objects. One that is there stays as it is, also if two write it at once.

        An object appears whole or not at all.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        """Read whole objects into memory, which has garbage for each key that is not `DONE`.

        Once it has returned nothing writes there, whatever failed.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, as far as the store lets go of them."""

    @abstractmethod
    def close(self) -> None:
        """Wait for calls in other threads, and disconnect for good. Idempotent.

        What this process gave the store in memory goes with it.
        """
