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

The data is served under a name only if all of this matches. So the following are misses, and never
another block's bytes: a partly written record, a record from before the file was started over, one
copied from another file, and one with a flipped bit. A slot that was never written is all zeros.
The checksums involve no secret: anyone who can write to the file can forge a record.
"""

from __future__ import annotations

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


def checksum(data: Any) -> bytes:
    """Return the 16-byte XXH3-128 of contiguous bytes; releases the GIL unless they are few."""
    # In xxhash 3 and earlier, the one-call function holds the GIL.
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
        """Return the header page for `data`, which must not change until it is written.

        `data` has `slot_bytes` contiguous bytes.
        """
        fields = _FIELDS.pack(
            _MAGIC, FORMAT, len(name), self.slot_bytes, self.file_id, checksum(data)
        )
        page = (fields + name).ljust(_SUMMED_BYTES, b"\0")
        return page + checksum(page)

    def verify(self, header: Any, data: Any, name: bytes) -> bool:
        """Return whether a header page and its data are an intact record of this file and name."""
        page = bytes(header)
        if checksum(page[:_SUMMED_BYTES]) != page[_SUMMED_BYTES:]:
            return False
        magic, format_, name_bytes, slot_bytes, file_id, data_sum = _FIELDS.unpack_from(page)
        found = page[_FIELDS.size : _FIELDS.size + name_bytes]
        expected = (_MAGIC, FORMAT, self.slot_bytes, self.file_id, name)
        if (magic, format_, slot_bytes, file_id, found) != expected:
            return False
        return bool(checksum(data) == data_sum)
