"""The first region of a tier's file, which describes the file.

It has 64 KiB. One record per slot follows (`record.py`), plus one for testing direct I/O. Numbers
are little-endian:

    offset  bytes
         0      8   magic, the letters KVTIERS and a zero
         8      8   n, the bytes of the JSON
        16     16   XXH3-128 of the JSON
        32      n   JSON: format, file_id, slot_bytes, num_slots, description
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kv_swap.errors import TierError, explain
from kv_swap.tiers.record import FORMAT, RecordFormat, checksum

FIRST_REGION_BYTES = 64 << 10

_MAGIC = b"KVTIERS\0"
_FIELDS = struct.Struct("<8sQ16s")

_LARGEST_FILE_BYTES = 1 << 62
"""File sizes have 63 bits."""


class FileDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description in a file's header.

    `file_id` is 32 hexadecimal digits, drawn whenever a file is started. The caller provides
    `description`: everything that determines the meaning of a slot's bytes.
    """

    file_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    slot_bytes: Annotated[int, Meta(gt=0)]
    num_slots: Annotated[int, Meta(gt=0)]
    description: dict[str, str]
    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)]

    @property
    def records(self) -> RecordFormat:
        """The format of the file's records."""
        return RecordFormat(bytes.fromhex(self.file_id), self.slot_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.offset(self.num_slots + 1)

    def offset(self, slot: int) -> int:
        """Return the offset of a slot's record; slot `num_slots` is the record for tests."""
        return FIRST_REGION_BYTES + slot * self.records.record_bytes

    def encode(self) -> bytes:
        """Return the first region as bytes. Raises `TierError` if the description is too long."""
        text = json.dumps(msgspec.structs.asdict(self)).encode()  # any path, UTF-8 or not
        if _FIELDS.size + len(text) > FIRST_REGION_BYTES:
            raise TierError(
                f"the description of a tier takes {len(text)} bytes, at most "
                f"{FIRST_REGION_BYTES - _FIELDS.size} fit: describe it with less"
            )
        region = _FIELDS.pack(_MAGIC, len(text), checksum(text)) + text
        return region.ljust(FIRST_REGION_BYTES, b"\0")

    def reason_against(self, wanted: FileDescription) -> str:
        """Return why a file with this description differs from `wanted`; empty if it does not."""
        if self.slot_bytes != wanted.slot_bytes:
            return f"its slots have {self.slot_bytes} bytes, {wanted.slot_bytes} are wanted"
        if self.num_slots != wanted.num_slots:
            return f"it has {self.num_slots} slots, {wanted.num_slots} are wanted"
        for key in sorted(self.description | wanted.description):
            has, wants = self.description.get(key), wanted.description.get(key)
            if has != wants:
                return f"its {key} is {has!r}, {wants!r} is wanted"
        return ""


def read_region(fd: int, path: Path) -> FileDescription | str:
    """Return a file's description, or the reason why the file must be started over.

    Raises `TierError` if it cannot be read, or if no tier created it.
    """
    try:
        region = os.pread(fd, FIRST_REGION_BYTES, 0)
    except OSError as error:
        raise TierError(f"cannot read {path}: {explain(error)}") from error
    magic, nbytes, expected = _FIELDS.unpack_from(region.ljust(_FIELDS.size, b"\0"))
    text = region[_FIELDS.size : _FIELDS.size + nbytes]
    is_whole = bool(text) and checksum(text) == expected
    if magic != _MAGIC and not is_whole:
        raise TierError(
            f"{path} has {os.fstat(fd).st_size} bytes, and no tier has made it; it is left as it "
            f"is: name another file, or remove it"
        )
    if magic != _MAGIC or not is_whole:
        return "its first region is damaged"
    return _parse(text)


def _parse(text: bytes) -> FileDescription | str:
    """Return the description in an intact first region, or why this version cannot use it."""
    try:
        found = msgspec.convert(json.loads(text), FileDescription)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        return f"its first region describes no file of this version: {error}"
    if found.nbytes >= _LARGEST_FILE_BYTES:
        return "its first region describes no file of this version: it would be too large"
    return found


def fitting_slots(nbytes: int, slot_bytes: int) -> int:
    """Return how many slots fit in a file of at most `nbytes`; 0 or less if none fits."""
    records = RecordFormat(bytes(16), slot_bytes)
    return (nbytes - FIRST_REGION_BYTES) // records.record_bytes - 1


def read_description(path: Path) -> FileDescription:
    """Return the description of a tier's file, even while an engine uses it.

    Raises `TierError` if it cannot be read, is damaged, has another format, or if no tier created
    it.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TierError(f"cannot open {path}: {explain(error)}") from error
    try:
        found = read_region(fd, path)
    finally:
        os.close(fd)
    if isinstance(found, str):
        raise TierError(f"{path} cannot be used: {found}; an engine would start it over")
    return found
