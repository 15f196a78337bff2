"""Moves objects between a store and the arena: some rows of a job, on one thread.

The value of an object is a record (`kv_swap/tiers/record.py`): header page and slot. The store
reads and writes slots in the arena, and header pages in memory of the thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_swap.errors import TierError
from kv_swap.memory.arena import HostArena
from kv_swap.tiers.engine import TierDirection
from kv_swap.tiers.mover import Mover, Outcome, Row
from kv_swap.tiers.record import PAGE_BYTES, RecordFormat
from kv_swap.tiers.remote.client import Fate, Parts, RemoteClient
from kv_swap.tiers.remote.keys import object_keys

_FULL = TierError(
    "the store is full, or no process gives it memory: give it more, or look at what its engines "
    "write and how fast it evicts"
)


class RemoteMover(Mover):
    """The transfers of one thread; it owns memory for the headers of a chunk."""

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

    def move(self, direction: TierDirection, rows: Sequence[Row]) -> Outcome:
        """See `Mover`. One call for all rows; tier slots have no meaning."""
        keys = object_keys(self._file_id, [row.name for row in rows])
        try:
            if direction is TierDirection.DEMOTE:
                return self._put(rows, keys)
            return self._get(rows, keys)
        except TierError as error:
            # A new error, without a traceback, which would hold the arena.
            again = TierError(str(error))
            return Outcome([row.number for row in rows], error=again, gone=True)

    def _put(self, rows: Sequence[Row], keys: Sequence[str]) -> Outcome:
        """Write blocks that the store lacks. Reads arena slots twice: checksum, then network."""
        there = self._client.exist(keys)
        outcome = Outcome(unmoved=sum(there))
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

    def _get(self, rows: Sequence[Row], keys: Sequence[str]) -> Outcome:
        """Read objects, and remove those that do not match their names."""
        outcome = Outcome()
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
            # Otherwise it would be found repeatedly and never rewritten.
            with contextlib.suppress(TierError):  # blocks that were read are valid in any case
                self._client.remove(wrong)
        return outcome

    def _parts(self, page: int, row: Row) -> Parts:
        header, slot = self._headers[page], self._arena[row.arena_slot]
        return [(header.ctypes.data, header.nbytes), (slot.ctypes.data, slot.nbytes)]

    def _matches(self, page: int, row: Row) -> bool:
        data = self._arena[row.arena_slot].data
        return self._records.verify(self._headers[page], data, row.name)


def _reject(outcome: Outcome, row: Row, fate: Fate | TierError) -> None:
    outcome.failed.append(row.number)
    if isinstance(fate, TierError):
        outcome.rejection = outcome.rejection or fate
