"""A tier in a store that many engines share."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import TierError
from kv_swap.tiers.engine import TierDirection
from kv_swap.tiers.store.client import StoreClient
from kv_swap.tiers.store.keys import namespace
from kv_swap.tiers.store.mover import StoreMover
from kv_swap.tiers.threaded import ThreadedTier

NUM_SLOTS = 2**31 - 1
"""A store has no slots; this is more than any job has rows."""

NUM_THREADS = {TierDirection.PROMOTE: 2, TierDirection.DEMOTE: 2}
"""Of two, one can compute checksums while the other's bytes are on the network."""

CHUNK_BYTES = 16 << 20
"""Bytes of slots in one call."""

CHUNK_SLOTS = 64
"""In one call: Mooncake queues 1,024 transfers to a peer, and refuses those that wait for a place
there for a second. A slot is two, and each thread has a call."""


class StoreTier(ThreadedTier):
    """Moves slots between an arena and a store, whose client `make_client` makes.

    `arena` is a view of a `HostArena`, uint8 of `(slots, slot_bytes)`, which keeps the memory
    alive. `description` is all that changes what the bytes of a slot mean. `file_id`, its digest
    with the size of a slot, is a part of each object's key: engines with the same share objects.

    It connects in the background. While the store cannot be reached jobs fail, and each job that is
    submitted after a failure tries again. A row whose object is not there fails, without an error
    and without a mismatch. If only some rows of a job fail, because the store is full or has lost a
    part of its memory, the job has no error.
    """

    def __init__(
        self,
        make_client: Callable[[], StoreClient],
        arena: NDArray[np.uint8],
        description: Mapping[str, str],
    ) -> None:
        slot_bytes = arena.shape[1]
        self.file_id = namespace(description, slot_bytes)
        chunk_slots = max(1, min(CHUNK_BYTES // slot_bytes, CHUNK_SLOTS))
        connection = _Connection(make_client)
        movers = {
            way: [
                StoreMover(connection.client, arena, self.file_id, chunk_slots)
                for _ in range(count)
            ]
            for way, count in NUM_THREADS.items()
        }
        connection.buffers = [arena, *(mover.headers for own in movers.values() for mover in own)]
        super().__init__(NUM_SLOTS, arena.shape, movers, chunk_slots, connection.release)
        # A process gives its memory to the pool although it may move nothing for a while.
        threading.Thread(
            target=functools.partial(_try_to_connect, connection),
            name="kv-swap-connect",
            daemon=True,
        ).start()


class _Connection:
    """The client of all threads, made by the first that needs it and can."""

    def __init__(self, make_client: Callable[[], StoreClient]) -> None:
        self.buffers: Sequence[NDArray[np.uint8]] = ()
        self._make_client = make_client
        self._lock = threading.Lock()
        self._client: StoreClient | None = None
        self._released = False

    def client(self) -> StoreClient:
        """Return the client; connect if there is none. Raises `TierError`."""
        with self._lock:
            if self._released:
                raise TierError("the tier is closed")
            if self._client is None:
                client = self._make_client()
                client.connect(self.buffers)
                self._client = client
            return self._client

    def release(self) -> None:
        """Close the client, once and for all, and let go of the arena."""
        with self._lock:
            self._released = True
            if self._client is not None:
                self._client.close()
            self._client, self.buffers = None, ()


def _try_to_connect(connection: _Connection) -> None:
    with contextlib.suppress(TierError):  # the first job has the error
        connection.client()
