"""A rank's transfer engine: starts its jobs, counts and measures those that end, and closes it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from kv_swap.engine import Completion, Direction, SwapEngine, SwapJob
from kv_swap.errors import CopyError, TransferError

from kv_offload.worker.log import RankLog
from kv_offload.worker.rates import CopySpeeds
from kv_offload.worker.reports import Reports

DRAIN_SECONDS = 10.0
"""Bound of the wait for running copies before a reset, a sleep or the end."""


class Copies:
    """What this rank copies. Only `wait`, `let_go_of_tensors` and `close` block."""

    def __init__(self, reports: Reports, log: RankLog) -> None:
        self.transfer: SwapEngine | None = None
        """There from the registration of KV caches until `close`."""
        self.speeds = CopySpeeds()
        self._reports = reports
        self._log = log
        # The KV tensors that the transfer engine held before a sleep.
        self._let_go: list[weakref.ref[Any]] = []

    def require_transfer(self) -> SwapEngine:
        """Return the transfer engine, which must be there."""
        assert self.transfer is not None, "a copy was asked for before register_kv_caches"
        return self.transfer

    @property
    def ready_slots(self) -> int:
        """Slots from 0 on that jobs may name by now."""
        return 0 if self.transfer is None else self.transfer.ready_slots

    def start(self, job: SwapJob) -> None:
        """Start a job. Raises whatever the transfer engine raises; then nothing is copied."""
        self.require_transfer().submit(job)
        self.speeds.starts(job)

    def submit(self, job: SwapJob) -> Completion | None:
        """Start a job; return how it ended if the transfer engine refused it."""
        transfer = self.require_transfer()
        try:
            transfer.submit(job)
        except Exception as error:  # noqa: BLE001 - whatever it is, one job has failed
            failure = error if isinstance(error, TransferError) else CopyError(repr(error))
            self._log.error("%s", failure)
            return Completion(job.job_id, job.direction, 0, 0.0, failure)
        self.speeds.starts(job)
        return None

    def poll(self) -> Iterator[Completion]:
        """Yield the jobs that ended since the last call, each counted as it is yielded."""
        for done in () if self.transfer is None else self.transfer.poll():
            self.speeds.ended(done)
            if done.error is not None:
                self._log.error("%s", done.error)
            else:
                name = "stored" if done.direction is Direction.STORE else "loaded"
                self._reports.count(f"{name}_bytes", done.nbytes)
                self._reports.count(f"{name}_seconds", done.seconds)
            yield done

    def wait(self) -> None:
        """Wait, bounded, for all copies."""
        if self.transfer is not None and not self.transfer.wait(DRAIN_SECONDS):
            self._log.error("copies still run after %.0f s", DRAIN_SECONDS)

    def let_go_of_tensors(self) -> None:
        """Hold no KV tensor; waits, bounded, for copies. A second call does nothing.

        While a copy runs it uses the tensors, so they stay held if copies do not end.
        """
        if self.transfer is None or self._let_go:
            return
        if not self.transfer.wait(DRAIN_SECONDS):
            self._log.error("copies run while the engine sleeps")
            return
        self._let_go = [weakref.ref(tensor) for tensor in self.transfer.keep_alive(())]

    def hold_tensors_again(self) -> None:
        """Hold the KV tensors again, which are back at their addresses."""
        if self.transfer is not None and self._let_go:
            alive = [tensor for ref in self._let_go if (tensor := ref()) is not None]
            self.transfer.keep_alive(alive)
            self._let_go = []

    def close(self) -> None:
        """Wait, bounded, for running copies, and let go of the KV tensors and of host memory."""
        if self.transfer is not None:
            self.transfer.close(DRAIN_SECONDS)
            self.transfer = None
