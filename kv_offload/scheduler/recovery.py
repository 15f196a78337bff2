"""Find the requests that computed with KV that was never loaded: they are tainted and must end."""

from __future__ import annotations

from collections.abc import Sequence

from kv_offload.scheduler.request import RequestTable, StoreCursor, TrackedRequest
from kv_offload.scheduler.transfers import Transfer


def tainted_requests(requests: RequestTable, lost_loads: Sequence[Transfer]) -> set[TrackedRequest]:
    """Return the requests of lost loads and all that have computed with their blocks since.

    A request shares blocks only with requests admitted before it: one that was preempted before the
    load was planned may still list blocks that the load was given. Every block after a wrong one is
    wrong as well. A request that reads a window may share only the window.

    The result may contain requests that have ended.
    """
    wrong = {block for load in lost_loads for block in load.blocks}
    by_cursor: dict[StoreCursor, TrackedRequest] = {}
    for load in lost_loads:
        assert load.request is not None
        assert load.cursor is not None
        by_cursor[load.cursor] = load.request
    tainted = set(by_cursor.values())
    first = min(cursor.admission for cursor in by_cursor)
    for tracked in requests:
        if tracked.cursor is not None and tracked.cursor.admission > first:
            by_cursor[tracked.cursor] = tracked
    for cursor in sorted(by_cursor, key=lambda cursor: cursor.admission):
        for ids in cursor.block_ids:
            shared = next((at for at, block in enumerate(ids) if block in wrong), None)
            if shared is not None:
                tainted.add(by_cursor[cursor])
                wrong.update(ids[shared:])
    return tainted
