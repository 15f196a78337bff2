"""Traces of requests: the blocks of each prompt, by ids that shared prefixes have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kv_offload.errors import KVOffloadError

BLOCK_TOKENS = 512
"""Tokens of a block if a request does not give `block_size`, as in Mooncake's traces."""

Count = Annotated[int, Meta(ge=0)]


class TraceError(KVOffloadError, ValueError):
    """A trace cannot be read; names the file, the line and the problem."""


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. Equal prefixes have equal `hash_ids`, one per block of the prompt.

    Raises `ValueError` for a repeated id: the id of a block covers the blocks before it.
    """

    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds since the trace began."""
    input_length: Count
    """Tokens of the prompt."""
    output_length: Count
    """Generated tokens."""
    hash_ids: tuple[Count, ...]
    block_tokens: Annotated[int, Meta(ge=1)] = msgspec.field(
        default=BLOCK_TOKENS, name="block_size"
    )
    """Number of tokens in each block."""

    def __post_init__(self) -> None:
        """Check that the ids are distinct."""
        if len(set(self.hash_ids)) < len(self.hash_ids):
            raise ValueError("hash_ids names a block twice: ids cover what lies before, too")


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a file of JSON lines, which need not fit into memory.

    Skips empty lines, and an incomplete last line unless it is the only one: an engine is writing
    it, or was killed while doing so. Raises `TraceError` for a file or a line that cannot be read.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    request = msgspec.json.decode(line, type=TraceRequest)
                except (RecursionError, msgspec.DecodeError) as error:
                    if line.endswith(b"\n") or number == 1:
                        raise TraceError(f"{path}, line {number}: {error}") from error
                    return
                yield request
    except OSError as error:
        raise TraceError(
            f"{path}: cannot be read: {error.strerror}. Give a file of JSON lines, such as "
            "record_trace writes"
        ) from error
