"""The record of a slot in a tier's file. This docstring specifies the format.

A record is a header page of 4,096 bytes, the data of the slot, and up to 4,095 bytes of padding, so
that the next record begins at a multiple of 4,096. Numbers are little-endian:

    offset  bytes
         0      8   magic, the letters KVRECORD
         8      4   format, 1
        12      4   n, the bytes of the name: 1 to 1,024
        16      8   bytes of the data
        24     16   id of the file, as it was begun
        40     16   XXH3-128 of the data
        56      n   the name
    56 + n          zeros
     4,080     16   XXH3-128 of the 4,080 bytes before

The data are served under a name only if all of this matches. So the following are misses, and never
another block's bytes: a partly written record, a record left from before the file was started over,
one copied from another file, and one with a flipped bit. A slot that was never written is all
zeros. The checksums involve no secret: anyone who can write the file can forge a record.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Any

import xxhash

PAGE_BYTES = 4096
"""Bytes of a header, and alignment of records: enough for direct I/O on today's disks."""

FORMAT = 1
"""Version of records and their file. Changes whenever older code would misread a file."""

_MAGIC = b"KVRECORD"
_FIELDS = struct.Struct("<8sIIQ16s16s")
_SUM_BYTES = 16
_SUMMED_BYTES = PAGE_BYTES - _SUM_BYTES


class Verdict(enum.Enum):
    """The state of a record for a reader that expects a name."""

    MATCH = "match"
    EMPTY = "empty"
    """Never written."""
    DAMAGED = "damaged"
    """Header or data are damaged or only partly written."""
    OTHER = "other"
    """The header is intact, but has another name, file, format or slot size."""
    UNREADABLE = "unreadable"
    """The disk returned an error, or the file is too short."""


def checksum(data: Any) -> bytes:
    """Return the 16-byte XXH3-128 of contiguous bytes; releases the GIL unless they are few."""
    # Up to xxhash 3, the one-call function holds the GIL.
    state = xxhash.xxh3_128()
    state.update(data)
    return state.digest()


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """The format of one file's records: the 16-byte id of the file and the bytes of a slot."""

    file_id: bytes
    slot_bytes: int

    @property
    def pad_bytes(self) -> int:
        """Bytes of padding after the data."""
        return -self.slot_bytes % PAGE_BYTES

    @property
    def record_bytes(self) -> int:
        """Bytes from one record to the next."""
        return PAGE_BYTES + self.slot_bytes + self.pad_bytes

    def header(self, name: bytes, data: Any) -> bytes:
        """Return the header page for `slot_bytes` contiguous bytes, unchanged until written."""
        fields = _FIELDS.pack(
            _MAGIC, FORMAT, len(name), self.slot_bytes, self.file_id, checksum(data)
        )
        page = (fields + name).ljust(_SUMMED_BYTES, b"\0")
        return page + checksum(page)

    def verify(self, header: Any, data: Any, name: bytes | None) -> tuple[Verdict, bytes]:
        """Return the verdict on a header page and data for an expected name, or None for any name.

        Also returns the name in the header; empty unless the header is intact.
        """
        verdict, found, data_sum = self.verify_header(header, name)
        if verdict is Verdict.MATCH and checksum(data) != data_sum:
            return Verdict.DAMAGED, found
        return verdict, found

    def verify_header(self, header: Any, name: bytes | None) -> tuple[Verdict, bytes, bytes]:
        """Return the verdict on a header page: a match if the data have the returned checksum.

        Returns the verdict, the name in the header, and the checksum that its data must have.
        """
        page = bytes(header)
        if checksum(page[:_SUMMED_BYTES]) != page[_SUMMED_BYTES:]:
            return (Verdict.DAMAGED if any(page) else Verdict.EMPTY), b"", b""
        magic, format_, name_bytes, slot_bytes, file_id, data_sum = _FIELDS.unpack_from(page)
        found = page[_FIELDS.size : _FIELDS.size + name_bytes]
        expected = (_MAGIC, FORMAT, self.slot_bytes, self.file_id)
        if (magic, format_, slot_bytes, file_id) != expected or name not in (None, found):
            return Verdict.OTHER, found, data_sum
        return Verdict.MATCH, found, data_sum
