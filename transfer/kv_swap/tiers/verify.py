"""Looks at the records of a file in place: without an arena, also while an engine uses the file.

It takes no lock and writes nothing. A record that an engine writes at that moment looks damaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kv_swap.errors import TierError
from kv_swap.tiers.record import PAGE_BYTES, Verdict
from kv_swap.tiers.region import open_described


@dataclass(frozen=True, slots=True)
class SlotState:
    """What lies in a slot, and the name in its header: empty unless the header is intact."""

    slot: int
    verdict: Verdict
    name: bytes


def verify(
    path: Path, slots: Iterable[int], names: Mapping[int, bytes] | None = None
) -> Iterator[SlotState]:
    """Read the records of `slots`, one after the other, and say what they are.

    `names` has the blocks that are expected, by slot; in other slots any is a match. Raises
    `TierError` as `open_described` does, and for a slot that the file does not have.
    """
    with open_described(path) as (fd, content):
        record_bytes = content.records.record_bytes
        for slot in slots:
            if not 0 <= slot < content.num_slots:
                raise TierError(
                    f"{path} has no slot {slot}, valid are 0 to {content.num_slots - 1}"
                )
            offset = content.offset(slot)
            try:
                record = os.pread(fd, record_bytes, offset)
            except OSError:
                record = b""
            # The page cache is for others.
            os.posix_fadvise(fd, offset, record_bytes, os.POSIX_FADV_DONTNEED)
            if len(record) < record_bytes:
                yield SlotState(slot, Verdict.UNREADABLE, b"")
                continue
            data = memoryview(record)[PAGE_BYTES : PAGE_BYTES + content.slot_bytes]
            name = None if names is None else names.get(slot)
            yield SlotState(slot, *content.records.verify(record[:PAGE_BYTES], data, name))
