"""A rank's synchronous loads: the forward of their own step reads what they bring.

On the device that forward is queued behind them: the compute stream waits, the host does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kv_swap.engine import Completion
from kv_swap.errors import CopyError, TransferError

from kv_offload.messages import LoadJob
from kv_offload.worker.arrival import Arrival, Phase
from kv_offload.worker.copies import Copies
from kv_offload.worker.log import RankLog
from kv_offload.worker.reports import Reports
from kv_offload.worker.waves import Forward, LayerWaves

WAVES_FROM_BYTES = 16 << 20
"""A load of fewer bytes takes less time (0.3 ms on PCIe Gen5 x16) than its waves would save."""


class SynchronousLoads:
    """The arrival of this step, and those of earlier steps whose copies run.

    One object a rank. In each step `take`, `start`, `make_forward_wait` and `forward_ended` are
    called in this order. Between the last two, every call of an attention layer goes to `on_layer`,
    if that is set.
    """

    def __init__(
        self,
        copies: Copies,
        reports: Reports,
        log: RankLog,
        forward_context: Callable[[], object | None],
    ) -> None:
        self.waves = LayerWaves({}, [])
        """Knows which layers wait for their part of a load."""
        self.on_layer: Callable[[str], None] | None = None
        """Takes the calls of attention layers in this step; None in most steps."""
        self._copies = copies
        self._reports = reports
        self._log = log
        self._forward_context = forward_context
        # The arrival that this step's forward, or a layer of it, has not been made to wait for.
        self._arriving: Arrival | None = None
        self._copying: dict[int, Arrival] = {}
        # Whether the last forward that had loads to wait for could wait layer by layer, or will
        # have taught us to. What kind of forward follows is not known when its loads start.
        self._layers_can_wait = True

    @property
    def running_requests(self) -> set[str]:
        """The requests whose blocks a copy may still write."""
        return {job.request_id for arrival in self._copying.values() for job in arrival.jobs}

    # -- before the forward --------------------------------------------------------------------

    def take(self, jobs: Sequence[LoadJob]) -> None:
        """Take in the loads of a step; end the arrival of a step that was cut short."""
        cut_short, self._arriving = self._arriving, None
        if jobs:
            self._arriving = Arrival(jobs, self._copies, self._reports, self._log)
        if cut_short is not None:
            self._end(cut_short)

    def start(self) -> None:
        """Start this step's loads, unless they were; a failure is kept for `make_forward_wait`."""
        arrival = self._arriving
        if arrival is None or arrival.phase is not Phase.NOT_STARTED:
            return
        enough = arrival.nbytes >= WAVES_FROM_BYTES
        may_wait = self.waves.cut is not None and self._layers_can_wait
        # A layer writes its KV before it waits, and a late wave would undo that.
        arrival.start(in_waves=enough and may_wait and not arrival.whole)
        if arrival.copying:
            self._copying[arrival.job_id] = arrival

    def make_forward_wait(self, forward: Forward | None) -> None:
        """Have the compute stream wait for this step's loads: the forward is queued behind them.

        Where the layers wait for the later waves, it waits for the first wave only. What failed
        until now is made good now. `forward` is the one that follows, if its layers are known to
        call.
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
            arrival.phase = Phase.IN_WAVES
        else:
            arrival.phase = Phase.AWAITED
            self._arriving = None

    def make_good(self, error: Exception) -> None:
        """Copy at once, while the engine waits, what the forward or a layer has yet to wait for."""
        arrival, self._arriving = self._arriving, None
        if arrival is None:
            return
        self.on_layer = None
        self.waves.missed()  # no layer has to call any more
        self._copying.pop(arrival.job_id, None)
        arrival.make_good(error)

    # -- the forward ---------------------------------------------------------------------------

    def _learn_layer(self, layer: str) -> None:
        self.waves.learn(layer, self._forward_context())

    def _make_layer_wait(self, layer: str) -> None:
        """Have the compute stream wait for what a layer reads, just before the layer is queued."""
        transfer = self._copies.require_transfer()
        try:
            transfer.await_wave(self.waves.called(layer))
        except Exception as error:  # noqa: BLE001 - whatever it is, the load is made good
            self.make_good(error)

    def forward_ended(self) -> None:
        """Learn from this step's forward, and check that its layers waited; idempotent.

        Called after the forward was queued. From here on the compute stream has waited for the
        whole load: nothing may write the blocks once the step has ended.
        """
        self.on_layer = None
        if self.waves.forward_ended():
            self._set_waves()
        arrival, self._arriving = self._arriving, None
        if arrival is not None:
            self._end(arrival)

    def _set_waves(self) -> None:
        cut = self.waves.cut
        assert cut is not None
        try:
            self._copies.require_transfer().set_waves(cut.waves)
        except TransferError as error:
            self.waves.give_up()
            self._log.error("loads arrive whole: %s", error)
            return
        self._log.info(
            "loads before a forward may arrive in %d waves, %d layers wait for theirs",
            len(cut.waves),
            len(cut.wave_of),
        )

    def _end(self, arrival: Arrival) -> None:
        """Have the compute stream wait for all waves; lose the loads if a layer did not call."""
        if self._copies.transfer is None:
            return
        error, missed = arrival.error, []
        if arrival.phase is Phase.NOT_STARTED:
            error = CopyError("its step was cut short")
        elif self.waves.cut is not None:
            try:
                self._copies.transfer.await_wave(len(self.waves.cut.waves) - 1)
            except Exception as raised:  # noqa: BLE001 - whatever it is, the load is lost
                error = raised
            missed = self.waves.missed()
        if not missed and error is None:
            arrival.phase = Phase.AWAITED
            return
        if arrival.phase is Phase.IN_WAVES:
            self.waves.give_up()
        why = str(error)
        if missed:
            why = (
                f"{len(missed)} layers, {missed[0]} first, did not call the connector in a "
                f"forward, as they did before. From now on forwards wait for whole loads, so "
                f"nothing need be done. Please report the model and the engine's arguments"
            )
        arrival.lose(why)

    # -- the end of the copies -----------------------------------------------------------------

    def ended(self, done: Completion) -> None:
        """Take in the end of an arrival's copies; nothing if it was made good meanwhile."""
        arrival = self._copying.pop(done.job_id, None)
        if arrival is not None:
            arrival.ended(done)
