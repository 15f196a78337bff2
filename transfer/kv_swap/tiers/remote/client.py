"""The interface of a remote store: named objects that are written once and read whole."""

from __future__ import annotations

import ctypes
import enum
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import xxhash

from kv_swap.errors import TierError
from kv_swap.tiers.record import FORMAT

Parts = Sequence[tuple[int, int]]
"""Memory of one object: address and bytes of each part, in order."""


def memory_of(parts: Parts) -> list[memoryview]:
    """Return views of the memory of an object's parts, which the caller keeps mapped."""
    return [
        memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        for address, size in parts
    ]


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
    and reconnect automatically once it is back. Each call has a time limit of up to a minute.
    """

    threads = 2
    """Number of threads per direction. With two, one computes checksums while the other transfers;
    a store with high latency per object has more."""

    probes: int | None = None
    """Best number of keys to look up at a time if each key is a separate request; None if one
    request can look up any number of keys."""

    @abstractmethod
    def connect(self) -> None:
        """Connect; any other call does so if necessary. May take seconds.

        Raises `TierError`; the call can then be repeated.
        """

    @abstractmethod
    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, whether its object exists; it may be gone a moment later."""

    @abstractmethod
    def put(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        """Write objects. An existing object stays unchanged, even if two calls write it at once.

        An object appears whole or not at all.
        """

    @abstractmethod
    def get(self, keys: Sequence[str], parts: Sequence[Parts]) -> list[Fate | TierError]:
        """Read whole objects into memory, which holds garbage for each key that is not `DONE`.

        After the call returns, nothing writes to that memory, even after a failure.
        """

    @abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, as far as the store allows."""

    @abstractmethod
    def close(self) -> None:
        """Wait for calls in other threads, then disconnect for good. Idempotent.

        Withdraws the memory that this process gave to the store.
        """


PREFIX = "kv-offload/"
"""Prefix of every object's key, in a store that may hold other objects."""


def namespace(description: Mapping[str, str], slot_bytes: int) -> str:
    """Return 32 hexadecimal digits that identify everything that determines the bytes' meaning."""
    text = json.dumps([FORMAT, slot_bytes, sorted(description.items())])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def object_keys(file_id: str, names: Sequence[bytes]) -> list[str]:
    """Return the key of each block's object: 76 characters.

    A name is shortened to a digest. If two names share one, the second is a mismatch, because the
    object contains the full name.
    """
    prefix = f"{PREFIX}{file_id}/"
    return [prefix + xxhash.xxh3_128_hexdigest(name) for name in names]
