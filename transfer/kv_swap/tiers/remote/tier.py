"""A tier in a store shared by many engines."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import TierError
from kv_swap.tiers.engine import TierDirection, TierEngine
from kv_swap.tiers.remote.client import RemoteClient
from kv_swap.tiers.remote.keys import namespace
from kv_swap.tiers.remote.mover import RemoteMover

NUM_SLOTS = 2**31 - 1
"""Stands for the number of slots, which a store does not have; no job has as many rows."""

CHUNK_BYTES = 16 << 20
"""Maximum bytes of slots in one call."""

CHUNK_SLOTS = 64
"""Maximum slots in one call: Mooncake queues 1,024 transfers to a peer, and refuses those that wait
a second for a place. A slot takes two transfers, and each thread has one call."""


class RemoteTier(TierEngine):
    """Moves slots between an arena and a store through a client, which it connects and closes.

    `arena` is a view of a `HostArena`, uint8 of shape `(slots, slot_bytes)`, which keeps the memory
    alive. `description` contains everything that determines the meaning of a slot's bytes.
    `file_id`, the digest of the description and the slot size, is part of each object's key:
    engines with the same id share objects.

    It connects in the background. While the store cannot be reached, jobs fail, and each job
    submitted after a failure tries again. A row whose object does not exist fails without an error
    and without a mismatch. If only some rows of a job fail, because the store is full or has lost
    part of its memory, the job has no error.
    """

    def __init__(
        self,
        client: RemoteClient,
        arena: NDArray[np.uint8],
        description: Mapping[str, str],
    ) -> None:
        slot_bytes = arena.shape[1]
        self.file_id = namespace(description, slot_bytes)
        chunk_slots = max(1, min(CHUNK_BYTES // slot_bytes, CHUNK_SLOTS))
        movers = {
            way: [
                RemoteMover(client, arena, self.file_id, chunk_slots) for _ in range(client.threads)
            ]
            for way in TierDirection
        }
        super().__init__(NUM_SLOTS, arena.shape, movers, chunk_slots, client.close)
        # Connect now, so that the process gives its memory to the pool even if it moves nothing
        # yet.
        threading.Thread(
            target=_try_to_connect, args=(client,), name="kv-swap-connect", daemon=True
        ).start()


def _try_to_connect(client: RemoteClient) -> None:
    with contextlib.suppress(TierError):  # the first job reports the error
        client.connect()
