"""The engine's duties after reports of ranks, and the requests and blocks that copies hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_offload.messages import OffloadWorkerMetadata
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.request import Phase, RequestTable, StoreCursor, TrackedRequest
from kv_offload.scheduler.transfers import Kind, Transfer


@dataclass(slots=True)
class Effects:
    """Requests, by id. The engine acts on the fields in this order.

    - `tainted`: have computed with wrong KV; None if no KV was lost. Before it processes the output
      of the step, the engine ends them, and drops the keys of all its blocks.
    - `failed`: their asynchronous loads have failed. They are also in `loaded`, but the engine must
      not treat them as loaded.
    - `loaded`: their asynchronous loads have ended.
    - `stranded`: are loaded, but two steps have not run them although nothing else is under way.
      One step is not enough: the engine admits nothing in a step that preempts.
    """

    tainted: set[str] | None = None
    failed: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    stranded: set[str] = field(default_factory=set)


class PendingEffects:
    """Collects effects, and determines the tainted requests when they are asked for."""

    def __init__(self, core: Core) -> None:
        self._requests, self._transfers = core.requests, core.transfers
        self.pending = Effects()
        self._idle_loaded: set[str] = set()
        self._lost_loads: list[Transfer] = []
        self._step_is_lost = False

    def load_ended(self, request_id: str, *, ok: bool) -> None:
        """Note the end of an asynchronous load on all ranks."""
        self.pending.loaded.add(request_id)
        if not ok:
            self.pending.failed.add(request_id)

    def lost(self, loads: Sequence[Transfer], report: OffloadWorkerMetadata) -> bool:
        """Note loads that a forward read too early, and a step that a rank aborted.

        Returns whether computed KV may be wrong.
        """
        self._lost_loads += loads
        for rank in report.ranks.values():
            if rank.aborted_step is not None:
                self._step_is_lost |= rank.aborted_step > self._requests.admissions_at_reset
        return bool(self._lost_loads) or self._step_is_lost

    def step_begins(self, idle_loaded: set[str]) -> None:
        """Note the loaded requests of a step in which nothing else is under way."""
        self.pending.stranded = idle_loaded & self._idle_loaded
        self._idle_loaded = idle_loaded

    def step_failed(self) -> None:
        """Strand no request: an error hid whether the step runs it."""
        self.pending.stranded = set()

    def take(self) -> Effects:
        """Return the effects since the last call, except for `tainted`."""
        taken, self.pending = self.pending, Effects()
        return taken

    def take_tainted(self) -> set[TrackedRequest] | None:
        """Return the requests that have computed with wrong KV so far; None if nothing was lost.

        These are the requests of lost loads, and all that share blocks computed with them. After an
        aborted step any named block may never have been computed: then these are all requests with
        blocks, or none if the engine's own cache has been emptied since. No pending store of any
        request becomes readable. Some of the requests may have ended.
        """
        loads, self._lost_loads = self._lost_loads, []
        step_is_lost, self._step_is_lost = self._step_is_lost, False
        if not loads and not step_is_lost:
            return None
        self._transfers.invalidate_pending_stores()  # also those planned since the report
        tainted = tainted_requests(self._requests, loads) if loads else set()
        if step_is_lost:
            tainted |= {tracked for tracked in self._requests if tracked.cursor is not None}
        return tainted


class InFlight:
    """A view of the requests, by id, and the GPU blocks that copies hold."""

    def __init__(self, core: Core, effects: PendingEffects) -> None:
        self._requests, self._transfers = core.requests, core.transfers
        self._effects, self._pool = effects, core.engine.pool

    @property
    def awaits_ranks(self) -> bool:
        """True while some rank has not reported the end of a transfer."""
        return self._transfers.any_running

    @property
    def pinned_blocks(self) -> set[int]:
        """GPU blocks that stores pin."""
        return set(self._transfers.pinned())

    @property
    def holds_idle_blocks(self) -> bool:
        """True if some GPU block would be free but for a store."""
        blocks = self._pool.blocks
        return any(blocks[block].ref_cnt == 1 for block in self._transfers.pinned())

    @property
    def loading(self) -> set[str]:
        """Requests with an asynchronous load that has not ended; some may have ended themselves."""
        loads = self._transfers.running(Kind.LOAD).values()
        return {one.request.request_id for one in loads if one.request and not one.synchronous}

    @property
    def abandoned(self) -> set[str]:
        """Ended requests whose load has not ended: the engine still holds their blocks."""
        return {name for name in self.loading if self._requests.get(name) is None}

    @property
    def has_loaded(self) -> bool:
        """True while the engine has not processed the end of some asynchronous load."""
        return bool(self._effects.pending.loaded)

    @property
    def waiting(self) -> set[str]:
        """Requests that may wait for a load, or for their turn after it."""
        return {tracked.request_id for tracked in self._requests if tracked.loaded is not None}

    @property
    def loaded(self) -> set[str]:
        """Requests whose loads have ended and that have not been scheduled since."""
        ready = [tracked for tracked in self._requests if tracked.phase is Phase.READY]
        return {tracked.request_id for tracked in ready if tracked.loaded is not None}


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
