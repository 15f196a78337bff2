"""What the requests of a step get and compute: which of them have blocks to store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import compress
from typing import Any

from kv_offload.engine import RunningRequests, StepOutput
from kv_offload.scheduler.request import RequestTable, StoreCursor, TrackedRequest
from kv_offload.scheduler.stores.candidates import StoreCandidates


class Progress:
    """Follows requests from step to step, and has what they fill examined for stores.

    A running request is looked at when it gets a block, and as long as it has more to store than
    was examined. So a block that it filled in an earlier step waits for the next one: the request
    keeps the block meanwhile, and most requests of a step of decodes are not touched at all.
    """

    def __init__(self, requests: RequestTable, candidates: StoreCandidates) -> None:
        self._requests = requests
        self._candidates = candidates

    def follow(self, output: StepOutput) -> int:
        """Take in a step; return how many blocks requests have got in it that ran before."""
        unfinished = self._candidates.take_unfinished()
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            tracked = self._requests.get(new.req_id)
            if tracked is not None and tracked.cursor is not None:
                end = new.num_computed_tokens + scheduled[new.req_id]
                self._begin(tracked, tracked.cursor, new.block_ids, end)
        return self._follow_running(output.scheduled_cached_reqs, scheduled, unfinished)

    def _begin(
        self,
        tracked: TrackedRequest,
        cursor: StoreCursor,
        block_ids: Sequence[Sequence[int]],
        end_tokens: int,
    ) -> None:
        """Have a request examined that has not run with these blocks before."""
        loaded = tracked.scheduled(block_ids)
        if loaded is not None:
            # Known, and used just now. What the GPU had before it may have been evicted.
            self._candidates.examine(cursor, loaded[0])
            self._candidates.skip(cursor, loaded[1])
        self._candidates.examine(cursor, end_tokens)

    def _follow_running(
        self, cached: RunningRequests, scheduled: Mapping[str, int], unfinished: Set[str]
    ) -> int:
        request_ids, new_block_ids = cached.req_ids, cached.new_block_ids
        computed, resumed = cached.num_computed_tokens, cached.resumed_req_ids
        grown_blocks = 0
        for index in _to_look_at(request_ids, new_block_ids, unfinished):
            request_id, new_ids = request_ids[index], new_block_ids[index]
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.cursor is None:
                continue
            end = computed[index] + scheduled[request_id]
            if request_id in resumed:
                self._begin(tracked, tracked.cursor, new_ids or (), end)
                continue
            if new_ids is not None:
                for ids, more in zip(tracked.cursor.block_ids, new_ids, strict=True):
                    ids += more
                    grown_blocks += len(more)
            self._candidates.examine(tracked.cursor, end)
        return grown_blocks


def _to_look_at(
    request_ids: Sequence[str], new_block_ids: Sequence[Any], unfinished: Set[str]
) -> Iterable[int]:
    """Return the places of those that got a block or are unfinished; most got none, which is None.

    The only work of a step that is done for every running request.
    """
    places = range(len(request_ids))
    if not unfinished:
        return compress(places, new_block_ids)
    return [i for i in places if new_block_ids[i] is not None or request_ids[i] in unfinished]
