"""The first region of a tier's file, which says what the file is.

It has 64 KiB. A record for each slot follows (`record.py`), and one more record, at which direct
I/O is tried. Numbers are little-endian:

    offset  bytes
         0      8   magic, the letters KVTIERS and a zero
         8      8   n, the bytes of the JSON
        16     16   XXH3-128 of the JSON
        32      n   JSON: format, file_id, slot_bytes, num_slots, description
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kv_swap.errors import TierError
from kv_swap.tiers.os_errors import explain
from kv_swap.tiers.record import FORMAT, RecordFormat, checksum

FIRST_REGION_BYTES = 64 << 10

_MAGIC = b"KVTIERS\0"
_FIELDS = struct.Struct("<8sQ16s")

_LARGEST_FILE_BYTES = 1 << 62
"""Systems count the bytes of a file in 63 bits."""


@dataclass(frozen=True, slots=True)
class FileDescription:
    """The description in a file's header.

    `file_id` is 32 hexadecimal digits, random for each beginning of a file. `description` is its
    user's: all that changes what the bytes of a slot mean.
    """

    file_id: str
    slot_bytes: int
    num_slots: int
    description: dict[str, str]
    format: int = FORMAT

    @property
    def records(self) -> RecordFormat:
        """The format of its records."""
        return RecordFormat(bytes.fromhex(self.file_id), self.slot_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.offset(self.num_slots + 1)

    def offset(self, slot: int) -> int:
        """Return where the record of a slot begins; that of `num_slots` is the one for trials."""
        return FIRST_REGION_BYTES + slot * self.records.record_bytes

    def encode(self) -> bytes:
        """Return the first region. Raises `TierError` if the description is too long for it."""
        text = json.dumps(asdict(self)).encode()
        if _FIELDS.size + len(text) > FIRST_REGION_BYTES:
            raise TierError(
                f"the description of a tier takes {len(text)} bytes, at most "
                f"{FIRST_REGION_BYTES - _FIELDS.size} fit: describe it with less"
            )
        region = _FIELDS.pack(_MAGIC, len(text), checksum(text)) + text
        return region.ljust(FIRST_REGION_BYTES, b"\0")

    def reason_against(self, wanted: FileDescription) -> str:
        """Say why a file of this description is not what is wanted; empty if it is."""
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
    """Return what a file is, or why it can only be begun afresh.

    Raises `TierError` if it cannot be read, and if it is not a tier's.
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
    """Return what a whole first region says, or why that is no description of this version."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        return "its first region describes no file"
    if document.get("format") != FORMAT:
        return f"its format is {document.get('format')!r:.40}, this version has {FORMAT}"
    if not _is_description(document):
        return "its first region describes no file"
    return FileDescription(**document)


def _is_description(document: dict[str, Any]) -> bool:
    """Say whether a document has the fields of a `FileDescription`, with values that can be."""
    types = {name: type(value) for name, value in document.items()}
    wanted = {"file_id": str, "slot_bytes": int, "num_slots": int, "description": dict}
    if types != {**wanted, "format": int}:
        return False
    return (
        re.fullmatch("[0-9a-f]{32}", document["file_id"]) is not None
        and all(isinstance(value, str) for value in document["description"].values())
        and min(document["slot_bytes"], document["num_slots"]) > 0
        and FileDescription(**document).nbytes < _LARGEST_FILE_BYTES
    )


def fitting_slots(nbytes: int, slot_bytes: int) -> int:
    """Return how many slots a file of at most `nbytes` has; 0 or less if none fits."""
    records = RecordFormat(bytes(16), slot_bytes)
    return (nbytes - FIRST_REGION_BYTES) // records.record_bytes - 1


def read_description(path: Path) -> FileDescription:
    """Return what the file of a tier says of itself, as `open_described` does."""
    with open_described(path) as (_, found):
        return found


@contextlib.contextmanager
def open_described(path: Path) -> Iterator[tuple[int, FileDescription]]:
    """Open the file of a tier to read, also while an engine uses it, and what it says of itself.

    Raises `TierError` if it cannot be read, is not a tier's, is damaged, or has another format.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TierError(f"cannot open {path}: {explain(error)}") from error
    try:
        found = read_region(fd, path)
        if isinstance(found, str):
            raise TierError(f"{path} cannot be used: {found}; an engine would begin it afresh")
        yield fd, found
    finally:
        os.close(fd)
