"""Which requests have computed with KV that was not there, so that they must end."""

from __future__ import annotations

from collections.abc import Sequence

from kv_offload.scheduler.jobs import Job
from kv_offload.scheduler.request import RequestTable, StoreCursor, TrackedRequest


def computed_with(requests: RequestTable, loads: Sequence[Job]) -> set[TrackedRequest]:
    """Return the requests of lost loads, and all that have computed with wrong KV since.

    A request shares blocks of those that were admitted before it, and of no others: one that was
    preempted before such a load was planned may still name blocks that the load was given. What it
    has behind a wrong block is wrong, too. One that reads a window may share that alone.

    Requests of these loads may have ended.
    """
    wrong = {block for load in loads for block in load.blocks}
    by_cursor: dict[StoreCursor, TrackedRequest] = {}
    for load in loads:
        assert load.request is not None
        assert load.cursor is not None
        by_cursor[load.cursor] = load.request
    lost = set(by_cursor.values())
    first = min(cursor.admission for cursor in by_cursor)
    for tracked in requests:
        if tracked.cursor is not None and tracked.cursor.admission > first:
            by_cursor[tracked.cursor] = tracked
    for cursor in sorted(by_cursor, key=lambda cursor: cursor.admission):
        for ids in cursor.block_ids:
            shared = next((at for at, block in enumerate(ids) if block in wrong), None)
            if shared is not None:
                lost.add(by_cursor[cursor])
                wrong.update(ids[shared:])
    return lost
