"""The scheduler's half of the plugin: called by the engine's hooks, one method per event."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kv_offload.cache.lasting import LastingManager
from kv_offload.config import OffloadConfig
from kv_offload.engine import AllocatedBlocks, Request, StepOutput
from kv_offload.errors import UnsupportedError
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata, Outcome, WorkerCapacity
from kv_offload.metrics import OffloadStats
from kv_offload.scheduler.core import Core, EngineFacts, SlotFacts
from kv_offload.scheduler.effects import Effects, InFlight, PendingEffects
from kv_offload.scheduler.events.announcer import Announcement
from kv_offload.scheduler.loads.admissions import Admissions, Match
from kv_offload.scheduler.observers import Observers
from kv_offload.scheduler.request import Phase, TrackedRequest
from kv_offload.scheduler.resets import Resets
from kv_offload.scheduler.stores.planner import StorePlanner
from kv_offload.scheduler.transfers import Kind, Transfer
from kv_offload.scheduler.windows import Windows
from kv_offload.tiers.lower import LowerTiers, TierSpec

logger = logging.getLogger(__name__)

NO_OBSERVERS = Observers()


class OffloadScheduler:
    """Called by the engine's hooks, all on its one scheduling thread.

    Built when the block sizes and the number of slots are final. No slot is used before
    `take_capacities` has been called for every rank.

    - `in_flight`: requests and GPU blocks that running copies hold.
    - `resets`: empties host memory and the tiers.
    - `tiers`: the tiers below host memory, the fastest first.
    """

    def __init__(
        self,
        config: OffloadConfig,
        engine: EngineFacts,
        slots: SlotFacts,
        tiers: Sequence[TierSpec] = (),
        observers: Observers = NO_OBSERVERS,
    ) -> None:
        self.config = config
        self._engine, self._slots = engine, slots
        core = Core(
            config, engine, slots, observers, self.gauges, has_tier=bool(tiers or config.host_pool)
        )
        self.manager, self.watch = core.manager, core.watch
        self._transfers, self._requests = core.transfers, core.requests
        self._statistics, self._retention = core.statistics, core.retention
        self._subscribers, self._quotas = core.subscribers, core.quotas
        self._lookups, self._costs = core.lookups, core.costs
        self.tiers = LowerTiers(core, tiers)
        self._admissions = Admissions(core, self.tiers)
        self._stores = StorePlanner(core)
        self.resets = Resets(core, self._stores, self.tiers)
        self._effects = PendingEffects(core)
        self.in_flight = InFlight(core, self._effects)
        self._core = core
        self._windows: Windows | None = None
        self._ready_slots: dict[int, int] = {}
        self.manager.limit_slots(0)

    # -- requests ------------------------------------------------------------------------------

    def arrived(self, request: Request) -> None:
        """Note that the engine has queued a request."""
        tracked = self._requests.track(request)
        tracked.still_waits = self._lookups.is_spent
        if self.tiers.tiers:
            self.tiers.arrived(tracked)

    def still_waits(self, request_id: str) -> bool:
        """Return, in O(1), whether `match` would make the engine ask again."""
        tracked = self._requests.get(request_id)
        if tracked is None or not self._admissions.still_waits(tracked):
            return False
        for notify in self._subscribers.lookup:
            notify(tracked)
        return True

    def match(
        self, request: Request, num_computed_tokens: int, *, served_by_peer_connector: bool = False
    ) -> Match:
        """Look up a waiting request; see `Admissions.match`.

        `served_by_peer_connector`: another connector loads its first tokens. This is ignored once
        the request has had blocks, since it may have been preempted.
        """
        tracked = self._requests.track(request)
        tracked.served_by_peer_connector = served_by_peer_connector and tracked.cursor is None
        for notify in self._subscribers.lookup:
            notify(tracked)
        return self._admissions.match(tracked, num_computed_tokens)

    def allocated(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """See `Admissions.allocated`."""
        tracked = self._requests.track(request)
        hit = tracked.hit
        self._admissions.allocated(tracked, blocks, num_external_tokens)
        for notify in self._subscribers.admission:
            notify(tracked, hit, num_external_tokens)

    def allocation_failed(
        self, request: Request, blocks: AllocatedBlocks, num_external_tokens: int
    ) -> None:
        """See `Admissions.allocation_failed`."""
        tracked = self._requests.track(request)
        self._admissions.allocation_failed(tracked, blocks, num_external_tokens)

    def finished(self, request: Request, block_ids: Sequence[Sequence[int]] | None) -> None:
        """Plan the last stores of a request, just before its blocks are freed.

        Without `block_ids`, as after an error, no more of its blocks are stored.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return
        self._end_request(tracked)
        if block_ids is None or tracked.cursor is None or tracked.loaded is not None:
            return  # nothing of it was computed
        # Steps in flight run before the stores that are planned now, so the tokens that they
        # compute count. Drafts and placeholders have no hashes.
        end_tokens = min(request.num_computed_tokens, request.num_tokens)
        for notify in self._subscribers.request_end:
            notify(request, end_tokens)
        self._stores.request_ends(tracked.cursor, end_tokens)

    def tail_finished(
        self,
        request: Request,
        states: Sequence[tuple[int, int, int]],
        block_ids: Sequence[Sequence[int]],
    ) -> None:
        """Plan the stores of the blocks inside which a request ends, before `finished`.

        `states` are as in `BlockState`. Nothing of the request is in flight.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.cursor is None or tracked.loaded is not None:
            return  # nothing of it was computed
        self._stores.tail_ends(tracked.cursor, request.num_computed_tokens, states, block_ids)

    def _end_request(self, tracked: TrackedRequest) -> None:
        self._lookups.arrived(tracked)
        self._requests.end(tracked)

    # -- steps ---------------------------------------------------------------------------------

    def plan_step(self, output: StepOutput) -> OffloadMetadata:
        """Plan the stores of this step's requests; return them with the loads planned before.

        If it raises, `plan_after_error` must follow: the engine counts on the loads.
        """
        self._transfers.step_time.next_step()
        self._retention.expire()
        self.tiers.advance(computes=bool(output.num_scheduled_tokens))
        idle = not output.num_scheduled_tokens and self._is_still
        load_seconds = self._costs.queued_seconds()
        self._stores.plan_step(output, load_seconds=load_seconds, idle=idle)
        loaded = self.in_flight.loaded if idle and not self._transfers.pinned_blocks else set()
        self._effects.step_begins(loaded)
        return self._begin_step(output)

    def plan_after_error(self, output: StepOutput) -> OffloadMetadata:
        """Return the plan, as far as it was made, of a step for which `plan_step` has raised."""
        self._effects.step_failed()
        return self._begin_step(output)

    def _begin_step(self, output: StepOutput) -> OffloadMetadata:
        # This comes last and does not raise: planned transfers must be sent.
        transfers = self._transfers
        self._lookups.next_step()
        self._costs.next_step()
        loads, waits = transfers.num_loads > 0, transfers.plans_synchronous_load
        self.watch.begin(output, loads=loads, waits=waits)
        plan = transfers.seal(self._requests.admissions)
        for add in self._subscribers.plans:
            try:
                plan = add(plan)
            except Exception:
                self._statistics.count("hook_errors", 1)
                logger.exception("kv-offload: an error in what a plan lacks. Please report this")
        return plan

    @property
    def _is_still(self) -> bool:
        """True if no load, and no step that computes, is under way."""
        return not self._transfers.num_loads and not any(
            tracked.request.num_in_flight_tokens
            for tracked in self._requests
            if tracked.cursor is not None
        )

    def step_ended(self) -> None:
        """Note that the engine has processed the output of the oldest step under way."""
        self.watch.end()

    # -- reports -------------------------------------------------------------------------------

    def apply_report(self, report: OffloadWorkerMetadata) -> None:
        """Apply reports of ranks, before the engine processes the tokens of the reported step.

        Applying a report twice changes nothing. No block computed with wrong KV can be readable
        yet: a store ends in a later step than the forward whose KV it copies.
        """
        ended, lost = self._transfers.apply_reports(report.ranks)
        if any(rank.aborted_step is not None for rank in report.ranks.values()):
            self.watch.forget()
        if self._effects.lost(lost, report):
            self._transfers.invalidate_pending_stores(ended)
        for transfer in ended:
            self._survive(self._end, transfer)
        self._survive(self._learn, report)

    def _survive(self, take: Callable[[Any], None], part: Any) -> None:
        """Apply a part of a report; an error in it does not stop the others."""
        try:
            take(part)
        except Exception:
            self._statistics.count("hook_errors", 1)
            logger.exception("kv-offload: an error in a part of a report. Please report this")

    def _end(self, transfer: Transfer) -> None:
        """Act on the end of a transfer on all ranks."""
        if transfer.kind is Kind.STORE:
            self._end_store(transfer)
        elif transfer.kind is Kind.LOAD:
            self._end_load(transfer)
        else:
            self.tiers.end(transfer)

    def _end_load(self, load: Transfer) -> None:
        assert load.request is not None
        if not load.synchronous:
            ok = load.outcome is Outcome.OK
            load.request.load_ended(ok=ok)
            self._effects.load_ended(load.request.request_id, ok=ok)
            self._statistics.count("failed_loads", not ok)
        self._transfers.end_load(load)
        for notify in self._subscribers.load_end:
            notify(load)

    def _end_store(self, store: Transfer) -> None:
        if store.outcome is Outcome.OK:
            refused: Sequence[Any] = ()
            if store.failed_rows:
                refused = self.manager.keys_of(store.slots[store.failed])
            self._stores.stored(len(store.slots), refused)
        else:
            self._statistics.skipped("copy_failed", len(store.slots))
        self._transfers.end_store(store)
        self._retention.stored(store.slots)
        for notify in self._subscribers.store_end:
            notify(store)

    def _learn(self, report: OffloadWorkerMetadata) -> None:
        # This comes first: slots that become usable may hold blocks of the previous weights.
        weight_loads = {r: n.weight_loads for r, n in report.ranks.items() if n.weight_loads}
        if weight_loads:
            self.resets.weights_were_loaded(weight_loads)
        speeds: dict[str, dict[int, float]] = {}
        for rank, news in report.ranks.items():
            for name, speed in (news.bytes_per_second or {}).items():
                speeds.setdefault(name, {})[rank] = speed
        for name, by_rank in speeds.items():
            self.watch.copy_rates[name].add_reports(by_rank)
        for take in self._subscribers.reports:
            self._survive(take, report)
        for rank, news in report.ranks.items():
            if news.ready_slots is not None:
                self._use_ready_slots({rank: news.ready_slots})

    def take_effects(self, *, between_steps: bool = False) -> Effects:
        """Return the engine's new duties, each once; called before it processes an output.

        Tainted requests end here, and the engine must end them. `between_steps` leaves them for the
        next call, because the output of a step informs their clients.
        """
        effects = self._effects.take()
        tainted = None if between_steps else self._effects.take_tainted()
        if tainted is not None:
            # An aborted request has left the table, where another may now have its id.
            alive = [tracked for tracked in tainted if tracked.phase is not Phase.ENDED]
            for tracked in alive:
                self._end_request(tracked)
            self._statistics.count("lost_requests", len(alive))
            effects.tainted = {tracked.request_id for tracked in tainted}
        return effects

    def others_load_failed(self) -> None:
        """Discard pending stores: they may hold KV that another connector failed to load."""
        self._transfers.invalidate_pending_stores()

    # -- between steps -------------------------------------------------------------------------

    def plan_drain(self) -> OffloadMetadata:
        """Return a plan that makes the ranks end all copies between two steps."""
        return self._transfers.seal(self._requests.admissions)

    def give_up_stores(self) -> int:
        """Release the blocks of all stores that have not ended; return the number of stores."""
        return self._transfers.give_up_stores()

    @property
    def has_pending_work(self) -> bool:
        """True while the engine must keep stepping: for a transfer, for routers, or for gauges.

        At the start it steps once to report all gauges, which read 0 until then.
        """
        if not self._statistics.has_reported:
            return True
        idle, transfers = not self._requests.admitted, self._transfers
        if any(has_work(idle) for has_work in self._subscribers.has_work):
            return True
        if transfers.pinned_blocks or self._stores.candidates.waiting_slots:
            return True
        # Only a step brings the report of a synchronous load.
        if any(load.synchronous for load in transfers.running(Kind.LOAD).values()):
            return True
        return self.tiers.has_pending_work

    # -- host memory ---------------------------------------------------------------------------

    def take_capacities(self, capacities: Sequence[WorkerCapacity]) -> None:
        """Use the capacities of ranks, at the start or later.

        With a `host_pool` the first call adopts the slots that an earlier process left in the
        ranks' arenas. Raises `UnsupportedError` if that call does not name all ranks.
        """
        manager = self.manager
        if isinstance(manager, LastingManager) and not manager.is_open:
            arenas = {rank.rank: Path(rank.arena) for rank in capacities}
            if len(arenas) != self._engine.num_ranks:
                raise UnsupportedError(
                    f"host_pool: of {self._engine.num_ranks} ranks only {sorted(arenas)} have "
                    "reported their memory, and blocks are kept by all of them: remove the key"
                )
            manager.open(arenas)
            manager.share(self._engine.wake)
            if manager.peers is not None:
                self._windows = Windows(self._core, manager, manager.peers)
        self._use_ready_slots({rank.rank: rank.ready_slots for rank in capacities})
        self.tiers.take_capacities(capacities)

    def _use_ready_slots(self, ready_slots: Mapping[int, int]) -> None:
        """Use slots whose memory is ready on every rank; a lower number is an older report."""
        for rank, slots in ready_slots.items():
            self._ready_slots[rank] = max(slots, self._ready_slots.get(rank, 0))
        known = len(self._ready_slots) == self._engine.num_ranks
        usable = min(self._ready_slots.values()) if known else 0
        self.manager.limit_slots(min(usable, self.manager.num_slots))

    def pause_stores(self, *, paused: bool) -> None:
        """Pause or resume stores. Those that are planned still run."""
        self._stores.pause(paused=paused)

    def close(self) -> None:
        """Stop the threads of recorder and tiers when the engine shuts down."""
        for close in self._subscribers.close:
            close()
        self.tiers.close()
        self.manager.close()

    def take_announcements(self) -> list[Announcement]:
        """Return the announcements that routers get in this step."""
        return [one for take in self._subscribers.announcements for one in take()]

    # -- figures -------------------------------------------------------------------------------

    def take_stats(self, errors: int = 0, *, at_once: bool = False) -> OffloadStats | None:
        """Return the counts since the last call, with `errors` of hooks; None if there are none.

        Changed gauges are added at intervals, or at once if asked for and while the engine is idle.
        """
        idle = at_once or not self._requests.admitted
        self._statistics.count("hook_errors", errors)
        for work in self._subscribers.work:
            work(idle)
        return self._statistics.take(idle=idle)

    def gauges(self) -> dict[str, float]:
        """Return the current values of the gauges of `kv_offload.metrics`."""
        transfers = self._transfers
        return {
            "slots": self.manager.usable_slots,
            "slots_in_use": self.manager.slots_in_use,
            "pool_slots": self.manager.num_slots,
            "adopted_slots": self.manager.adopted_slots,
            "slot_bytes": self._slots.slot_bytes,
            "block_bytes": self._slots.block_bytes,
            "running_loads": transfers.num_loads,
            "running_stores": len(transfers.running(Kind.STORE)),
            "oldest_copy_seconds": transfers.oldest_age_seconds(Kind.STORE, Kind.LOAD),
            "pinned_blocks": transfers.pinned_blocks,
            "waiting_slots": self._stores.candidates.waiting_slots,
            "retained_slots": self._retention.slots,
            "stores_paused": float(self._stores.paused),
            **self.watch.gauges(),
            **self.tiers.gauges(),
            **(self._windows.gauges() if self._windows is not None else {}),
        }

    def check_integrity(self) -> None:
        """Raise `AssertionError` where the state contradicts itself; tests call it each step."""
        self._requests.check_integrity()
        self._lookups.check_integrity()
        self._transfers.check_integrity()
        self.manager.check_integrity()
        self._retention.check_integrity()
        self.tiers.check_integrity()
        if self._quotas is not None:
            self._quotas.owners.check_integrity()
        loading = self.in_flight.loading
        for tracked in self._requests:
            planned = self._transfers.plans_load_of(tracked)
            assert tracked.phase is not Phase.LOADING or planned or tracked.request_id in loading
