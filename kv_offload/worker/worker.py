"""A rank's half of the connector: starts and ends it, and runs each step in order.

`stores`, `synchronous_loads` and `asynchronous_loads` know what a step moves, and `reports` what the
scheduler is told of it. `copies` has the transfer engine, which they share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kv_swap.engine import Direction, SwapEngine
from kv_swap.errors import CopyError

from kv_offload.config import OffloadConfig
from kv_offload.engine import RankEngine
from kv_offload.messages import (
    DrainAnswer,
    JobResult,
    LoadJob,
    OffloadMetadata,
    OffloadWorkerMetadata,
    StoreJob,
    WorkerCapacity,
)
from kv_offload.metrics import OffloadStats
from kv_offload.worker.allocation import allocate, transfer_kind
from kv_offload.worker.asynchronous_loads import AsynchronousLoads
from kv_offload.worker.copies import Copies
from kv_offload.worker.log import RankLog
from kv_offload.worker.reports import Reports
from kv_offload.worker.sharing import ALONE, Peers
from kv_offload.worker.stores import Stores
from kv_offload.worker.synchronous_loads import SynchronousLoads
from kv_offload.worker.waves import LayerWaves

logger = logging.getLogger(__name__)


class OffloadWorker:
    """Lives on a rank's main thread; every method is one of the connector's hooks.

    A step's stores are queued at its end and submitted at the start of the next one. So they delay
    neither the copy of the sampled tokens nor the compute of their own step. Loads start in the
    step that planned them. No method but `drain`, `unregister_kv_caches` and `shutdown` waits.
    """

    def __init__(
        self,
        config: OffloadConfig,
        rank_engine: RankEngine,
        rank: int,
        num_ranks: int,
        peers: Peers = ALONE,
    ) -> None:
        self.rank = rank
        self.num_slots = 0
        self._config = config
        self._rank_engine = rank_engine
        self._num_ranks = num_ranks
        self._log = RankLog(logger, rank)
        self._reports = Reports(rank)
        self._copies = Copies(self._reports, self._log)
        self._stores = Stores(self._copies, self._reports, peers)
        self._synchronous = SynchronousLoads(
            self._copies, self._reports, self._log, rank_engine.forward_context
        )
        self._asynchronous = AsynchronousLoads(self._copies, self._reports, self._log)
        # The steps whose loads were taken in, and whose stores were queued.
        self._started_for: OffloadMetadata | None = None
        self._ended_for: OffloadMetadata | None = None
        self._count_weight_loads: Callable[[], int] | None = None

    # -- start and end -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describe the KV tensors and allocate this rank's share of host memory.

        Ranks with the same KV bytes share theirs, or none does. Called once by the model runner,
        on whose call stack the model and the output-copy stream are found. Raises
        `UnsupportedError`, `CapacityError` or `ConfigError`, each with the remedy.
        """
        self._count_weight_loads = self._rank_engine.count_weight_loads()
        caches = self._rank_engine.describe_kv_caches(kv_caches)
        kind = transfer_kind(self._config, caches.tensors[0].device)
        stream = self._rank_engine.find_output_copy_stream() if kind != "host" else None
        mine = allocate(
            self._config,
            self._num_ranks,
            self._stores.peers,
            kind,
            caches,
            tuple(kv_caches),
            stream,
        )
        self._copies.transfer = mine.transfer
        self._stores.peers = mine.peers
        self.num_slots = mine.num_slots
        if mine.transfer.can_load_before_compute:
            page_bytes = [region.page_bytes for region in caches.layout.regions]
            self._synchronous.waves = LayerWaves(caches.regions_of_layer, page_bytes)
        logger.info(
            "kv-offload: rank %d holds %s; stores wait for %s",
            self.rank,
            mine.describe(),
            "compute" if stream is None else "compute and for the output-copy stream",
        )

    def unregister_kv_caches(self) -> None:
        """Let go of the KV tensors, which a sleeping engine unmaps; waits, bounded, for copies."""
        self._copies.let_go_of_tensors()

    def restore_kv_caches(self) -> None:
        """Hold the KV tensors again, which are back at their addresses."""
        self._copies.hold_tensors_again()

    def shutdown(self) -> None:
        """Wait, bounded, for running copies and let go of the KV tensors and of host memory."""
        self._copies.close()

    # -- what this rank is like ----------------------------------------------------------------

    @property
    def transfer(self) -> SwapEngine | None:
        """The transfer engine; None before `register_kv_caches` and after `shutdown`."""
        return self._copies.transfer

    @property
    def waves(self) -> LayerWaves:
        """What is known of the layers that wait for their part of a load."""
        return self._synchronous.waves

    @property
    def sharing_ranks(self) -> int:
        """How many ranks keep their KV bytes in this rank's host memory, this one included."""
        return self._stores.peers.count

    @property
    def weight_loads(self) -> dict[int, int]:
        """How often this rank's model has been given weights, by rank; empty before the first."""
        loads = self._weight_loads()
        return {self.rank: loads} if loads else {}

    def capacity(self) -> WorkerCapacity:
        """Return what this rank holds and how much of it is ready."""
        synchronous = self.transfer is not None and self.transfer.can_load_before_compute
        return WorkerCapacity(self.rank, self.num_slots, self._copies.ready_slots, synchronous)

    def _weight_loads(self) -> int:
        return 0 if self._count_weight_loads is None else self._count_weight_loads()

    # -- the start of a step -------------------------------------------------------------------

    def submit_stores(self) -> None:
        """Start the stores that the last step queued; they wait for all compute until now."""
        self._stores.submit()

    def start_copies(self, metadata: OffloadMetadata) -> None:
        """Start the last step's stores, then this step's loads: those that were not started yet.

        Called as soon as the engine will not zero or copy any block before this step's forward:
        both could undo a load. From then until the forward, nothing touches the destinations. The
        blocks of an asynchronous load belong to a request that waits for it, so no forward reads or
        writes them. The blocks of synchronous loads are read by this step's forward, which
        `start_kv_transfers` makes wait.
        """
        if self._started_for is not metadata:
            self._take_loads(metadata)
        self.submit_stores()
        self._synchronous.start()
        self._asynchronous.start()

    def start_kv_transfers(self, metadata: OffloadMetadata) -> None:
        """Start this step's copies if they were not, and have its forward wait for what it reads.

        Called before the forward, after all else that the engine does for the step. The compute
        stream waits for the synchronous loads, or for their first wave if the layers wait for the
        others. Loads that have failed by now are made good now.
        """
        self.start_copies(metadata)
        self._synchronous.make_forward_wait(self._rank_engine.forward_with_layer_calls())

    def rescue(self, metadata: OffloadMetadata) -> None:
        """Make the loads of a step good in which `start_kv_transfers` raised.

        What the forward reads is copied at once. Asynchronous loads that have not started fail.
        """
        if self._started_for is not metadata:
            self._take_loads(metadata)
        self._synchronous.make_good(CopyError("an error of the plugin, which the log has"))
        self._asynchronous.fail_those_not_started()

    def _take_loads(self, metadata: OffloadMetadata) -> None:
        self._started_for = metadata
        self._asynchronous.take([job for job in metadata.loads if not job.synchronous])
        self._synchronous.take([job for job in metadata.loads if job.synchronous])

    @property
    def on_layer(self) -> Callable[[str], None] | None:
        """Takes the calls of attention layers in this step; None in most steps."""
        return self._synchronous.on_layer

    # -- the end of a step ---------------------------------------------------------------------

    def prepare_store_kv(self, metadata: OffloadMetadata) -> None:
        """Queue this step's stores for the start of the next; a second call does nothing.

        Two hooks end a step and some versions call only one of them in a step without a forward.
        """
        if self._ended_for is not metadata:
            self._ended_for = metadata
            self._stores.queue(metadata.stores)
            self._synchronous.forward_ended()

    def end_step_anyhow(self, metadata: OffloadMetadata) -> None:
        """End a step in which an error kept the report of loads from being made.

        Its stores fail if they were not queued yet.
        """
        self._reports.received_were_not_told()
        if self._ended_for is not metadata:
            self._ended_for = metadata
            self._stores.fail(metadata.stores)
            self._synchronous.forward_ended()

    def poll(self) -> None:
        """Take in what ended since the last call. Never waits."""
        for done in self._copies.poll():
            if done.direction is Direction.STORE:
                self._stores.ended(done)
            elif not self._asynchronous.ended(done):
                self._synchronous.ended(done)

    def take_received(self) -> tuple[set[str], dict[str, LoadJob]]:
        """See `Reports.take_received`."""
        return self._reports.take_received()

    def take_report(self) -> OffloadWorkerMetadata | None:
        """See `Reports.take_report`."""
        return self._reports.take_report(
            load_speed=self._copies.speeds.take_load_speed(),
            store_speed=self._copies.speeds.take_store_speed(),
            ready_slots=self._copies.ready_slots,
            weight_loads=self._weight_loads(),
        )

    def take_losses(self) -> OffloadWorkerMetadata | None:
        """See `Reports.take_losses`."""
        return self._reports.take_losses()

    def count_hook_errors(self, errors: int) -> None:
        """Count exceptions of hooks."""
        self._reports.count("hook_errors", errors)

    def take_stats(self) -> OffloadStats | None:
        """See `Reports.take_stats`."""
        return self._reports.take_stats()

    # -- between steps -------------------------------------------------------------------------

    def take_ended_loads(self) -> tuple[set[str], set[str]]:
        """Poll; see `Reports.take_ended_loads`."""
        self.poll()
        return self._reports.take_ended_loads()

    def take_ended_stores(self) -> dict[int, JobResult]:
        """Poll; see `Reports.take_ended_stores`.

        A store ends after the loads of the steps before it, so polling has found their losses.
        """
        self.poll()
        return self._reports.take_ended_stores()

    def drain(self, unsent: Sequence[StoreJob], running: Sequence[int]) -> DrainAnswer:
        """Submit what is queued, wait for all copies with a bound, and tell what has ended.

        Called between steps, before a reset or a sleep. `running` are the stores that the scheduler
        has no report of. A report of one may be on its way, so a result told here may be told
        again. Loads that failed are named once more as ended, and no more as failed: whoever asked
        for the drain takes their blocks back.
        """
        self._stores.queue(unsent)
        try:
            self.submit_stores()
            self._copies.wait()
            self.poll()
        except Exception:  # noqa: BLE001 - it would end the engine
            self._log.exception("not all copies could be ended")
        self._reports.forgive_failed_loads()
        return DrainAnswer(
            self._stores.results({*running, *(job.job_id for job in unsent)}),
            frozenset(self._asynchronous.running_requests | self._synchronous.running_requests),
            self._reports.lost_lately,
        )
