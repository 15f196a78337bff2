"""A rank's half of the connector: starts and ends it, and runs each step in order."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from kv_swap.engine import SwapEngine
from kv_swap.errors import CopyError

from kv_offload.config import OffloadConfig
from kv_offload.engine import RankEngine
from kv_offload.messages import (
    DrainAnswer,
    JobResult,
    OffloadMetadata,
    OffloadWorkerMetadata,
    StoreJob,
    WorkerCapacity,
)
from kv_offload.worker.allocation import allocate, transfer_kind
from kv_offload.worker.background import BackgroundCopies
from kv_offload.worker.copies import Copies, RankLog
from kv_offload.worker.reports import Reports
from kv_offload.worker.sharing import ALONE, Peers
from kv_offload.worker.synchronous_loads import SynchronousLoads
from kv_offload.worker.waves import LayerWaves

logger = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
"""Bound of the wait for running copies before a reset, a sleep or the end."""


class OffloadWorker:
    """Lives on a rank's main thread; every method is one of the connector's hooks.

    A step's stores are queued at its end and submitted at the start of the next one. So they delay
    neither the copy of the sampled tokens nor the compute of their own step. Loads start in the
    step that planned them. Only `register_kv_caches`, `unregister_kv_caches`, `drain` and
    `shutdown` wait.
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
        self.reports = Reports(rank)
        """What ended on this rank, until it was told."""
        self._copies = Copies(self.reports, RankLog(logger, rank))
        self._background = BackgroundCopies(self._copies, peers)
        self._synchronous = SynchronousLoads(self._copies, rank_engine.forward_context)
        # The steps whose loads were taken in, and whose stores were queued.
        self._started_for: OffloadMetadata | None = None
        self._ended_for: OffloadMetadata | None = None
        self._count_weight_loads: Callable[[], int] = lambda: 0
        # The KV tensors that the transfer engine held before a sleep.
        self._let_go: list[weakref.ref[Any]] = []

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describe the KV tensors and allocate this rank's share of host memory.

        Ranks with the same KV bytes share theirs, or none does. Called once by the model runner,
        on whose call stack the model and the output-copy stream are found. Raises
        `UnsupportedError`, `CapacityError` or `ConfigError`, each with the remedy.
        """
        self._count_weight_loads = self._rank_engine.count_weight_loads()
        caches = self._rank_engine.describe_kv_caches(kv_caches)
        layout = caches.layout
        kind = transfer_kind(self._config, caches.tensors[0].device)
        stream = self._rank_engine.find_output_copy_stream() if kind != "host" else None
        started = time.monotonic()
        transfer, self._background.peers = allocate(
            self._config,
            self._num_ranks,
            self._background.peers,
            kind,
            caches,
            tuple(kv_caches),
            stream,
        )
        self._copies.transfer = transfer
        self.num_slots = transfer.num_slots
        if transfer.can_load_before_compute:
            page_bytes = [region.page_bytes for region in layout.regions]
            self._synchronous.waves = LayerWaves(caches.regions_of_layer, page_bytes)
        logger.info(
            "kv-offload: rank %d holds %d slots, %d of them ready, of %d bytes (%.2f GiB%s) over "
            "%d regions, started in %.1f s; stores wait for %s",
            self.rank,
            self.num_slots,
            transfer.ready_slots,
            layout.slot_bytes,
            self.num_slots * layout.slot_bytes / (1 << 30),
            f", kept once for {self.sharing_ranks} ranks" if self.sharing_ranks > 1 else "",
            len(layout.regions),
            time.monotonic() - started,
            "compute" if stream is None else "compute and for the output-copy stream",
        )

    def unregister_kv_caches(self) -> None:
        """Let go of the KV tensors, which a sleeping engine unmaps; waits, bounded, for copies.

        While a copy runs it uses the tensors, so they stay held if copies do not end. A second call
        does nothing.
        """
        if self.transfer is None or self._let_go:
            return
        if not self.transfer.wait(DRAIN_SECONDS):
            self._copies.log.error("copies run while the engine sleeps")
            return
        self._let_go = [weakref.ref(tensor) for tensor in self.transfer.keep_alive(())]

    def restore_kv_caches(self) -> None:
        """Hold the KV tensors again, which are back at their addresses."""
        if self.transfer is not None and self._let_go:
            alive = [tensor for ref in self._let_go if (tensor := ref()) is not None]
            self.transfer.keep_alive(alive)
            self._let_go = []

    def shutdown(self) -> None:
        """Wait, bounded, for running copies and let go of the KV tensors and of host memory."""
        if self.transfer is not None:
            self.transfer.close(DRAIN_SECONDS)
            self._copies.transfer = None

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
        return self._background.peers.count

    @property
    def weight_loads(self) -> dict[int, int]:
        """How often this rank's model has been given weights, by rank; empty before the first."""
        loads = self._count_weight_loads()
        return {self.rank: loads} if loads else {}

    def capacity(self) -> WorkerCapacity:
        """Return what this rank holds and how much of it is ready."""
        synchronous = self.transfer is not None and self.transfer.can_load_before_compute
        return WorkerCapacity(self.rank, self.num_slots, self._copies.ready_slots, synchronous)

    def submit_stores(self) -> None:
        """Start the stores that the last step queued; they wait for all compute until now."""
        self._background.submit_stores()

    def start_copies(self, metadata: OffloadMetadata, *, first: bool = False) -> None:
        """Start the last step's stores, then this step's loads, unless they were started.

        Called as soon as the engine will not zero or copy any block before this step's forward:
        both could undo a load. From then until the forward, nothing touches the destinations: no
        forward reads or writes the blocks of an asynchronous load, because its request waits. This
        step's forward reads the blocks of synchronous loads; `start_kv_transfers` makes it wait.

        `first` says that nothing of this step is queued yet. Forwards of earlier steps may still
        run then. They do not touch the destinations if `RankEngine.gives_idle_blocks`, and a load
        does not wait for them; what this rank itself has queued, the zeroing of a failed load's
        blocks, every load waits for.
        """
        self.begin_step(metadata)
        self.submit_stores()
        behind_compute = not (first and self._rank_engine.gives_idle_blocks)
        self._synchronous.start(behind_compute=behind_compute)
        self._background.start_loads(behind_compute=behind_compute)

    def start_kv_transfers(self, metadata: OffloadMetadata) -> None:
        """Start this step's copies if they were not, and have its forward wait for what it reads.

        Called before the forward, after all else that the engine does for the step.
        """
        self.start_copies(metadata)
        self._synchronous.make_forward_wait(self._rank_engine.forward_with_layer_calls())

    def rescue(self, metadata: OffloadMetadata) -> None:
        """Make the loads of a step good in which `start_kv_transfers` raised.

        What the forward reads is copied at once. Asynchronous loads that have not started fail.
        """
        self.begin_step(metadata)
        self._synchronous.make_good(CopyError("an error of the plugin, which the log has"))
        self._background.fail_loads()

    def begin_step(self, metadata: OffloadMetadata) -> None:
        """Take in a step's plan. Nothing of it has started; nothing of the step before follows."""
        if self._started_for is not metadata:
            self._end_cut_short()
            self._started_for = metadata
            self._background.take_loads([job for job in metadata.loads if not job.synchronous])
            self._synchronous.take([job for job in metadata.loads if job.synchronous])

    def _end_cut_short(self) -> None:
        """End the step before, if the engine never did: an error of its own cut it short.

        What it was to compute may be missing, so it is not stored. The engine goes on only where
        its user caught the error, in the user's own process.
        """
        step = self._started_for
        if step is None or self._ended_for is step:
            return
        self._ended_for = step
        self._background.fail_loads()
        self._background.fail_stores(step.stores)
        self.reports.step_cut_short(step.admissions)
        self._copies.log.error("an error of the engine cut a step short; nothing of it is kept")

    @property
    def on_layer(self) -> Callable[[str], None] | None:
        """Takes the calls of attention layers in this step; None in most steps."""
        return self._synchronous.on_layer

    def prepare_store_kv(self, metadata: OffloadMetadata) -> None:
        """Queue this step's stores for the start of the next; a second call does nothing.

        Two hooks end a step and some versions call only one of them in a step without a forward.
        """
        self._end_step(metadata, self._background.queue_stores)

    def end_step_anyhow(self, metadata: OffloadMetadata) -> None:
        """End a step whose loads an error kept from being reported; fail stores not yet queued."""
        self.reports.received_were_not_told()
        self._end_step(metadata, self._background.fail_stores)

    def _end_step(
        self, metadata: OffloadMetadata, take: Callable[[Sequence[StoreJob]], None]
    ) -> None:
        if self._ended_for is not metadata:
            self._ended_for = metadata
            take(metadata.stores)
            self._synchronous.forward_ended()

    def poll(self) -> None:
        """Take in what ended since the last call. Never waits."""
        for done in self._copies.poll():
            if not self._background.ended(done):
                self._synchronous.ended(done)

    def take_report(self) -> OffloadWorkerMetadata | None:
        """See `Reports.take_report`."""
        return self.reports.take_report(
            load_speed=self._copies.speeds.take_load_speed(),
            store_speed=self._copies.speeds.take_store_speed(),
            ready_slots=self._copies.ready_slots,
            weight_loads=self._count_weight_loads(),
        )

    def take_ended_loads(self) -> tuple[set[str], set[str]]:
        """Poll; see `Reports.take_ended_loads`."""
        self.poll()
        return self.reports.take_ended_loads()

    def take_ended_stores(self) -> dict[int, JobResult]:
        """Poll; see `Reports.take_ended_stores`.

        A store ends after the loads of the steps before it, so polling has found their losses.
        """
        self.poll()
        return self.reports.take_ended_stores()

    def fence_loads(self) -> bool:
        """Have loads wait for all forwards until now, so that blocks of these may be given away.

        Called between steps. Returns False if CUDA refuses.
        """
        try:
            if self.transfer is not None:
                self.transfer.fence_loads()
        except CopyError as error:
            self._copies.log.error("%s", error)
            return False
        return True

    def drain(
        self, unsent: Sequence[StoreJob], running: Sequence[int], given_up: Set[str] = frozenset()
    ) -> DrainAnswer:
        """Submit what is queued, wait, bounded, for all copies, and return what has ended.

        Called between steps, before a reset or a sleep. `running` are the stores that the scheduler
        has no report of; a report on its way may tell a result again. Loads of the requests
        `given_up` are named as ended, not as failed: the caller takes their blocks back.
        """
        self._background.queue_stores(unsent)
        try:
            self.submit_stores()
            if self.transfer is not None and not self.transfer.wait(DRAIN_SECONDS):
                self._copies.log.error("copies still run after %.0f s", DRAIN_SECONDS)
            self.poll()
        except Exception:  # it would end the engine
            self._copies.log.exception("not all copies could be ended")
        self.reports.forgive_failed_loads(given_up)
        return DrainAnswer(
            self._background.store_results({*running, *(job.job_id for job in unsent)}),
            frozenset(self._background.loading_requests | self._synchronous.running_requests),
            self.reports.lost_lately,
        )
