"""Shows what a disk holds: for a person, and for a program."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from kv_swap.tiers.record import Verdict

from kv_offload.config.sizes import format_size
from kv_offload.tools.tier.read import RankFile, Replica

Verified: TypeAlias = Mapping[int, Counter[Verdict]]
"""By rank, how many records are what."""

WORDS = {
    Verdict.MATCH: "as written",
    Verdict.EMPTY: "empty",
    Verdict.DAMAGED: "damaged",
    Verdict.OTHER: "of another block",
    Verdict.UNREADABLE: "unreadable",
}
HARM = (Verdict.DAMAGED, Verdict.UNREADABLE)


def as_text(replica: Replica, verified: Verified | None) -> str:
    """Return some lines on one replica; `verified` is None if nothing was verified."""
    lines = [str(replica.folder)]
    lines += [f"  {name:<12}{value}" for name, value in _lines(replica, verified)]
    # What a file says may have escapes, which a terminal would obey.
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def _lines(replica: Replica, verified: Verified | None) -> Iterator[tuple[str, str]]:
    in_use = {True: "by an engine", False: "by no engine", None: "not known"}[replica.in_use]
    yield "in use", in_use
    index = replica.index
    if index is None:
        yield "index", replica.problem
    else:
        yield "model", ", ".join(filter(None, map(index.description.get, ("model", "dtype"))))
        used = len(index.slots)
        share = f"{100 * used / index.num_slots:.1f} %"
        yield "slots", f"{used:,} of {index.num_slots:,} hold a block, {share}"
        yield "data", f"{format_size(replica.used_bytes)} in {len(replica.ranks)} files"
        if used:
            last, first = (_ago(index.used[i]) for i in (-1, 0))
            yield "last use", f"{last} ago; that of the next to go {first} ago"
        if index.was_reset:
            yield "restart", "begins empty, because a reset emptied the disk while the engine ran"
    for file in replica.ranks:
        yield f"rank {file.rank}", _describe_file(replica, file)
        if verified is not None:
            counts = verified[file.rank]
            found = [f"{n:,} {WORDS[verdict]}" for verdict in WORDS if (n := counts[verdict])]
            yield "", f"verified: {', '.join(found) or 'nothing to read'}"


def _describe_file(replica: Replica, file: RankFile) -> str:
    if file.content is None:
        return file.problem
    size = f"{format_size(file.file_bytes)} in {file.path.name}"
    slots = f"slots of {format_size(file.content.slot_bytes)}"
    if replica.index is not None and not replica.belongs(file):
        return f"{size}, {slots}; not the file that the index is of: nothing in it is found"
    return f"{size}, {slots}"


def _ago(microseconds: int) -> str:
    """Return how long a moment is past, in the largest unit that it fills."""
    seconds = max(0.0, time.time() - microseconds / 1e6)
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def as_json(replica: Replica, verified: Verified | None) -> dict[str, Any]:
    """Return all that is known of one replica; times are seconds since 1970."""
    index = replica.index
    used = [] if index is None else index.used.tolist()
    return {
        "folder": str(replica.folder),
        "in_use": replica.in_use,
        "problem": replica.problem,
        "description": None if index is None else dict(index.description),
        "slots": None if index is None else index.num_slots,
        "used_slots": len(used),
        "used_bytes": replica.used_bytes,
        "last_use": used[-1] / 1e6 if used else None,
        "first_use": used[0] / 1e6 if used else None,
        "was_reset": index is not None and index.was_reset,
        "ranks": [_file_as_json(replica, file, verified) for file in replica.ranks],
    }


def _file_as_json(replica: Replica, file: RankFile, verified: Verified | None) -> dict[str, Any]:
    content = file.content
    counts = None
    if verified is not None:
        counts = {verdict.value: verified[file.rank][verdict] for verdict in Verdict}
    return {
        "rank": file.rank,
        "file": str(file.path),
        "file_bytes": file.file_bytes,
        "slot_bytes": None if content is None else content.slot_bytes,
        "belongs_to_index": replica.belongs(file),
        "problem": file.problem,
        "verified": counts,
    }


def is_harmed(replica: Replica, verified: Verified) -> bool:
    """Say whether a disk that nobody writes to lost data: a record is damaged or unreadable."""
    return not replica.in_use and any(
        counts[verdict] for counts in verified.values() for verdict in HARM
    )
