"""The hooks that vLLM calls on a rank; `OffloadWorker` does the work."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)

from kv_offload.engines.vllm.hooks.errors import survives
from kv_offload.engines.vllm.locate import callers
from kv_offload.engines.vllm.patches.patch import log_new
from kv_offload.engines.vllm.runner import before_each_step, find_runner, guard_inputs
from kv_offload.engines.vllm.start.build import Engine, build_worker
from kv_offload.errors import UnsupportedError
from kv_offload.messages import OffloadMetadata, OffloadWorkerMetadata, WorkerCapacity
from kv_offload.worker.worker import OffloadWorker

if TYPE_CHECKING:
    import torch
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput


def changes_blocks(scheduler_output: SchedulerOutput) -> bool:
    """Return whether the runner zeroes or copies KV blocks for this step before its forward pass.

    Copying states between the blocks of a running request does not count.
    """
    return bool(scheduler_output.new_block_ids_to_zero or scheduler_output.kv_cache_block_copies)


KVConnectorWorkerMetadata.register(OffloadWorkerMetadata)
KVConnectorHandshakeMetadata.register(WorkerCapacity)


class WorkerHooks(KVConnectorBase_V1):
    """The half of `KVOffloadConnector` on a rank."""

    offload_worker: OffloadWorker

    def _start_worker(self, engine: Engine) -> None:
        """Build this half."""
        # The vLLM worker that is building it, if one was found.
        worker = find_runner()
        self._vllm_worker = None if worker is None else weakref.ref(worker)
        self._is_member = bool(engine.multi_connectors)
        self.offload_worker = build_worker(engine)

    @property
    def engine_is_gone(self) -> bool:
        """Return whether this half is left from an earlier engine that vLLM did not shut down."""
        return self._vllm_worker is not None and self._vllm_worker() is None

    def _belongs_to_other_worker(self) -> bool:
        """Return whether this half was built for a worker other than the one on the call stack."""
        if self._vllm_worker is None:
            return False
        worker = self._vllm_worker()
        return worker is None or all(caller is not worker for caller in callers())

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.offload_worker.transfer is not None or self._belongs_to_other_worker():
            # vLLM has one connector per process, and all engines in the process get it.
            raise UnsupportedError(
                "another engine in this process, or the remains of one that failed to start, has "
                "host memory, and the blocks of two engines would be confused: end the other one "
                "first, leave VLLM_ENABLE_V1_MULTIPROCESSING at 1, or start a new process"
            )
        self.offload_worker.register_kv_caches(kv_caches)
        before_each_step(self.begin_step)
        guard_inputs(self._vllm_config)
        log_new()

    def unregister_kv_caches(self) -> None:  # before a sleep, from vLLM 0.33
        self.offload_worker.unregister_kv_caches()

    def restore_kv_caches(self) -> None:  # after waking up, from vLLM 0.33
        self.offload_worker.restore_kv_caches()

    def get_handshake_metadata(self) -> WorkerCapacity | None:
        """Report to the scheduler how many slots this rank holds, and how many are ready.

        None inside a MultiConnector, which passes one member's metadata to all members: most of
        them would fail on it.
        """
        return None if self._is_member else self.offload_worker.capacity()

    @survives(lambda self, *_, **__: None)  # later hooks start the remaining copies
    def begin_step(self, scheduler_output: SchedulerOutput, *_: Any, **__: Any) -> None:
        """Submit copies before the runner prepares the step, unless it zeroes or copies KV blocks.

        Inside a MultiConnector, the metadata here is the outer connector's, so copies start in
        later hooks.
        """
        metadata = scheduler_output.kv_connector_metadata
        if not isinstance(metadata, OffloadMetadata):
            return
        self.offload_worker.begin_step(metadata)
        if not changes_blocks(scheduler_output):
            self.offload_worker.start_copies(metadata, first=True)

    @survives(lambda self, metadata: None)  # queued stores stay queued
    def handle_preemptions(self, kv_connector_metadata: OffloadMetadata) -> None:
        """Submit the last step's stores if they are still queued: each step begins with this hook.

        Runner V1 zeroes and copies blocks after this hook, runner V2 before it. Neither touches the
        pinned sources of a store.
        """
        self.offload_worker.submit_stores()

    @survives(lambda self, metadata: self.offload_worker.rescue(metadata))
    def bind_connector_metadata(self, connector_metadata: OffloadMetadata) -> None:
        """Make the forward pass wait for its loads. vLLM calls this just before it, after zeroing.

        `start_load_kv` would be too late: unless a step has synchronous loads, vLLM calls it after
        launching the forward pass.
        """
        super().bind_connector_metadata(connector_metadata)
        self.offload_worker.start_kv_transfers(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Do nothing: this step's loads are already running."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """While a load of this step is running, make compute wait for this layer's regions."""
        on_layer = self.offload_worker.on_layer
        if on_layer is not None:
            self._call_on_layer(on_layer, layer_name)

    @survives(lambda self, on_layer, layer_name: None)  # as if the layer had made no call
    def _call_on_layer(self, on_layer: Callable[[str], None], layer_name: str) -> None:
        on_layer(layer_name)

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        """Do nothing: a block is stored with all its layers at once."""

    @survives(lambda self: None)  # `get_finished` queues them
    def wait_for_save(self) -> None:
        """Queue this step's stores without waiting: their sources are pinned."""
        self.offload_worker.prepare_store_kv(self._get_connector_metadata())

    @survives(lambda self, _: self._end_step_anyhow())
    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """Queue this step's stores unless `wait_for_save` has done so, and poll for ended jobs.

        With a draft model, vLLM calls `wait_for_save` only after the drafts, and an error in
        between would lose the stores. Returns no requests: the scheduler's half reports them.
        """
        if self.has_connector_metadata():
            self.offload_worker.prepare_store_kv(self._get_connector_metadata())
        self.offload_worker.poll()
        return None, None

    def _end_step_anyhow(self) -> tuple[None, None]:
        """Discard this step's work; the next step reports the jobs that ended."""
        if self.has_connector_metadata():
            self.offload_worker.end_step_anyhow(self._get_connector_metadata())
        return None, None

    @survives(lambda self: self.offload_worker.take_losses())
    def build_connector_worker_meta(self) -> OffloadWorkerMetadata | None:
        """Report the jobs that ended; after an error, only what this step must report."""
        return self.offload_worker.report()
