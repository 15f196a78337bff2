"""The worker side of the connector: its start and end, and the order of each step."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kv_swap.engine import Direction, SwapEngine
from kv_swap.errors import CopyError
from kv_swap.packing.samples import TileSampler

from kv_offload.config import OffloadConfig
from kv_offload.engine import RankEngine
from kv_offload.messages import (
    OffloadMetadata,
    OffloadWorkerMetadata,
    RankReport,
    StoreJob,
    WorkerCapacity,
)
from kv_offload.metrics import OffloadStats
from kv_offload.worker.allocation import FindFiles, allocate, transfer_kind
from kv_offload.worker.copies import Loads, Stores
from kv_offload.worker.disk import Disk
from kv_offload.worker.forward_loads import ForwardLoads
from kv_offload.worker.jobs import RankJobs
from kv_offload.worker.moves import Moves
from kv_offload.worker.pool import Seat
from kv_offload.worker.remote import Remote
from kv_offload.worker.sharing import ALONE, SharingRanks
from kv_offload.worker.waves import LayerWaves
from kv_offload.worker.windows import PeerArenas

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
"""Maximum seconds to wait for running copies before a reset, a sleep or shutdown."""

LowerTier = Disk | Remote

NO_TIERS: Mapping[str, LowerTier] = {}

REVOKE_SECONDS = 5.0
"""Maximum seconds to wait for the tiers before a reset is answered: a disk may be slow or hang."""


class OffloadWorker:
    """Lives on a rank's main thread; every method is one of the connector's hooks.

    A step's stores are queued at its end and submitted at the start of the next one, so they delay
    neither the copy of the sampled tokens nor the compute of their own step. Loads start in the
    step that planned them. Only `register_kv_caches`, `unregister_kv_caches`, `drain`,
    `revoke_tiers` and `shutdown` block.
    """

    def __init__(
        self,
        config: OffloadConfig,
        rank_engine: RankEngine,
        rank: int,
        num_ranks: int,
        sharing: SharingRanks = ALONE,
        tiers: Mapping[str, LowerTier] = NO_TIERS,
        seat: Seat | None = None,
    ) -> None:
        self.rank = rank
        self.num_slots = 0
        self._config = config
        self._rank_engine = rank_engine
        self._num_ranks = num_ranks
        self._jobs = RankJobs(rank, sharing)
        self._stores = Stores(self._jobs)
        self._loads = Loads(self._jobs)
        self._forward_loads = ForwardLoads(self._jobs, rank_engine.forward_context)
        self._moves = Moves(self._jobs)
        self._peers = PeerArenas(rank)
        self._tiers = tiers
        self._seat = seat
        self._arena = ""
        # The last steps whose loads were accepted, and whose stores were queued.
        self._started_for: OffloadMetadata | None = None
        self._ended_for: OffloadMetadata | None = None
        self._aborted_step: int | None = None
        # The last report to the scheduler.
        self._reported_ready_slots = self._reported_weight_loads = 0
        self._count_weight_loads: Callable[[], int] = lambda: 0
        # The KV tensors that the transfer engine held before a sleep.
        self._let_go: list[weakref.ref[Any]] = []

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describe the KV tensors and allocate this rank's share of host memory.

        Ranks with the same KV bytes all share their host memory, or none does. Called once by the
        model runner, on whose call stack the model and the output-copy stream are found. Raises
        `UnsupportedError`, `CapacityError` or `ConfigError`, each with the remedy.
        """
        self._count_weight_loads = self._rank_engine.count_weight_loads()
        caches = self._rank_engine.describe_kv_caches(kv_caches)
        layout = caches.layout
        kind = transfer_kind(self._config, caches.tensors[0].device.type)
        stream = self._rank_engine.find_output_copy_stream() if kind != "host" else None
        config, num_ranks, sharing = self._config, self._num_ranks, self._jobs.sharing
        lasts = self._seat is not None or self._tiers
        pages = self._rank_engine.describe_pages(kv_caches) if lasts else ""
        find_files: FindFiles | None = None
        if self._seat is not None:
            find_files = partial(
                self._seat.arena_files, self.rank, num_ranks, pages, reserve=kind == "host"
            )
        transfer, sharing, name = allocate(
            config, num_ranks, sharing, kind, caches, tuple(kv_caches), stream, find_files
        )
        if self._seat is not None:
            self._arena = str(self._seat.folder / name)
        self._jobs.transfer, self._jobs.sharing = transfer, sharing
        self._peers.windows = transfer.windows
        self._stores.sampler = TileSampler(layout) if layout.num_tiles else None
        self.num_slots = transfer.num_slots
        for name, tier in self._tiers.items():
            self._moves.use(name, tier.open(self.rank, num_ranks, sharing, pages, transfer))
        page_bytes = [region.page_bytes for region in layout.regions]
        self._forward_loads.waves = LayerWaves(caches.regions_of_layer, page_bytes)
        logger.log(
            logging.DEBUG if self.rank else logging.INFO,  # the other ranks log the same
            "kv-offload: rank %d holds %d slots, %d of them ready, of %d bytes%s (%.2f GiB%s) in "
            "%d regions; stores wait for %s",
            self.rank,
            self.num_slots,
            transfer.ready_slots,
            layout.slot_bytes,
            f" for blocks of {layout.block_bytes}" if layout.num_tiles else "",
            self.num_slots * layout.slot_bytes / (1 << 30),
            f", kept once for {self.sharing_ranks} ranks" if self.sharing_ranks > 1 else "",
            len(layout.regions),
            "compute" if stream is None else "compute and for the output-copy stream",
        )

    def unregister_kv_caches(self) -> None:
        """Release the KV tensors, which a sleeping engine unmaps; waits for copies, with a timeout.

        A running copy uses the tensors, so they stay held if copies do not end. A second call does
        nothing.
        """
        if self.transfer is None or self._let_go:
            return
        if not self.transfer.wait(DRAIN_SECONDS):
            self._jobs.log.error("copies run while the engine sleeps")
            return
        self._let_go = [weakref.ref(tensor) for tensor in self.transfer.keep_alive(())]

    def restore_kv_caches(self) -> None:
        """Hold the KV tensors again, after they are mapped at their old addresses."""
        if self.transfer is not None and self._let_go:
            alive = [tensor for ref in self._let_go if (tensor := ref()) is not None]
            self.transfer.keep_alive(alive)
            self._let_go = []

    def revoke_tiers(self) -> str:
        """See `TierEngine.revoke`. Blocks, with a timeout."""
        return self._moves.revoke_tiers(REVOKE_SECONDS)

    def shutdown(self) -> None:
        """Wait for running copies, with a timeout, and release the KV tensors and host memory."""
        self._moves.close(DRAIN_SECONDS)
        if self.transfer is not None:
            self.transfer.close(DRAIN_SECONDS)
            self._jobs.transfer = self._peers.windows = None
        if self._seat is not None:
            self._seat.leave()

    @property
    def transfer(self) -> SwapEngine | None:
        """The transfer engine; None before `register_kv_caches` and after `shutdown`."""
        return self._jobs.transfer

    @property
    def sharing_ranks(self) -> int:
        """Number of ranks that keep their KV in this rank's host memory, including this one."""
        return self._jobs.sharing.count

    def weight_loads(self) -> dict[int, int]:
        """Return how often this rank's model has received weights, by rank; empty before that."""
        loads = self._count_weight_loads()
        return {self.rank: loads} if loads else {}

    def capacity(self) -> WorkerCapacity:
        """Return the capacity of this rank and how much of it is ready."""
        ready, tiers = self._jobs.ready_slots, self._moves.capacities()
        slot_bytes = 0 if self.transfer is None else self.transfer.layout.slot_bytes
        return WorkerCapacity(self.rank, self.num_slots, ready, tiers, slot_bytes, self._arena)

    # -- a step --------------------------------------------------------------------------------

    def begin_step(self, metadata: OffloadMetadata) -> None:
        """Accept a step's plan, of which nothing has started. The previous step is over."""
        if self._started_for is metadata:
            return
        self._end_aborted_step()
        self._started_for = metadata
        self._jobs.take_plan(metadata)
        self._peers.take(metadata.windows)
        loads = self._peers.number(metadata.loads)
        # First, because a forward would read blocks that are not loaded.
        self._forward_loads.take([job for job in loads if job.synchronous])
        self._loads.take(job for job in loads if not job.synchronous)
        self._moves.start(metadata.moves)

    def _end_aborted_step(self) -> None:
        """End the previous step if the engine did not, because an error of its own aborted it.

        Blocks of that step may not have been computed, so they are not stored. The engine continues
        only if its user caught the error, in the user's own process.
        """
        step = self._started_for
        if step is None or self._ended_for is step:
            return
        self._ended_for = step
        self._stores.fail(step.stores)
        self._aborted_step = step.admissions
        self._jobs.log.error("an error of the engine cut a step short; nothing of it is kept")

    def submit_stores(self) -> None:
        """Start the stores that the last step queued; they wait for all compute queued so far."""
        self._stores.submit()

    def start_copies(self, metadata: OffloadMetadata, *, first: bool = False) -> None:
        """Start the last step's stores, then this step's loads, if not started yet.

        Called as soon as the engine will zero or copy no more blocks before this step's forward,
        since both could undo a load. `first` means that nothing of this step is queued yet, while
        forwards of earlier steps may still be running. If `RankEngine.gives_idle_blocks`, they do
        not touch the destinations, and a load does not wait for them. Every load waits for work
        that this rank itself has queued, such as zeroing the blocks of a failed load.
        """
        self.begin_step(metadata)
        self.submit_stores()
        after_compute = not (first and self._rank_engine.gives_idle_blocks)
        self._forward_loads.start(after_compute=after_compute)
        self._loads.start(after_compute=after_compute)

    def start_kv_transfers(self, metadata: OffloadMetadata) -> None:
        """Start this step's copies if not started yet, and make its forward wait for its loads.

        Called before the forward, after everything else that the engine does for the step.
        """
        self.start_copies(metadata)
        self._forward_loads.make_forward_wait(self._rank_engine.forward_with_layer_calls())

    def rescue(self, metadata: OffloadMetadata) -> None:
        """Repair the loads of a step in which `start_kv_transfers` raised.

        Blocks that the forward reads are copied at once. Asynchronous loads that have not started
        fail.
        """
        self.begin_step(metadata)
        self._forward_loads.make_good(CopyError("an error of the plugin, which the log has"))
        self._loads.fail()

    @property
    def on_layer(self) -> Callable[[str], None] | None:
        """The callback for attention layers in this step; None in most steps."""
        return self._forward_loads.on_layer

    def prepare_store_kv(self, metadata: OffloadMetadata) -> None:
        """Queue this step's stores for the start of the next step; a second call does nothing.

        Two hooks end a step, and some versions call only one of them in a step without a forward.
        """
        self._end_step(metadata, self._stores.queue)

    def end_step_anyhow(self, metadata: OffloadMetadata) -> None:
        """End a step after an error in its hooks; stores that are not queued fail."""
        self._end_step(metadata, self._stores.fail)

    def _end_step(
        self, metadata: OffloadMetadata, take: Callable[[Sequence[StoreJob]], None]
    ) -> None:
        if self._ended_for is not metadata:
            self._ended_for = metadata
            take(metadata.stores)
            self._forward_loads.forward_ended()

    # -- reports -------------------------------------------------------------------------------

    def poll(self) -> None:
        """Process all copies that ended since the last call. Never waits."""
        for done in self._jobs.poll():
            try:
                self._jobs.count(done)
                if done.direction is Direction.STORE:
                    self._stores.ended(done)
                elif not self._loads.ended(done):
                    self._forward_loads.ended(done)
            except Exception:  # noqa: BLE001 - later copies in the list have ended, too
                self._jobs.not_taken_in(done.job_id)
        self._moves.poll()

    def ended(self, aborted_step: int | None = None) -> OffloadWorkerMetadata:
        """Return outcomes that the scheduler has not acknowledged. Can be called at any time."""
        jobs = self._jobs
        report = RankReport(dict(jobs.ended), dict(jobs.failed_rows), aborted_step)
        return OffloadWorkerMetadata({self.rank: report})

    def report(self) -> OffloadWorkerMetadata | None:
        """Return the report of this step; None if nothing has happened."""
        jobs, ready, weights = self._jobs, self._jobs.ready_slots, self._count_weight_loads()
        news = (  # in the order of the fields of `RankReport`
            self._aborted_step,
            jobs.speeds.take(),
            ready if ready > self._reported_ready_slots else None,
            weights if weights > self._reported_weight_loads else None,
            self._peers.report(),
        )
        if not jobs.ended and news.count(None) == len(news):
            return None  # the case in most steps
        self._aborted_step = None
        self._reported_ready_slots, self._reported_weight_loads = ready, weights
        report = RankReport(dict(jobs.ended), dict(jobs.failed_rows), *news)
        return OffloadWorkerMetadata({self.rank: report})

    def take_losses(self) -> OffloadWorkerMetadata:
        """Return the losses, which must be reported in this step even if `report` has raised.

        Otherwise the engine would accept tokens that were computed with lost blocks.
        """
        aborted_step, self._aborted_step = self._aborted_step, None
        return self.ended(aborted_step)

    def take_stats(self, errors: int = 0) -> OffloadStats | None:
        """Return the metrics counted since the last call, plus `errors` of hooks; None if none."""
        self._jobs.stats.count("hook_errors", errors)
        return self._jobs.stats.take()

    # -- between steps -------------------------------------------------------------------------

    def fence_loads(self) -> bool:
        """Make loads wait for all forwards queued so far, so that their blocks may be reused.

        Called between steps. Returns False if CUDA refuses.
        """
        try:
            if self.transfer is not None:
                self.transfer.fence_loads()
        except CopyError as error:
            self._jobs.log.error("%s", error)
            return False
        return True

    def drain(self, plan: OffloadMetadata) -> OffloadWorkerMetadata:
        """Submit queued and planned stores, wait for all copies with a timeout, and report.

        Called between steps, before a reset or a sleep. `plan` has no loads. Moves continue; one
        that ends later announces no block that has been emptied.
        """
        self._jobs.take_plan(plan)
        self._peers.take(plan.windows)
        self._moves.start(plan.moves)
        self._stores.queue(plan.stores)
        try:
            self.submit_stores()
            if self.transfer is not None and not self.transfer.wait(DRAIN_SECONDS):
                self._jobs.log.error("copies still run after %.0f s", DRAIN_SECONDS)
            self.poll()
        except Exception:  # it would end the engine
            self._jobs.log.exception("not all copies could be ended")
        return self.ended()
