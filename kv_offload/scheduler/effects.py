"""The engine's duties after reports of ranks: one value, collected until the engine takes it.

Ranks may report at any time, and may report a transfer twice. Each effect is returned once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_offload.messages import OffloadWorkerMetadata
from kv_offload.scheduler.core import Core
from kv_offload.scheduler.recovery import tainted_requests
from kv_offload.scheduler.request import TrackedRequest
from kv_offload.scheduler.transfers import Transfer


@dataclass(slots=True)
class Effects:
    """Requests by their ids. The engine acts on the fields in this order.

    - `tainted`: they have computed with wrong KV; None if no request has. The engine ends them, and
      finds no block by its key any more, before it takes in the output of the step.
    - `failed`: their asynchronous loads have failed. They are also in `loaded`, but the engine must
      not take them for loaded.
    - `loaded`: their asynchronous loads have ended.
    - `stranded`: they are loaded, and two steps have not run them though nothing else is under way.
      Not one step: the engine admits nothing in a step that preempts.
    """

    tainted: set[str] | None = None
    failed: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    stranded: set[str] = field(default_factory=set)


class PendingEffects:
    """Collects effects, and decides who is tainted at the moment when that is asked."""

    def __init__(self, core: Core) -> None:
        self._requests, self._transfers = core.requests, core.transfers
        self._effects = Effects()
        self._idle_loaded: set[str] = set()
        self._lost_loads: list[Transfer] = []
        self._step_is_lost = False

    # -- reports -------------------------------------------------------------------------------

    def load_ended(self, request_id: str, *, ok: bool) -> None:
        """Note the end of an asynchronous load on all ranks."""
        self._effects.loaded.add(request_id)
        if not ok:
            self._effects.failed.add(request_id)

    def lost(self, loads: Sequence[Transfer], report: OffloadWorkerMetadata) -> bool:
        """Note loads that a forward read too early, and a step that a rank has cut short.

        Returns whether what has been computed may be wrong, now or since an earlier report.
        """
        self._lost_loads += loads
        for rank in report.ranks.values():
            if rank.aborted_step is not None:
                self._step_is_lost |= rank.aborted_step > self._requests.admissions_at_reset
        return bool(self._lost_loads) or self._step_is_lost

    # -- steps ---------------------------------------------------------------------------------

    def step_begins(self, idle_loaded: set[str]) -> None:
        """Note the loaded requests of a step in which nothing else is under way."""
        self._effects.stranded = idle_loaded & self._idle_loaded
        self._idle_loaded = idle_loaded

    def step_failed(self) -> None:
        """Strand no request: an error hid whether the step runs it."""
        self._effects.stranded = set()

    # -- the engine ----------------------------------------------------------------------------

    @property
    def has_loaded(self) -> bool:
        """True while the engine has not taken the end of some asynchronous load."""
        return bool(self._effects.loaded)

    def take(self) -> Effects:
        """Return what has come since the last call, except for `tainted`."""
        taken, self._effects = self._effects, Effects()
        return taken

    def take_tainted(self) -> set[TrackedRequest] | None:
        """Return the requests that have computed with wrong KV by now; None if there is no loss.

        These are the requests of lost loads, and all that share their blocks or what was computed
        with them. After a step that was cut short any named block may be one that was never
        computed: then these are all requests with blocks, but none once the engine's own cache has
        been emptied. Nothing of them is stored any more. Some may have ended.
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
