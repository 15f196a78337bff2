"""A rank's synchronous loads: the forward of their own step reads what they bring.

The forward is queued behind them: the compute stream waits, the host does not. Until the forward,
or the layer that reads them, is queued, a failure can be made good: the host copies the blocks
itself, while the engine waits. Later it cannot. Under asynchronous scheduling the engine cannot
take back a forward that read the wrong bytes, because the next step is planned already. Such loads
are lost, and their requests end with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from kv_swap.engine import Completion, Direction, SwapJob
from kv_swap.errors import CopyError, TransferError

from kv_offload.messages import LoadJob, Pairs
from kv_offload.worker.copies import Copies
from kv_offload.worker.waves import Forward, LayerWaves

WAVES_FROM_BYTES = 16 << 20
"""A load of fewer bytes takes less time (0.3 ms on PCIe Gen5 x16) than its waves would save."""


@dataclass(eq=False, slots=True)
class Arrival:
    """The synchronous loads of one step, which arrive as one transfer."""

    jobs: Sequence[LoadJob]
    started: bool = False
    in_waves: bool = False
    """Whether the transfer brings it wave by wave."""
    layers_wait: bool = False
    """Whether the forward waits for the first wave only, and layers wait for the others."""
    error: Exception | None = None
    """What went wrong while the loads could still be made good."""
    lost: bool = False
    """Whether a forward may have read what was not there."""

    @property
    def job_id(self) -> int:
        """The id of the transfer."""
        return self.jobs[0].job_id

    @property
    def whole(self) -> bool:
        """Whether a forward writes to blocks that are loaded, before a layer waits for them."""
        return any(job.whole for job in self.jobs)


class SynchronousLoads:
    """The arrival of this step, and earlier arrivals whose copies run.

    One object a rank. In each step `take`, `start`, `make_forward_wait` and `forward_ended` are
    called in this order. Between the last two, every call of an attention layer goes to `on_layer`,
    if that is set. Every load is reported as ended once no copy writes its blocks.
    """

    def __init__(self, copies: Copies, forward_context: Callable[[], object | None]) -> None:
        self.waves = LayerWaves({}, [])
        """Knows which layers wait for their part of a load."""
        self.on_layer: Callable[[str], None] | None = None
        """Takes the calls of attention layers in this step; None in most steps."""
        self._copies = copies
        self._forward_context = forward_context
        # The arrival that this step's forward, or a layer of it, has not been made to wait for.
        # Its failures can still be made good.
        self._arriving: Arrival | None = None
        # By job id: arrivals whose blocks the transfer may still write. One that was made good is
        # not here: how its transfer ends does not matter any more.
        self._copying: dict[int, Arrival] = {}
        # Whether the last forward that had loads to wait for could wait layer by layer, or will
        # have taught us to. What kind of forward follows is not known when its loads start.
        self._layers_can_wait = True

    @property
    def running_requests(self) -> set[str]:
        """The requests whose blocks a copy may still write."""
        return {job.request_id for arrival in self._copying.values() for job in arrival.jobs}

    def take(self, jobs: Sequence[LoadJob]) -> None:
        """Take in the loads of a step; end the arrival of a step that was cut short."""
        cut_short, self._arriving = self._arriving, Arrival(jobs) if jobs else None
        if cut_short is not None:
            self._end(cut_short)

    def start(self, *, behind_compute: bool) -> None:
        """Start this step's loads, unless they were; a failure is kept for `make_forward_wait`.

        See `SwapJob.behind_compute`.
        """
        arrival = self._arriving
        if arrival is None or arrival.started:
            return
        enough = self._nbytes(arrival.jobs) >= WAVES_FROM_BYTES
        may_wait = self.waves.cut is not None and self._layers_can_wait
        # A layer writes its KV before it waits, and a late wave would undo that.
        arrival.in_waves = enough and may_wait and not arrival.whole
        arrival.started = True
        if any(job.incomplete for job in arrival.jobs):
            arrival.error = CopyError("host memory lacks some of its slots")
            return
        pairs, job_id = _all_pairs(arrival.jobs), arrival.job_id
        arrival.error = self._copies.start(
            SwapJob(
                job_id,
                Direction.LOAD,
                pairs,
                before_compute=True,
                in_waves=arrival.in_waves,
                behind_compute=behind_compute,
            )
        )
        if arrival.error is None:
            self._copying[job_id] = arrival

    def make_forward_wait(self, forward: Forward | None) -> None:
        """Have the compute stream wait for this step's loads: the forward is queued behind them.

        If the layers wait for the later waves, it waits for the first wave only. What has failed by
        now is made good. `forward` is the one that follows, if its layers are known to call.
        """
        self.waves.forward_follows(forward)
        self.on_layer = self._learn_layer if self.waves.learning else None
        arrival = self._arriving
        if arrival is None:
            return
        transfer = self._copies.require_transfer()
        if not arrival.whole:
            self._layers_can_wait = self.waves.possible or self.waves.learning
        in_waves = arrival.in_waves and self.waves.possible
        error = arrival.error
        if error is None:
            try:
                if in_waves:
                    transfer.await_wave(0)
                else:
                    transfer.await_loads()
            except Exception as raised:  # noqa: BLE001 - whatever it is, the load is made good
                error = raised
        if error is not None:
            self.make_good(error)
        elif in_waves:
            self.waves.expect()
            self.on_layer = self._make_layer_wait
            arrival.layers_wait = True
        else:
            self._arriving = None

    def _learn_layer(self, layer: str) -> None:
        self.waves.learn(layer, self._forward_context())

    def _make_layer_wait(self, layer: str) -> None:
        """Have the compute stream wait for what a layer reads, just before the layer is queued."""
        transfer = self._copies.require_transfer()
        try:
            transfer.await_wave(self.waves.called(layer))
        except Exception as error:  # noqa: BLE001 - whatever it is, the load is made good
            self.make_good(error)

    def make_good(self, error: Exception) -> None:
        """Copy at once, while the engine waits, what the forward or a layer has yet to wait for.

        What host memory lacks cannot be copied, and is lost.
        """
        arrival, self._arriving = self._arriving, None
        if arrival is None:
            return
        self.on_layer = None
        self.waves.missed()  # no layer has to call any more
        self._copying.pop(arrival.job_id, None)
        jobs = [job for job in arrival.jobs if not job.incomplete]
        lost: Sequence[LoadJob] = [job for job in arrival.jobs if job.incomplete]
        if jobs:
            try:
                self._copies.require_transfer().load_now(_all_pairs(jobs))
            except Exception as second:  # noqa: BLE001 - its requests end, the engine goes on
                error = CopyError(f"{error}; and when it was copied at once: {second}")
                jobs, lost = [], arrival.jobs
        reports = self._copies.reports
        if jobs:
            nbytes = self._nbytes(jobs)
            self._copies.log.error(
                "a load before a forward failed, and its %d bytes were copied at once instead, "
                "while the engine waited: %s",
                nbytes,
                error,
            )
            reports.count("repaired_loads", len(jobs))
            reports.count("loaded_bytes", nbytes)
        for job in lost:
            self._lose(job, error)
        for job in arrival.jobs:
            reports.synchronous_load_ended(job)

    def forward_ended(self) -> None:
        """Learn from this step's forward, and check that its layers waited; idempotent.

        Called after the forward was queued. From here on the compute stream has waited for the
        whole load: nothing may write the blocks once the step has ended.
        """
        self.on_layer = None
        cut = self.waves.forward_ended()
        if cut is not None:
            try:
                self._copies.require_transfer().set_waves(cut.waves)
            except TransferError as error:
                self.waves.give_up()
                self._copies.log.error("loads arrive whole: %s", error)
            else:
                self._copies.log.info(
                    "loads before a forward may arrive in %d waves, %d layers wait for theirs",
                    len(cut.waves),
                    len(cut.wave_of),
                )
        arrival, self._arriving = self._arriving, None
        if arrival is not None:
            self._end(arrival)

    def _end(self, arrival: Arrival) -> None:
        """Have the compute stream wait for all waves; lose the loads if a layer did not call."""
        error, missed = arrival.error, []
        if not arrival.started:
            error = CopyError("its step was cut short")
        elif self.waves.cut is not None:
            try:
                self._copies.require_transfer().await_wave(len(self.waves.cut.waves) - 1)
            except Exception as raised:  # noqa: BLE001 - whatever it is, the load is lost
                error = raised
            missed = self.waves.missed()
        if not missed and error is None:
            return
        if arrival.layers_wait:
            self.waves.give_up()
        why: object = error
        if missed:
            why = (
                f"{len(missed)} layers, {missed[0]} first, did not call the connector in a "
                f"forward, as they did before. From now on forwards wait for whole loads, so "
                f"nothing need be done. Please report the model and the engine's arguments"
            )
        arrival.lost = True
        for job in arrival.jobs:
            self._lose(job, why)
            if arrival.job_id not in self._copying:
                self._copies.reports.synchronous_load_ended(job)

    def ended(self, done: Completion) -> None:
        """Take in the end of an arrival's copies; nothing if it was made good meanwhile."""
        arrival = self._copying.pop(done.job_id, None)
        if arrival is None:
            return
        if done.error is not None and arrival is self._arriving:
            arrival.error = done.error  # it is made good before the forward, or lost after it
            return
        for job in arrival.jobs:
            if done.error is None and not arrival.lost:
                self._copies.reports.load_copied(self._nbytes([job]), done.seconds)
            elif not arrival.lost:
                self._lose(job, done.error)
            self._copies.reports.synchronous_load_ended(job)

    def _lose(self, job: LoadJob, why: object) -> None:
        self._copies.log.error(
            "%d blocks of request %s were not loaded when they were read, so it ends with an "
            "error, as does whoever shares them: %s",
            len(job.pairs),
            job.request_id,
            why,
        )
        self._copies.reports.load_lost(job)

    def _nbytes(self, jobs: Sequence[LoadJob]) -> int:
        slot_bytes = self._copies.require_transfer().layout.slot_bytes
        return sum(len(job.pairs) for job in jobs) * slot_bytes


def _all_pairs(jobs: Sequence[LoadJob]) -> Pairs:
    return np.concatenate([job.pairs for job in jobs])
