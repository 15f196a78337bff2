"""Verifies the records of a file in place: without an arena, even while an engine uses the file.

It takes no lock and writes nothing. A record that an engine is writing looks damaged. The memory
needed does not depend on the slot size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kv_swap.errors import TierError
from kv_swap.tiers.record import PAGE_BYTES, RecordFormat, Verdict
from kv_swap.tiers.region import open_described

PIECE_BYTES = 4 << 20
"""Bytes read at a time."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """A slot's state, and the name in its header: empty unless the header is intact."""

    slot: int
    verdict: Verdict
    name: bytes


def verify(
    path: Path, slots: Iterable[int], names: Mapping[int, bytes] | None = None
) -> Iterator[SlotState]:
    """Read the records of `slots` one after the other, and yield their states.

    `names` has the expected block names by slot; in other slots any name matches. Raises
    `TierError` like `open_described`, and for a slot that the file does not have.
    """
    with open_described(path) as (fd, content):
        records = content.records
        for slot in slots:
            if not 0 <= slot < content.num_slots:
                raise TierError(
                    f"{path} has no slot {slot}, valid are 0 to {content.num_slots - 1}"
                )
            offset = content.offset(slot)
            name = None if names is None else names.get(slot)
            try:
                verdict, found = _look_at(fd, offset, records, name)
            except OSError:
                verdict, found = Verdict.UNREADABLE, b""
            yield SlotState(slot, verdict, found)


def _look_at(
    fd: int, offset: int, records: RecordFormat, name: bytes | None
) -> tuple[Verdict, bytes]:
    """Return the state of the record at `offset`, and its name. Raises `OSError`."""
    verdict, found, expected = records.verify_header(_read(fd, offset, PAGE_BYTES), name)
    if verdict is not Verdict.MATCH:
        return verdict, found
    data_sum, start = xxhash.xxh3_128(), offset + PAGE_BYTES
    end = start + records.slot_bytes
    for place in range(start, end, PIECE_BYTES):
        data_sum.update(_read(fd, place, min(PIECE_BYTES, end - place)))
    return (Verdict.MATCH if data_sum.digest() == expected else Verdict.DAMAGED), found


def _read(fd: int, offset: int, nbytes: int) -> bytes:
    """Read `nbytes` bytes without keeping them in the page cache."""
    piece = os.pread(fd, nbytes, offset)
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
    if len(piece) < nbytes:
        raise OSError(f"{nbytes} bytes at {offset} are wanted, and {len(piece)} came")
    return piece
