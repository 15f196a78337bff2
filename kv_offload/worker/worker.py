"""A rank's half of the connector: turns plans into transfer jobs, and completions into reports."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.errors import CopyError, TransferError
from kv_swap.factory import EngineKind, create_engine, numa_node
from kv_swap.layout import KVLayout
from kv_swap.memory.shared import SharedMemory

from kv_offload.config import OffloadConfig
from kv_offload.engines.vllm.compat import (
    count_weight_loads,
    find_output_copy_stream,
    forward_context,
    forward_log,
    forward_with_layer_calls,
    logger,
)
from kv_offload.engines.vllm.layout import describe_kv_caches, kv_tensors, layer_regions
from kv_offload.errors import CapacityError, ConfigError, UnsupportedError
from kv_offload.messages import (
    DrainAnswer,
    JobResult,
    LoadJob,
    OffloadMetadata,
    OffloadWorkerMetadata,
    Pairs,
    StoreJob,
    WorkerCapacity,
)
from kv_offload.metrics import OffloadStats
from kv_offload.scheduler.rates import StoreRate
from kv_offload.worker.capacity import growing_room
from kv_offload.worker.sharing import ALONE, Peers, arena_bytes, open_shared_memory
from kv_offload.worker.waves import LayerWaves

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig

DRAIN_SECONDS = 10.0
"""Bound of the wait for running stores before a reset or a sleep."""

MEASURED_BYTES = 8 << 20
"""A job of fewer bytes says more about its start than about the speed of the link."""

WAVES_FROM_BYTES = 16 << 20
"""A load of fewer bytes takes less time (0.3 ms on PCIe Gen5 x16) than its waves would save."""

REMEMBERED_FAILURES = 1024
"""Failed stores kept for a drain, which may ask after what a report on its way says too."""


@dataclass(slots=True)
class _Awaited:
    """The synchronous loads of a step, one transfer: its forward must come after them.

    `error` says what went wrong with them before the forward was made to wait.
    """

    job_id: int
    jobs: Sequence[LoadJob]
    in_waves: bool
    error: Exception | None = None


def _all_pairs(jobs: Sequence[LoadJob]) -> Pairs:
    return np.concatenate([job.pairs for job in jobs])


class OffloadWorker:
    """Lives on a rank's main thread; every method is one of the connector's hooks.

    A step's stores are queued at its end and submitted at the start of the next one: then their
    copies stand neither before the sampled tokens' copy nor in the way of this step's work. Loads
    are submitted in the step that planned them. No method but `drain` and `shutdown` waits.
    """

    def __init__(
        self,
        config: OffloadConfig,
        kv_cache_config: KVCacheConfig,
        rank: int,
        num_ranks: int,
        peers: Peers = ALONE,
    ) -> None:
        self._config = config
        self._kv_cache_config = kv_cache_config
        self._rank = rank
        self._num_ranks = num_ranks
        self._peers = peers
        self._engine: SwapEngine | None = None
        self._released: list[weakref.ref[Any]] = []
        self._queued: deque[StoreJob] = deque()
        self._queued_for: OffloadMetadata | None = None
        self._next_store_id = 0
        self._storing: set[int] = set()
        self._loading: dict[int, list[LoadJob]] = {}
        # Whether the load submitted last has been the only one since.
        self._alone = False
        self._load_bytes_per_second: float | None = None
        # Whether the store submitted last has been the only copy since.
        self._store_alone = False
        self._store_rate = StoreRate()
        self._failed_stores: deque[int] = deque(maxlen=REMEMBERED_FAILURES)
        self._store_results: dict[int, JobResult] = {}
        # What the last report said of stores, and whether it said that a load was lost.
        self._reported_stores: dict[int, JobResult] = {}
        self._reported_loss = False
        self._received: set[str] = set()
        # Of the loads that ended well, those that the last report names.
        self._reported_loads: set[str] = set()
        self._failed_loads: dict[str, LoadJob] = {}
        self._failed_requests: set[str] = set()
        self._lost: set[int] = set()
        self._lost_lately: deque[int] = deque(maxlen=REMEMBERED_FAILURES)
        self._load_results: dict[int, JobResult] = {}
        self._waves = LayerWaves({}, [])
        # What this step's forward, or its layers, have not been made to wait for yet.
        self._awaited: _Awaited | None = None
        # Whether the last forward that had loads to wait for could wait layer by layer, or will
        # have taught us to. What kind of forward follows is not known when its loads start.
        self._layers_can_wait = True
        self._started_for: OffloadMetadata | None = None
        self._to_start: deque[LoadJob] = deque()
        self.on_layer: Callable[[str], None] | None = None
        """Takes the calls of attention layers in this step; None in most steps."""
        self._stats = OffloadStats()
        forward_log("kv_swap")
        self._ready_slots_reported = 0
        self._count_weight_loads: Callable[[], int] | None = None
        self._weight_loads_reported: dict[int, int] = {}
        self.num_slots = 0

    # -- start and end -------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describe the KV tensors and allocate this rank's share of host memory.

        Ranks with the same KV bytes share theirs, or none does. Called once by the model runner,
        on whose call stack the model and the output-copy stream are found. Raises
        `UnsupportedError`, `CapacityError` or `ConfigError`, each with the remedy.
        """
        self._count_weight_loads = count_weight_loads()
        layout = describe_kv_caches(kv_caches, self._kv_cache_config)
        slot_bytes = layout.slot_bytes
        tensors = kv_tensors(kv_caches)
        device = tensors[0].device
        kind = self._engine_kind(device)
        stream = None if kind == "host" else find_output_copy_stream()
        started = time.monotonic()
        shared = self._open_shared_memory(tuple(kv_caches), layout, kind, device)
        if shared is None:
            self._peers = ALONE
        self.num_slots = self._count_slots(slot_bytes)
        with shared or contextlib.nullcontext():
            self._engine = create_engine(
                kind,
                layout,
                self.num_slots,
                device=device,
                keep_alive=tensors,
                output_copy_stream=stream,
                shared=shared,
                room=growing_room(),
            )
        if self._engine.can_load_in_waves:
            page_bytes = [region.page_bytes for region in layout.regions]
            self._waves = LayerWaves(layer_regions(kv_caches, layout), page_bytes)
        logger.info(
            "kv-offload: rank %d holds %d slots, %d of them ready, of %d bytes (%.2f GiB%s) over "
            "%d regions, started in %.1f s; stores wait for %s",
            self._rank,
            self.num_slots,
            self._ready_slots(),
            slot_bytes,
            self.num_slots * slot_bytes / (1 << 30),
            f", kept once for {self._peers.count} ranks" if self._peers.count > 1 else "",
            len(layout.regions),
            time.monotonic() - started,
            "compute" if stream is None else "compute and for the output-copy stream",
        )

    def _open_shared_memory(
        self, layers: Sequence[str], layout: KVLayout, kind: EngineKind, device: torch.device
    ) -> SharedMemory | None:
        """Return memory for the slots of all peers; None without a peer, or where one cannot.

        Peers must have the same layers' bytes at the same places of a slot.
        """
        if self._peers.count == 1:
            return None
        slot_bytes = layout.slot_bytes
        places = [(region.slot_offset_bytes, region.page_bytes) for region in layout.regions]
        return open_shared_memory(
            self._peers,
            self._count_slots(slot_bytes) * slot_bytes,
            (layers, places),
            numa_node(kind, device),
        )

    def _count_slots(self, slot_bytes: int) -> int:
        """Return how many slots fit this rank's arena. Raises `CapacityError` if none does."""
        sharing = self._peers.count
        share_bytes = arena_bytes(self._config.cpu_bytes, self._num_ranks, sharing)
        if share_bytes < slot_bytes:
            num_arenas = self._num_ranks // sharing
            raise CapacityError(
                f"cpu_bytes gives each of {num_arenas} ranks {share_bytes} bytes, and one slot "
                f"takes {slot_bytes}: set cpu_bytes to {slot_bytes * num_arenas} or more"
            )
        return share_bytes // slot_bytes

    def _engine_kind(self, device: torch.device) -> EngineKind:
        kinds: dict[str, tuple[EngineKind, ...]] = {"cpu": ("host",), "cuda": ("cuda", "dma")}
        if device.type not in kinds:
            raise UnsupportedError(
                f"the KV cache is on {device}: supported are CUDA devices and CPU"
            )
        fitting = kinds[device.type]
        for kind in fitting:
            if self._config.transfer_engine in ("auto", kind):
                return kind
        raise ConfigError(
            f"transfer_engine is {self._config.transfer_engine!r}, but the KV cache of this "
            f"engine is on {device}: use 'auto' or {' or '.join(map(repr, fitting))}"
        )

    def unregister_kv_caches(self) -> None:
        """Let go of the KV tensors, which a sleeping engine unmaps; waits, bounded, for copies.

        Where copies do not end the tensors stay held. A second call does nothing.
        """
        if self._engine is None or self._released:
            return
        if not self._engine.wait(DRAIN_SECONDS):
            logger.error("kv-offload: rank %d: copies run while the engine sleeps", self._rank)
            return
        self._released = [weakref.ref(tensor) for tensor in self._engine.keep_alive(())]

    def restore_kv_caches(self) -> None:
        """Hold the KV tensors again, which are back at their addresses."""
        if self._engine is not None and self._released:
            alive = [tensor for ref in self._released if (tensor := ref()) is not None]
            self._engine.keep_alive(alive)
            self._released = []

    def shutdown(self) -> None:
        """Wait, bounded, for running copies and let go of the KV tensors and of host memory."""
        if self._engine is not None:
            self._engine.close(DRAIN_SECONDS)
            self._engine = None

    # -- one step ------------------------------------------------------------------------------

    def submit_stores(self) -> None:
        """Start the stores that the last step queued; they wait for all compute until now."""
        while self._queued:
            job = self._queued.popleft()
            pairs = self._peers.own_part(job)
            if len(pairs):
                self._store_alone = not self._storing and not self._loading
                self._storing.add(job.job_id)
                self._submit(SwapJob(job.job_id, Direction.STORE, pairs))
            else:
                self._store_results[job.job_id] = self._result(job.job_id)

    def start_copies(self, metadata: OffloadMetadata) -> None:
        """Start the last step's stores that are still queued, then this step's loads; idempotent.

        Called as soon as the engine will not zero or copy any block before this step's forward:
        both could undo a load. Behind that, until the forward, nothing touches the destinations.
        Those of an asynchronous load belong to requests that wait for it, so no forward reads or
        writes them; those of synchronous loads are read by this step's forward, which waits for
        them in `start_kv_transfers`.
        """
        if self._started_for is metadata:
            return
        self._started_for = metadata
        self._to_start = deque(sorted(metadata.loads, key=lambda job: not job.synchronous))
        self._end_arrival()  # of a step that was cut short
        self.submit_stores()
        self._start_synchronous()
        while self._to_start:
            self._start_asynchronous(self._to_start.popleft())

    def start_kv_transfers(self, metadata: OffloadMetadata) -> None:
        """Start this step's copies if they were not, and have its forward wait for what it reads.

        Called before the forward, after all else that the engine does for the step. The compute
        stream waits for the synchronous loads here; or for their first wave, if the layers wait for
        the others. What failed of them until now is made good now.
        """
        self.start_copies(metadata)
        self._waves.begin_step(forward_with_layer_calls())
        self.on_layer = self._learn_layer if self._waves.learning else None
        awaited = self._awaited
        if awaited is None:
            return
        assert self._engine is not None, "a load came before register_kv_caches"
        if not any(job.whole for job in awaited.jobs):
            self._layers_can_wait = self._waves.possible or self._waves.learning
        in_waves = awaited.in_waves and self._waves.possible
        error = awaited.error
        if error is None:
            try:
                if in_waves:
                    self._engine.await_wave(0)
                else:
                    self._engine.await_loads()
            except Exception as raised:  # noqa: BLE001 - whatever it is, the load is made good
                error = raised
        if error is not None:
            self._make_good(error)
        elif in_waves:
            self._waves.expect()
            self.on_layer = self._await_layer
        else:
            self._awaited = None

    def rescue(self, metadata: OffloadMetadata) -> None:
        """Account for the loads of a step in which an error kept `start_kv_transfers` from its end.

        What the forward reads is copied at once; what has not been started of the rest fails.
        """
        if self._started_for is not metadata:
            self._started_for = metadata
            self._to_start = deque(metadata.loads)
        jobs, self._to_start = self._to_start, deque()
        synchronous = [job for job in jobs if job.synchronous]
        if synchronous and self._awaited is None:
            self._awaited = _Awaited(synchronous[0].job_id, synchronous, in_waves=False)
        if self._awaited is not None:
            self._make_good(CopyError("an error of the plugin, which the log has"))
        for job in jobs:
            if not job.synchronous:
                self._end_load(job, failed=True)

    def _start_asynchronous(self, job: LoadJob) -> None:
        """Start one load; a plan with a gap fails and is not copied."""
        if job.incomplete:
            self._end_load(job, failed=True)
            self._zero(job)
            return
        self._alone, self._store_alone = not self._loading, False
        self._reported_loads.discard(job.request_id)  # that was an earlier load of this request
        self._loading[job.job_id] = [job]
        self._submit(SwapJob(job.job_id, Direction.LOAD, job.pairs))

    def _start_synchronous(self) -> None:
        """Load for the requests of this step by one transfer."""
        jobs = [job for job in self._to_start if job.synchronous]
        if not jobs:
            return
        assert self._engine is not None, "a load came before register_kv_caches"
        self._alone, self._store_alone = not self._loading, False
        job_id, pairs = jobs[0].job_id, _all_pairs(jobs)
        enough = len(pairs) * self._engine.layout.slot_bytes >= WAVES_FROM_BYTES
        may_wait = self._waves.plan is not None and self._layers_can_wait
        # A layer writes its KV before it waits, and a late wave would undo that.
        whole = any(job.whole for job in jobs)
        self._awaited = _Awaited(job_id, jobs, in_waves=enough and may_wait and not whole)
        self._loading[job_id] = jobs
        for _ in jobs:
            self._to_start.popleft()
        if any(job.incomplete for job in jobs):
            self._awaited.error = CopyError("host memory lacks some of its slots")
            return
        try:
            self._engine.submit(
                SwapJob(job_id, Direction.LOAD, pairs, True, self._awaited.in_waves)
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the load is made good
            self._awaited.error = error

    def _make_good(self, error: Exception) -> None:
        """Bring what this step's forward waits for in another way, since its load failed.

        What host memory lacks cannot be brought, and is lost.

        Under asynchronous scheduling the engine has no way back from a forward that read what was
        not there: the next one is planned already. So the host waits here, before the forward or
        the layer that needs it.
        """
        awaited, self._awaited = self._awaited, None
        assert awaited is not None
        assert self._engine is not None
        self.on_layer = None
        self._waves.missed()  # nobody has to call any more
        self._loading.pop(awaited.job_id, None)  # its own completion says nothing any more
        jobs = [job for job in awaited.jobs if not job.incomplete]
        failed = [job for job in awaited.jobs if job.incomplete]
        nbytes = 0
        if jobs:
            pairs = _all_pairs(jobs)
            try:
                self._engine.load_now(pairs)
                nbytes = len(pairs) * self._engine.layout.slot_bytes
            except Exception as second:  # noqa: BLE001 - its requests end, the engine goes on
                error = CopyError(f"{error}; and when it was copied at once: {second}")
                jobs, failed = [], list(awaited.jobs)
        if jobs:
            logger.error(
                "kv-offload: rank %d: a load before a forward failed, and its %d bytes were "
                "copied at once instead, while the engine waited: %s",
                self._rank,
                nbytes,
                error,
            )
            self._stats.count("repaired_loads", len(jobs))
            self._stats.count("loaded_bytes", nbytes)
        for job in jobs:
            self._end_load(job, failed=False)
        for job in failed:
            self._lose(job, str(error))
            self._end_load(job, failed=True)
            self._zero(job)

    def _lose(self, job: LoadJob, why: str) -> None:
        """Tell the scheduler that a forward read what this load was to bring: it ends the request.

        The load itself ends when its copies do.
        """
        logger.error(
            "kv-offload: rank %d: %d blocks of request %s were not loaded when they were read, so "
            "it ends with an error, as does whoever shares them: %s",
            self._rank,
            len(job.pairs),
            job.request_id,
            why,
        )
        self._lost.add(job.job_id)
        self._lost_lately.append(job.job_id)

    def _submit(self, job: SwapJob) -> None:
        assert self._engine is not None, "a job came before register_kv_caches"
        try:
            self._engine.submit(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, one job has failed
            failure = error if isinstance(error, TransferError) else CopyError(repr(error))
            self._ended(Completion(job.job_id, job.direction, 0, 0.0, failure))

    # -- layers --------------------------------------------------------------------------------

    def _learn_layer(self, layer: str) -> None:
        self._waves.learn(layer, forward_context())

    def _await_layer(self, layer: str) -> None:
        assert self._engine is not None, "a load arrives in an engine that is gone"
        try:
            self._engine.await_wave(self._waves.called(layer))
        except Exception as error:  # noqa: BLE001 - whatever it is, the load is made good
            self._make_good(error)

    def end_forward(self) -> None:
        """Learn from this step's forward, and check that its layers waited; idempotent.

        Called after the forward was queued. From here on compute has waited for the whole load.
        """
        self.on_layer = None
        if self._waves.end_step():
            self._set_waves()
        self._end_arrival()

    def _set_waves(self) -> None:
        plan = self._waves.plan
        assert self._engine is not None
        assert plan is not None
        try:
            self._engine.set_waves(plan.waves)
        except TransferError as error:
            self._waves.give_up()
            logger.error("kv-offload: rank %d: loads arrive whole: %s", self._rank, error)
            return
        logger.info(
            "kv-offload: rank %d: loads before a forward may arrive in %d waves, %d layers wait "
            "for theirs",
            self._rank,
            len(plan.waves),
            len(plan.wave_of),
        )

    def _end_arrival(self) -> None:
        """Have compute wait for all of a load in waves; lose it if a layer did not ask for it."""
        awaited, self._awaited = self._awaited, None
        if awaited is None or self._waves.plan is None or self._engine is None:
            return
        error = awaited.error
        try:
            self._engine.await_wave(len(self._waves.plan.waves) - 1)
        except Exception as raised:  # noqa: BLE001 - whatever it is, the load is lost
            error = raised
        missed = self._waves.missed()
        if not missed and error is None:
            return
        self._waves.give_up()
        why = str(error)
        if missed:
            why = (
                f"{len(missed)} layers, {missed[0]} first, did not call the connector in a "
                f"forward, as they did before. From now on forwards wait for whole loads, so "
                f"nothing need be done. Please report the model and the engine's arguments"
            )
        for job in awaited.jobs:
            self._lose(job, why)

    # -- the end of a step ---------------------------------------------------------------------

    def prepare_store_kv(self, metadata: OffloadMetadata) -> None:
        """Queue this step's stores for the start of the next; a second call does nothing.

        Two hooks end a step and some versions call only one of them in a step without a forward.
        """
        if self._queued_for is not metadata:
            self._queued_for = metadata
            self._queue(metadata.stores)
            self.end_forward()

    def _queue(self, stores: Sequence[StoreJob]) -> None:
        for job in stores:
            self._queued.append(job)
            self._next_store_id = job.job_id + 1

    def end_step_anyhow(self, metadata: OffloadMetadata) -> None:
        """End a step of which an error has kept the report of loads from being made.

        Its stores that were not queued fail.
        """
        self._reported_loads = set()
        if self._queued_for is not metadata:
            self._queued_for = metadata
            for job in metadata.stores:
                self._next_store_id = job.job_id + 1
                self._failed_stores.append(job.job_id)
                self._store_results[job.job_id] = self._result(job.job_id)
            self.end_forward()

    def poll(self) -> None:
        """Take in what ended since the last call. Never waits."""
        if self._engine is not None:
            for completion in self._engine.poll():
                self._ended(completion)

    def _ended(self, done: Completion) -> None:
        if done.error is not None:
            logger.error("kv-offload: rank %d: %s", self._rank, done.error)
        elif done.direction is Direction.STORE:
            self._stats.count("stored_bytes", done.nbytes)
            self._stats.count("stored_seconds", done.seconds)
            if done.seconds > 0:
                exact = self._store_alone and done.nbytes >= MEASURED_BYTES
                self._store_rate.learn(done.nbytes / done.seconds, exact=exact)
        else:
            self._stats.count("loaded_bytes", done.nbytes)
            self._stats.count("loaded_seconds", done.seconds)
            if self._alone and done.nbytes >= MEASURED_BYTES and done.seconds > 0:
                self._load_bytes_per_second = done.nbytes / done.seconds
        if done.direction is Direction.LOAD:
            self._ended_load(done)
            return
        self._storing.discard(done.job_id)
        if done.error is not None:
            self._failed_stores.append(done.job_id)
        self._store_results[done.job_id] = self._result(done.job_id)

    def _ended_load(self, done: Completion) -> None:
        awaited = self._awaited
        if done.error is not None and awaited is not None and awaited.job_id == done.job_id:
            awaited.error = done.error  # it is made good before the forward, or lost behind it
            return
        jobs = self._loading.pop(done.job_id, ())  # none if it was made good or lost meanwhile
        for job in jobs:
            if done.error is not None and job.synchronous and job.job_id not in self._lost_lately:
                self._lose(job, str(done.error))
            self._end_load(job, failed=done.error is not None)
            if done.error is not None and not job.synchronous:
                self._zero(job)

    def _result(self, job_id: int) -> JobResult:
        return JobResult(frozenset({self._rank}), job_id not in self._failed_stores)

    def _end_load(self, job: LoadJob, *, failed: bool) -> None:
        if job.synchronous:
            self._load_results[job.job_id] = JobResult(frozenset({self._rank}), not failed)
            return
        self._received.add(job.request_id)
        if failed:
            self._failed_loads[job.request_id] = job
            self._failed_requests.add(job.request_id)

    def _zero(self, job: LoadJob) -> None:
        """Zero half-written blocks: the engine does not zero blocks that were to be loaded."""
        assert self._engine is not None
        try:
            self._engine.zero_blocks([int(block) for block in job.pairs[:, 0]])
        except TransferError as error:
            # They are recomputed before they are read; only NaNs in unused rows could remain.
            logger.error("kv-offload: rank %d: %s", self._rank, error)

    # -- reports -------------------------------------------------------------------------------

    def take_received(self) -> tuple[set[str], dict[str, LoadJob]]:
        """Return the requests whose loads ended, each once, and those among them that failed."""
        received, self._received = self._received, set()
        failed, self._failed_loads = self._failed_loads, {}
        self._reported_loads = received - failed.keys()
        return received, failed

    def take_ended_loads(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended well by now, before the last report arrives.

        First those that no report will name, then those that the last one names, which may be that
        of a step that has only been launched.
        """
        self.poll()
        ended = self._received - self._failed_loads.keys()
        self._received -= ended
        reported, self._reported_loads = self._reported_loads, set()
        return ended, reported

    def take_ended_stores(self) -> dict[int, JobResult]:
        """Return the stores that have ended by now, instead of a report or before the last arrives.

        The last report may be that of a step that has only been launched. None while it says that a
        load was lost, or the next one will: what was computed with that load must be distrusted
        first. A store ends after the loads of the steps before it, so `poll` has seen those.
        """
        self.poll()
        if self._lost or self._reported_loss:
            return {}
        results = self._reported_stores | self._store_results
        self._reported_stores, self._store_results = {}, {}
        return results

    def take_report(self) -> OffloadWorkerMetadata | None:
        """Return what the scheduler must know; None where nothing happened."""
        stores, self._store_results = self._store_results, {}
        loads, self._load_results = self._load_results, {}
        failed, self._failed_requests = self._failed_requests, set()
        lost, self._lost = self._lost, set()
        load_speed, self._load_bytes_per_second = self._load_bytes_per_second, None
        store_speed = self._store_rate.take_change()
        store_speeds = {} if store_speed is None else {self._rank: store_speed}
        ready = self._take_ready_slots()
        weight_loads = self.weight_loads
        if weight_loads == self._weight_loads_reported:
            weight_loads = {}
        else:
            self._weight_loads_reported = weight_loads
        self._reported_stores, self._reported_loss = stores, bool(lost)
        if not (stores or loads or failed or lost or load_speed or store_speeds or ready):
            return OffloadWorkerMetadata(weight_loads=weight_loads) if weight_loads else None
        return OffloadWorkerMetadata(
            stores,
            frozenset(failed),
            loads,
            frozenset(lost),
            load_speed,
            ready,
            store_speeds,
            weight_loads,
        )

    def take_losses(self) -> OffloadWorkerMetadata | None:
        """Return what cannot wait for the next report: which loads did not bring what they should.

        The engine hears in this step that loads have ended, and of the tokens that were computed.
        """
        lost, self._lost = self._lost, set()
        failed, self._failed_requests = self._failed_requests, set()
        self._reported_loss = bool(lost)
        if not (lost or failed):
            return None
        return OffloadWorkerMetadata(failed_loads=frozenset(failed), lost_loads=frozenset(lost))

    @property
    def weight_loads(self) -> dict[int, int]:
        """How often this rank's model has been given weights, by rank; empty before the first."""
        loads = 0 if self._count_weight_loads is None else self._count_weight_loads()
        return {self._rank: loads} if loads else {}

    def capacity(self) -> WorkerCapacity:
        """Return what this rank holds and how much of it is ready."""
        synchronous = self._engine is not None and self._engine.can_load_before_compute
        return WorkerCapacity(self._rank, self.num_slots, self._ready_slots(), synchronous)

    def _ready_slots(self) -> int:
        return 0 if self._engine is None else self._engine.ready_slots

    def _take_ready_slots(self) -> dict[int, int]:
        if self._ready_slots_reported == self.num_slots:
            return {}
        ready_slots = self._ready_slots()
        if ready_slots <= self._ready_slots_reported:
            return {}
        self._ready_slots_reported = ready_slots
        return {self._rank: ready_slots}

    def count_hook_errors(self, errors: int) -> None:
        """Count exceptions of hooks."""
        self._stats.count("hook_errors", errors)

    def take_stats(self) -> OffloadStats | None:
        """Return the counters since the last call; None where nothing was counted."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, OffloadStats()
        return stats

    def drain(self, unsent: Sequence[StoreJob], running: Sequence[int]) -> DrainAnswer:
        """Submit what is queued, wait for all copies with a bound, and tell what has ended.

        Called between steps, before a reset or a sleep. `running` are the stores that the scheduler
        has no report of; one may be on its way, so what is told here may be reported again. Loads
        that failed are reported once more as ended, and no more as failed: whoever asked for the
        drain takes their blocks back.
        """
        self._queue(unsent)
        try:
            self.submit_stores()
            if self._engine is not None and not self._engine.wait(DRAIN_SECONDS):
                logger.error(
                    "kv-offload: rank %d: copies still run after %.0f s", self._rank, DRAIN_SECONDS
                )
            self.poll()
        except Exception:  # noqa: BLE001 - it would end the engine
            logger.exception("kv-offload: rank %d: not all copies could be ended", self._rank)
        self._failed_loads.clear()
        asked = {*running, *(job.job_id for job in unsent)}
        stores = {
            job_id: self._result(job_id)
            for job_id in asked
            if job_id not in self._storing and job_id < self._next_store_id
        }
        loading = frozenset(job.request_id for jobs in self._loading.values() for job in jobs)
        return DrainAnswer(stores, loading, frozenset(self._lost_lately))
