"""A rank's synchronous loads, whose blocks the forward of the same step reads.

The forward is queued after them: the compute stream waits, the host does not. Until the forward, or
the layer that reads the blocks, is queued, a failed load can be repaired: the host copies the
blocks itself, while the engine waits. After that the load is lost, and its requests end with an
error, because under asynchronous scheduling the next step is already planned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError, TransferError

from kv_offload.messages import LoadJob, Outcome, Pairs
from kv_offload.worker.jobs import RankJobs
from kv_offload.worker.waves import Forward, LayerWaves

WAVES_FROM_BYTES = 16 << 20
"""Minimum bytes of a load in waves: a smaller one takes less time (0.3 ms on PCIe Gen5 x16) than
its waves would save."""


@dataclass(eq=False, slots=True)
class StepLoads:
    """The synchronous loads of one step, copied as one transfer."""

    jobs: Sequence[LoadJob]
    started: bool = False
    in_waves: bool = False
    """True if the transfer copies them wave by wave."""
    error: Exception | None = None
    """The error, if one occurred while the loads could still be repaired."""
    done: Completion | None = None
    """The completion, if the transfer ended while a layer of the forward could still read early."""

    @property
    def transfer_id(self) -> int:
        """The id of the transfer."""
        return self.jobs[0].job_id

    @property
    def whole(self) -> bool:
        """True if a forward writes to loaded blocks before a layer waits for them."""
        return any(job.whole for job in self.jobs)


class ForwardLoads:
    """The loads of this step, and running transfers of earlier steps.

    In each step, `take`, `start`, `make_forward_wait` and `forward_ended` are called in this order.
    Between the last two, every call of an attention layer goes to `on_layer`, if that is set. A
    load is reported as ended once no copy writes its blocks and no layer can still turn out to have
    read them early, because polls may happen between the forward and `forward_ended`. A lost load
    is reported at once, because everything computed later runs after its copies.
    """

    def __init__(self, jobs: RankJobs, forward_context: Callable[[], object | None]) -> None:
        self.waves = LayerWaves({}, [])
        """Tracks which layers wait for their part of a load."""
        self.on_layer: Callable[[str], None] | None = None
        self._jobs = jobs
        self._forward_context = forward_context
        # Loads that neither this step's forward nor a layer of it has been made to wait for. A
        # failure of these can still be repaired.
        self._awaited: StepLoads | None = None
        # Transfers by id whose end must be reported. The result of a repaired or lost load no
        # longer matters.
        self._copying: dict[int, StepLoads] = {}
        # True if the last forward with loads could wait layer by layer, or its calls were learned.
        # The kind of the next forward is not known when its loads start.
        self._layers_can_wait = True

    def take(self, jobs: Sequence[LoadJob]) -> None:
        """Accept the loads of a step; end those of an aborted step."""
        aborted, self._awaited = self._awaited, StepLoads(jobs) if jobs else None
        if aborted is not None:
            self.waves.missed()  # its layers did not run
            aborted.error = aborted.error or CopyError("its step was cut short")
            self._end(aborted)

    def start(self, *, after_compute: bool) -> None:
        """Start this step's loads if not yet started; keep a failure for `make_forward_wait`.

        See `SwapJob.after_compute`.
        """
        loads = self._awaited
        if loads is None or loads.started:
            return
        enough = self._nbytes(loads.jobs) >= WAVES_FROM_BYTES
        may_wait = self.waves.cut is not None and self._layers_can_wait
        # A layer writes its KV before it waits, and a later wave would overwrite that.
        loads.in_waves = enough and may_wait and not loads.whole
        loads.started = True
        if any(job.incomplete for job in loads.jobs):
            loads.error = CopyError("host memory lacks some of its slots")
            return
        loads.error = self._jobs.start(
            SwapJob(
                loads.transfer_id,
                Direction.LOAD,
                _all_pairs(loads.jobs),
                before_compute=True,
                in_waves=loads.in_waves,
                after_compute=after_compute,
            )
        )
        if loads.error is None:
            self._copying[loads.transfer_id] = loads

    def make_forward_wait(self, forward: Forward | None) -> None:
        """Make the compute stream wait for this step's loads, before the forward is queued.

        If the layers wait for the later waves, it waits only for the first wave. Loads that have
        already failed are repaired. `forward` is the next forward, if its layers are known to call
        the connector.
        """
        self.waves.forward_follows(forward)
        self.on_layer = self._learn_layer if self.waves.learning else None
        loads = self._awaited
        if loads is None:
            return
        transfer = self._jobs.require_transfer()
        if not loads.whole:
            self._layers_can_wait = self.waves.possible or self.waves.learning
        in_waves = loads.in_waves and self.waves.possible
        error = loads.error
        if error is None:
            try:
                if in_waves:
                    transfer.await_wave(0)
                else:
                    transfer.await_loads()
            except Exception as raised:  # noqa: BLE001 - after any error the load is repaired
                error = raised
        if error is not None:
            self.make_good(error)
        elif in_waves:
            self.waves.expect()
            self.on_layer = self._make_layer_wait
        else:
            self._awaited = None
            if loads.done is not None:
                self._report(loads, loads.done)

    def _learn_layer(self, layer: str) -> None:
        self.waves.learn(layer, self._forward_context())

    def _make_layer_wait(self, layer: str) -> None:
        """Make the compute stream wait for the KV of a layer, before the layer is queued."""
        transfer = self._jobs.require_transfer()
        try:
            transfer.await_wave(self.waves.called(layer))
        except Exception as error:  # noqa: BLE001 - after any error the load is repaired
            self.make_good(error)

    def make_good(self, error: Exception) -> None:
        """Repair failed loads that nothing has waited for yet: copy them while the engine waits.

        A load whose blocks are missing from host memory cannot be repaired, and is lost.
        """
        loads, self._awaited = self._awaited, None
        if loads is None:
            return
        self.on_layer = None
        self.waves.missed()  # no layer needs to call now
        self._copying.pop(loads.transfer_id, None)
        for job in loads.jobs:
            if job.incomplete:
                self._lose(job, error)
        jobs = [job for job in loads.jobs if not job.incomplete]
        if not jobs:
            return
        try:
            self._jobs.require_transfer().load_now(_all_pairs(jobs))
        except Exception as second:  # noqa: BLE001 - its requests end, the engine continues
            for job in jobs:
                self._lose(job, f"{error}; and when it was copied at once: {second}")
            return
        nbytes = self._nbytes(jobs)
        self._jobs.log.error(
            "a load before a forward failed, and its %d bytes were copied at once instead, while "
            "the engine waited: %s",
            nbytes,
            error,
        )
        self._jobs.stats.count("repaired_loads", len(jobs))
        self._jobs.stats.count("loaded_bytes", nbytes)
        for job in jobs:
            self._jobs.end(job.job_id, Outcome.OK)

    def forward_ended(self) -> None:
        """Learn from this step's forward, and check that its layers waited; idempotent.

        Called after the forward has been queued. After this call the compute stream has waited for
        the whole load, because nothing may write the blocks once the step has ended.
        """
        self.on_layer = None
        cut = self.waves.forward_ended()
        if cut is not None:
            try:
                self._jobs.require_transfer().set_waves(cut.waves)
            except TransferError as error:
                self.waves.give_up()
                self._jobs.log.error("loads arrive whole: %s", error)
            else:
                self._jobs.log.info(
                    "loads before a forward may arrive in %d waves, %d layers wait for theirs",
                    len(cut.waves),
                    len(cut.wave_of),
                )
        loads, self._awaited = self._awaited, None
        if loads is not None:
            self._end(loads)

    def _end(self, loads: StepLoads) -> None:
        """Make the compute stream wait for the loads; lose them if a layer did not call."""
        why: object = loads.error
        if loads.started:
            transfer = self._jobs.require_transfer()
            try:
                if loads.in_waves and self.waves.cut is not None:
                    transfer.await_wave(len(self.waves.cut.waves) - 1)
                else:  # nothing has waited for it: its step was aborted
                    transfer.await_loads()
            except Exception as error:  # noqa: BLE001 - after any error the load is lost
                why = error
            missed = self.waves.missed()
            if missed:
                self.waves.give_up()
                why = (
                    f"{len(missed)} layers, {missed[0]} first, did not call the connector in a "
                    f"forward, as they did before. From now on forwards wait for whole loads, so "
                    f"nothing need be done. Please report the model and the engine's arguments"
                )
        if why is not None:
            self._copying.pop(loads.transfer_id, None)
            for job in loads.jobs:
                self._lose(job, why)
        elif loads.done is not None:
            self._report(loads, loads.done)

    def ended(self, done: Completion) -> None:
        """Process the end of a transfer; ignore it if its loads were repaired or lost meanwhile."""
        loads = self._copying.pop(done.job_id, None)
        if loads is None:
            return
        if loads is self._awaited:
            # A failed load is repaired before the forward, or lost after it.
            loads.done, loads.error = done, done.error
        else:
            self._report(loads, done)

    def _report(self, loads: StepLoads, done: Completion) -> None:
        for job in loads.jobs:
            if done.error is None:
                self._jobs.load_copied(self._nbytes([job]), done.seconds)
                self._jobs.end(job.job_id, Outcome.OK)
            else:
                self._lose(job, done.error)

    def _lose(self, job: LoadJob, why: object) -> None:
        self._jobs.log.error(
            "%d blocks of request %s were not loaded when they were read, so it ends with an "
            "error, as do all that share them: %s",
            len(job.pairs),
            job.request_id,
            why,
        )
        self._jobs.end(job.job_id, Outcome.LOST)

    def _nbytes(self, jobs: Sequence[LoadJob]) -> int:
        block_bytes = self._jobs.require_transfer().layout.block_bytes
        return sum(len(job.pairs) for job in jobs) * block_bytes


def _all_pairs(jobs: Sequence[LoadJob]) -> Pairs:
    return np.concatenate([job.pairs for job in jobs])
