"""Traces of requests: which blocks each prompt has, by names that share prefixes share."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kv_offload.errors import KVOffloadError

BLOCK_TOKENS = 512
"""Tokens of a block where a request does not say it (`block_size`), as in Mooncake's traces."""


class TraceError(KVOffloadError, ValueError):
    """A trace cannot be read: names the file, the line and what is wrong there."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request. Equal prefixes have equal `hash_ids`, one for each block of the prompt."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    """Tokens of the prompt."""
    output_length: int
    """Tokens that were generated."""
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS
    """Tokens of each block."""


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a file of JSON lines, which need not fit into memory.

    Empty lines are passed over, and a last line without its end, behind others: an engine writes
    it, or was killed meanwhile. Raises `TraceError` for a file or a line that cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    request = _request(line, f"{path}, line {number}")
                except TraceError:
                    if line.endswith("\n") or number == 1:
                        raise
                    return
                yield request
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error


def split_blocks(requests: Iterable[TraceRequest], parts: int) -> Iterator[TraceRequest]:
    """Cut each block into so many: a trace of blocks of 512 tokens becomes one of 16 by 32."""
    for request in requests:
        ids = tuple(block * parts + part for block in request.hash_ids for part in range(parts))
        tokens = request.block_tokens // parts
        yield TraceRequest(
            request.timestamp, request.input_length, request.output_length, ids, tokens
        )


def _request(line: str, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (RecursionError, ValueError) as error:
        raise TraceError(f"{where}: not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: {line.strip()[:40]!r} is no JSON object")
    timestamp = _field(fields, "timestamp", where)
    if type(timestamp) not in (int, float) or not timestamp >= 0:  # NaN compares with nothing
        raise TraceError(f"{where}: timestamp is {timestamp!r}: give milliseconds, 0 or more")
    for name in ("input_length", "output_length"):
        if not _is_count(length := _field(fields, name, where)):
            raise TraceError(f"{where}: {name} is {length!r}: give a number of tokens")
    ids = _field(fields, "hash_ids", where)
    if not isinstance(ids, list) or not all(map(_is_count, ids)):
        raise TraceError(f"{where}: hash_ids is not a list of integers, 0 or more")
    if len(set(ids)) < len(ids):
        raise TraceError(f"{where}: hash_ids names a block twice: ids cover what lies before, too")
    block_tokens = fields.get("block_size", BLOCK_TOKENS)
    if not _is_count(block_tokens) or not block_tokens:
        raise TraceError(f"{where}: block_size is {block_tokens!r}: give the tokens of a block")
    return TraceRequest(
        timestamp, fields["input_length"], fields["output_length"], tuple(ids), block_tokens
    )


def _field(fields: dict[str, Any], name: str, where: str) -> Any:
    if name not in fields:
        raise TraceError(f"{where}: {name} is missing")
    return fields[name]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def count_blocks(requests: Sequence[TraceRequest]) -> int:
    """Return how many blocks all prompts have."""
    return sum(len(request.hash_ids) for request in requests)
