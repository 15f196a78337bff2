"""A tier in a store shared by many engines.

An object's value is a record (`kv_swap/tiers/record.py`): header page and slot. The store reads and
writes slots in the arena, and header pages in the thread's memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import TierError
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.engine import TierDirection, TierEngine
from kv_swap.tiers.record import PAGE_BYTES, RecordFormat
from kv_swap.tiers.remote.client import Fate, Parts, RemoteClient, namespace, object_keys
from kv_swap.tiers.workers import Mover, MoveResult, Row

_FULL = TierError(
    "the store is full, or no process gives it memory: give it more, or look at what its engines "
    "write and how fast it evicts"
)


class RemoteMover(Mover):
    """Transfers on one thread, which owns memory for the headers of a chunk."""

    def __init__(
        self,
        client: RemoteClient,
        arena: NDArray[np.uint8],
        file_id: str,
        chunk_slots: int,
    ) -> None:
        self._client = client
        self._arena = arena
        self._file_id = file_id
        self._records = RecordFormat(bytes.fromhex(file_id), arena.shape[1])
        self._headers = HostArena(chunk_slots, PAGE_BYTES, register=None).view()

    def move(self, direction: TierDirection, rows: Sequence[Row]) -> MoveResult:
        """See `Mover`. One call for all rows; tier slots have no meaning."""
        keys = object_keys(self._file_id, [row.name for row in rows])
        try:
            if direction is TierDirection.DEMOTE:
                return self._put(rows, keys)
            return self._get(rows, keys)
        except TierError as error:
            # A new error, because a traceback would hold the arena.
            again = TierError(str(error))
            return MoveResult([row.number for row in rows], error=again, gone=True)

    def _put(self, rows: Sequence[Row], keys: Sequence[str]) -> MoveResult:
        """Write blocks that the store lacks. Reads arena slots twice, for checksum and network."""
        there = self._client.exist(keys)
        outcome = MoveResult(unmoved=sum(there))
        new = [index for index, is_there in enumerate(there) if not is_there]
        if not new:
            return outcome
        parts = []
        for page, index in enumerate(new):
            data = self._arena[rows[index].arena_slot]
            header = self._records.header(rows[index].name, data.data)
            self._headers[page] = np.frombuffer(header, np.uint8)
            parts.append(self._parts(page, rows[index]))
        fates = self._client.put([keys[index] for index in new], parts)
        for index, fate in zip(new, fates, strict=True):
            if fate is not Fate.DONE:
                _reject(outcome, rows[index], _FULL if fate is Fate.FULL else fate)
        return outcome

    def _get(self, rows: Sequence[Row], keys: Sequence[str]) -> MoveResult:
        """Read objects, and remove those that do not match their names."""
        outcome = MoveResult()
        fates = self._client.get(keys, [self._parts(page, row) for page, row in enumerate(rows)])
        wrong = []
        for page, (row, key, fate) in enumerate(zip(rows, keys, fates, strict=True)):
            if fate is Fate.OTHER or (fate is Fate.DONE and not self._matches(page, row)):
                outcome.failed.append(row.number)
                outcome.mismatches += 1
                wrong.append(key)
            elif fate is not Fate.DONE:
                _reject(outcome, row, fate)
        if wrong:
            # Otherwise they would be found repeatedly and never rewritten.
            with contextlib.suppress(TierError):  # the blocks that were read are valid anyway
                self._client.remove(wrong)
        return outcome

    def _parts(self, page: int, row: Row) -> Parts:
        header, slot = self._headers[page], self._arena[row.arena_slot]
        return [(header.ctypes.data, header.nbytes), (slot.ctypes.data, slot.nbytes)]

    def _matches(self, page: int, row: Row) -> bool:
        data = self._arena[row.arena_slot].data
        return self._records.verify(self._headers[page], data, row.name)


def _reject(outcome: MoveResult, row: Row, fate: Fate | TierError) -> None:
    outcome.failed.append(row.number)
    if isinstance(fate, TierError):
        outcome.rejection = outcome.rejection or fate


NUM_SLOTS = 2**31 - 1
"""Replaces the number of slots, which a store does not have; no job has as many rows."""

CHUNK_BYTES = 16 << 20
"""Maximum bytes of slots in one call."""

CHUNK_SLOTS = 64
"""Maximum slots in one call: Mooncake queues 1,024 transfers to a peer, and refuses transfers that
wait a second for a place. A slot takes two transfers, and each thread has one call."""


class RemoteTier(TierEngine):
    """Moves slots between an arena and a store through a client, which it connects and closes.

    `arena` is a view of a `HostArena`, uint8 of shape `(slots, slot_bytes)`, which keeps the memory
    alive. `description` contains everything that determines the meaning of a slot's bytes.
    `file_id`, the digest of the description and the slot size, is part of each object's key:
    engines with the same id share objects.

    It connects in the background. While the store cannot be reached, jobs fail, and each job
    submitted after a failure tries again. A row whose object does not exist fails without an error
    or a mismatch. If only some rows of a job fail, because the store is full or has lost part of
    its memory, the job has no error.
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
        # Connect now, so that the process gives its memory to the pool before it moves anything.
        threading.Thread(
            target=_try_to_connect, args=(client,), name="kv-swap-connect", daemon=True
        ).start()


def _try_to_connect(client: RemoteClient) -> None:
    with contextlib.suppress(TierError):  # the first job reports the error
        client.connect()
